"""python -m fastdp demo | info | finetune | tune | audit | ntk"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .commands.audit_options import add_options as add_audit_options
from .commands.parsing import Parser
from .commands.tune_options import add_options as add_tune_options
from .finetune import options as finetune_options


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(prog="python -m fastdp", description="Exact differentially private training.")
    made.add_version()
    commands = made.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train on scikit-learn's digits with privacy; downloads nothing")
    demo.add_argument(
        "--out", type=Path, default=Path("fastdp-demo"), help="the folder for the plots (default: %(default)s)"
    )
    commands.add_parser("info", help="show versions, backends and devices")
    finetune_options.add_options(
        commands.add_parser("finetune", help="fine-tune a model on a table or a folder of images, privately")
    )
    add_tune_options(commands.add_parser("tune", help="search settings privately, and release the best run alone"))
    add_audit_options(commands.add_parser("audit", help="test a training step, of any framework, for private bugs"))
    ntk = commands.add_parser(
        "ntk",
        help="measure the effect of clipping on convergence, on small random networks (Table 1 of Bu et al. 2023)",
    )
    ntk.add_argument("--networks", type=int, default=20, help="the number of random networks (default: %(default)s)")
    ntk.add_argument("--steps", type=int, default=4000, help="the largest number of steps (default: %(default)s)")
    ntk.add_argument("--seed", type=int, default=0, help="the seed of networks and data (default: %(default)s)")
    ntk.add_argument("--out", type=Path, metavar="FILE", help="write the counts to this CSV file")
    commands.metavar = "|".join(commands.choices)
    return made


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options. What tune hands on, after --, is not read here."""
    own, after = list(words), []
    if own[:1] == ["tune"] and "--" in own:
        place = own.index("--")
        own, after = own[:place], own[place + 1 :]
    options = parser().parse_args(own)
    if options.command == "tune":
        options.words = after
    return options


def main() -> None:
    """Parse the command line and run."""
    options = parsed(sys.argv[1:])
    if options.command == "demo":
        from .commands.demo import main as run

        run(options.out)
    elif options.command == "finetune":
        from .finetune.command import main as finetune

        sys.exit(finetune(options))
    elif options.command == "tune":
        from .commands.tune import main as tune

        def of_finetune(*given: Any) -> Any:
            from .finetune.tuned import candidates

            return candidates(*given)

        sys.exit(tune(options, of_finetune))
    elif options.command == "audit":
        from .audit.command import main as audit

        sys.exit(audit(options))
    elif options.command == "ntk":
        if options.networks < 1 or options.steps < 1:
            parser().error("--networks and --steps are at least 1")
        from .commands.ntk_table import main as table

        table(options.networks, options.steps, options.seed, options.out)
    else:
        from .commands.info import report

        print(report())


if __name__ == "__main__":
    main()
