"""Diagnostics against one sample at a time, and a training that does not notice them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.diagnostics import GradientDiagnostics, NormHistogram, Report, compare
from fastdp.errors import StepError
from fastdp.losses.preactivations import Hook


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(144, 6), nn.ReLU(), nn.Linear(6, 3)
    )


def data(n: int = 40):
    torch.manual_seed(1)
    return torch.randn(n, 1, 8, 8), torch.arange(n) % 3


def alone(model, x, y):
    """Gradients of each sample, flat: {name: [B, numel]}."""
    rows = []
    for i in range(len(x)):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        rows.append([p.grad.double().flatten() for p in model.parameters()])
    model.zero_grad()
    return {name: torch.stack([r[k] for r in rows]) for k, (name, _) in enumerate(model.named_parameters())}


@pytest.mark.parametrize("style", ["flat", "layerwise"])
def test_the_numbers_of_one_sample_at_a_time(style):
    model, (x, y) = network().eval(), data(12)
    each = alone(model, x, y)
    whole = torch.cat(list(each.values()), 1)
    optimizer = fastdp.DPSGD(
        model, lr=0.1, noise_multiplier=1.0, max_grad_norm=2.0, expected_batch_size=12, style=style
    )
    watch = GradientDiagnostics(optimizer)
    with pytest.raises(StepError, match="no backward"):
        watch.report()
    F.cross_entropy(model(x), y).backward()
    found = watch.report()
    weights = {name: float(p.detach().norm()) for name, p in model.named_parameters()}
    assert torch.allclose(found.norms.double(), whole.norm(dim=1), rtol=1e-5)
    if style == "flat":
        limit, layers = 2.0, {"all": list(each)}
    else:
        layers = {place: [n for n in each if n.startswith(place)] for place in ("0", "4", "6")}
        limit = 2.0 / math.sqrt(3)
    norms = {k: torch.cat([each[n] for n in names], 1).norm(dim=1) for k, names in layers.items()}
    factor = {n: (limit / norms[k]).clamp(max=1) for k, names in layers.items() for n in names}
    sums = {n: (factor[n][:, None] * each[n]).sum(0) for n in each}
    clipped, unclipped = torch.cat(list(sums.values())), whole.sum(0)
    assert found.clipped == pytest.approx(float(torch.stack([n > limit for n in norms.values()]).double().mean()))
    assert 0 < found.clipped < 1
    assert found.cosine == pytest.approx(float(F.cosine_similarity(clipped, unclipped, 0)), abs=5e-5)
    assert found.cosine < 0.9999
    assert found.clipped_norm == pytest.approx(float(clipped.norm()), rel=1e-5)
    assert found.unclipped_norm == pytest.approx(float(unclipped.norm()), rel=1e-5)
    for name in each:
        wanted = float(F.cosine_similarity(sums[name], each[name].sum(0), 0))
        assert found.cosine_of[name] == pytest.approx(wanted, abs=5e-5)
    optimizer.step()
    again = watch.report()  # after the step: the same gradients, other weights
    assert again.cosine == found.cosine and again.weights != found.weights
    assert found.weights == pytest.approx(weights, rel=1e-6)


def test_pre_activations_and_logits():
    model, (x, y) = network().eval(), data(12)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=2.0, expected_batch_size=12)
    watch = GradientDiagnostics(optimizer, layers=["0", "5"])
    with torch.no_grad():
        first = model[0](x)
        hidden = model[4](model[3](model[2](model[1](first))))
        logits = model(x)
    F.cross_entropy(model(x), y).backward()
    found = watch.report()
    root = lambda t: float(t.flatten(1).square().sum(1).mean().sqrt())
    assert found.pre_activations == pytest.approx({"0": root(first), "5": root(hidden)}, rel=1e-6)
    assert found.logits == pytest.approx(root(logits), rel=1e-6)
    values = found.values()
    assert values["pre.5"] == found.pre_activations["5"] and values["cosine"] == found.cosine
    assert values["weights"] == pytest.approx(
        float(torch.cat([p.flatten() for p in model.parameters()]).norm().detach())
    )


@pytest.mark.parametrize("limit, every", [(None, 1), (6, 1), (6, 2)])
@pytest.mark.parametrize("style", ["flat", "layerwise"])
def test_training_is_the_same_to_the_last_bit(limit, every, style):
    """Dropout's draws, the noise, and sums over physical batches, with and without."""
    ends = []
    for watched in (False, True):
        torch.manual_seed(5)
        model = network()
        optimizer = fastdp.DPAdam(model, lr=0.05, noise_multiplier=0.5, max_grad_norm=0.5, style=style, seed=7)
        watch = GradientDiagnostics(optimizer, every=every) if watched else None
        torch.manual_seed(6)
        seen = []
        for x, y in fastdp.poisson_loader(
            torch.utils.data.TensorDataset(*data()), sample_rate=0.4, steps=5, max_physical_batch_size=limit, seed=3
        ):
            F.cross_entropy(model(x), y, reduction="sum").div(max(len(y), 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch is not None:
                seen.append(watch.report())
        ends.append([*model.state_dict().values(), torch.tensor(optimizer.nonfinite_samples), torch.rand(3)])
        if watch is not None:
            assert len({r.cosine for r in seen if r.samples}) > 2
            watch.remove()
            hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
            assert not any(isinstance(getattr(h, "__self__", None), Hook) for h in hooks)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_logical_batch_of_several_physical_ones_is_one():
    found = []
    for limit in (None, 5):
        model = network().eval()
        optimizer = fastdp.DPSGD(model, lr=0.0, noise_multiplier=1.0, max_grad_norm=0.5)
        watch = GradientDiagnostics(optimizer)
        for x, y in fastdp.poisson_loader(
            torch.utils.data.TensorDataset(*data()), sample_rate=0.4, steps=3, max_physical_batch_size=limit, seed=3
        ):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(watch.report())
    a, b = found
    assert a.samples == b.samples > 5
    assert torch.allclose(a.norms, b.norms, rtol=1e-5)
    for name in ("cosine", "clipped_norm", "unclipped_norm", "logits", "clipped"):
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-5)
    assert a.pre_activations == pytest.approx(b.pre_activations, rel=1e-5)


def test_every_nth_logical_batch_is_looked_at():
    model, (x, y) = network().eval(), data(12)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=2.0, expected_batch_size=4)
    watch = GradientDiagnostics(optimizer, every=2)
    seen, norms, logits = [], [], []
    for k in range(3):
        with torch.no_grad():
            logits.append(float(model(x[4 * k : 4 * k + 4]).square().sum(1).mean().sqrt()))
        F.cross_entropy(model(x[4 * k : 4 * k + 4]), y[4 * k : 4 * k + 4]).backward()
        norms.append(optimizer.norms.clone())
        seen.append(watch.report())
        optimizer.step()
        optimizer.zero_grad()
    for report, batch in zip(seen, (0, 0, 2), strict=True):
        assert torch.equal(report.norms, norms[batch])
        assert report.logits == pytest.approx(logits[batch], rel=1e-6)


def test_samples_that_are_not_finite_are_told_and_in_no_sum():
    model, (x, y) = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (torch.randn(6, 3), torch.arange(6) % 2)
    x[2] = math.nan
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=2.0, expected_batch_size=6)
    watch = GradientDiagnostics(optimizer)
    F.cross_entropy(model(x), y).backward()
    found = watch.report()
    assert found.nonfinite == 1 and found.samples == 6 and math.isfinite(found.cosine)
    assert int(found.histogram(4).counts.sum()) == 5


def test_histogram():
    report = Report(5, torch.tensor([1.0, 10.0, 100.0, 99.0, 0.0]), 0.0, 0, 1.0, 1.0, 1.0)
    found = report.histogram(2)
    assert found.edges.tolist() == pytest.approx([1, 10, 100])
    assert found.counts.tolist() == [1, 3]
    assert report.histogram(2, log=False).counts.tolist() == [3, 2]
    assert isinstance(found, NormHistogram)
    same = Report(3, torch.full((3,), 2.0), 0.0, 0, 1.0, 1.0, 1.0).histogram(3)
    assert int(same.counts.sum()) == 3
    nothing = Report(0, torch.zeros(0), 0.0, 0, 0.0, 0.0, math.nan)
    assert nothing.histogram(3).counts.tolist() == [0, 0, 0] and math.isnan(nothing.values()["norm_median"])
    with pytest.raises(ValueError, match="bins"):
        report.histogram(0)


def test_an_engine_alone():
    model, (x, y) = network().eval(), data(8)
    each = torch.cat(list(alone(model, x, y).values()), 1)
    engine = fastdp.PerSampleGradients(model)
    F.cross_entropy(model(x), y).backward()
    factors = (2.0 / engine.norms()).clamp(max=1)
    found = compare(engine, factors)
    sums = [each.sum(0), (factors.double()[:, None] * each).sum(0)]
    assert found.cosine == pytest.approx(float(F.cosine_similarity(*sums, 0)), abs=1e-6)
    assert found.clipped == pytest.approx(float((factors < 1).double().mean()))


def test_what_cannot_be_watched_is_refused():
    model, (x, y) = network(), data(4)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=2.0, expected_batch_size=4)
    with pytest.raises(ValueError, match="fastdp optimizer"):
        GradientDiagnostics(torch.optim.SGD(model.parameters(), lr=0.1))
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="every"):
            GradientDiagnostics(optimizer, every=wrong)
    with pytest.raises(ValueError, match="no module named"):
        GradientDiagnostics(optimizer, layers=["nothing"])
    watch = GradientDiagnostics(optimizer, layers=[])
    with pytest.raises(StepError, match="watched already"):
        GradientDiagnostics(optimizer)
    copy.deepcopy(model)(x)
    watch.remove()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(StepError, match="no backward"):
        watch.report()
    GradientDiagnostics(optimizer).remove()
    optimizer.detach()
    with pytest.raises(StepError, match="detached"):
        GradientDiagnostics(optimizer)
