"""CIFAR-10 as the examples keep it, of a few images of greys."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np


def write(path: Path, draw: np.random.Generator, train: int, test: int) -> None:
    """So many JPEGs for training and for the test, each of a grey that tells its class."""
    from PIL import Image

    arrays: dict[str, np.ndarray] = {}
    for part, count in (("train", train), ("test", test)):
        files = []
        for label in np.repeat(np.arange(10), count // 10):
            buffer = io.BytesIO()
            image = np.full((32, 32, 3), 25 * label) + draw.integers(0, 5, (32, 32, 3))
            Image.fromarray(image.astype(np.uint8)).save(buffer, "JPEG")
            files.append(buffer.getvalue())
        arrays |= {f"jpeg_{part}": np.frombuffer(b"".join(files), np.uint8),
                   f"len_{part}": np.array([len(f) for f in files]),
                   f"y_{part}": np.repeat(np.arange(10), count // 10)}  # fmt: skip
    np.savez(path, **arrays)
