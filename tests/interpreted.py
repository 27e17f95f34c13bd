"""Triton's interpreter, without work that it does again and again: a third of the time of the kernels' tests."""

from __future__ import annotations

import inspect
from typing import Any


def patch_once_a_launch() -> None:
    """Let calls of device functions within a launch find `triton.language` as the launch has patched it.

    The interpreter looks through all of the language's members for each such call, finds them patched, and changes
    nothing. Functions that see more of the language than their kernel are served as before.
    """
    try:
        from triton import language
        from triton.runtime import interpreter

        own, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    except (ImportError, AttributeError):  # not there, or of another version
        return
    if getattr(own, "once", False):
        return
    running: list[set[str]] = []  # what a launch has patched

    def once(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        seen = {m.__name__ for m in modules if m in (language, language.core)}
        if running and seen and seen <= running[-1]:
            return None  # a launch alone restores, at its end, and it comes first
        if running:
            running[-1].update(seen)
        return own(fn)

    def launched(self: Any, *args: Any, **options: Any) -> Any:
        running.append(set())
        try:
            return launch(self, *args, **options)
        finally:
            running.pop()

    once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched
