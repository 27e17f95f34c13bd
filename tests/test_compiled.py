"""torch.compile before the private optimizer: exact, whatever was compiled, and by compiled code where it can be.

Most tests use backends without code generation, which see the same graphs.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fastdp
from fastdp import PerSampleGradients
from fastdp.errors import FastDPError, StepError

from .truth import norms_of, truth

B, T, D, V = 3, 5, 8, 11
Losses = Callable[[nn.Module, Any], Tensor]
Way = Callable[[nn.Module], nn.Module]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    logging.getLogger("torch.__trace").propagate = False  # pytest would keep all of torch's traces
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.compile under fastdp.*")
        yield


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often graphs were interpreted and ran compiled."""
    from fastdp import compiled_graph

    count = {"interpreted": 0, "compiled": 0}
    for name, kind in (("Interpretation", "interpreted"), ("Plan", "compiled")):
        method = "run" if kind == "interpreted" else "__call__"
        real = getattr(getattr(compiled_graph, name), method)

        def counted(self: Any, *args: Any, real: Any = real, kind: str = kind) -> Any:
            count[kind] += 1
            return real(self, *args)

        monkeypatch.setattr(getattr(compiled_graph, name), method, counted)
    return count


# --------------------------------------------------------------------------- models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)
        self.scale = nn.Parameter(torch.rand(D) + 0.5)  # RMS norm by hand

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.down(F.gelu(self.up(y)))


class Language(nn.Module):
    """A small GPT with a tied head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Parameter(torch.randn(T, D))
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.size(1)]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Images(nn.Module):
    """Convolutions with GroupNorm, sums and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
        self.short, self.norm = nn.Conv2d(8, 8, 1, 2), nn.GroupNorm(4, 8)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        y = self.norm(self.conv2(x))
        y += self.short(x)
        return self.head(self.relu(y).mean((2, 3)))


class Raw(nn.Module):
    """Raw parameters and functions of them: 1 + w, a product, a transpose, weight norm, a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.left, self.right = (nn.Parameter(0.3 * torch.randn(*s)) for s in ((D,), (D, 2), (2, 6)))
        self.token, self.normed = nn.Parameter(torch.randn(1, 1, 6)), parametrizations.weight_norm(nn.Linear(6, D))
        self.base = nn.Linear(D, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * (1 + self.scale))
        y = F.linear(y, (self.left @ self.right).t()) + self.base(y)
        y = torch.cat([self.token.expand(len(y), -1, -1), y], 1)
        return self.normed(torch.tanh(y))


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.base = nn.Embedding(V, D).requires_grad_(False), nn.Linear(D, D).requires_grad_(False)
        self.down, self.up, self.head = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False), nn.Linear(D, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(torch.tanh(self.base(x) + 2 * self.up(self.down(x))).mean(1))


class Broken(nn.Module):
    """What torch cannot make one graph of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x * x.detach().abs())


def tokens(b: int = B) -> Tensor:
    return torch.randint(0, V, (b, T))


def rows(b: int = B) -> Tensor:
    return torch.randn(b, T, D)


def images(b: int = B) -> Tensor:
    return torch.randn(b, 3, 8, 8)


MODELS: dict[str, tuple[type[nn.Module], Callable[..., Tensor]]] = {
    "language": (Language, tokens), "images": (Images, images), "raw": (Raw, rows), "lora": (LoRA, tokens),
    "broken": (Broken, rows),
}  # fmt: skip


def whole(backend: str, **options: Any) -> Way:
    return lambda model: torch.compile(model, backend=backend, **options)  # type: ignore[return-value]


def in_place(backend: str, **options: Any) -> Way:
    def way(model: nn.Module) -> nn.Module:
        model.compile(backend=backend, **options)
        return model

    return way


def parts(backend: str) -> Way:
    """Some submodules as compiled modules, others in place."""

    def way(model: nn.Module) -> nn.Module:
        if isinstance(model, Language):
            model.blocks[0] = torch.compile(model.blocks[0], backend=backend)
            model.blocks[1].compile(backend=backend)
        else:
            for name, child in list(model.named_children())[:2]:
                setattr(model, name, torch.compile(child, backend=backend))
        return model

    return way


def losses(model: nn.Module, batch: Any) -> Tensor:
    """One loss a sample, different for every output."""
    out = (model(*batch) if isinstance(batch, tuple) else model(batch)).flatten(1)
    return (out * torch.linspace(0.5, 1.5, out.size(1), dtype=out.dtype)).square().mean(1)


def build(name: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    torch.manual_seed(3)
    kind, batch = MODELS[name]
    return kind(), batch


def assert_exact(
    engine: PerSampleGradients,
    run: nn.Module,
    plain: nn.Module,
    batch: Any,
    loss: Losses = losses,
    digits: float = 1e-5,
) -> None:
    """One step of the compiled model against the plain one, a sample at a time, in float64."""
    exact = truth(plain, batch, loss)
    norms = norms_of(exact)
    factors = (norms.median() / norms).clamp(max=1)
    loss(run, batch).mean().backward()
    torch.testing.assert_close(engine.norms().double(), norms, rtol=digits, atol=0)
    found = {name.replace("_orig_mod.", ""): g.double() for name, g in engine.clipped_sum(factors.float()).items()}
    assert set(found) == set(exact)
    size = sum(float(torch.einsum("b,b...->...", factors, g).square().sum()) for g in exact.values()) ** 0.5
    for name, g in exact.items():
        wanted = torch.einsum("b,b...->...", factors, g)
        assert float((found[name] - wanted).norm()) <= digits * size, name
    assert all(p.grad is None for p in run.parameters())


# --------------------------------------------------------------------------- exact


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("way,backend", [(whole, "aot_eager"), (in_place, "eager"), (parts, "eager")])
def test_exact(name: str, way: Callable[..., Way], backend: str, ran: dict[str, int]) -> None:
    """Three steps: interpreted, compiling, compiled; eval mode and no_grad between; all gone after detach."""
    plain, batch = build(name)
    model = way(backend)(copy.deepcopy(plain))
    engine = PerSampleGradients(model)
    for _ in range(3):
        assert_exact(engine, model, plain, batch())
        with torch.no_grad():
            x = batch()
            torch.testing.assert_close(model.eval()(x), plain(x))
            model.train()
    engine.detach()
    x = batch()
    losses(model, x).mean().backward()
    losses(plain, x).mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    if name != "broken":
        assert ran["compiled"] >= 2 * ran["interpreted"] > 0


@pytest.mark.parametrize("name", ["language", "images"])
def test_exact_by_generated_code(name: str, ran: dict[str, int]) -> None:
    plain, batch = build(name)
    if name == "language":
        plain = Language(1)
    model = torch.compile(copy.deepcopy(plain))
    engine = PerSampleGradients(model)
    for _ in range(3):
        assert_exact(engine, model, plain, batch())
    assert ran == {"interpreted": 1, "compiled": 2}


def test_batches_of_many_sizes(ran: dict[str, int]) -> None:
    """As Poisson sampling gives them: code is compiled for any size, each size is interpreted once."""
    plain, batch = build("language")
    model = in_place("eager")(copy.deepcopy(plain))
    engine = PerSampleGradients(model)
    for size in (4, 3, 6, 1, 4, 3, 6, 5, 1, 6, 5):
        assert_exact(engine, model, plain, batch(size))
    assert ran["compiled"] >= 5
    model(batch(0)).square().sum().backward()
    assert engine.norms().shape == (0,)


def test_the_update_is_that_of_the_plain_model() -> None:
    plain, batch = build("language")
    models = [copy.deepcopy(plain), torch.compile(copy.deepcopy(plain), backend="eager")]
    options: dict[str, Any] = dict(lr=0.1, noise_multiplier=0.0, max_grad_norm=0.3, expected_batch_size=B)
    optimizers = [fastdp.DPSGD(model, **options) for model in models]
    for _ in range(4):
        x = batch()
        for model, optimizer in zip(models, optimizers, strict=True):
            losses(model, x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_several_forwards_before_one_backward() -> None:
    plain, batch = build("language")
    model = torch.compile(copy.deepcopy(plain), backend="eager")
    engine = PerSampleGradients(model)

    def twice(m: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return losses(m, pair[0]) + 2 * losses(m, pair[1])

    for _ in range(3):
        assert_exact(engine, model, plain, (batch(), batch()), twice)


def test_frozen_and_thawed() -> None:
    """What is trained may change between steps."""
    plain, batch = build("language")
    model = torch.compile(copy.deepcopy(plain), backend="eager")
    engine = PerSampleGradients(model)
    for frozen in (False, False, True, True, False):
        for m in (plain, model):
            m.blocks.requires_grad_(not frozen)
        assert_exact(engine, model, plain, batch())


def test_autocast_outside_and_inside() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
            self.scale = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.first(x * (1 + self.scale))
            return self.second(self.norm(torch.tanh(y).float()))

    torch.manual_seed(0)
    plain = Mixed()
    model, eager = torch.compile(copy.deepcopy(plain), backend="eager"), copy.deepcopy(plain)
    engines = [PerSampleGradients(m) for m in (model, eager)]
    for outside in (False, False, True, True, False):
        x = rows()
        for m in (model, eager):
            with torch.autocast("cpu", torch.bfloat16, enabled=outside):
                losses(m, x).float().mean().backward()
        torch.testing.assert_close(engines[0].norms(), engines[1].norms(), rtol=1e-3, atol=0)


def test_dropout_is_random(ran: dict[str, int]) -> None:
    """Other numbers every step, and the gradient of what the forward really did."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, 2))
    model = torch.compile(plain, backend="inductor")
    engine = PerSampleGradients(model)
    x, found = torch.randn(B, D), []
    for _ in range(4):
        out = model(x)
        out.sum(1).mean().backward()
        found.append(out.detach())
        per_sample = engine.materialize()["_orig_mod.2.weight"]  # [B, 2, D]: what came out of the dropout
        torch.testing.assert_close(plain[2](per_sample[:, 0].detach()), out.detach(), rtol=1e-5, atol=1e-6)
    assert ran["compiled"] == 3
    assert all(not torch.equal(a, b) for k, a in enumerate(found) for b in found[:k])


def test_checkpointing_around_and_inside() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Language):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids) + self.positions
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return F.linear(self.norm(x), self.tokens.weight)

    torch.manual_seed(0)
    plain = Checkpointed()
    for way in (in_place("eager"), parts("eager")):
        model = way(copy.deepcopy(plain))
        engine = PerSampleGradients(model)
        for _ in range(3):
            assert_exact(engine, model, plain, tokens())


def test_compiled_within_compiled() -> None:
    plain, batch = build("language")
    model = copy.deepcopy(plain)
    model.blocks[0].compile(backend="eager")
    model = torch.compile(model, backend="eager")
    engine = PerSampleGradients(model)
    for _ in range(3):
        assert_exact(engine, model, plain, batch())


def test_samples_in_the_second_dimension_and_a_mask() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # [T, B, D], [T, B]
            y = self.a(x).masked_fill(~mask.unsqueeze(-1), 0.0)
            return self.b(torch.tanh(y)).sum(0)

    torch.manual_seed(0)
    plain = Masked()
    model = torch.compile(copy.deepcopy(plain), backend="eager")
    engine = PerSampleGradients(model, batch_first=False)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return m(*(t.transpose(0, 1) for t in batch)).square().sum(1)

    for _ in range(3):
        assert_exact(engine, model, plain, (rows(), torch.rand(B, T) > 0.3), loss)


# --------------------------------------------------------------------------- refused


def test_compiled_afterwards_is_refused() -> None:
    plain, batch = build("lora")
    engine = PerSampleGradients(plain)
    later = torch.compile(plain, backend="eager")
    with pytest.raises(StepError, match="compiled after"):
        later(batch())
    with torch.no_grad():
        later(batch())
    engine.detach()
    later(batch()).sum().backward()
    plain.zero_grad()
    engine = PerSampleGradients(later)  # made anew: taken
    before = copy.deepcopy(plain)
    for _ in range(2):
        assert_exact(engine, later, before, batch())


def test_code_compiled_before_that_runs_past_the_engine_makes_no_step() -> None:
    model = nn.Linear(D, 2)
    alias = torch.compile(model, backend="eager")
    alias(torch.randn(B, D)).sum().backward()
    model.zero_grad()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=B)
    before = model.weight.detach().clone()
    with pytest.raises(FastDPError):
        alias(torch.randn(B, D)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_mixed_samples_are_refused_every_time() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y - y.mean(0, keepdim=True))

    model = torch.compile(Mixing(), backend="eager")
    PerSampleGradients(model)
    for _ in range(3):
        with pytest.raises(FastDPError, match="mean"):
            model(torch.randn(B, D)).square().sum().backward()


def test_rows_that_depend_on_values_are_never_taken_from_before(ran: dict[str, int]) -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)
            self.order: Tensor
            self.register_buffer("order", torch.arange(B))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x))[self.order])

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
    model = Ordered()
    model.first.load_state_dict(plain[0].state_dict()), model.second.load_state_dict(plain[2].state_dict())
    compiled = torch.compile(model, backend="eager")
    engine = PerSampleGradients(compiled)
    weight = torch.tensor([1.0, 2.0, 3.0])
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2]):
        model.order.copy_(torch.tensor(order))
        x = torch.randn(B, D)
        (compiled(x).square().sum(1) * weight[model.order]).mean().backward()
        exact = norms_of(truth(plain, x, lambda m, s: m(s).square().sum(1))) * weight
        torch.testing.assert_close(engine.norms().double(), exact, rtol=1e-5, atol=0)
    assert ran["compiled"] == 0


def test_backward_twice_is_refused() -> None:
    plain, batch = build("lora")
    model = torch.compile(plain, backend="eager")
    PerSampleGradients(model)
    for _ in range(3):
        loss = losses(model, batch()).mean()
        loss.backward(retain_graph=True)
        with pytest.raises((StepError, RuntimeError), match=r"twice|retain_graph"):
            loss.backward()


def test_a_write_into_what_was_saved_is_an_error() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)), backend="eager")
    PerSampleGradients(model)
    for _ in range(3):
        x = torch.randn(B, D)
        out = model(x)
        with torch.no_grad():
            x.mul_(0.01)
        with pytest.raises(RuntimeError, match="inplace"):
            out.sum().backward()


def test_a_second_optimizer_and_a_copy() -> None:
    plain, batch = build("lora")
    model = torch.compile(plain, backend="eager")
    engine = PerSampleGradients(model)
    with pytest.raises(FastDPError, match="already has"):
        PerSampleGradients(model)
    free = copy.deepcopy(model)
    free(batch()).sum().backward()
    assert free.head.weight.grad is not None
    for _ in range(2):
        assert_exact(engine, model, copy.deepcopy(plain), batch())


def test_nothing_is_held_after_backward() -> None:
    import gc
    import weakref

    plain, batch = build("language")
    model = torch.compile(plain, backend="eager")
    engine = PerSampleGradients(model, on_backward=lambda gradients: None)
    for _ in range(2):
        losses(model, batch()).mean().backward()
    loss = losses(model, batch()).mean()
    runs = [o for o in gc.get_objects() if type(o).__name__ == "Run"]
    held = [weakref.ref(t) for run in runs for t in run.keeper.saved_tensors]
    del runs
    assert held
    loss.backward()
    del loss
    assert not [ref for ref in held if ref() is not None]
    engine.detach()
