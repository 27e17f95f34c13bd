"""Programs whose samples meet in unusual places, and arguments that kernels must not be handed: refused, not wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp import PerSampleGradients, ops
from fastdp.errors import FastDPError, StepError

B, T, D = 4, 5, 6


class Net(nn.Module):
    """A learned layer, a function of its result that mixes samples by an argument beside the first, another layer."""

    def __init__(self, mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.mix = nn.Linear(D, D), nn.Linear(D, D), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.mix(torch.tanh(self.first(x))))


MIXING = {
    "layer_norm": lambda h: F.layer_norm(h, (D,), h.mean((0, 1))),
    "rms_norm": lambda h: F.rms_norm(h, (D,), h.mean((0, 1))),
    "group_norm": lambda h: F.group_norm(h.mT, 2, h.mean((0, 1))).mT,
    "batch_norm": lambda h: F.batch_norm(h.mT, h.detach().mean((0, 1)), h.detach().var((0, 1)), training=False).mT,
    "mask of the mean": lambda h: F.scaled_dot_product_attention(h, h, h, attn_mask=(h @ h.mT).mean(0)),
    "mask of another": lambda h: F.scaled_dot_product_attention(h, h, h, attn_mask=(h @ h.mT).flip(0)),
    "gather": lambda h: h.gather(2, h.argsort(2).flip(0)),
    "take_along_dim": lambda h: torch.take_along_dim(h, h.argsort(2).flip(0), 2),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_by_another_argument_is_refused(name: str) -> None:
    model = Net(MIXING[name])
    PerSampleGradients(model)
    for _ in range(2):
        with pytest.raises(FastDPError):
            model(torch.randn(B, T, D)).square().sum((1, 2)).mean().backward()


@pytest.mark.parametrize("mix", [lambda h: F.scaled_dot_product_attention(h, h, h, attn_mask=h @ h.mT),
                                 lambda h: h.gather(2, h.argsort(2))])  # fmt: skip
def test_the_samples_own_mask_and_indices_are_exact(mix) -> None:
    model, x = Net(mix), torch.randn(B, T, D)
    engine = PerSampleGradients(model, loss_reduction="sum")
    model(x).square().sum().backward()
    plain = Net(mix)
    truth = []
    for b in range(B):
        grads = torch.autograd.grad(plain(x[b : b + 1]).square().sum(), list(plain.parameters()))
        truth.append(torch.stack([g.double().square().sum() for g in grads]).sum().sqrt())
    torch.testing.assert_close(engine.norms().double(), torch.stack(truth), rtol=1e-5, atol=0)


@pytest.mark.parametrize("first", ["no_grad", "reentrant"])
def test_what_no_grad_saw_is_looked_at_again(first: str) -> None:
    class Cov(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h + torch.cov(h.T)[:1, :1]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.cov, self.b = nn.Linear(D, D), Cov(), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if first == "no_grad":
                with torch.no_grad():
                    self.cov(h)
                return self.b(self.cov(h))
            return self.b(checkpoint(self.cov, h, use_reentrant=True))

    model = Model()
    PerSampleGradients(model)
    with pytest.raises(FastDPError):
        model(torch.randn(B, D)).square().sum(1).mean().backward()


def test_a_constant_of_all_rows_is_looked_at_every_time() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.adjacency = nn.Linear(D, D), nn.Linear(D, D), torch.zeros(0)

        def forward(self, x: Tensor) -> Tensor:
            h = self.adjacency @ self.a(x).reshape(B * T, D)
            return self.b(h.view(B, T, D))

    model = Graph()
    PerSampleGradients(model)
    blocks = torch.block_diag(*[torch.rand(T, T) for _ in range(B)])
    model.adjacency = blocks
    model(torch.randn(B, T, D)).square().sum((1, 2)).mean().backward()
    model.adjacency = torch.rand(B * T, B * T)
    with pytest.raises(FastDPError):
        model(torch.randn(B, T, D)).square().sum((1, 2)).mean().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_backwards_through_one_checkpointed_forward(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model = Model()
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, expected_batch_size=1)
    x = torch.randn(B, D, requires_grad=True)
    for _ in range(2):  # ordinary steps are let through
        model(x).square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = model(x), model(x)  # so are two forwards with a backward each
    first.square().sum(1).mean().backward()
    second.square().sum(1).mean().backward()
    optimizer.step()
    loss = model(x).square().sum(1).mean()
    loss.backward(retain_graph=True)
    with pytest.raises(StepError, match="twice"):
        loss.backward()


def test_a_norms_weight_made_of_data_keeps_its_gradient() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.f, self.bias = nn.Linear(D, D), nn.Parameter(torch.randn(D))

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (D,), self.f(x)[0], self.bias)

    model, plain, x = Model(), Model(), torch.randn(1, D)
    engine = PerSampleGradients(model)
    model(x).square().sum().backward()
    grads = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    truth = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt()
    torch.testing.assert_close(engine.norms().double(), truth.view(1), rtol=1e-5, atol=0)


def test_a_scalar_parameter_beside_other_small_ones() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.tensor(2.0)), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    model = Model()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=B)
    model(torch.randn(B, D)).square().sum(1).mean().backward()
    optimizer.step()
    assert model.scale.grad is not None and model.scale.grad.shape == ()


def test_a_long_vector_that_is_looked_up_trains_on() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.lookup = nn.Parameter(torch.randn(20_000)), False

        def forward(self, ids: Tensor) -> Tensor:
            return self.table[ids] if self.lookup else self.table.sum() + ids * self.table[0]

    model = Model()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=B)
    for lookup in (False, True, True, False, True):
        model.lookup = lookup
        model(torch.randint(0, 20_000, (B, T))).square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("method", ["gram", "auto"])
@pytest.mark.parametrize("reference", [False, True])
def test_products_that_vanish_do_not_shrink_a_norm(method: str, reference: bool) -> None:
    a, g = torch.zeros(1, 4, 512), torch.zeros(1, 4, 512)
    a[0, 0], g[0, 0] = 1e-23, 1e18
    a[0, 1], g[0, 1] = 1.0, 1e-6
    truth = (g.double().mT @ a.double()).square().sum()
    with ops.registry.forced("reference" if reference else "auto"):
        found = ops.linear_norm_sq(a, g, method, dtype=torch.float64)
        assert float(found[0]) == pytest.approx(float(truth), rel=1e-5)
        x, grads = a.mT.contiguous(), g.mT.contiguous()
        assert float(ops.conv_norm_sq(x, grads, 1, method="gram", dtype=torch.float64)[0]) == pytest.approx(
            float(truth), rel=1e-5
        )


def test_arguments_that_do_not_fit_raise() -> None:
    with pytest.raises(ValueError, match="c"):
        ops.weighted_sum(torch.ones(1000, 4), torch.ones(3))
    with pytest.raises(ValueError, match="c"):
        torch.ops.fastdp.weighted_sum(torch.ones(1000, 4), torch.ones(3))
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        ops.linear_norm_sq(torch.randn(2, 3, 4), torch.empty(2, 3, 4, device="meta"))
    with pytest.raises(ValueError, match="1 or more"):
        ops.conv_norm_sq(torch.randn(2, 3, 8), torch.randn(2, 4, 9), 0)
    assert ops.weighted_sum(torch.ones(0, 3), torch.ones(0)).tolist() == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_named_and_refused(layout: torch.layout) -> None:
    model = Net(lambda h: torch.nested.as_nested_tensor([row[: i + 1] for i, row in enumerate(h)], layout=layout) * 2.0)
    PerSampleGradients(model)
    with pytest.raises(StepError, match=r"\w+\(\).*nested tensor.*mark_rows"):
        model(torch.randn(B, T, D))
    ragged = torch.nested.nested_tensor([torch.randn(i + 1, D) for i in range(B)], layout=layout)
    with pytest.raises(StepError, match=r"argument is a nested tensor.*mark_rows"):
        model(ragged)


PICKING = {
    "take": lambda h, ids: torch.take(h, ids),
    "embedding": lambda h, ids: F.embedding(ids[:, 0] // D, h),
    "gather": lambda h, ids: h.gather(0, ids // D),
    "index_select": lambda h, ids: h.index_select(0, ids[:, 0] // D),
}


@pytest.mark.parametrize("name", PICKING)
def test_ids_that_pick_other_samples_rows_are_refused_also_after_harmless_ones(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.second(PICKING[name](torch.tanh(self.first(x)), ids))

    model, own = Model(), torch.arange(B * D).view(B, D)
    engine = PerSampleGradients(model)
    for _ in range(2):  # what is known of a call must not hide what its ids pick
        model(torch.randn(B, D), own).sum(1).mean().backward()
        assert engine.norms().shape == (B,)
    with pytest.raises(FastDPError, match="sample"):
        model(torch.randn(B, D), own.roll(1, 0)).sum(1).mean().backward()
