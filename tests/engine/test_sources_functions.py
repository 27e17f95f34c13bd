"""What computes out of torch's sight: quantised bases, autograd functions of one's own, transforms of torch.func."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import BatchLayoutError, BatchReadWarning, SampleMixingError, UncapturedUseError

from ..cases import Net, net, shake, square
from ..truth import assert_refused, compare

B, T, D = 3, 5, 8
TOLERANCE = 1e-5

# --------------------------------------------------------------------------- quantised base, LoRA on top


class Quantised(nn.Module):
    """A frozen int8 base, dequantised in the forward."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        weight = torch.randn(out, features) / features**0.5
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("codes", (weight / self.scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scale.to(x.dtype))


class Matmul4Bit(torch.autograd.Function):
    """As quantisation libraries have it: the weight is no input of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Quantised) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.codes.to(x.dtype) * layer.scale.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g @ (ctx.layer.codes.to(g.dtype) * ctx.layer.scale.to(g.dtype)), None


class HiddenMatmul(Matmul4Bit):
    """Its work is a kernel's, out of torch's sight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Quantised) -> Tensor:
        ctx.layer = layer
        weight = layer.codes.to(x.dtype) * layer.scale.to(x.dtype)
        return torch.from_numpy(x.detach().numpy() @ weight.numpy().T)


class FunctionQuantised(Quantised):
    def forward(self, x: Tensor) -> Tensor:
        return Matmul4Bit.apply(x, self)


class HiddenQuantised(Quantised):
    def forward(self, x: Tensor) -> Tensor:
        return HiddenMatmul.apply(x, self)


class LoRA(nn.Module):
    def __init__(self, base: nn.Module, features: int, out: int) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(features, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


@pytest.mark.filterwarnings("ignore:(?s).*in sight.*")
@pytest.mark.parametrize("shape", [(B, T, D), (B, D), (1, T, D)], ids=str)
@pytest.mark.parametrize("kind", [Quantised, FunctionQuantised, HiddenQuantised])
def test_lora_on_a_quantised_base(kind: type[Quantised], shape: tuple[int, ...]) -> None:
    """Also where the base alone, hidden, stands between two trained layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        LoRA(kind(D, D), D, D), nn.Tanh(), kind(D, D), nn.Tanh(), nn.LayerNorm(D), LoRA(kind(D, 4), D, 4)
    )
    assert compare(shake(model), torch.randn(shape), square).worst < TOLERANCE


def test_data_of_unseen_origin_is_guessed_with_a_warning_or_refused() -> None:
    model = nn.Sequential(nn.Linear(D, D), HiddenQuantised(D, D), nn.Linear(D, 4))
    with pytest.warns(UserWarning, match=r"module '2'.*fastdp\.verify"):
        assert compare(model, torch.randn(B, T, D), square).worst < TOLERANCE
    hidden = HiddenQuantised(D, B)  # [B, T, D] -> [B * T, B]: only a dimension that is none has the batch's size
    forward = lambda m, x: m.b(HiddenMatmul.apply(m.a(x).flatten(0, 1), hidden)).view(len(x), -1)
    flat = net(forward, torch.randn(B, T, D), a=nn.Linear(D, D), b=nn.Linear(B, 4))
    with pytest.raises(BatchLayoutError, match="cannot tell"):
        compare(*flat)


def test_perturbed_inputs_have_a_row_for_each_sample_whatever_their_shape() -> None:
    """As other inputs have; what an encoder out of sight made of them may lie in another order."""
    model, x, outside = nn.Linear(D, 4), torch.randn(D, D), nn.Linear(D, D)
    assert compare(model, x, lambda m, x: square(m, x + torch.zeros_like(x, requires_grad=True))).worst < TOLERANCE
    with pytest.raises(BatchLayoutError, match="cannot tell"):
        compare(model, x, lambda m, x: square(m, outside.to(x.dtype)(x)))


def test_a_function_that_mixes_samples_is_refused() -> None:
    class Centred(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x - x.mean(0)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g - g.mean(0)

    with pytest.raises(SampleMixingError, match="mean"):
        compare(*net(lambda m, x: m.b(Centred.apply(m.a(x))), torch.randn(B, D), a=nn.Linear(D, D), b=nn.Linear(D, 4)))


# --------------------------------------------------------------------------- transforms of torch.func


HIDDEN = {
    "vmap along the batch": lambda x: torch.vmap(lambda c: c - c.mean(), in_dims=1, out_dims=1)(x),
    "vmap as the last step of several": lambda x: torch.vmap(lambda c: c.softmax(0), in_dims=1, out_dims=1)(x) + x,
    "grad of a function of all": lambda x: torch.func.grad(lambda y: (y.sum(0) ** 3).sum())(x),
    "vjp": lambda x: torch.func.vjp(lambda y: (y - y.mean(0)).tanh(), x)[0],
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", HIDDEN)
def test_transforms_of_data_are_refused(name: str, last: bool) -> None:
    hidden = HIDDEN[name]
    forward = (lambda m, x: hidden(m.a(x))) if last else (lambda m, x: m.b(hidden(m.a(x)).tanh()))
    model = Net(forward, a=nn.Linear(D, D), b=nn.Linear(D, 4))
    assert_refused(model, torch.randn(B, D), square, "torch.func")


def test_transforms_of_data_without_gradients_are_warned_of() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = torch.vmap(lambda c: c - c.mean(), in_dims=1, out_dims=1)(x)
        return m.a(x + mean)

    model = Net(forward, a=nn.Linear(D, D))
    fastdp.PerSampleGradients(model)
    with pytest.warns(BatchReadWarning, match="inside torch.func or torch.vmap"):
        model(torch.randn(B, D))


@pytest.mark.filterwarnings("ignore:(?s).*in sight.*")
def test_transforms_of_parameters_and_data_name_the_parameter() -> None:
    with pytest.raises(UncapturedUseError, match=r"'a\.weight' \(linear\(\) in module 'a', inside torch.func"):
        compare(*net(lambda m, x: torch.vmap(m.a)(x).tanh(), torch.randn(B, D), a=nn.Linear(D, D)))


@pytest.mark.parametrize("batch", [3, D])
def test_a_straight_through_estimator_of_weights_is_named_with_the_remedy(batch: int) -> None:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return (weight * 8).round() / 8

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    forward = lambda m, x: m.b(F.linear(x, Rounded.apply(m.a.weight), m.a.bias).tanh())
    case = net(forward, torch.randn(batch, D), a=nn.Linear(D, D), b=nn.Linear(D, 2))
    with pytest.raises(UncapturedUseError, match=r"'a.weight'.*fastdp.register_rule\(Rounded\)\(None\)"):
        compare(*case)
    fastdp.register_rule(Rounded)(None)
    assert compare(*case).worst < 1e-4
