"""The example of a layout rule on the page of the architecture: exact where it answers, no wider than the trial."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fastdp import PerSampleGradients
from fastdp.batch_axis.calls import LAYOUT_RULES, Call, Tags, layout_rule
from fastdp.batch_axis.operator_table import spellings
from fastdp.batch_axis.propagate import ask
from fastdp.errors import SampleMixingError

from ..cases import Net, square
from ..truth import compare

PAGE = Path(__file__).parent.parent.parent / "docs" / "architecture.md"
D = 4


@pytest.fixture(autouse=True)
def example() -> Iterator[list[Call]]:
    """The page's rule, registered. Gives the calls that it left to the trial."""
    (code,) = re.findall(r"```python\n(@layout_rule.*?)```", PAGE.read_text(), re.S)
    left: list[Call] = []

    def asked(call: Call) -> Tags:
        left.append(call)
        return ask(call)

    before = dict(LAYOUT_RULES)
    exec(compile(code, str(PAGE), "exec"), {"layout_rule": layout_rule, "spellings": spellings, "ask": asked,
                                            "Call": Call, "Tags": Tags})  # fmt: skip
    assert len(LAYOUT_RULES) == len(before) + 1
    yield left
    LAYOUT_RULES.clear()
    LAYOUT_RULES.update(before)


def test_exact_and_by_the_rule(example: list[Call]) -> None:
    model = Net(lambda m, x: torch.trapezoid(m.a(x).tanh())[:, None] * x, a=nn.Linear(D, D))
    assert compare(model, torch.randn(5, D), square).worst < 1e-5 and not example


def positions(h: Tensor) -> Tensor:
    return torch.linspace(0, 1, h.numel()).view(h.shape)


@pytest.mark.parametrize("mixing", [
    lambda h: h * torch.trapezoid(h, dim=0), lambda h: h * torch.trapezoid(h, positions(h))[:, None],
    lambda h: h * torch.trapezoid(h.t())[None, :D].sum(),
], ids=["over the samples", "positions by place", "samples last"])  # fmt: skip
def test_what_mixes_samples_stays_refused(mixing, example: list[Call]) -> None:
    model = Net(lambda m, x: mixing(m.a(x)), a=nn.Linear(D, D))
    engine = PerSampleGradients(model)
    with pytest.raises(SampleMixingError):
        square(model, torch.randn(5, D)).mean().backward()
    engine.detach()
    assert example
