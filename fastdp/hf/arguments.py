"""Checks a TrainingArguments against the table of its fields. The private trainers enforce `check`.

`python -m fastdp.hf.arguments` prints the tables of docs/huggingface.md.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

from ..errors import FastDPError
from .argument_table import READERS, TABLES, Field, fields_of, reader_of
from .combining import NOT_PRIVATE


class ArgumentError(FastDPError, ValueError):
    """A field of TrainingArguments has a value that private training refuses."""


def check(args: Any, read: Iterable[str] = READERS) -> None:
    """Raise ArgumentError, with the field, its value and the reason, if private training refuses a field.

    read: the subclasses of TrainingArguments whose fields the trainer reads. A field that the tables do not contain
    (of a newer transformers, or another subclass) must have its class's default.
    """
    kinds = {parent.__name__ for parent in type(args).__mro__}
    for trainer, why in NOT_PRIVATE.items():
        if trainer.replace("Trainer", "Config") in kinds:
            raise ArgumentError(f"{type(args).__name__} is for {trainer}, which is not made private: {why}")
    fields = fields_of(type(args), read)
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        known = fields.get(field.name)
        if known is None:
            if value != _default(field) and value != _made_by_default(args, field.name):
                reader = reader_of(type(args), field.name)
                raise ArgumentError(
                    f"{type(args).__name__}.{field.name}={_short(value)}: "
                    + (
                        f"this trainer does not read the field, fastdp.hf.{reader} does"
                        if reader
                        else "fastdp.hf does not know this field, so it does not know what it means for privacy; leave "
                        "its default"
                    )
                )
        elif not known.accepts(value):
            raise ArgumentError(f"{type(args).__name__}.{field.name}={_short(value)} is refused: {known.why}")
    if getattr(args, "n_gpu", 0) > 1:
        raise ArgumentError(
            f"one process with {args.n_gpu} GPUs: gradients of several devices would be added up before they are "
            "private. Start one process a GPU (torchrun), or show it one (CUDA_VISIBLE_DEVICES=0)"
        )
    if getattr(args, "world_size", 1) > 1 and getattr(args, "torch_compile", False):
        raise ArgumentError(
            f"torch_compile=True with {args.world_size} processes: the wrapper around the model would be compiled with "
            "it. Leave it out"
        )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _made_by_default(args: Any, name: str) -> Any:
    """What an object of this class has there if nothing is said: __post_init__ may replace a field's default."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(type(args)(output_dir=args.output_dir), name, None)
    except (TypeError, ValueError, RuntimeError):
        return None


def _short(value: Any) -> str:
    text = repr(getattr(value, "value", value))
    return text if len(text) <= 60 else text[:57] + "..."


def table(fields: dict[str, Field]) -> str:
    """Return the fields as a table in Markdown, with the refused ones first and those of one remark together.

    If all are of one kind, no column says so.
    """
    order = ("refused", "supported", "no effect")
    rows: dict[tuple[str, str], list[str]] = {}
    for name, field in fields.items():
        rows.setdefault((field.status, field.why), []).append(f"`{name}`")
    several = len({kind for kind, _ in rows}) > 1
    lines = ["| field | | remark |", "| --- | --- | --- |"] if several else ["| field | remark |", "| --- | --- |"]
    for status in order:
        said = f" {status} |" if several else ""
        lines += [f"| {', '.join(names)} |{said} {why} |" for (kind, why), names in rows.items() if kind == status]
    return "\n".join(lines)


if __name__ == "__main__":
    for kind, fields in TABLES.items():
        print(f"{kind}:\n\n{table(fields)}\n")
