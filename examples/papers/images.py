"""MNIST, Fashion-MNIST and CIFAR-10 from the files that people have of them, as tensors.

The files are read, never fetched; where one is missing, a message says where to get it.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MNIST = (
    "MNIST: mnist.npz with X_train (or x_train) uint8 [60000, 28, 28], y_train and the same of _test, such as "
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz; or the four idx files "
    "(train-images-idx3-ubyte.gz ...) in DIR or DIR/MNIST/raw, as torchvision leaves them."
)
FASHION = (
    "Fashion-MNIST: the four idx files (train-images-idx3-ubyte.gz ...) in DIR/fashion-mnist or DIR/FashionMNIST/raw; "
    "Debian's package dataset-fashion-mnist has them, and https://github.com/zalandoresearch/fashion-mnist."
)
CIFAR = (
    "CIFAR-10: cifar10.npz with x_train uint8 [50000, 32, 32, 3], y_train, x_test, y_test (written from "
    "https://www.cs.toronto.edu/~kriz/cifar.html); or cifar10_jpeg.npz, each image a JPEG in one string of bytes: "
    "jpeg_train, len_train, y_train and the same of _test."
)
SYSTEM = Path("/usr/share/datasets/fashion-mnist")  # Debian's
PARTS = ("train", "t10k")


class Images(NamedTuple):
    """Training and test images, float32 [N, C, H, W], and labels [N]; in a fixed random order."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    name: str = ""


def need(files: Iterable[Path], where: str) -> Path:
    """The first of the files that exists. Exits with where to get it if none does."""
    tried = list(files)
    for path in tried:
        if path.exists():
            return path
    looked = ", ".join(str(path) for path in tried) or "nowhere: give the folder of the data as --data DIR"
    raise SystemExit(f"a data file is missing (looked for: {looked}).\n{where}")


def idx(path: Path) -> np.ndarray:
    """The array of unsigned bytes in an idx file (LeCun's format), gzipped or not. Raises ValueError on others."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is no idx file of unsigned bytes")
    sizes = np.frombuffer(data, ">i4", data[3], 4)
    if len(data) - 4 - 4 * len(sizes) != int(np.prod(sizes)):
        raise ValueError(f"{path} is cut short: {len(data)} bytes of an array of {' x '.join(map(str, sizes))}")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)


def _idx_files(folders: Sequence[Path], where: str) -> list[np.ndarray]:
    """Training images and labels, test images and labels."""
    found = []
    for part in PARTS:
        for kind in ("images-idx3", "labels-idx1"):
            names = [f"{part}-{kind}-ubyte{end}" for end in (".gz", "")]
            found.append(idx(need([folder / name for folder in folders for name in names], where)))
    return found


def _images(arrays: Sequence[np.ndarray], mean: Sequence[float], std: Sequence[float], name: str) -> Images:
    """uint8 [N, C, H, W] and labels of both parts -> floats less the mean over the deviation, in random order."""
    made: list[Tensor] = []
    shift, scale = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
    for images, labels in (arrays[:2], arrays[2:]):
        x, y = torch.from_numpy(np.array(images)), torch.from_numpy(np.asarray(labels).astype(np.int64))
        if len(x) != len(y):
            raise ValueError(f"{name}: {len(x)} images and {len(y)} labels")
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))  # files are sorted by class
        made += [x[order].float().div_(255).sub_(shift).div_(scale), y.ravel()[order]]
    return Images(*made, name)


def mnist(data: Path | None) -> Images:
    """60,000 and 10,000 images [1, 28, 28], less the mean 0.1307 over the deviation 0.3081 (public constants).

    data: the folder with mnist.npz or the idx files. Exits with where to get them.
    """
    folders = [data, data / "MNIST/raw", data / "mnist"] if data else []
    archive = data / "mnist.npz" if data else None
    if archive is not None and archive.exists():
        with np.load(archive) as file:
            names = {name.lower(): name for name in file.files}
            arrays: list[Any] = [file[names[key]] for key in ("x_train", "y_train", "x_test", "y_test")]
    else:
        arrays = _idx_files(folders, MNIST)
    return _images([arrays[0][:, None], arrays[1], arrays[2][:, None], arrays[3]], [0.1307], [0.3081], "MNIST")


def fashion_mnist(data: Path | None) -> Images:
    """60,000 and 10,000 images [1, 28, 28], less the mean 0.2860 over the deviation 0.3530 (public constants).

    data: its folder, or None for the system's. Exits with where to get them.
    """
    folders = [data / "fashion-mnist", data / "FashionMNIST/raw"] if data else []
    if data and data.name in ("fashion-mnist", "raw"):  # idx files in DIR itself are MNIST's
        folders.append(data)
    arrays = _idx_files([*folders, SYSTEM], FASHION)
    return _images([arrays[0][:, None], arrays[1], arrays[2][:, None], arrays[3]], [0.2860], [0.3530], "Fashion-MNIST")


def jpegs(data: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """JPEGs in one string of bytes -> uint8 [N, C, H, W]."""
    from PIL import Image

    ends, text = np.cumsum(lengths), data.tobytes()
    parts = [text[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    found = np.stack([np.asarray(Image.open(io.BytesIO(part)).convert("RGB")) for part in parts])
    return found.transpose(0, 3, 1, 2)


def cifar10_bytes(data: Path | None) -> tuple[list[np.ndarray], str]:
    """Training images uint8 [N, 3, 32, 32] and labels, the same of the test, sorted as in the file; and their name.

    data: the folder with cifar10.npz, or cifar10_jpeg.npz, whose images are lossy: the name says so. Exits with where
    to get them.
    """
    path = need([data / "cifar10.npz", data / "cifar10_jpeg.npz"] if data else [], CIFAR)
    arrays: list[np.ndarray] = []
    with np.load(path) as file:
        for part in ("train", "test"):
            if path.stem == "cifar10":
                arrays += [file[f"x_{part}"].transpose(0, 3, 1, 2), file[f"y_{part}"]]
            else:
                arrays += [jpegs(file[f"jpeg_{part}"], file[f"len_{part}"]), file[f"y_{part}"]]
    return arrays, "CIFAR-10" if path.stem == "cifar10" else "CIFAR-10 (JPEG)"


def cifar10(data: Path | None) -> Images:
    """50,000 and 10,000 images [3, 32, 32], less 0.5 over 0.25 of each channel; of `cifar10_bytes`."""
    arrays, name = cifar10_bytes(data)
    return _images(arrays, [0.5] * 3, [0.25] * 3, name)


def subset(data: Images, records: int | None, test: int | None = None) -> Images:
    """The first so many training and test images (of the random order); None: all."""
    return Images(data.x[:records], data.y[:records], data.x_test[:test], data.y_test[:test], data.name)
