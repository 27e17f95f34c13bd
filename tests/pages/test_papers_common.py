"""What the experiments of the papers share: data files, rows, the training loop."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastdp
from examples.papers import common, images, training

TRAIN, TEST = 8, 4


def pictures(count: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Image k is all of brightness 25 k, and its label is k."""
    labels = np.arange(count, dtype=np.uint8)
    return (25 * labels).reshape(-1, *[1] * len(shape)) * np.ones(shape, np.uint8), labels


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def idx_files(folder: Path, end: str = ".gz") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        for kind, array in zip(("images-idx3", "labels-idx1"), pictures(count, 28, 28), strict=True):
            data = idx_bytes(array)
            (folder / f"{part}-{kind}-ubyte{end}").write_bytes(gzip.compress(data) if end else data)


def check(found: common.Images, mean: float, std: float, shape: tuple[int, ...], close: float = 1e-6) -> None:
    """Every image still has its own label, and the stated scale."""
    assert found.x.shape == (TRAIN, *shape) and found.x_test.shape == (TEST, *shape) and found.x.dtype == torch.float32
    assert sorted(found.y.tolist()) == list(range(TRAIN)) and found.y.tolist() != sorted(found.y.tolist())
    for x, y in ((found.x, found.y), (found.x_test, found.y_test)):
        wanted = (25 * y.double() / 255 - mean) / std
        assert float((x.double() - wanted.view(-1, 1, 1, 1)).abs().max()) < close


def test_mnist_and_fashion_mnist(tmp_path, monkeypatch):
    """MNIST of an archive and of idx files; Fashion-MNIST of DIR/fashion-mnist, or the system's, not of MNIST's."""
    names = ("X_train", "y_train", "X_test", "y_test")
    arrays = (*pictures(TRAIN, 28, 28), *pictures(TEST, 28, 28))
    np.savez(tmp_path / "mnist.npz", **dict(zip(names, arrays, strict=True)))
    idx_files(tmp_path / "raw/MNIST/raw", "")
    for folder in (tmp_path, tmp_path / "raw"):
        check(common.mnist(folder), 0.1307, 0.3081, (1, 28, 28))
    monkeypatch.setattr(images, "SYSTEM", tmp_path / "system")
    idx_files(tmp_path / "data")
    with pytest.raises(SystemExit, match="dataset-fashion-mnist"):
        common.fashion_mnist(tmp_path / "data")
    idx_files(tmp_path / "data/fashion-mnist")
    check(common.fashion_mnist(tmp_path / "data"), 0.2860, 0.3530, (1, 28, 28))
    idx_files(tmp_path / "system")
    check(common.fashion_mnist(None), 0.2860, 0.3530, (1, 28, 28))


def test_cifar10_exact_and_jpeg(tmp_path):
    image = pytest.importorskip("PIL.Image")
    exact: dict[str, np.ndarray] = {}
    lossy: dict[str, np.ndarray] = {}
    for part, count in (("train", TRAIN), ("test", TEST)):
        x, y = pictures(count, 32, 32, 3)
        exact |= {f"x_{part}": x, f"y_{part}": y[:, None]}  # Keras's labels are columns
        encoded = []
        for picture in x:
            image.fromarray(picture).save(file := io.BytesIO(), "JPEG", quality=95)
            encoded.append(file.getvalue())
        lossy |= {f"jpeg_{part}": np.frombuffer(b"".join(encoded), np.uint8), f"y_{part}": y,
                  f"len_{part}": np.array([len(e) for e in encoded])}  # fmt: skip
    np.savez(tmp_path / "cifar10_jpeg.npz", **lossy)
    found = common.cifar10(tmp_path)
    check(found, 0.5, 0.25, (3, 32, 32), close=0.05)
    assert found.name == "CIFAR-10 (JPEG)"
    np.savez(tmp_path / "cifar10.npz", **exact)
    check(common.cifar10(tmp_path), 0.5, 0.25, (3, 32, 32))
    assert common.cifar10(tmp_path).name == "CIFAR-10"
    part = common.subset(found, 3, 2)
    assert torch.equal(part.x, found.x[:3]) and torch.equal(part.y_test, found.y_test[:2])


def test_damaged_and_missing_files(tmp_path):
    idx_files(tmp_path, "")
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut short"):
        common.mnist(tmp_path)
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="no idx file"):
        common.mnist(tmp_path)
    for read in (common.mnist, common.cifar10):
        with pytest.raises(SystemExit, match="--data DIR"):
            read(None)


# ---------------------------------------------------------------------- rows


def test_rows_have_all_columns_and_commands_no_folders(tmp_path):
    given = ["--data", "/secret/place", "--seeds=2", "--out", "/x/y.csv", "--cases", "local, R = 1"]
    assert common.command_of("s", given) == "python examples/papers/s.py --data DIR --seeds=2 --cases 'local, R = 1'"
    options = common.parser("Words.", "script").parse_args(["--seeds", "2"])
    rows = common.rows(options, "E", "c, d", "short", 1, {"accuracy": 1 / 3, "nll": 2}, sigma=1.1)
    path = tmp_path / "new" / "rows.csv"
    for some in (rows, rows[:1]):
        common.write(path, some)
    with path.open() as file:
        found = list(csv.DictReader(file))
    assert [(row["metric"], row["value"]) for row in found] == [("accuracy", "0.333333"), ("nll", "2"),
                                                                ("accuracy", "0.333333")]  # fmt: skip
    assert tuple(found[0]) == common.COLUMNS and found[0]["torch"] == torch.__version__ and found[0]["date"]
    with pytest.raises(ValueError, match="no column of a result: learning_rate"):
        common.write(path, [{**rows[0], "learning_rate": 1}])


# ---------------------------------------------------------------------- training


def problem(records: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(records, 5) * torch.linspace(0.1, 30, records).view(-1, 1)
    return x, torch.randint(0, 3, (records,))


@pytest.mark.parametrize("style", ["flat", "layerwise"])
def test_training_counts_logical_steps_and_long_gradients(style):
    """The share of norms above R is that of one-sample gradients; rate 1, so that every step sees every record."""
    x, y = problem()
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    norms = []
    for k in range(len(x)):
        grads = torch.autograd.grad(F.cross_entropy(model(x[k : k + 1]), y[k : k + 1]), list(model.parameters()))
        squares = [float(g.square().sum()) for g in grads]
        norms.append([sum(squares)] if style == "flat" else [squares[0] + squares[1], squares[2] + squares[3]])
    limit = 2.0**2 / len(norms[0])
    wanted = sum(n > limit for each in norms for n in each) / (len(norms) * len(norms[0]))
    assert 0.2 < wanted < 0.9
    batches = training.loader(x, y, len(x), max_physical_batch_size=16, steps=2)
    optimizer = fastdp.DPSGD(model, lr=0.0, noise_multiplier=1.0, max_grad_norm=2.0, style=style)
    seen: list[int] = []
    run = training.train(model, optimizer, batches, steps=3, before=seen.append, lines=False)
    assert seen == [0, 1, 2] and run.steps == 3 and run.epochs == 1.5 and len(run.losses) == 2
    assert optimizer.history == [(1.0, 1.0, 3)]
    assert run.clipped == pytest.approx(wanted)
    with torch.no_grad():
        assert run.losses[0] == pytest.approx(float(F.cross_entropy(model(x), y)), rel=1e-5)
    optimizer.detach()


def test_empty_batches_cost_a_step_and_break_nothing():
    x, y = problem()
    model = torch.nn.Linear(5, 3)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
    run = training.train(model, optimizer, training.loader(x, y, 0.2), steps=30, lines=False)
    assert run.steps == 30 and sum(steps for _, _, steps in optimizer.history) == 30
    assert all(torch.isfinite(p).all() for p in model.parameters())
    optimizer.detach()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert training.train(model, plain, training.loader(x, y, 0.2, seed=0), steps=30, lines=False).clipped is None


def test_diverging_training_and_no_steps_are_errors():
    x, y = problem()
    model = torch.nn.Linear(5, 3)
    plain = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with pytest.raises(FloatingPointError, match="not finite after 2 steps"):
        training.train(model, plain, training.loader(x, y, 20, seed=0), steps=2, lines=False)
    with pytest.raises(ValueError, match="steps must be 1 or more"):
        training.train(model, plain, training.loader(x, y, 20, seed=0), steps=0)
