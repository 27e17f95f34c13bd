"""Numbers that sizes told, computed further: followed through tensors, told by how they grow; literals are none."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import BatchReadWarning, NotVerifiedWarning, SampleMixingError

from ..programs_by_hand import D, run, squares


class Scaled(nn.Module):
    def __init__(self, number: Callable[[Scaled, Tensor], float | Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.number = nn.Linear(D, 4), nn.Linear(4, 3), number
        self.scaling, self.step = 0.5, 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        h = self.a(x)
        return self.b(h * self.number(self, h))


def warned(number: Callable[[Scaled, Tensor], float | Tensor], batches: list[int]) -> bool:
    torch.manual_seed(0)
    model = Scaled(number)
    optimizer = fastdp.DPSGD(
        model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, expected_batch_size=6
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for size in batches:
                F.cross_entropy(model(torch.randn(size, D)), torch.randint(0, 3, (size,))).backward()
                optimizer.step()
        except SampleMixingError:
            return True
        finally:
            optimizer.detach()
    kinds = {w.category for w in caught} - {NotVerifiedWarning}
    assert kinds <= {BatchReadWarning}
    return bool(kinds)


AT_ONCE = {
    "ones added up": lambda m, h: torch.ones(h[h > 0].shape[0]).sum() ** 2 * 0.01,
    "ones beside data added up": lambda m, h: h.new_ones(len(h)).sum() * 0.3,
    "a full tensor": lambda m, h: torch.full((4,), float(len(h))),
    "a line that asked for another dimension first": lambda m, h: [h.size(dim) for dim in (1, 0)][1],
    "a tensor of a list": lambda m, h: torch.tensor([float(len(h))]),
    "a full tensor beside data": lambda m, h: h.new_full((1,), len(h)),
    "a filled tensor": lambda m, h: torch.zeros(4).fill_(len(h)),
    "of NumPy": lambda m, h: numpy.float32(len(h)),
    "as it is": lambda m, h: len(h),
    "by a function of one's own": lambda m, h: (lambda t: t.shape[0])(h),
}


def test_the_length_of_one_hot_is_the_batchs() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.b(self.a(x) * F.one_hot(labels).shape[1])

    optimizer = fastdp.DPSGD(model := Counting(), lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
    with pytest.warns(BatchReadWarning, match="largest label"):
        model(torch.randn(7, D), torch.tensor([0, 1, 8, 2, 1, 0, 3]))
    optimizer.detach()


@pytest.mark.parametrize("name", AT_ONCE)
def test_numbers_followed_through_tensors_are_warned_of(name: str) -> None:
    assert warned(AT_ONCE[name], [7])


FOLLOWED = {
    "constants scaled": lambda m, h: torch.ones(4) * len(h),
    "constants divided": lambda m, h: torch.linspace(1, 2, 4) / h.shape[0],
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_numbers_by_which_constants_were_scaled_are_followed_first(name: str) -> None:
    """A constant may be scaled by a number that equals the size by chance."""
    assert not warned(FOLLOWED[name], [7, 7]) and warned(FOLLOWED[name], [6, 9, 4])


def test_the_number_of_samples_that_a_forward_returns() -> None:
    def scaled(returned: bool) -> list[int]:
        optimizer = fastdp.DPSGD(model := nn.Linear(D, 3), lr=0.1, noise_multiplier=1.0, expected_batch_size=6)
        model.forward = lambda x: (nn.Linear.forward(model, x), len(x))  # type: ignore[method-assign]
        done = []
        for size in (6, 9, 4, 5):
            out, number = model(torch.randn(size, D))
            (out * (number if returned else 6)).square().sum(1).mean().backward()
            done.append(size)
        optimizer.detach()
        return done

    assert scaled(False) == [6, 9, 4, 5]
    with pytest.raises(SampleMixingError, match="made of the number of samples"):
        scaled(True)


SERIES = [6, 9, 4, 12, 8, 5, 11, 7]
GROWING = {
    "square": lambda m, h: len(h) ** 2 * 0.013,
    "logarithm": lambda m, h: math.log1p(len(h)),
    "a share": lambda m, h: 3.7 * len(h),
    "inverse": lambda m, h: 0.37 / len(h),
}


@pytest.mark.parametrize("name", GROWING)
def test_numbers_that_grow_with_a_size_are_warned_of(name: str) -> None:
    assert not warned(GROWING[name], SERIES[:3]) and warned(GROWING[name], SERIES)


def unpacked(h: Tensor, number: float) -> float:
    rows, _ = h.shape
    return number if rows else 0.0


RIGHT = {
    "written down": lambda m, h: (len(h), 2.0)[1],
    "the width, asked by place": lambda m, h: 1 / (h.shape[1] // 2) ** 0.5,
    "the width, asked by size": lambda m, h: 1 / (h.size(1) * (h.size(1) - 1)),
    "a root of all elements, by chance": lambda m, h: unpacked(h, math.sqrt(24.0)),
    "a schedule": lambda m, h: (len(h), 0.99**m.step)[1],
    "a constant": lambda m, h: (len(h), 0.7)[1],
    "random": lambda m, h: (len(h), random.random())[1],
    "the width": lambda m, h: 1 / math.sqrt(h.shape[-1]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_other_numbers_are_not(name: str) -> None:
    random.seed(0)
    assert not warned(RIGHT[name], [6, 9, 4, 6, 8, 5, 11, 7])


TOLD = {
    "len": lambda m, h: h * len(h),
    "shape": lambda m, h: h / h.shape[0],
    "root": lambda m, h: h / h.size(0) ** 0.5,
    "tensor": lambda m, h: h * torch.tensor(len(h)),
    "full": lambda m, h: h * torch.full((1,), len(h)),
    "of a parameter": lambda m, h: h * (m.token * len(h)),
    "nonzero": lambda m, h: h * (h > 0).nonzero().shape[0],
    "selected": lambda m, h: h / h[h > 0].shape[0],
    "unique": lambda m, h: h * len(torch.unique((h * 3).long())),
    "where": lambda m, h: h * torch.where(h > 0)[0].size(0),
}


@pytest.mark.parametrize("name", TOLD)
def test_numbers_told_by_sizes(name: str) -> None:
    """Warned of at once, refused in another batch."""
    with pytest.warns(BatchReadWarning, match="computes with"):
        run(TOLD[name])
    with pytest.raises(SampleMixingError, match="computes with"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(TOLD[name], sizes=(6, 5, 7, 6, 4))


def test_a_constant_that_equals_the_size_goes_on_working() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(run(lambda m, h: h.view(len(h), -1) / 6, sizes=(6, 5, 7, 6))) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(lambda m, h: h.view(len(h), -1) / 6, sizes=(5, 6, 7), loss=squares)
        run(lambda m, h: h.view(h.shape[0], 2, -1).flatten(1) * 3, sizes=(6, 5, 7))


LITERALS = {
    "of a GELU": lambda m, h: (len(h), 0.5 * (1.0 + torch.tanh(h + 0.044715 * torch.pow(h, 3.0))))[1],
    "a square": lambda m, h: (len(h), h.pow(2))[1],
    "an attribute": lambda m, h: (len(h), h * m.scaling)[1],
    "of a constant": lambda m, h: (lambda number: (len(h), torch.ones(4) * number)[1])(float("2")),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", LITERALS)
def test_what_is_written_in_the_code_is_no_size(name: str, size: int) -> None:
    assert not warned(LITERALS[name], [size] * 3)


class Texts(nn.Module):
    """A mean over texts' words, by hand."""

    def __init__(self, mean: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.b, self.mean = nn.Embedding(9, D), nn.Linear(D, 3), mean

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.mean(self.words(x)))


LENGTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "of a shape": lambda h: h.sum(1) / h.shape[1],
    "of a size": lambda h: h.sum(1) / h.size(1),
    "a root": lambda h: h.sum(1) / h.shape[1] ** 0.5,
    "its name": lambda h: (length := h.size(1), h.sum(1) / length)[1],
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_of_texts_that_equal_the_size_by_chance(name: str) -> None:
    model = Texts(LENGTHS[name])
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BatchReadWarning)
        for size, length in ((7, 7), (8, 12), (6, 6), (5, 9), (4, 4), (9, 9)):
            words = torch.randint(0, 9, (size, length))
            loss = F.cross_entropy(model(words), words[:, 0] % 3, reduction="sum") / words.numel()
            (loss * length).backward()
            optimizer.step()
    optimizer.detach()


def test_a_sum_over_all_elements_is_divided_by_their_number() -> None:
    """Which grows as a power of the size where lengths and sizes do, by chance."""
    model = nn.Linear(D, 3)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, loss_reduction="mean",
                             expected_batch_size=6)  # fmt: skip
    for size, length in ((8, 12), (4, 6), (6, 9)):
        losses = model(torch.randn(size, length, D)).square().sum(2)
        (losses.sum() / losses.numel()).backward()
        optimizer.step()
    optimizer.detach()


def test_numbers_that_follow_the_size_but_once() -> None:
    run(lambda m, h: h / max(len(h), 7), sizes=(5, 8, 9, 10), loss=squares)
    with pytest.raises(SampleMixingError, match="computes with"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(lambda m, h: h / max(len(h), 7), sizes=(5, 8, 9, 10, 11))


# --------------------------------------------------------------------------- in the loss

WEIGHT, RECORDS = {"of the loss": 0.3}, range(50_000)
SCALED = {  # losses of outputs o, and whether they are warned of at once
    "mean": (lambda o: o.mean(), False),
    "each divided, summed": (lambda o: (o / len(o)).sum(), False),
    "summed, divided": (lambda o: o.sum() / len(o) * 0.5, False),
    "a weight beside a view": (lambda o: WEIGHT["of the loss"] * o.view(len(o)).mean(), False),
    "a constant that is a multiple of some sizes": (lambda o: o.sum() / len(o) + o.sum() / len(o) / 64, False),
    "the elements": (lambda o: torch.stack([o, o], 1).sum() / torch.stack([o, o], 1).numel(), False),
    "by another dimension": (
        lambda o: (torch.stack([o] * D, 1).sum(1) / torch.stack([o] * D, 1).size(1)).mean(),
        False,
    ),
    "each times the size": (lambda o: (o * len(o)).mean(), True),
    "the mean by a part of the records": (lambda o: len(o) / 60 * o.mean(), True),
    "the mean by a part of a variable": (lambda o, n_data=60_000: o.mean() * (len(o) / n_data), True),
    "the mean by a part of a list's length": (lambda o: o.mean() * (len(o) / len(RECORDS)), True),
    "unbiased": (lambda o: o.mean() * (len(o) / (len(o) - 1)), True),
    "no number that a size makes": (lambda o: (o.view(len(o)) * math.inf).mean() + o.sum() / len(o) * 1e-320, False),
    "each times a tensor of the size": (lambda o: (o * torch.tensor(len(o))).mean(), True),
    "added as often as samples": (lambda o: torch.add(o, o, alpha=len(o)).mean(), True),
    "the mean by a root": (lambda o: o.mean() * len(o) ** 0.5, True),
}


def by_shape(o: Tensor) -> Tensor:
    o = o[:, None].expand(-1, 24).unflatten(1, (-1, 2))
    rows, columns = o.shape[1:]
    return o.sum((1, 2)).mean() / (rows * columns) + o.sum() / o.size(0) / o[0].numel()


def by_one(o: Tensor) -> Tensor:
    o = o[:, None].expand(-1, 24)
    return o.sum() / o.size(0) / o[0].numel()


def by_steps(o: Tensor) -> Tensor:
    o, total = torch.stack([o] * 12, 1), torch.zeros(())
    for t in range(o.size(1)):
        total = total + o[:, t].mean()
    return total / o.size(1)


def distilled(o: Tensor, temperature: int = 4, share: float = 0.7) -> Tensor:
    return o.sum() / o.size()[0] * (temperature**2) + o.sum() / o.size()[0] * (1 - share) + o.mean()


@pytest.mark.parametrize("loss", [by_shape, by_one, by_steps, distilled])
def test_numbers_beside_the_size_that_are_of_none(loss: Callable[[Tensor], Tensor]) -> None:
    """Whatever of them is a multiple of the batch's size by chance."""
    for sizes in ([16], [8], [12], [16, 15, 8, 3, 12, 6]):
        assert not _scaled(loss, sizes)


def test_the_size_itself_though_it_is_a_product_of_others() -> None:
    def loss(o: Tensor) -> Tensor:
        rows, columns = o[:, None].expand(-1, 4).unflatten(1, (2, 2)).shape[1:]
        return o.mean() / len(o) + rows * columns

    assert _scaled(loss, [8]) and _scaled(loss, [7])


def _scaled(loss: Callable[[Tensor], Tensor], sizes: list[int]) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(D, 3)
    optimizer = fastdp.DPSGD(
        model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, expected_batch_size=6
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for size in sizes:
                loss(model(torch.randn(size, D)).square().sum(1)).backward()
                optimizer.step()
        finally:
            optimizer.detach()
    return [w.category.__name__ for w in caught]


@pytest.mark.parametrize("name", SCALED)
def test_factors_of_the_loss_that_are_made_of_the_batchs_size(name: str) -> None:
    loss, bad = SCALED[name]
    assert bool(_scaled(loss, [6])) == bad
    if not bad:
        assert not _scaled(loss, [7, 4, D, 7, 8, 3, 9, 6, 7])


def test_a_factor_that_follows_the_size_is_refused_or_warned_of() -> None:
    with pytest.raises(SampleMixingError, match="the number of samples"):
        _scaled(SCALED["each times the size"][0], [6, 5, 7])

    for power in (lambda o: o.sum() / len(o) ** 2, lambda o: o.sum().mul(1 / len(o) ** 2)):
        with pytest.raises(SampleMixingError, match="a power of the number of samples"):
            _scaled(power, [6, 5])

    def by_name(o: Tensor) -> Tensor:
        part = len(o) / 60
        return o.mean() + part * o.sqrt().mean()

    assert not _scaled(by_name, [6])  # a weight, for all that its name tells
    assert _scaled(by_name, [6, 5, 7, 4, 8, 3, 9]) == ["BatchReadWarning"]
    for extra in (lambda o: (o / len(o)).mean(), lambda o: o.sum() * (1 / len(o)) * (1 / len(o))):
        assert "LossReductionWarning" in _scaled(extra, [6, 5])
    weight = 0.1
    assert not _scaled(lambda o: weight * o.sum() / len(o), [10, 20, 5, 10])  # 1 / 10 is one of its sizes by chance


def test_a_sum_divided_by_how_many_labels_there_are_is_warned_of() -> None:
    """Which a batch at a time does not show: 13 boxes, then 15. (As many tokens for each sample are another matter.)"""
    sizes, counts, pieces = [6, 5, 7], iter([13, 17, 15, 13, 17, 15]), iter([6, 5, 7])
    found = _scaled(lambda o: o.sum() / torch.as_tensor([next(counts)]).clamp(min=1).item(), sizes)
    assert "BatchReadWarning" in found
    assert "BatchReadWarning" not in _scaled(lambda o: o.sum() / (next(pieces) * 12), sizes)
    assert "BatchReadWarning" not in _scaled(lambda o: o.sum() / 1000 + o.sum() / 100, sizes)


METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "wrong ones": lambda o, y: len(y) - (o.argmax(1) == y).sum(),
    "negatives": lambda o, y: o.numel() - (o > 0).sum(),
    "percent": lambda o, y: (o.argmax(1) == y).float().sum().mul_(100.0 / len(y)),
    "the loss so far": lambda o, y: F.cross_entropy(o.detach(), y, reduction="sum") / (len(y) + 1),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_by_the_batchs_size_are_refused_in_the_loss_alone(name: str) -> None:
    torch.manual_seed(0)
    for logged in (True, False):
        model = nn.Linear(D, 3)
        optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, sample_rate=0.1, expected_batch_size=6)
        with warnings.catch_warnings():
            warnings.simplefilter("error", BatchReadWarning)
            for size in (5, 7, 4, 6, 9):
                x, y = torch.randn(size, D), torch.randint(0, 3, (size,))
                out = model(x)
                loss, metric = F.cross_entropy(out, y), METRICS[name](out, y)
                if not logged:
                    with pytest.raises(SampleMixingError):
                        (loss * (1 + metric)).backward()
                    break
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.detach()
