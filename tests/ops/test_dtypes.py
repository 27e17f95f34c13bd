"""16-bit models and autocast: errors measured against PyTorch's own in the same type."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import fastdp

from .. import cases
from ..truth import norms_of, take, truth

NAMES = (
    "linear_3d_bias matmul_right addmm_conv1d_hf conv2d_padding embedding_repeated layer_norm_both class_token "
    "layer_scale mha_self_batch_first slices tied_embedding_head shared_layer"
).split()


def floats(batch, dtype):
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    return type(batch)(floats(b, dtype) for b in batch)


def one_by_one(model, batch, losses):
    """Per-sample gradients by plain PyTorch in the model's own types."""
    model = copy.deepcopy(model)
    rows = {n: [] for n, p in model.named_parameters() if p.requires_grad}
    for i in range(cases.B):
        model.zero_grad()
        losses(model, take(batch, [i])).sum().backward()
        for n, p in model.named_parameters():
            if n in rows:
                rows[n].append(torch.zeros_like(p).double() if p.grad is None else p.grad.double())
    return {n: torch.stack(g) for n, g in rows.items()}


def error(rows, exact):
    scale = float(norms_of(exact).mean())
    return max(float((rows[n].double() - g).reshape(len(g), -1).norm(dim=1).max()) for n, g in exact.items()) / scale


@pytest.mark.parametrize("mode", ["bfloat16 model", "bfloat16 autocast", "float16 model"])
@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bits(name, mode):
    model, batch, losses = cases.build(name)
    exact = truth(model, batch, losses)
    dtype = torch.float16 if "16 model" in mode and mode.startswith("float16") else torch.bfloat16
    if mode.endswith("model"):
        model, batch, run = model.to(dtype), floats(batch, dtype), losses
    else:

        def run(m, b):
            with torch.autocast("cpu", torch.bfloat16):
                return losses(m, b)

    plain = error(one_by_one(model, batch, run), exact)
    engine = fastdp.PerSampleGradients(model)
    run(model, batch).float().mean().backward()
    rows = engine.materialize()
    assert all(g.dtype == torch.float32 for g in rows.values())
    assert error(rows, exact) <= 4 * plain + 1e-5
    # norms and sums are those of the very gradients, in float32
    own = norms_of({n: g.double() for n, g in rows.items()})
    assert torch.allclose(engine.norms().double(), own, rtol=2e-2 if name == "slices" else 1e-4)
    factors = torch.rand(cases.B) + 0.5
    for n, total in engine.clipped_sum(factors).items():
        want = torch.einsum("b,b...->...", factors.double(), rows[n].double())
        assert torch.allclose(total.double(), want, rtol=2e-2, atol=2e-3 * float(own.max())), n


def test_float64_stays_float64():
    model, batch, losses = cases.build("encoder_layer_True_False")
    exact = truth(model, batch, losses)
    engine = fastdp.PerSampleGradients(model.double())
    losses(model, tuple(b.double() for b in batch)).mean().backward()
    assert error(engine.materialize(), exact) < 1e-13
    assert all(t.dtype == torch.float64 for t in engine.clipped_sum(torch.ones(cases.B)).values())


def test_bfloat16_contribution_stays_within_the_bound():
    """A weight cast within the forward: autograd would round the clipped sum to bfloat16."""
    model = cases.Net(
        lambda m, x: torch.nn.functional.linear(x, m.w.to(torch.bfloat16).t()[:5]).float(),
        w=nn.Parameter(torch.randn(6, 8).T.contiguous()),
    )
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, max_grad_norm=1.0, loss_reduction="sum")
    for seed in range(20):
        torch.manual_seed(seed)
        (100 * model(torch.randn(1, 5, 8).to(torch.bfloat16))).square().sum().backward()
        optimizer.step()
        assert float(model.w.grad.double().norm()) <= 1.0
        optimizer.zero_grad()


@pytest.mark.parametrize("name", NAMES)
def test_backward_within_autocast_changes_nothing(name):
    """Autocast turns float32 products into 16 bits; norms and sums are taken without it."""
    found = []
    for inside in (False, True):
        model, batch, losses = cases.build(name)
        engine = fastdp.PerSampleGradients(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = losses(model, batch).float().mean()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
            norms = engine.norms()
            found.append((norms, engine.clipped_sum((1 / norms).clamp(max=1))))
    (norms, sums), (norms_inside, sums_inside) = found
    # the input gradients that backward itself computes may be rounded in another order
    torch.testing.assert_close(norms_inside, norms, rtol=1e-6, atol=0)
    for key in sums:
        torch.testing.assert_close(sums_inside[key], sums[key], rtol=1e-5, atol=1e-7)
