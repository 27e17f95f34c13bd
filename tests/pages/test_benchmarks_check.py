"""The check before the training benchmark: truths by hand, and what is judged wrong or right, on any device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import contenders, exactness, steps, suites
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.models import Workload, class_losses
from benchmarks.suites import SMALL

from .test_benchmarks_training import CPU16, tiny


def test_truths_by_hand() -> None:
    work = tiny(3)
    truth = exactness.truth_of(work)
    model, (x, y) = steps.build(work).double(), steps.batch(work)
    grads = []
    for b, weight in enumerate((1.0, 1.0, 4.0)):
        loss = weight * class_losses(model(x[b : b + 1].double()), y[b : b + 1]).sum()
        grads.append(
            dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, model.parameters()), strict=True))
        )
    norms = [math.sqrt(sum(float(g.square().sum()) for g in grad.values())) for grad in grads]
    assert sorted(norms)[1] < truth.limit < sorted(norms)[2] and truth.clipped == 1
    factors = {"none": [1.0] * 3, "local": [min(1.0, truth.limit / n) for n in norms],
               "global": [float(n <= truth.limit) for n in norms],
               "automatic": [truth.limit / (n + 0.01) for n in norms]}  # fmt: skip
    for kind, c in factors.items():
        for name, mean in truth.means[kind].items():
            torch.testing.assert_close(mean, sum(c[b] * grads[b][name] for b in range(3)) / 3)
    for layer in ("0", "2"):  # each of two by its own norm and limit / sqrt(2)
        names = [f"{layer}.weight", f"{layer}.bias"]
        own = [math.sqrt(sum(float(grad[n].square().sum()) for n in names)) for grad in grads]
        for name in names:
            wanted = sum(min(1.0, truth.limit / 2**0.5 / own[b]) * grads[b][name] for b in range(3)) / 3
            torch.testing.assert_close(truth.means["layerwise"][name], wanted)


def test_an_error_in_one_small_parameter_is_an_error() -> None:
    truth = {"large": torch.full((10, 10), 1.0), "small": torch.full((2,), 0.1)}
    assert exactness.distance(truth, truth) == 0
    wrong = {**truth, "small": 1.1 * truth["small"]}
    assert exactness.distance(wrong, truth) == pytest.approx(0.1) and exactness.distance(wrong, truth, 1.0) < 0.01
    assert exactness.distance({"large": truth["large"]}, truth) == math.inf
    assert exactness.distance({**truth, "small": torch.full((2,), math.nan)}, truth) == math.inf


class _AnotherOrder(TorchDispatchMode):
    """Convolutions whose float32 sums are added up in another order, as on another device: off by 3e-7."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.convolution.default:
            result += 3e-7 * result.square().mean().sqrt() * torch.randn_like(result)
        return result


def _in_another_order(scale: float) -> object:
    def make(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> contenders.Step:
        inner = contenders.nonprivate(model, work._replace(losses=lambda out, y: scale * work.losses(out, y)))

        def step(x: Tensor, y: Tensor) -> None:
            with _AnotherOrder():
                inner(x, y)

        return step

    return make


def test_no_contender_is_wrong_for_the_rounding_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One window of max-pooling that nearly ties moved the gradient of ordinary training by 6e-3."""
    for name, scale in (("other", 1.0), ("off by 1 %", 0.99)):
        monkeypatch.setitem(CONTENDERS, name, Contender(_in_another_order(scale), "none"))  # type: ignore[arg-type]
    work = suites.CPU["cifar-cnn"]
    truth = exactness.truth_of(work)
    assert 56 <= truth.samples < work.whole and 0 < truth.clipped <= truth.samples / 2
    place = steps.CPU
    for _ in range(3):
        assert exactness.verdict("other", work, place, truth).status == "ok"
        assert exactness.verdict("off by 1 %", work, place, truth).status == "wrong"
    assert exactness.verdict("fastdp", work, place, truth).status == "ok"


def test_tf32_is_off_while_contenders_are_judged() -> None:
    def now() -> list[str]:
        return [torch._C._get_fp32_precision_getter("cuda", what) for what in ("matmul", "conv", "rnn")]

    before = now()
    with exactness.full_precision(torch.device("cuda")):
        assert now() == ["ieee"] * 3 != before
    assert now() == before


def test_in_16_bits_ordinary_training_says_how_far_rounding_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-50's own gradient is off by 0.3 there; a quarter of it, or twice as much, is wrong."""
    monkeypatch.setitem(CONTENDERS, "quarter", Contender(_scaled_in_16_bits(0.25), "none"))  # type: ignore[arg-type]
    monkeypatch.setitem(CONTENDERS, "twice", Contender(_scaled_in_16_bits(2.0), "none"))  # type: ignore[arg-type]
    found = exactness.judge(["non-private", "fastdp", "quarter", "twice"], SMALL["resnet50"], CPU16)
    assert [verdict.status for verdict in found.values()] == ["ok", "ok", "wrong", "wrong"], found


def _scaled_in_16_bits(scale: float) -> object:
    def make(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> contenders.Step:
        factor = 1.0 if next(model.parameters()).dtype == torch.float32 else scale
        return contenders.nonprivate(model, work._replace(losses=lambda out, y: factor * work.losses(out, y)))

    return make
