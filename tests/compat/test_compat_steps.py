"""Steps of fastdp.compat.opacus: each is the sum of clipped gradients of one sample at a time, in any loop."""

from __future__ import annotations

import opacus
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fastdp.compat import opacus as ours
from fastdp.compat.opacus import grad_sample, optimizers
from fastdp.compat.opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed

from ..truth import truth
from .compat_runs import clipped_sum as summed
from .compat_runs import private, weights

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0, 2])
BOUND = 0.4
both_modes = pytest.mark.parametrize("mode", ["hooks", "ghost"])


def plain(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)


def pair(mode="hooks", lib=ours, noise=0.0, model=None, **options):
    model = model or plain()
    options = {"max_grad_norm": BOUND, "expected_batch_size": 6, **options}
    extra = {"max_grad_norm": options["max_grad_norm"]} if mode == "ghost" else {}
    wrapped = lib.grad_sample.get_gsm_class(mode)(model, **extra)
    inside = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = lib.optimizers.get_optimizer_class("flat", False, mode)
    return wrapped, made(inside, noise_multiplier=noise, **options)


def backward(model, rows=slice(None)):
    F.cross_entropy(model(X[rows]), Y[rows]).backward()


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def factors_of(each, bound=BOUND):
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    return (bound / norms).clamp(max=1)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_layers_over_sequences_step_after_step(mode):
    """Sums made of activations after the backward are the engine's own work, not copies of the batch's samples."""
    torch.manual_seed(0)
    model, words = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 12)), torch.randint(0, 12, (4, 10))
    wrapped, optimizer = pair(mode, model=model)
    for _ in range(3):
        F.cross_entropy(wrapped(words).transpose(1, 2), words).backward()
        optimizer.step()
        optimizer.zero_grad()


def clipped_sum(model, bound=BOUND, rows=slice(None)):
    """The truth, by name, float64."""
    each = truth(model, (X[rows], Y[rows]), losses)
    return {name: torch.einsum("b,b...->...", factors_of(each, bound), g) for name, g in each.items()}


def check(model, expected, scale=1.0, attribute="summed_grad"):
    for name, p in model._module.named_parameters():
        assert torch.allclose(getattr(p, attribute).double(), expected[name] * scale, rtol=1e-5, atol=1e-6), name


# ------------------------------------------------------------------ models and losses that Opacus gets wrong


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(7, 2, mode="sum")

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids.flatten(), torch.arange(0, ids.numel(), 3))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.both = nn.Linear(4, 2), nn.Linear(4, 2), True

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.unused(x) if self.both else self.used(x)


def convolution(**options) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, **options), nn.Flatten(), nn.Linear(48, 2))


IMAGES = torch.randn(5, 2, 4, 4)
IDS = torch.tensor([[1, 1, 2], [3, 3, 3], [0, 1, 2], [4, 4, 0], [5, 6, 0]])
MODELS = {
    "channels_last": (convolution, IMAGES.contiguous(memory_format=torch.channels_last)),
    "circular padding": (lambda: convolution(padding_mode="circular"), IMAGES),
    "an id twice in a bag": (Bag, IDS),
    "padding_idx": (lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 2)), IDS),
    "LayerNorm without bias": (lambda: nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, 2)), X[:5]),
    "a layer not used in the second step": (Unused, X[:5]),
}


@both_modes
@pytest.mark.parametrize("name", MODELS)
def test_models(name, mode):
    build, x = MODELS[name]
    torch.manual_seed(1)
    net, y = build(), torch.tensor([0, 1, 1, 0, 1])
    data = torch.utils.data.TensorDataset(x, y)
    _, module, optimizer, _, _ = private(mode, module=net, data=data, batch_size=5, lr=0.1)
    for both in (True, False):
        net.both = both
        plain = build()
        plain.load_state_dict(net.state_dict())
        plain.both = both
        want = weights(net) - 0.1 * summed(plain, x, y, 0.5) / 5
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()  # in mode "ghost" any loss is clipped, not only the criterion's
        optimizer.step()
        torch.testing.assert_close(weights(net), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [1, 3])
def test_losses_of_several_columns_in_mode_ghost(columns):
    """Opacus multiplies losses [B, 1] by factors [B] to [B, B]: nothing is clipped."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, columns), torch.randn(6, 4), 100 * torch.randn(6, columns)
    each = truth(net, (x, y), lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="none").mean(1))
    data = torch.utils.data.TensorDataset(x, y)
    _, module, optimizer, criterion, _ = private("ghost", module=net, data=data, batch_size=6, criterion=nn.MSELoss())
    loss = criterion(module(x), y)
    assert type(loss) is Tensor and loss.dim() == 0
    loss.backward()
    torch.testing.assert_close(module.get_clipping_coef().double(), factors_of(each, 0.5).clone(), rtol=1e-5, atol=0.0)
    optimizer.step()
    check(module, {name: torch.einsum("b,b...->...", factors_of(each, 0.5), g) for name, g in each.items()})
    assert len(module.get_norm_sample()) == 6


def test_norms_under_autocast_stay_within_the_bound():
    for seed in range(20):
        torch.manual_seed(seed)
        net, x = nn.Linear(64, 64), torch.randn(1, 16, 64)
        _, module, optimizer, _, _ = private("hooks", module=net, data=[x[0]], batch_size=1)
        before = weights(net)
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        out.float().square().sum().backward()
        optimizer.step()
        assert (before - weights(net)).norm() <= 0.5 * (1 + 1e-5)


# ------------------------------------------------------------------ loops


@both_modes
def test_several_backwards_before_a_step(mode):
    """Opacus's ghost drops all but the last."""
    model, optimizer = pair(mode)
    expected = clipped_sum(model._module)
    backward(model, slice(0, 4))
    backward(model, slice(4, 6))
    optimizer.step()
    assert optimizer.accumulated_iterations == 2
    check(model, expected)
    check(model, expected, 1 / 12, "grad")


@both_modes
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


@both_modes
def test_gradients_are_used_once(mode):
    model, optimizer = pair(mode)
    with pytest.raises(ValueError, match="not initialized"):
        optimizer.step()
    backward(model)
    optimizer.step()
    with pytest.raises(ValueError, match="haven't been cleared since the last optimizer step"):
        optimizer.step()
    expected = clipped_sum(model._module)
    backward(model)
    if mode == "hooks":
        with pytest.raises(ValueError, match="haven't been cleared since the last optimizer step"):
            optimizer.step()
    else:  # a ghost criterion of Opacus clears by itself
        optimizer.step()
        check(model, expected)


def test_a_part_of_a_batch_is_taken_once():
    """Without zero_grad() what the part before it left would be added again, at twice the clipping norm."""
    model, optimizer = pair()
    optimizer.signal_skip_step(True)
    backward(model, slice(0, 2))
    optimizer.step()
    backward(model, slice(2, 6))
    with pytest.raises(ValueError, match="haven't been cleared"):
        optimizer.step()


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
        model, optimizer = pair("no_op", lib, max_grad_norm=1.0)
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

    model, inside = pair()
    optimizer = Normalised(inside.original_optimizer, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=6)
    each = truth(model._module, (X, Y), losses)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    backward(model)
    optimizer.step()
    check(model, {name: torch.einsum("b,b...->...", 1 / norms, g) for name, g in each.items()})
    with pytest.raises(ValueError, match="haven't been cleared"):
        optimizer.step()


def test_an_optimizer_of_a_part_clips_that_part():
    model, _ = pair()
    part = model._module[2]
    optimizer = optimizers.DPOptimizer(torch.optim.SGD(part.parameters(), lr=0.1), noise_multiplier=0.0,
                                       max_grad_norm=BOUND, expected_batch_size=6)  # fmt: skip
    each = {n: g for n, g in truth(model._module, (X, Y), losses).items() if n.startswith("2")}
    backward(model)
    optimizer.step()
    expected = torch.einsum("b,b...->...", factors_of(each), each["2.weight"])
    assert (
        torch.allclose(part.weight.summed_grad.double(), expected, atol=1e-6) and model._module[0].weight.grad is None
    )


# ------------------------------------------------------------------ numbers


@both_modes
@pytest.mark.parametrize("look", [False, True])
def test_a_sample_that_is_not_finite_contributes_nothing(mode, look):
    model, optimizer = pair(mode)
    expected = clipped_sum(model._module, rows=[0, 1, 3, 4, 5])
    broken = X.clone()
    broken[2] = float("nan")
    F.cross_entropy(model(broken), Y).backward()
    assert not look or len(optimizer.grad_samples) == 4
    optimizer.step()
    check(model, expected)


@both_modes
def test_sixteen_bit_models_are_summed_in_float32(mode):
    model, optimizer = pair(mode, model=plain(torch.bfloat16), noise=1e-6)
    F.cross_entropy(model(X.bfloat16()).float(), Y).backward()
    optimizer.step()
    for p in optimizer.params:
        assert (p.summed_grad.dtype, p.grad.dtype) == (torch.float32, torch.bfloat16)
        assert torch.allclose(p.grad.float() * 6, p.summed_grad, rtol=0.02, atol=1e-4)


def noise_of(optimizer):
    scale = 6 * optimizer.accumulated_iterations
    return torch.cat([(p.grad * scale - p.summed_grad).flatten() for p in optimizer.params])


@both_modes
def test_noise_is_of_the_largest_norm_among_the_parts_of_a_step(mode):
    wide = nn.Sequential(nn.Linear(4, 4000), nn.Linear(4000, 3))
    model, optimizer = pair(mode, noise=3.0, max_grad_norm=2.0, model=wide)
    optimizer.signal_skip_step(True)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.max_grad_norm = 0.001
    backward(model)
    optimizer.step()
    assert float(noise_of(optimizer).std()) == pytest.approx(6.0, rel=0.03)


def test_clipping_norms_of_layers_set_the_noise_whatever_max_grad_norm_becomes():
    """Schedulers change max_grad_norm, which clips nothing in this mode."""
    model = grad_sample.GradSampleModule(nn.Sequential(nn.Linear(4, 4000), nn.Linear(4000, 3)))
    optimizer = optimizers.DPPerLayerOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=3.0, max_grad_norm=[1.0] * 4,
        expected_batch_size=6,
    )  # fmt: skip
    optimizer.max_grad_norm = 1e-3
    backward(model)
    optimizer.step()
    assert float(noise_of(optimizer).std()) == pytest.approx(6.0, rel=0.03)


def test_noise_does_not_repeat_between_parameters():
    model, optimizer = pair(model=nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 300), nn.Linear(300, 3)), noise=1.0)
    backward(model)
    optimizer.step()
    noise = [(p.grad * 6 - p.summed_grad).flatten()[:900] for p in optimizer.params if p.numel() >= 900]
    assert abs(float(torch.corrcoef(torch.stack(noise))[0, 1])) < 0.15


# ------------------------------------------------------------------ process groups


def test_optimizers_of_process_groups(tmp_path):
    inside = torch.optim.SGD(plain().parameters(), lr=0.1)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 6}
    kinds = [optimizers.get_optimizer_class("flat", True, m) for m in ("hooks", "ghost")]
    for kind in kinds:
        with pytest.raises(ValueError, match="process group"):
            kind(inside, **options)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert [(o := kind(inside, **options)).rank + o.world_size for kind in kinds] == [1, 1]
        with pytest.raises(ValueError, match="ghost_fsdp"):
            optimizers.FSDPOptimizerFastGradientClipping(inside, **options)
    finally:
        dist.destroy_process_group()
