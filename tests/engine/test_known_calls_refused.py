"""Repeated steps: what couples samples is refused in known calls too, and what is kept between steps is bounded."""

from __future__ import annotations

import gc
import itertools
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp import PerSampleGradients
from fastdp.errors import FastDPError, SampleMixingError, StepError

from .. import cases
from ..truth import norms_of, truth
from .test_known_calls import B, D, Layers, T, Way, data, losses, norms, plainly, relu_in_place

# --------------------------------------------------------------------------- what couples samples later on


def mean_taken(m: Layers, h: Tensor) -> Tensor:
    return h - h.mean(0, keepdim=True) if m.mixed else h


def by_place(m: Layers, h: Tensor) -> Tensor:
    return h * torch.linspace(0, 1, B).view(B, 1, 1) if m.mixed else h


def of_numpy(m: Layers, h: Tensor) -> Tensor:
    numbers = h.detach().numpy()
    if m.mixed:
        numbers -= numbers.mean(0)
    return h


def of_a_matrix(m: Layers, h: Tensor) -> Tensor:
    """A graph's adjacency over the nodes of all samples: only its values tell whose rows meet."""
    matrix = torch.rand(B * T, B * T) if m.mixed else torch.block_diag(*[torch.rand(T, T) for _ in range(B)])
    return (matrix @ h.reshape(B * T, D)).view(h.shape)


LATER: dict[str, Way] = {
    "mean": mean_taken, "by place": by_place, "numpy": of_numpy,
    "matrix": of_a_matrix,
    # the same call but for one argument, with results of the same shape
    "dimension": lambda m, h: h.softmax(0 if m.mixed else 1),
    "dimension by keyword": lambda m, h: torch.softmax(input=h, dim=0 if m.mixed else 1),
    "dimensions": lambda m, h: h + h.roll((1,), (0,) if m.mixed else (1,)),
    "flag": lambda m, h: (h > 0).any(0 if m.mixed else 1, keepdim=True) * h,
    "in an index": lambda m, h: h * 2 + (h[-1:] if m.mixed else h[:, -1:]),
    "the other tensor": lambda m, h: F.scaled_dot_product_attention(h, h, h.transpose(0, 1) if m.mixed else h),
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_what_couples_samples_is_refused_after_good_steps(name: str) -> None:
    model = Layers(lambda m, x: m.b(LATER[name](m, m.a(x))))
    engine = PerSampleGradients(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            losses(model, data()).mean().backward()
            assert engine.norms().isfinite().all()
        for _ in range(2):
            model.mixed = True
            with pytest.raises(FastDPError, match="sample"):
                losses(model, data()).mean().backward()
            model.mixed = False
            losses(model, data()).mean().backward()


PICKING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "take": lambda h, ids: torch.take(h, ids),
    "embedding": lambda h, ids: F.embedding(ids[:, 0] // D, h),
    "gather": lambda h, ids: h.gather(0, ids // D),
    "index_select": lambda h, ids: h.index_select(0, ids[:, 0] // D),
}


@pytest.mark.parametrize("name", PICKING)
def test_ids_that_pick_other_samples_rows_are_refused_also_after_harmless_ones(name: str) -> None:
    model = cases.Net(lambda m, x, ids: m.b(PICKING[name](m.a(x).tanh(), ids)), a=nn.Linear(D, D), b=nn.Linear(D, 2))
    engine, own = PerSampleGradients(model), torch.arange(B * D).view(B, D)
    for _ in range(2):
        model(torch.randn(B, D), own).sum(1).mean().backward()
        assert engine.norms().shape == (B,)
    with pytest.raises(FastDPError, match="sample"):
        model(torch.randn(B, D), own.roll(1, 0)).sum(1).mean().backward()


def test_an_order_of_rows_is_looked_at_in_every_step() -> None:
    order = torch.arange(B)
    model = Layers(lambda m, x: m.b(m.a(x).tanh()[order]))
    engine = PerSampleGradients(model)
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(B, 1, 1)
    plain = Layers(lambda m, x: m.b(m.a(x).tanh()))
    for order in (torch.arange(B), torch.tensor([3, 1, 0, 2]), torch.tensor([2, 3, 1, 0])):
        x = data()
        (model(x).square().flatten(1).mean(1) * scale.flatten()[order]).mean().backward()
        exact = norms_of(truth(plain, x, losses)) * scale.flatten()
        torch.testing.assert_close(engine.norms().double(), exact, rtol=1e-5, atol=0)


def tables(m: Layers, x: Tensor) -> Tensor:
    """What is made of a buffer is noted, also where the same was made of another tensor of its shape before."""
    other, table = m.plain[0] * 2, m.table * 2
    return m.b(m.a(x) * table[1 : 1 + len(x), None, None]) + 0 * other[0]


def size_of_a_tensor(m: Layers, x: Tensor) -> Tensor:
    return m.b(m.a(x) * torch.tensor(0.5) * torch.tensor(1 / len(x)))


def size_as_a_factor(m: Layers, x: Tensor) -> Tensor:
    return m.b(torch.add(m.a(x), m.norm.bias, alpha=len(x)))


@pytest.mark.parametrize(("way", "least"), [(tables, 6), (size_of_a_tensor, 3), (size_as_a_factor, 3)])
def test_numbers_of_places_and_sizes_are_refused(way: Way, least: int) -> None:
    """In six steps of four sizes: a number that follows the size is warned of before that is certain."""
    model, refused = Layers(way), 0
    PerSampleGradients(model)
    for size in (4, 4, 4, 4, 4, 4) if way is tables else (4, 6, 4, 6, 5, 7):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                losses(model, data(size)).mean().backward()
            except SampleMixingError:
                refused += 1
    assert refused >= least


# --------------------------------------------------------------------------- errors


def test_a_backward_within_a_hook_is_refused() -> None:
    model = Layers(plainly)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=B)
    kept: list[Tensor] = []
    model.a.register_forward_hook(lambda module, given, out: kept.append(out))
    out = model(data())
    done: list[bool] = []

    def hook(grad: Tensor) -> None:
        if not done:
            done.append(True)
            with torch.enable_grad():
                (out.mean(0) ** 2).sum().backward(retain_graph=True)

    kept[0].register_hook(hook)
    with pytest.raises(FastDPError):
        out.square().mean().backward(retain_graph=True)
    with pytest.raises(StepError):
        optimizer.step()


def test_tangents_do_not_run_past_parameters() -> None:
    """Forward-mode derivatives through native nodes would miss the parameters' part."""
    model, x = Layers(relu_in_place), data()
    PerSampleGradients(model)
    for _ in range(3):
        losses(model, x).mean().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError):
        model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


# --------------------------------------------------------------------------- what is kept


def test_counts_of_objects_stay() -> None:
    """No reference is lost or kept too often in what counts them by hand."""
    engine, watched = PerSampleGradients(model := Layers(plainly)), [F.linear, torch.relu, torch.float32, nn.Parameter]
    x = data()

    def steps(times: int) -> list[int]:
        for _ in range(times):
            losses(model, x).mean().backward()
            engine.norms()
        gc.collect()  # passes refer to each other
        return [sys.getrefcount(each) for each in watched]

    counts = [steps(3), steps(50), steps(50)]  # (a cache that is full, and is cleared, may fall into one of two rounds)
    changes = [max(abs(new - old) for new, old in zip(*pair, strict=True)) for pair in itertools.pairwise(counts)]
    assert min(changes) < 40, counts  # of some 250 calls


def test_gradients_of_chosen_tensors_record_nothing() -> None:
    engine = PerSampleGradients(model := Layers(norms).double())
    for _ in range(3):
        x = data().double().requires_grad_()
        exact = norms_of(truth(model, x, losses))
        loss = losses(model, x).mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        torch.testing.assert_close(engine.norms().double(), exact, rtol=1e-6, atol=0)
    losses(model, x).mean().backward(inputs=[x])
    with pytest.raises(StepError, match="no backward yet"):
        engine.norms()


@pytest.mark.parametrize("what", ["input", "weight"])
def test_writes_between_forward_and_backward_are_errors(what: str) -> None:
    kept: list[Tensor] = []
    model = Layers(lambda m, x: m.b(kept[-1]) if kept.append(m.a(x)) is None else x)  # type: ignore[func-returns-value]
    PerSampleGradients(model)
    for number in range(4):
        loss = losses(model, data()).mean()
        if number == 3:
            (kept[-1] if what == "input" else model.b.weight).detach().mul_(2)
            with pytest.raises(RuntimeError, match="inplace|written to"):
                loss.backward()
        else:
            loss.backward()
