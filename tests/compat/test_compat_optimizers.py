"""The optimizers of fastdp.compat.opacus, used directly: several backwards, parts of batches, edits, closures."""

from __future__ import annotations

import opacus
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.compat import opacus as ours
from fastdp.compat.opacus import grad_sample, optimizers
from fastdp.compat.opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from fastdp.errors import StepError

from ..truth import truth

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0, 2])
BOUND = 0.4


def plain(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)


def pair(mode="hooks", lib=ours, noise=0.0, model=None, **options):
    model = model or plain()
    options.setdefault("max_grad_norm", BOUND)
    kind = lib.grad_sample.get_gsm_class(mode)
    kind_of_optimizer = lib.optimizers.get_optimizer_class("flat", False, mode)
    options.setdefault("expected_batch_size", 6)
    extra = {"max_grad_norm": options["max_grad_norm"]} if mode == "ghost" else {}
    wrapped = kind(model, loss_reduction=options.get("loss_reduction", "mean"), **extra)
    inside = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return wrapped, kind_of_optimizer(inside, noise_multiplier=noise, **options)


def backward(model, rows=slice(None)):
    F.cross_entropy(model(X[rows]), Y[rows]).backward()


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def clipped_sum(model, bound=BOUND, rows=slice(None)):
    """The truth, by name, float64."""
    each = truth(model, (X[rows], Y[rows]), losses)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    factors = (bound / norms).clamp(max=1)
    return {name: torch.einsum("b,b...->...", factors, g) for name, g in each.items()}


def check(model, expected, scale=1.0, attribute="summed_grad"):
    for name, p in model._module.named_parameters():
        assert torch.allclose(getattr(p, attribute).double(), expected[name] * scale, rtol=1e-5, atol=1e-6), name


# ------------------------------------------------------------------ sums


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_several_backwards_before_a_step(mode):
    """Opacus's ghost drops all but the last."""
    model, optimizer = pair(mode)
    expected = clipped_sum(model._module)
    backward(model, slice(0, 4))
    backward(model, slice(4, 6))
    assert mode == "ghost" or optimizer.accumulated_iterations == 2
    optimizer.step()
    assert optimizer.accumulated_iterations == 2
    check(model, expected)
    check(model, expected, 1 / 12, "grad")


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_between_forward_and_backward(mode, set_to_none):
    model, optimizer = pair(mode)
    for _ in range(3):
        loss = F.cross_entropy(model(X), Y)
        optimizer.zero_grad(set_to_none)
        expected = clipped_sum(model._module)
        loss.backward()
        optimizer.step()
        check(model, expected)


# ------------------------------------------------------------------ discipline


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_gradients_are_used_once(mode):
    model, optimizer = pair(mode)
    with pytest.raises(ValueError, match="not initialized"):
        optimizer.step()
    backward(model)
    optimizer.step()
    with pytest.raises(ValueError, match="haven't been cleared since the last optimizer step"):
        optimizer.step()
    if mode == "hooks":  # a ghost criterion of Opacus clears by itself
        backward(model)
        with pytest.raises(ValueError, match="haven't been cleared since the last optimizer step"):
            optimizer.step()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_ghost_needs_no_zero_grad_between_steps():
    model, optimizer = pair("ghost")
    for _ in range(3):
        expected = clipped_sum(model._module)
        backward(model)
        optimizer.step()
        check(model, expected)


def test_the_wrong_module_is_named():
    optimizer = optimizers.DPOptimizer(torch.optim.SGD(plain().parameters(), lr=0.1), noise_multiplier=1.0,
                                       max_grad_norm=1.0, expected_batch_size=6)  # fmt: skip
    with pytest.raises(ValueError, match="Are you using GradSampleModule"):
        optimizer.step()
    with pytest.raises(ValueError, match="loss_reduction"):
        optimizers.DPOptimizer(optimizer.original_optimizer, noise_multiplier=1.0, max_grad_norm=1.0,
                               expected_batch_size=1, loss_reduction="max")  # fmt: skip


WRITES = {
    "in place": lambda grad: grad.mul_(1000),
    "past its version": lambda grad: grad.data.mul_(2),
    "one element": lambda grad: grad.data.view(-1)[-1:].add_(1),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_ghost_gradients_written_to_before_the_noise_are_refused(write, again):
    model, optimizer = pair("ghost")
    backward(model)
    WRITES[write](model._module[0].weight.grad)
    with pytest.raises(StepError, match="no bound"):
        backward(model) if again else optimizer.step()


def test_ghost_factors_of_the_users_own_are_refused_as_nothing_asks_for_them():
    class Mine(grad_sample.GradSampleModuleFastGradientClipping):
        def get_clipping_coef(self):
            return torch.ones(6)

    with pytest.raises(NotImplementedError, match="Mine.get_clipping_coef was replaced"):
        Mine(plain())
    model, _ = pair("ghost")
    model.get_norm_sample = lambda: torch.ones(6)
    with pytest.raises(NotImplementedError, match="get_norm_sample was replaced"):
        backward(model)


# ------------------------------------------------------------------ what research code does


def test_gradients_that_were_looked_at_and_edited_are_what_is_clipped():
    runs = []
    for lib in (opacus, ours):
        model, optimizer = pair(lib=lib)
        backward(model)
        first, last = model._module[0].weight, model._module[2].bias
        first.grad_sample[:, 0] = 0
        last.grad_sample = last.grad_sample * 3
        optimizer.step()
        runs.append([p.summed_grad for p in optimizer.params])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*runs, strict=True))
    assert not runs[1][0][0].any()


def test_gradients_of_nobody_but_the_user():
    runs = []
    for lib in (opacus, ours):
        model = lib.grad_sample.GradSampleModuleNoOp(plain())
        optimizer = lib.optimizers.DPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=0.0,
                                               max_grad_norm=1.0, expected_batch_size=6)  # fmt: skip
        torch.manual_seed(1)
        for p in optimizer.params:
            p.grad_sample = torch.randn(6, *p.shape)
        optimizer.step()
        runs.append([p.grad for p in optimizer.params])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*runs, strict=True))
    optimizer.zero_grad()
    for n, p in enumerate(optimizer.params):
        p.grad_sample = torch.randn(5 + n % 2, *p.shape)
    with pytest.raises(ValueError, match="5 samples|6 samples"):
        optimizer.step()


def test_a_subclass_with_a_clipping_of_its_own():
    class Normalised(optimizers.DPOptimizer):
        def clip_and_accumulate(self):
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in self.grad_samples]).norm(dim=0)
            for p in self.params:
                _check_processed_flag(p.grad_sample)
                p.summed_grad = torch.einsum("b,b...->...", self.max_grad_norm / norms, p.grad_sample)
                _mark_as_processed(p.grad_sample)

    model = grad_sample.GradSampleModule(plain())
    optimizer = Normalised(torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=1.0,
                           expected_batch_size=6)  # fmt: skip
    each = truth(model._module, (X, Y), losses)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    backward(model)
    optimizer.step()
    check(model, {name: torch.einsum("b,b...->...", 1 / norms, g) for name, g in each.items()})
    with pytest.raises(ValueError, match="haven't been cleared"):
        optimizer.step()


def test_an_optimizer_of_a_part_clips_that_part():
    model = plain()
    wrapped = grad_sample.GradSampleModule(model)
    optimizer = optimizers.DPOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), noise_multiplier=0.0,
                                       max_grad_norm=BOUND, expected_batch_size=6)  # fmt: skip
    each = {n: g for n, g in truth(model, (X, Y), losses).items() if n.startswith("2")}
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    backward(wrapped)
    optimizer.step()
    expected = torch.einsum("b,b...->...", (BOUND / norms).clamp(max=1), each["2.weight"])
    assert torch.allclose(model[2].weight.summed_grad.double(), expected, atol=1e-6) and model[0].weight.grad is None


def test_closures_schedulers_and_hooks():
    model, optimizer = pair()
    seen = []
    optimizer.register_step_pre_hook(lambda *a: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *a: seen.append("post"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) > 0 and seen == ["pre", "post"]
    schedule.step()
    assert optimizer.original_optimizer.param_groups[0]["lr"] == 0.05
