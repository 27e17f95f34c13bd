"""Images of a folder, read by datasets' imagefolder: a folder for each class, one record an image."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..utils.formatting import listed
from .models import first_line
from .plan import FinetuneError
from .records import Data, Record, check, fraction_of, label_names, numbered, split, usable

_SPLITS = {"train", "training", "val", "valid", "validation", "test", "dev", "eval"}
_KEPT = 1 << 30  # bytes of decoded images
_NOT_FOR_IMAGES = ("text_column", "pair_column", "label_column", "group_by", "format", "columns", "delimiter", "quote",
                   "encoding", "max_length", "fused_loss", "graphed")  # fmt: skip


def load_images(options: Namespace, known: Mapping[str, int] | None = None) -> Data:
    """Find and decode the images of DATA and --eval: one that cannot be decoded is named and refused. Raises
    FinetuneError."""
    for name in _NOT_FOR_IMAGES:
        if getattr(options, name):
            raise FinetuneError(f"--{name.replace('_', '-')} does not go with --task images: leave it out")
    rows, said = _rows(options.data, options)
    data = Data([], [], columns={"text": "its file", "label": "its folder"}, said=said)
    data.names, data.public = label_names([[row["label"]] for row in rows], options, known)
    data.train, data.held_out = split(numbered(rows, data, options.data, options), fraction_of(options))
    if options.eval is not None:
        rows, said = _rows(options.eval, options)
        data.held_out, data.said = numbered(rows, data, options.eval, options), data.said + said
    check(data, options)
    return data


def _rows(folder: Path, options: Namespace) -> tuple[list[Record], list[str]]:
    """(images with the names of their folders, what was left out). Raises FinetuneError."""
    from datasets import Image, load_dataset

    if importlib.util.find_spec("PIL") is None:
        raise FinetuneError("--task images needs Pillow: pip install pillow")
    if not folder.is_dir():
        raise FinetuneError(f"--task images reads a folder that has a folder for each class, and {folder} is a file")
    classes = sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if classes and {name.lower() for name in classes} <= _SPLITS:
        raise FinetuneError(
            f"{folder} is divided already, into {listed(classes)}: these are no classes. Give "
            f"{folder / classes[0]} --eval {folder / classes[-1]}"
        )
    try:
        with tempfile.TemporaryDirectory() as cache:  # which is deleted: the records are private
            table = load_dataset(
                "imagefolder", data_files=f"{glob.escape(str(folder))}/*/**", split="train", drop_labels=False,
                drop_metadata=True, keep_in_memory=True, cache_dir=cache,
            )  # fmt: skip
    except Exception as problem:  # noqa: BLE001 - datasets raises errors of many kinds
        raise FinetuneError(f"the folders of {folder} hold no images: {first_line(problem)}") from None
    return usable(table.cast_column("image", Image(decode=False))["image"], _decoded, folder, options)


def _decoded(image: Mapping[str, Any]) -> Record:
    path = Path(image["path"])
    try:
        pixels(path)
        return {"path": str(path), "text": hashlib.sha256(path.read_bytes()).hexdigest(), "label": path.parent.name}
    except Exception as problem:  # noqa: BLE001 - Pillow has many errors for a damaged file
        raise ValueError(f"{path.parent.name}/{path.name}: {first_line(problem)}") from None


def pixels(path: Path) -> Any:
    """The image in RGB, upright, as datasets decodes it. Raises OSError or ValueError."""
    from datasets import Image

    found = Image().decode_example({"path": str(path), "bytes": None})
    if found.mode in ("I", "F") or found.mode.startswith("I;"):  # Pillow would cut them at 255
        raise ValueError(f"its pixels have more than 8 bits (mode {found.mode}): convert it to 8")
    return found.convert("RGB")


class Images:
    """Items {"pixel_values": [C, H, W], "labels": int}. What fits is kept in memory, the rest is decoded again."""

    def __init__(self, records: list[Record], processor: Any) -> None:
        self.records, self.processor = records, processor
        self.kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> dict[str, Any]:
        found = self.kept.get(i)
        if found is None:
            image = pixels(Path(self.records[i]["path"]))
            found = self.processor(images=[image], return_tensors="pt")["pixel_values"][0]
            if len(self.kept) * found.numel() * found.element_size() < _KEPT:
                self.kept[i] = found
        return {"pixel_values": found, "labels": self.records[i]["label"]}
