"""Layouts remembered from step to step: whatever may change between two calls of one kind is looked at again."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdp import PerSampleGradients
from fastdp.batch_axis.layout import Layout, tag
from fastdp.engine.call_cache import Memo, inquires
from fastdp.errors import FastDPError
from fastdp.utils import cache

B, T, D = 4, 4, 6  # the batch and the sequence of one size, on purpose


def per_sample_truth(model: nn.Module, x: Tensor, run) -> Tensor:
    norms = []
    for b in range(len(x)):
        grads = torch.autograd.grad(run(model, x[b : b + 1]).sum(), list(model.parameters()), allow_unused=True)
        norms.append(torch.stack([g.double().square().sum() for g in grads if g is not None]).sum().sqrt())
    return torch.stack(norms)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.way = "plain"

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        if self.way == "transposed":  # [T, B, D] and back
            y = (y.transpose(0, 1) * torch.linspace(0.5, 1.5, T).view(T, 1, 1)).transpose(0, 1)
        elif self.way == "rows":
            y = y.flatten(0, 1).view(B if len(x) == B else 1, T, D)
        elif self.way == "mixed":
            y = y - y.mean(0, keepdim=True)
        elif self.way == "attention":
            y = F.scaled_dot_product_attention(y, y, y)
        return self.second(y)


def test_another_way_through_the_same_shapes() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(B, T, D)
    engine = PerSampleGradients(model, loss_reduction="sum")
    for way in ("plain", "transposed", "rows", "attention", "transposed", "plain", "rows"):
        model.way = way
        model(x).square().sum().backward()
        found = engine.norms().double()
        truth = per_sample_truth(model_without_engine(model), x, lambda m, s: m(s).square())
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=0)


def model_without_engine(model: Net) -> Net:
    other = Net()
    other.load_state_dict(model.state_dict())
    other.way = model.way
    return other


def test_what_mixes_samples_is_refused_after_many_good_steps() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(B, T, D)
    PerSampleGradients(model, loss_reduction="sum")
    for _ in range(3):
        model(x).square().sum().backward()
    for _ in range(2):
        model.way = "mixed"
        with pytest.raises(FastDPError, match="mean"):
            model(x).square().sum().backward()
        model.way = "plain"
        model(x).square().sum().backward()


def test_a_mask_of_the_batchs_size_is_looked_at_every_time() -> None:
    """torch.cumsum along the batch, by a function that takes the dimension from a tensor's value."""

    class Rolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
            self.order = torch.arange(B)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x))[self.order])

    torch.manual_seed(0)
    model, x = Rolled(), torch.randn(B, T, D)
    engine = PerSampleGradients(model, loss_reduction="sum")
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(B, 1, 1)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        model.order = torch.tensor(order)
        (model(x).square() * scale[model.order]).sum().backward()
        plain = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        plain[0].load_state_dict(model.first.state_dict()), plain[2].load_state_dict(model.second.state_dict())
        truth = per_sample_truth(plain, x, lambda m, s: m(s).square())
        torch.testing.assert_close(engine.norms().double(), truth * scale.flatten(), rtol=1e-5, atol=0)


def test_the_second_step_asks_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastdp.engine import capture

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Flatten(), nn.Linear(T * D, 3)), torch.randn(B, T, D)
    PerSampleGradients(model)
    asked: list[str] = []
    propagate = capture.propagate
    monkeypatch.setattr(capture, "propagate", lambda call: (asked.append(call.name), propagate(call))[1])
    model(x).square().sum(1).mean().backward()
    first = len(asked)
    model(x).square().sum(1).mean().backward()
    assert first > 0 and len(asked) == first
    model(x[:3]).square().sum(1).mean().backward()  # another batch is another kind
    assert len(asked) == 2 * first


def test_what_is_not_remembered() -> None:
    memo, x = Memo(), torch.randn(B, D)
    tag(x, Layout(B))
    tracked = {id(p): "p" for p in [torch.nn.Parameter(torch.ones(D))]}
    weight = torch.nn.Parameter(torch.ones(D))
    assert memo.signature(torch.mul, (x, weight), {}, B, {id(weight): "w"}) is None  # a parameter
    assert memo.signature(torch.Tensor.add_, (x, x), {}, B, tracked) is None  # in place
    assert memo.signature(torch.index_select, (x, 0, torch.tensor([1])), {}, B, tracked) is None  # by value
    assert memo.signature(torch.mul, (x, 2), {}, B, tracked) != memo.signature(torch.mul, (x, 2.0), {}, B, tracked)
    double = x.double()
    tag(double, Layout(B))
    assert memo.signature(torch.mul, (x, 2), {}, B, tracked) != memo.signature(torch.mul, (double, 2), {}, B, tracked)
    assert memo.signature(torch.mul, (torch.randn(B, D), 2), {}, B, tracked) is None  # of constants alone
    assert inquires(torch.Tensor.size) and inquires(torch.Tensor.shape.__get__) and not inquires(torch.Tensor.view)
    assert not inquires(torch.Tensor.data.__get__) and not inquires(torch.Tensor.grad.__get__)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SIZE", 3)
    kept = cache.Answers()
    for number in range(8):
        kept[number] = -number
        assert len(kept) <= 3 and kept[number] == -number
