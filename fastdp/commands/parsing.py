"""The parser of the command line: what is wrong in one line, with the nearest name, and no wall of usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from .. import __version__
from ..utils.formatting import nearest


def declare(parser: argparse.ArgumentParser, flags: Mapping[str, Any], description: str, epilog: str) -> None:
    """Add a table of flags, {name: arguments of add_argument}, and the texts of --help."""
    parser.description, parser.epilog = description, epilog
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for flag, how in flags.items():
        parser.add_argument(flag, **how)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text, its columns padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line; unknown options and names are answered with the nearest known one."""

    def add_version(self) -> None:
        """--version."""
        self.add_argument(
            "--version", action="version", version=f"fastdp {__version__}", help="show the version and end"
        )

    def error(self, message: str) -> NoReturn:
        """One line, and where the options are explained; exit code 2."""
        self.exit(2, f"{self.prog}: {message} (--help explains the options)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        self._refuse_unknown(words)
        return super().parse_known_args(words, namespace)

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """An option that does not exist is named before others are missed: it may be one of those, misspelt."""
        known = self._option_string_actions
        commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        for word in words:
            if word == "--" or (commands and not word.startswith("-")):
                return  # from here on no options, or another parser's
            name = word.split("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                self.error(f"there is no option {name}{nearest(name, list(known))}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            hint = nearest(str(value), names) or f"; there are {', '.join(names)}"
            raise argparse.ArgumentError(None, f"there is no command {value!r}{hint}")
        raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(names)}{nearest(str(value), names)}")
