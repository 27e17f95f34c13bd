"""make_compatible: every kind of module, what is kept, what is reported, and that training is exact afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

import fastdp
from fastdp.errors import ParameterError, SampleMixingError
from fastdp.verification.compatible import GroupNormThen, groups_of

from ..cases import Net, shake, square
from ..truth import compare

B = 3
NORMS = {
    "1d of rows": (lambda: nn.BatchNorm1d(16), (B, 16)),
    "1d of sequences": (lambda: nn.BatchNorm1d(16), (B, 16, 5)),
    "1d of few features": (lambda: nn.BatchNorm1d(6), (B, 6)),
    "2d": (lambda: nn.BatchNorm2d(6), (B, 6, 4, 5)),
    "2d without affine": (lambda: nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6, affine=False)), (B, 6, 4, 5)),
    "2d without statistics": (lambda: nn.BatchNorm2d(6, track_running_stats=False), (B, 6, 4, 5)),
    "2d of one channel": (lambda: nn.BatchNorm2d(1), (B, 1, 4, 5)),
    "3d": (lambda: nn.BatchNorm3d(4), (B, 4, 2, 3, 2)),
    "synchronised": (lambda: nn.SyncBatchNorm(6), (B, 6, 4, 5)),
    "in a block": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)),
        (B, 3, 6, 6),
    ),
    "instance norm": (lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True), (B, 6, 4, 5)),
}  # fmt: skip


def built(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    make, shape = NORMS[name]
    model, x = make(), torch.randn(shape)
    with torch.no_grad():
        copy.deepcopy(model).cpu() if name == "synchronised" else model(x)
    return shake(model), x


@pytest.mark.parametrize("name", NORMS)
def test_private_and_exact_afterwards(name: str) -> None:
    model, x = built(name)
    parameters = dict(model.named_parameters())
    report = fastdp.make_compatible(model)
    assert report.ok and report.model is model and len(report.changed) == 1 and "->" in str(report)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert not [n for n, _ in model.named_buffers() if "running" in n]
    assert bool(model(x).isfinite().all()) and model(x).std() > 0.1, "normalised to a constant"
    assert compare(model, x, square).worst < 1e-5
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=B)
    square(model, x).mean().backward()
    optimizer.step()
    again = fastdp.make_compatible(model)
    assert again.ok and not again.changed, "not idempotent"


def test_the_refusal_names_the_remedy() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError, match=r"fastdp\.make_compatible\(model\)"):
        model(torch.randn(B, 3, 6, 6))


def test_group_counts() -> None:
    channels = (1, 2, 3, 7, 12, 32, 48, 64, 96, 100, 1024)
    assert [groups_of(c) for c in channels] == [1, 1, 1, 1, 6, 16, 24, 32, 32, 25, 32]
    assert [groups_of(c, 8) for c in (7, 16, 64, 513)] == [1, 2, 8, 27]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_type_mode_and_frozen_parameters_are_kept(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).to(dtype).eval()
    model[1].weight.requires_grad_(False)
    fastdp.make_compatible(model)
    norm = model[1]
    assert type(norm) is nn.GroupNorm and not norm.training and norm.weight.dtype == dtype
    assert not norm.weight.requires_grad and norm.bias.requires_grad and norm.eps == nn.BatchNorm2d(4).eps
    assert model(torch.randn(2, 3, 4, 4, dtype=dtype)).dtype == dtype
    repr(model), copy.deepcopy(model), model.state_dict()


def test_shared_instances_hooks_and_references_elsewhere() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.BatchNorm2d(4)
            self.listed = [self.a]  # not registered

        def forward(self, x: Tensor) -> Tensor:
            return self.listed[0](self.b(self.a(x)).tanh())

    model, seen = Model(), []
    handle = model.a.register_forward_hook(lambda *_: seen.append(1))
    report = fastdp.make_compatible(model)
    assert model.a is model.b is model.listed[0] and type(model.a) is nn.GroupNorm
    assert report.changed[0].paths == ("a", "b") and len(report.changed) == 1
    x = torch.randn(B, 4, 3, 3)
    model(x)
    assert len(seen) == 3
    handle.remove()
    assert not model.a._forward_hooks and compare(shake(model), x, square).worst < 1e-5


def test_an_optimizer_made_before_trains_on() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    optimizer = fastdp.DPSGD(model, lr=0.5, noise_multiplier=0.0, expected_batch_size=B)
    fastdp.make_compatible(model)
    before = model[1].weight.detach().clone()
    square(model, torch.randn(B, 3, 6, 6)).mean().backward()
    optimizer.step()
    assert not torch.equal(before, model[1].weight)


def test_keep_eval() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True))
    model[0].eval(), model[2].eval()
    report = fastdp.make_compatible(model, keep_eval=True)
    assert [c.paths for c in report.kept] == [("0",), ("2",)] and [c.paths for c in report.changed] == [("1",)]
    assert type(model[0]) is nn.BatchNorm2d and compare(shake(model), torch.randn(B, 4, 3, 3), square).worst < 1e-5
    assert len(fastdp.make_compatible(model).changed) == 2, "without it all are replaced, whatever their mode"
    stateless = nn.BatchNorm2d(4, track_running_stats=False).eval()  # takes the batch's statistics in eval mode too
    assert fastdp.make_compatible(stateless, keep_eval=True).changed


def test_a_copy_on_request() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4))
    report = fastdp.make_compatible(model, inplace=False)
    assert type(model[0]) is nn.BatchNorm2d and type(report.model[0]) is nn.GroupNorm
    assert report.model[0].weight is not model[0].weight


def test_lazy_norms() -> None:
    model = nn.Sequential(nn.LazyBatchNorm2d(), nn.LazyLinear(3))
    with pytest.raises(ParameterError, match="'0'.*Run the model on a batch"):
        fastdp.make_compatible(model)
    with pytest.raises(ParameterError, match="Run the model"):
        fastdp.make_compatible(nn.LazyBatchNorm1d(affine=False, track_running_stats=False))
    model(torch.randn(B, 4, 3, 3))
    fastdp.make_compatible(model)
    assert compare(shake(model), torch.randn(B, 4, 3, 3), square).worst < 1e-5


def test_embedding_options_that_couple_samples() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0, scale_grad_by_freq=True), nn.Linear(4, 2))
    report = fastdp.make_compatible(model)
    assert "max_norm=1.0" in str(report) and "scale_grad_by_freq" in str(report)
    assert compare(model, torch.randint(0, 9, (B, 5)), square).worst < 1e-5


class NormAct(nn.BatchNorm2d):
    """As timm has it: the activation is a child of the norm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class Conditional(nn.BatchNorm2d):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) * y


def test_a_norm_with_its_activation() -> None:
    model = NormAct(8)
    assert "then drop, act" in str(fastdp.make_compatible(model))
    x = torch.randn(B, 8, 3, 3)
    assert type(model) is GroupNormThen
    assert torch.equal(model(x), nn.functional.group_norm(x, 4, model.weight, model.bias).relu())
    assert not fastdp.make_compatible(model).changed


class Functional(nn.BatchNorm2d):
    """Its activation is no child."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Residual(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Scaled(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class OtherOrder(NormAct):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.ReLU(), nn.Hardtanh(-0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(nn.BatchNorm2d.forward(self, x)) - 0.1)


class Noisy(nn.BatchNorm2d):
    """More than a batch norm in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x) if self.training else x)


class Cast(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


@pytest.mark.parametrize("kind", [Functional, Residual, Scaled, OtherOrder, Noisy])
def test_a_forward_that_does_more_is_not_lost(kind: type[nn.BatchNorm2d]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), kind(8))
    state = torch.get_rng_state()
    report = fastdp.make_compatible(model)
    assert type(model[1]) is kind and "own forward()" in report.left[0].after and not report.changed
    assert torch.equal(state, torch.get_rng_state()) and int(model[1].num_batches_tracked) == 0


def test_a_forward_that_does_the_same_goes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Cast(8))
    assert fastdp.make_compatible(model).ok and type(model[1]) is nn.GroupNorm


def test_one_channel_without_positions() -> None:
    model = nn.ModuleDict({"a": nn.BatchNorm1d(1), "b": nn.BatchNorm2d(1)})
    report = fastdp.make_compatible(model)
    assert "one channel" in report.left[0].after and type(model["b"]) is nn.GroupNorm


def test_what_cannot_be_replaced_is_listed_with_the_reason() -> None:
    parametrized = nn.BatchNorm2d(4)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Softplus())
    hooked = nn.BatchNorm2d(4)
    hooked.forward = hooked.forward
    parts = dict(a=parametrized, b=hooked, c=Conditional(4), d=nn.Dropout(), e=nn.LayerNorm(4))
    report = fastdp.make_compatible(nn.ModuleDict(parts))
    found = {change.paths[0]: change.after for change in report.left}
    assert not report.ok and not report.changed and set(found) == set("abc")
    for path, word in {"a": "parametrized", "b": "forward was replaced", "c": "could not be tried"}.items():
        assert word in found[path] and f"LEFT {path}:" in str(report)


def test_pruned_norms_stay_pruned() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    nn.utils.prune.l1_unstructured(model[1], "weight", 2)
    fastdp.make_compatible(model)
    assert type(model[1]) is nn.GroupNorm and int((model[1].weight == 0).sum()) == 2
    engine = fastdp.PerSampleGradients(model)
    square(model, torch.randn(B, 3, 4, 4)).mean().backward()
    rows = engine.materialize()["1.weight_orig"]
    assert bool((rows[:, model[1].weight == 0] == 0).all()) and bool((rows.abs().sum(1) > 0).all())


def test_no_module_and_nothing_to_do() -> None:
    with pytest.raises(TypeError, match="Module"):
        fastdp.make_compatible([nn.BatchNorm2d(3)])
    report = fastdp.make_compatible(Net(lambda m, x: x, a=nn.Linear(2, 2)))
    assert report.ok and str(report) == "fastdp.make_compatible: 0 changed, 0 kept, 0 left"
