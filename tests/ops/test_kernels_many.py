"""Layers of equal shape in one launch: norms and clipped sums of each are what it would give alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from .by_triton import launches
from .kernels_truth import DEVICE, DTYPES, check_close, check_norms, linear_gradients, numbers, poisoned, weighted

pytest.importorskip("triton")
from fastdp.kernels import clipped, linear, many

from fastdp.ops import bounds

ALONE = pytest.mark.skipif(DEVICE == "cuda", reason="launches are counted in the interpreter")


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


def pairs_of(count: int, b: int, t: int, i: int, o: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    return [
        (numbers(b, t, i, dtype=dtype, seed=n) * 2.0**n, numbers(b, t, o, dtype=dtype, seed=n + 9))
        for n in range(count)
    ]


def plain(a: Tensor, g: Tensor) -> Tensor:
    return (g.float().mT @ a.float()).flatten(1).square().sum(1)


def norms(pairs: list[tuple[Tensor, Tensor]], method: str) -> Tensor:
    limits = bounds.units_of_products(*pairs[0]), bounds.TOLERANCE
    return many.linear_norm_sq(pairs, method, *limits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["gram", "direct"])
@pytest.mark.parametrize(("t", "i", "o"), [(1, 40, 24), (37, 48, 32), (37, 37, 50), (130, 16, 16)])
def test_norms(t: int, i: int, o: int, method: str, dtype: torch.dtype) -> None:
    pairs = pairs_of(3, 2, t, i, o, dtype)
    found = norms(pairs, method)
    assert found.shape == (3, 2) and found.dtype == torch.float64
    for row, (a, g) in zip(found, pairs, strict=True):
        check_norms(row, linear_gradients(a, g), plain(a, g))
        limits = bounds.units_of_products(a, g), bounds.TOLERANCE
        alone = linear.linear_norm_sq_and_bound(a, g, method, *limits)[0]
        torch.testing.assert_close(row, alone, rtol=1e-6, atol=0)


@ALONE
@pytest.mark.parametrize(
    ("method", "kernels"), [("gram", ["gram_kernel"]), ("direct", ["direct_kernel", "sizes_kernel"])]
)
def test_one_launch_each(method: str, kernels: list[str]) -> None:
    pairs = pairs_of(5, 2, 37, 48, 32, torch.bfloat16)
    with launches() as found:
        norms(pairs, method)
    assert found == dict.fromkeys([*kernels, "finish_kernel"], 1)
    with launches() as found:
        many.linear_clipped_sum(pairs, torch.ones(2, device=DEVICE))
    assert found["clipped_kernel"] == 1 and found.total() <= 2


def test_layers_that_lie_otherwise_are_launched_apart() -> None:
    """Other strides, addresses that are no multiple of 16 bytes, other shapes' neighbours: each norm is its own."""
    pairs = pairs_of(6, 2, 37, 48, 32, torch.bfloat16)
    pairs[1] = (pairs[1][0].transpose(0, 1).contiguous().transpose(0, 1), pairs[1][1])
    buffer = torch.zeros(2 * 37 * 48 + 1, dtype=torch.bfloat16, device=DEVICE)
    buffer[1:] = pairs[3][0].flatten()
    pairs[3] = (buffer[1:].view(2, 37, 48), pairs[3][1])
    assert many._groups(pairs, lambda a, g: 10) == [
        [0, 2, 4, 5],
        [1],
        [3],
    ]  # loads of 16 bytes from elsewhere would be a fault
    c = torch.tensor([0.5, 2.0], device=DEVICE)
    sums = many.linear_clipped_sum(pairs, c)
    for row, total, (a, g) in zip(norms(pairs, "gram"), sums, pairs, strict=True):
        check_norms(row, linear_gradients(a, g), plain(a, g))
        truth = weighted(linear_gradients(a, g), c)
        check_close(total, truth, truth.float())


@pytest.mark.parametrize("first", [0, 1])
def test_sums_of_layers_of_other_widths(first: int) -> None:
    """Each group has memory of its own shape: of layers of one vocabulary some are filled up, and others are not, whose
    inputs begin between two vectors."""
    x = numbers(2, 37, 64, dtype=torch.bfloat16)
    inputs = [x[..., 1:17], x[..., :16], x[..., 16:32], x[..., 32:48]]
    pairs = [(a, numbers(2, 37, 19, dtype=torch.bfloat16, seed=n)) for n, a in enumerate(inputs)]
    pairs = pairs[first:] + pairs[:first]
    whole = [linear.filled_once(*pair) for pair in pairs]
    assert sorted(g.size(2) for _, g in whole) == [19, 32, 32, 32]
    c = torch.tensor([0.5, 2.0], device=DEVICE)
    sums = many.linear_clipped_sum(list(whole), c)
    for total, (a, g), (_, wide) in zip(sums, pairs, whole, strict=True):
        truth = weighted(linear_gradients(a, g), c)
        assert total.shape == (wide.size(2), 16)
        check_close(total[:19], truth, truth.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b", "t"), [(3, 1), (5, 37), (4, 40)])
@pytest.mark.parametrize("most", [1, 2, 10])
def test_clipped_sums(b: int, t: int, dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "MOST", most * 4 * 48 * 32)
    pairs = pairs_of(4, b, t, 48, 32, dtype)
    c = torch.linspace(0.1, 1.7, b, device=DEVICE)
    c[1] = 0
    truths = [weighted(linear_gradients(a, g), c) for a, g in pairs]
    pairs[2][0][1] = math.nan  # of a dropped sample
    held = list(pairs)
    found = many.linear_clipped_sum(held, c, drop=True)
    assert all(a.numel() == 0 for a, _ in held)
    assert len({total.untyped_storage().data_ptr() for total in found}) == 4, "memory of its own"
    for total, truth in zip(found, truths, strict=True):
        assert total.dtype == torch.float32
        check_close(total, truth, truth.float())


def test_a_bad_number_stays_in_its_layer_and_sample() -> None:
    pairs = pairs_of(3, 2, 37, 48, 32, torch.float16)
    before = norms(pairs, "gram")
    pairs[1][1][1, -1, 3] = math.nan
    after = norms(pairs, "gram")
    bad = torch.zeros_like(before, dtype=torch.bool)
    bad[1, 1] = True
    assert not after[bad].isfinite() and torch.equal(before[~bad], after[~bad])


def test_groups_of_samples_make_whole_waves() -> None:
    """The tiles of 768 -> 3072 are 144 on 132 multiprocessors: of one group they would run for two samples' time."""
    assert clipped.splits(8, 512, 144, 132) > 1
    assert clipped.splits(8, 512, 36 * 144, 132) == 1, "many layers fill the device by themselves"
    assert clipped.splits(8, 512, 4, 132) == 8 and clipped.splits(1, 512, 4, 132) == 1
    for batch in range(1, 20):
        assert 1 <= clipped.splits(batch, 37, 10, 132) <= min(batch, clipped.MOST_SPLITS)


# ---------------------------------------------------------------------- stored gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 8), (2, 17, 61), (4, 1), (2, 40, 51)])
def test_stored_gradients(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many.rows, "PART", 1024)
    stacks = [numbers(*shape, dtype=dtype, seed=n) * 2.0**n for n in range(4)]
    c = torch.linspace(0.1, 1.7, shape[0], device=DEVICE)
    c[1] = 0
    found = many.square_sum(stacks)
    want = torch.stack([s.double().flatten(1).square().sum(1) for s in stacks])
    torch.testing.assert_close(found, want, rtol=1e-12, atol=0)
    exact = [torch.einsum("b,b...->...", c.double(), s.double()) for s in stacks]
    stacks[2][1] = math.nan  # of a dropped sample
    held = list(stacks)
    sums = many.weighted_sum(held, c, drop=True)
    assert not held and len({total.untyped_storage().data_ptr() for total in sums}) == 4
    for total, truth in zip(sums, exact, strict=True):
        assert total.dtype == dtype and total.shape == shape[1:]
        torch.testing.assert_close(total.double(), truth, rtol=4 * torch.finfo(dtype).eps, atol=4e-5)


@ALONE
def test_stored_gradients_in_one_launch_unless_they_lie_otherwise() -> None:
    stacks, c = [numbers(3, 20, 31, seed=n) for n in range(5)], torch.ones(3, device=DEVICE)
    with launches() as found:
        before = many.square_sum(stacks), many.weighted_sum(list(stacks), c)
    assert found == {"square_kernel": 1, "weighted_kernel": 1}
    stacks[3] = stacks[3].mT.contiguous().mT
    with launches() as found:
        after = many.square_sum(stacks), many.weighted_sum(list(stacks), c)
    assert found["square_kernel"] == 5
    torch.testing.assert_close(before, after, rtol=1e-6, atol=1e-6)
