"""Images of a folder: a folder for each class, one record an image, the size and the colours that the model wants.

Every image is decoded before the run: one that cannot be is named and refused, as a row of a table would be. What fits
is kept in memory; the rest is decoded again when it is drawn.
"""

from __future__ import annotations

import hashlib
import io
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from ..utils.formatting import count, listed
from .labels import class_name, label_names
from .models import first_line, quiet, read
from .plan import FinetuneError
from .records import Data, Records, check, split, with_digest
from .tables import Bad, Table, refuse_bad

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "dev", "eval"}
_KEPT = 1 << 30  # bytes of decoded images
_NOT_FOR_IMAGES = ("text_column", "pair_column", "label_column", "group_by", "format", "columns", "delimiter", "quote",
                   "encoding", "max_length", "fused_loss", "graphed")  # fmt: skip


def load_images(options: Namespace, known: Mapping[str, int] | None = None) -> Data:
    """Find and read the images of DATA and --eval. Raises FinetuneError."""
    for name in _NOT_FOR_IMAGES:
        if getattr(options, name):
            raise FinetuneError(f"--{name.replace('_', '-')} does not go with --task images: leave it out")
    table, contents, said = _read_folder(options.data)
    data = Data(Records([]), None, None, said, {"image": "its file", "label": "its folder"})
    data.said += [line] if (line := refuse_bad(table, table.bad, options.skip_bad_rows)) else []
    names, data.public_labels = label_names(table, [(row[1],) for row in table.rows], options.labels, known, "images")
    data.names = names
    found = _records(table, contents, names, options)
    fraction = options.eval_fraction if options.eval_fraction is not None else (0.0 if options.eval else 0.1)
    data.train, data.held_out = split(found, fraction)
    lines = "".join(f"{name} {value}\n" for name, value in sorted(contents.items()))
    digest = hashlib.sha256(lines.encode(errors="surrogateescape"))
    data.files = {options.data.name: digest.hexdigest()}
    if options.eval is not None:
        other, contents, said = _read_folder(options.eval)
        data.said += said + ([line] if (line := refuse_bad(other, other.bad, options.skip_bad_rows)) else [])
        data.held_out = _records(other, contents, names, options)
    if data.held_out is not None and not len(data.held_out):
        data.held_out = None
    check(data, options)
    return data


def _read_folder(folder: Path) -> tuple[Table, dict[str, str], list[str]]:
    """(images by class, {image: SHA-256}, what was left out). Raises FinetuneError."""
    if not folder.is_dir():
        raise FinetuneError(f"--task images reads a folder that has a folder for each class, and {folder} is a file")
    classes = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    names = [each.name for each in classes]
    if names and {name.lower() for name in names} <= _SPLITS:
        more = f" --eval {folder / names[-1]}" if len(names) > 1 else ""
        train = next((name for name in names if name.lower().startswith("train")), names[0])
        raise FinetuneError(
            f"{folder} is divided already, into {listed(names)}: these are no classes. Give {folder / train}{more}"
        )
    if not classes:
        raise FinetuneError(
            f"{folder} has no folders: put the images of each class into a folder that is named like it"
        )
    table = Table(folder, "images", ["image", "label"])
    contents: dict[str, str] = {}
    others = [each.name for each in folder.iterdir() if each.is_file() and not each.name.startswith(".")]
    for place in classes:
        for path in sorted(place.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_dir() or any(part.startswith(".") for part in Path(name).parts):
                continue
            if path.suffix.lower() not in ENDINGS:
                others.append(name)
                continue
            number = len(table.rows) + len(table.bad) + 1
            try:
                raw = path.read_bytes()
                _decoded(raw)
                table.rows.append([name, class_name(place.name)])
                table.lines.append(number)
                contents[name] = hashlib.sha256(raw).hexdigest()
            except (OSError, ValueError, SyntaxError) as problem:  # Pillow has many words for a damaged file
                table.bad.append(Bad(number, f"{name}: {first_line(problem)}"))
    if not table.rows and not table.bad:
        raise FinetuneError(f"the folders of {folder} hold no images ({', '.join(ENDINGS)})")
    said = [f"{count(len(others))} files are no images by their endings and are left out: {listed(others, 3)}"]
    return table, contents, said if others else []


def _decoded(raw: bytes) -> Any:
    """The image in RGB, upright. Raises OSError or ValueError."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise FinetuneError("--task images needs Pillow: pip install pillow") from None
    try:
        with Image.open(io.BytesIO(raw)) as found:
            if found.mode in ("I", "F") or found.mode.startswith("I;"):  # Pillow would cut them at 255
                raise ValueError(f"its pixels have more than 8 bits (mode {found.mode}): convert it to 8")
            return ImageOps.exif_transpose(found).convert("RGB")
    except UnidentifiedImageError:
        raise ValueError("it is no image that Pillow knows") from None
    except Image.DecompressionBombError as problem:
        raise ValueError(str(problem)) from None


def _records(table: Table, contents: Mapping[str, str], names: list[str], options: Namespace) -> Records:
    """Whose `texts` are the hashes of the images: by them it is decided who is held out. Raises FinetuneError."""
    numbers = {name: number for number, name in enumerate(names)}
    unknown = [Bad(line, f"{row[0]}: the label {row[1]!r} is none of {listed(names, 5)}")
               for line, row in zip(table.lines, table.rows, strict=True) if row[1] not in numbers]  # fmt: skip
    refuse_bad(table, [*table.bad, *unknown], options.skip_bad_rows)
    rows = [row for row in table.rows if row[1] in numbers]
    return with_digest(Records(
        [contents[row[0]] for row in rows], labels=[numbers[row[1]] for row in rows],
        paths=[str(table.path / row[0]) for row in rows],
    ))  # fmt: skip


# ---------------------------------------------------------------------- what the model sees


def load_processor(name: str) -> Any:
    """What resizes and scales images for the model."""
    from .models import transformers

    return read("image processor (preprocessor_config.json)", name, transformers().AutoImageProcessor)


class Images(Dataset[dict[str, Any]]):
    """Items {"pixel_values": [C, H, W], "label": int}."""

    what, cut, reference = "label", 0, None

    def __init__(self, records: Records, processor: Any) -> None:
        self.paths, self.contents, self.labels = records.paths or [], records.texts, records.labels or []
        self.processor = processor
        self.kept: dict[int, Tensor] = {}
        first = self._pixels(0)
        self.shape = first.shape
        for i in range(min(len(self), _KEPT // max(first.numel() * first.element_size(), 1))):
            self.kept[i] = self._pixels(i)
        if any(each.shape != self.shape for each in self.kept.values()):
            raise FinetuneError(
                "the model's image processor makes images of different sizes: let it resize them to one"
            )

    def __len__(self) -> int:
        return len(self.paths)

    def length(self, i: int) -> int:
        """All images are of one size."""
        return 1

    def by_length(self) -> Images:
        """As it is."""
        return self

    def digest(self) -> str:
        """Of what the model sees of the first image."""
        return hashlib.sha256(self[0]["pixel_values"].contiguous().numpy().tobytes()).hexdigest()

    def _pixels(self, i: int) -> Tensor:
        raw = Path(self.paths[i]).read_bytes()
        if hashlib.sha256(raw).hexdigest() != self.contents[i]:
            raise FinetuneError(f"{self.paths[i]} has changed since the run began")
        with quiet():
            found = self.processor(images=[_decoded(raw)], return_tensors="pt")["pixel_values"][0]
        return found  # type: ignore[no-any-return]

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"pixel_values": self.kept[i] if i in self.kept else self._pixels(i), "label": self.labels[i]}
