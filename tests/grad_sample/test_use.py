"""Uses taken together (concat, stack, regroup): the same sums of per-sample gradients, whatever their form."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.batch_axis.row_groups import Groups
from fastdp.grad_sample import cross_terms
from fastdp.grad_sample.conv import Conv
from fastdp.grad_sample.embedding import Lookup
from fastdp.grad_sample.linear import Matmul
from fastdp.grad_sample.parameter_use import Lazy, ParameterUse, Regrouped, Stack, Stored
from fastdp.grad_sample.routed_rows import Routed
from fastdp.ops.geometry import Geometry

from ..cases import square
from ..truth import norms_of, truth

WEIGHT, TABLE, FILTER = (nn.Parameter(torch.randn(shape)) for shape in ((2, 3), (7, 4), (3, 2, 2)))
GEOMETRY = Geometry(
    weight=(3, 2, 2), stride=(1,), padding=(0,), dilation=(1,), transposed=False, output_padding=(0,), groups=1
)
POINT = torch.zeros(0, dtype=torch.long)


def one(kind: str, k: int) -> ParameterUse:
    """A use by one sample, of k positions where the kind has positions."""
    rows = torch.randn(1, 2, 3)
    return {
        "matmul": lambda: Matmul(WEIGHT, torch.randn(1, k, 3), torch.randn(1, k, 2), "linear"),
        "lookup": lambda: Lookup(TABLE, torch.randint(0, 7, (1, k)), torch.randn(1, k, 4), "embedding"),
        "stored": lambda: Stored(WEIGHT, rows, "bias"),
        "lazy": lambda: Lazy(WEIGHT, 1, "generic", lambda low, high: rows[low:high]),
        "routed": lambda: Routed(
            WEIGHT, torch.randn(k, 3), torch.randn(k, 2), POINT.new_zeros(k), POINT.new_zeros(k), 1, "experts"
        ),
        # images of several sizes cannot lie side by side
        "conv": lambda: Conv(
            FILTER, torch.randn(1, 2, 2, 4 + k % 2), torch.randn(1, 2, 3, 3 + k % 2), GEOMETRY, "conv"
        ),
    }[kind]()


def assert_is(use: ParameterUse, truth: Tensor) -> None:
    factors = torch.rand(use.batch)
    torch.testing.assert_close(use.per_sample(0, use.batch).double(), truth, rtol=1e-5, atol=1e-5)
    for low in range(use.batch):
        torch.testing.assert_close(use.per_sample(low, low + 1).double(), truth[low : low + 1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(use.norm_sq().double(), truth.square().flatten(1).sum(1), rtol=1e-4, atol=1e-6)
    summed = torch.einsum("b,b...->...", factors.double(), truth)
    torch.testing.assert_close(use.clipped_sum(factors).double(), summed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["matmul", "lookup", "stored", "lazy", "routed", "conv"])
def test_uses_by_single_samples_are_one_use_by_the_batch_and_by_persons(kind: str, seed: int) -> None:
    """Samples that have no use, one or several, of no position, one or several; each of a person, or of one of two."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    batch, count = draw.choice([1, 2, 4]), draw.randint(1, 5)
    owners = [draw.randrange(batch) for _ in range(count)]
    inner = [one(kind, draw.choice([0, 1, 2, 3])) for _ in range(count)]
    truth = torch.zeros(batch, *inner[0].operand.shape, dtype=torch.double)
    for owner, use in zip(owners, inner, strict=True):
        truth[owner] += use.per_sample(0, 1)[0].double()
    uses = [Regrouped(use, Groups(torch.tensor([b]), batch)) for b, use in zip(owners, inner, strict=True)]
    whole = uses[0].concat(uses[1:], "x")
    assert_is(whole, truth)
    people = Groups(torch.tensor([draw.randrange(2) for _ in range(batch)]), 2)
    by_person = torch.zeros(2, *truth.shape[1:], dtype=torch.double).index_add_(0, people.own, truth)
    assert_is(whole.regroup(people), by_person)
    first, *others = (use.regroup(people) for use in uses)
    assert isinstance(first, Regrouped)
    assert_is(first.concat(others, "x"), by_person)


@pytest.mark.parametrize("kind", ["matmul", "lookup", "stored", "routed", "conv"])
def test_uses_by_the_same_samples_are_one(kind: str) -> None:
    torch.manual_seed(0)
    uses = [one(kind, k) for k in ((2, 2, 4) if kind == "conv" else (2, 1, 3))]
    whole = uses[0].concat(uses[1:], "x")
    assert whole is not None and type(whole) is type(uses[0])
    assert_is(whole, sum(use.per_sample(0, 1).double() for use in uses))


def test_what_cannot_lie_side_by_side_stays_apart() -> None:
    one_size, other = one("conv", 0), one("conv", 1)
    assert one_size.concat([other], "x") is None and isinstance(one_size.stack([other]), Stack)
    assert one("lazy", 1).concat([one("lazy", 1)], "x") is None


class Placed(nn.Module):
    """Rows of a table are looked up by ids that all samples share, and added to the data."""

    def __init__(self, how: str, ids: list[int]) -> None:
        super().__init__()
        self.how, self.table, self.head = how, nn.Parameter(torch.randn(7, 4)), nn.Linear(4, 3)
        self.register_buffer("ids", torch.tensor(ids))

    def forward(self, x: Tensor) -> Tensor:
        rows = F.embedding(self.ids % 7, self.table) if self.how == "embedding" else self.table[self.ids]
        return self.head((x + rows.to(x.device).unsqueeze(0)).tanh())


@pytest.mark.parametrize("how", ["embedding", "index"])
@pytest.mark.parametrize("ids, moved", [([4, 0, 6], True), ([4, 0, 4], False), ([-1, 0, 6], False)])
def test_rows_looked_up_once_have_the_norms_of_their_gradients(
    how: str, ids: list[int], moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the table's size is made for them; where one is taken twice, its two gradients add up."""
    made = []
    monkeypatch.setattr(cross_terms, "_zeros", lambda *given, zeros=cross_terms._zeros: made.append(1) or zeros(*given))
    torch.manual_seed(0)
    model, x = Placed(how, ids), torch.randn(5, 3, 4)
    engine = fastdp.PerSampleGradients(model)
    square(model, x).mean().backward()
    norms = engine.norms().double()
    engine.detach()
    assert bool(made) != moved
    torch.testing.assert_close(norms, norms_of(truth(model, x, square)), rtol=1e-5, atol=0)
