"""Buffers that a forward writes: those with the data's numbers are refused, those of weights and counts are not."""

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp.errors import BatchReadWarning, SampleMixingError, UncapturedUseError


class Writes(nn.Module):
    """Writes to a buffer, after it was used or without its being used at all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        mean = out.detach().mean(0)
        if self.how == "assigned":
            self.state = mean
        elif self.how == "an average anew":
            self.state = self.state * 0.9 + 0.1 * mean
        elif self.how == "a count anew":
            self.state = self.state + (x > 0).sum(0)
        elif self.how == "its data, in place":
            self.state.data.lerp_(mean, 0.1)
        elif self.how == "in place":
            self.state.mul_(0.9).add_(0.1 * mean)
        elif self.how == "through a view":
            self.state.view(2, 2)[0] = mean[:2]
        elif self.how == "its data":
            self.state.data = mean
        elif self.how == "count":
            self.state += 1
        elif self.how == "weights":
            self.state.copy_(self.layer.weight.detach().mean(0))
        elif self.how == "not kept":
            self.cache.copy_(mean)
        return out


def _after(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *layers)


def _batch_norm() -> nn.Module:
    return _after(nn.BatchNorm1d(4), nn.Linear(4, 2))


def _batch_norm_alone() -> nn.Module:
    model = _batch_norm().eval()
    model[1].train()
    return model


REFUSED = {
    "batch norm": _batch_norm,
    "batch norm alone in training": _batch_norm_alone,
    "instance norm": lambda: _after(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)),
    "observer": lambda: _after(torch.ao.quantization.MinMaxObserver(), nn.Linear(4, 2)).eval(),
    "observer beneath autograd": lambda: _after(torch.ao.quantization.FusedMovingAvgObsFakeQuantize()).eval(),
    **{how: lambda how=how: Writes(how) for how in ("assigned", "in place", "through a view", "its data")},
}
KEPT = {
    "batch norm in eval mode": lambda: _batch_norm().eval(),
    "batch norm without statistics": lambda: _after(nn.BatchNorm1d(4, track_running_stats=False)),
    "spectral norm": lambda: _after(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2))),
    **{how: lambda how=how: Writes(how) for how in ("count", "weights", "not kept")},
}


def _private(model: nn.Module) -> fastdp.DPSGD:
    return fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=6)


@pytest.mark.parametrize("name", REFUSED)
def test_data_in_a_buffer_is_refused_without_gradients(name):
    model = REFUSED[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = _private(model)
    with torch.no_grad(), pytest.raises(SampleMixingError, match="buffer '.*public"):
        model(torch.randn(6, 4))
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    if "norm" in name or name in ("in place", "through a view"):  # refused before anything was written
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items() if "num" not in key)
    with optimizer.public(), torch.no_grad():
        model(torch.randn(6, 4))


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_other_buffers_are_not_refused(name, evaluated):
    model = KEPT[name]().train(not evaluated and "eval" not in name)
    optimizer = _private(model)
    for _ in range(3):
        with torch.no_grad():
            model(torch.randn(6, 4))
    if "without" not in name:
        model(torch.randn(6, 4)).square().sum(1).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        *[(how, "buffer 'state'. A buffer") for how in ("in place", "assigned", "an average anew", "a count anew")],
        ("its data, in place", "buffer 'state'. A buffer"),
        ("not kept", "buffer 'cache'. What"),
    ],
)
def test_data_in_a_buffer_is_warned_of_with_gradients(how, words):
    """Of one that is not kept, as a hook of the optimizer, say, may make another of it that is."""
    model = Writes(how)
    optimizer = _private(model)
    with pytest.warns(BatchReadWarning, match=words):
        model(torch.randn(6, 4)).square().sum(1).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("way", ["in place", "data", "view"])
def test_data_in_a_parameter_is_refused(way: str, trained: bool) -> None:
    class Codebook(Writes):
        def __init__(self) -> None:
            super().__init__("none")
            self.codes = nn.Parameter(torch.zeros(2, 4), requires_grad=trained)

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            with torch.no_grad():
                if way == "in place":
                    self.codes.index_add_(0, torch.zeros(len(x), dtype=torch.long), out)
                elif way == "data":
                    self.codes.data = out.detach()[:2].clone()
                elif way == "view":
                    self.codes[0].lerp_(out.mean(0), 0.1)
            return out

    model = Codebook()
    before = model.codes.detach().clone()
    optimizer = _private(model)
    with pytest.raises(UncapturedUseError, match="parameter 'codes'.*clone"):
        model(torch.randn(6, 4))
    way = "none"
    model.codes.data = before.clone()  # the remedy
    (model(torch.randn(6, 4)) + model.codes.sum(0)).square().sum(1).mean().backward()
    optimizer.step()
