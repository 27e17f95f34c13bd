"""Functions that couple no samples and yet ask where a sample stands: found out by running them in another order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fastdp
from fastdp.errors import SampleMixingError

from ..programs_by_hand import C, D, Program, run, truth


def attended(h: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(h, h, h, dropout_p=0.5)


BY_PLACE = {
    "the lower triangle": lambda m, h: h.tril(),
    "the upper triangle": lambda m, h: torch.triu(h, -2),
    "a triangle beside the samples": lambda m, h: h.T.triu(1).T,
    "a triangle in place": lambda m, h: h.clone().tril_(),
    "a diagonal filled": lambda m, h: (h * 1.0).fill_diagonal_(0.0),
    "a triangle of tokens": lambda m, h: h.unflatten(1, (2, 2)).transpose(0, 1).tril().transpose(0, 1).flatten(1),
    "a triangle of positions": lambda m, h: h * (torch.zeros_like(h) + 1).tril(),
}
ALIKE = {
    "the triangle of each sample": lambda m, h: h.unflatten(1, (2, 2)).tril().flatten(1),
    "its own diagonal": lambda m, h: h.diag_embed().triu().sum(1),
    "draws of each": lambda m, h: F.gumbel_softmax(h, dim=1) * 0 + h,
    "attention that draws": lambda m, h: h + 0 * attended(h.unflatten(1, (2, 2))).flatten(1),
    "a Fourier transform of each": lambda m, h: torch.fft.rfft(h, dim=1).abs(),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_PLACE)
def test_functions_that_ask_for_the_place_are_refused(name: str) -> None:
    with pytest.raises(SampleMixingError, match="by their place|by place|positions"):
        run(BY_PLACE[name])


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("name", ALIKE)
def test_functions_of_each_sample_are_exact(name: str, size: int) -> None:
    (found,) = run(ALIKE[name], sizes=(size,))
    torch.testing.assert_close(found.double(), truth(ALIKE[name], size=size).double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mT", "tril", "norm"])
def test_rows_of_samples_of_different_lengths_are_asked_too(name: str) -> None:
    functions = {"mT": lambda h: h + h.mT.mT, "tril": lambda h: h.tril(-1), "norm": lambda h: F.normalize(h, dim=1)}
    x, owner = torch.randn(6, D), torch.tensor([0, 0, 1, 2, 2, 2])
    model = Program(lambda m, h: functions[name](h))
    engine = fastdp.PerSampleGradients(model)
    fastdp.mark_rows(x, owner, samples=3)

    def norms() -> torch.Tensor:
        torch.zeros(3, C).index_add(0, owner, model(x)).square().sum(1).mean().backward()
        return engine.norms()

    if name == "tril":
        with pytest.raises(SampleMixingError, match="by their position in the batch"):
            norms()
    else:
        assert norms().shape == (3,)
    engine.detach()
