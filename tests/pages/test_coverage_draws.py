"""Random models of the coverage benchmark: the same draws for a sample alone and in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage_draws import SameDraws
from benchmarks.coverage_engines import fastdp_step, one_by_one
from benchmarks.coverage_losses import row_losses
from benchmarks.coverage_truth import Case, Sizes, judge

DRAWS = {
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "randn_like": torch.randn_like,
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(p=0.7),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
}


class Noisy(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.name = nn.Linear(6, 6), name

    def forward(self, x: Tensor) -> Tensor:
        first, second = DRAWS[self.name](x.detach()), DRAWS[self.name](x.detach())
        return self.a(x * (1 + first)).tanh() + second


@pytest.mark.parametrize("name", DRAWS)
def test_a_row_draws_the_same_alone_and_in_every_type(name: str) -> None:
    x = torch.full((4, 6), 0.5)
    with SameDraws():
        rows = DRAWS[name](x)
    with SameDraws():
        alone = DRAWS[name](x[:1].double())
    torch.testing.assert_close(rows, alone.float().expand(4, 6))
    assert rows.std(0).max() == 0 and rows.std(1).min() > 0


@pytest.mark.parametrize("name", ["rand", "exponential_"])
def test_a_random_model_is_judged(name: str) -> None:
    def build(sizes: Sizes) -> Any:
        torch.manual_seed(0)
        batch = {"x": torch.randn(sizes.batch, 6), "seed": torch.arange(sizes.batch)}
        return Noisy(name), batch, lambda m, b: row_losses(m(b["x"]), b["seed"])

    for step in (one_by_one, fastdp_step):
        assert judge(Case(name, build), Sizes(3), step, "fastdp")["status"] == "exact"
