"""Two backwards for checkpointed blocks under a memory budget: the same norms and sums, less held, never more norm."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp import PerSampleGradients
from fastdp.errors import StepError

B, T, D, V = 5, 7, 16, 20


class Block(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))) * scale


class Model(nn.Module):
    def __init__(self, layers: int = 3, block: type[nn.Module] = Block, checkpointed: bool = True) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(V, D), nn.ModuleList(block() for _ in range(layers))
        self.head, self.checkpointed = nn.Linear(D, V), checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, 0.5, use_reentrant=False) if self.checkpointed else block(x, 0.5)
        return self.head(x)


def backward(model: nn.Module, ids: Tensor) -> None:
    torch.manual_seed(3)  # of dropout
    losses = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape).mean(1)
    losses.mean().backward()


def run(model: nn.Module, ids: Tensor, budget: int | None) -> tuple[Tensor, dict[str, Tensor], str]:
    engine = PerSampleGradients(model, memory_budget=budget)
    try:
        backward(model, ids)
        norms = engine.norms()
        return norms, engine.clipped_sum((0.1 / norms).clamp(max=1)), engine.explain()
    finally:
        engine.detach()


def models(**options) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Model(**options)
    plain = copy.deepcopy(model)
    plain.checkpointed = False
    return model, plain, torch.randint(0, V, (B, T))


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_same_norms_and_sums(autocast: bool) -> None:
    model, plain, ids = models()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        norms, sums, plan = run(plain, ids, None)
        again_norms, again, replayed = run(model, ids, 1)
    assert "two backwards" in replayed and "two backwards" not in plan
    torch.testing.assert_close(again_norms, norms)
    close(again, sums)


def test_only_beyond_the_budget() -> None:
    model, _, ids = models()
    _, _, plan = run(model, ids, None)
    assert "two backwards" not in plan
    _, _, plan = run(model, ids, 10**9)
    assert "two backwards" not in plan
    _, _, half = run(model, ids, 40_000)
    rows = [line for line in half.splitlines() if "two backwards" in line]
    assert 0 < len(rows) < 18 and all("blocks.2" not in row for row in rows), half  # the last block fits


def test_holds_less() -> None:
    model, _, ids = models(layers=6)

    def held(budget: int | None) -> int:
        engine = PerSampleGradients(model, memory_budget=budget)
        backward(model, ids)
        engine.detach()
        return engine.planner.held

    assert held(1) < held(None) / 4


def test_a_block_called_twice_is_kept() -> None:
    class Twice(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for _ in range(2):
                x = checkpoint(self.blocks[0], x, 0.5, use_reentrant=False)
            return self.head(checkpoint(self.blocks[1], x, 0.5, use_reentrant=False))

    torch.manual_seed(0)
    model, ids = Twice(2), torch.randint(0, V, (B, T))
    norms, sums, _ = run(model, ids, None)
    again_norms, again, plan = run(model, ids, 1)
    assert not any("two backwards" in line for line in plan.splitlines() if "blocks.0" in line)
    assert any("two backwards" in line for line in plan.splitlines() if "blocks.1" in line)
    torch.testing.assert_close(again_norms, norms)
    close(again, sums)


def test_a_parameter_used_elsewhere_too_is_kept() -> None:
    class Shared(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + F.linear(self.embedding(ids), self.blocks[0].up.weight)[..., :V]

    torch.manual_seed(0)
    model, ids = Shared(2), torch.randint(0, V, (B, T))
    norms, sums, _ = run(model, ids, None)
    again_norms, again, plan = run(model, ids, 1)
    assert not any("two backwards" in line for line in plan.splitlines() if "blocks.0.up.weight" in line)
    torch.testing.assert_close(again_norms, norms)
    close(again, sums)


class Whim(Block):
    """Runs another way the third time: after the forward and checkpointing's it is the second backward's."""

    kind, runs = "", 0

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(D, D)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        self.runs += 1
        if self.runs > 2 and self.kind == "other tensors":
            x.flatten(0, 1).flatten()
        self.kept = self.norm(x).tanh()
        if self.runs < 3:
            return super().forward(x, scale) + 0 * self.spare(x)
        if self.kind != "other parameters":
            x = x + 0 * self.spare(x)
        return super().forward(x, scale * {"larger": 2.0, "nan": float("nan"), "rounding": 1.0002}.get(self.kind, 1.0))


def whims(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Model(2, type(kind, (Whim,), {"kind": kind}))
    return model, torch.randint(0, V, (1, T))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["larger", "nan", "other tensors", "other parameters"])
def test_a_block_that_does_not_repeat_itself_is_refused(kind: str, autocast: bool) -> None:
    model, ids = whims(kind)
    if kind == "other tensors":  # whose gradient stands for the first ones'
        model = Penalised(lambda block, x: x)
        model.blocks = nn.ModuleList(type(kind, (Whim,), {"kind": kind})() for _ in range(2))
    with (
        pytest.raises(StepError, match=r"'blocks.1' was run backward a second time.*memory_budget"),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
    ):
        (penalised if kind == "other tensors" else run)(model, ids, 1)


def test_rounding_does_not_break_the_bound() -> None:
    """Norms that grew by less than is refused: the sum's norm is at most that of the factors and the first norms."""
    model, ids = whims("rounding")
    engine = PerSampleGradients(model, memory_budget=1)
    backward(model, ids)
    norms = engine.norms()
    sums = engine.clipped_sum((0.1 / norms).clamp(max=1))
    assert float(torch.stack([s.double().square().sum() for s in sums.values()]).sum().sqrt()) <= 0.1 * (1 + 1e-6)


def test_a_gradient_of_rounding_alone_may_differ() -> None:
    """A key's bias changes no attention: its gradient is zero but for rounding, which differs from run to run."""

    class Attention(Block):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.runs = nn.Linear(D, D), 0

        def forward(self, x: Tensor, scale: float) -> Tensor:
            self.runs += 1
            h = self.norm(x) * (1 + 1e-7 if self.runs > 2 else 1)
            return x + F.scaled_dot_product_attention(h, self.key(h), self.down(self.up(h)))

    torch.manual_seed(0)
    model, ids = Model(2, Attention).eval(), torch.randint(0, V, (B, T))
    norms, sums, _ = run(model, ids, None)
    for block in model.blocks:
        block.runs = 0
    again_norms, again, plan = run(model, ids, 1)
    assert "two backwards" in plan
    torch.testing.assert_close(again_norms, norms)
    close(again, sums)


@pytest.mark.parametrize("style", ["flat", "layerwise"])
def test_of_a_refused_backward_nothing_is_released(style: str) -> None:
    """Neither in the next step nor after several refusals: groups whose sums were taken before are dropped with it."""
    model, ids = whims("larger")
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = fastdp.DPSGD(
        model, lr=1.0, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=1, memory_budget=1, style=style
    )
    for _ in range(3):
        for block in model.blocks:
            block.runs = 0
        with pytest.raises(StepError, match="a second time"):
            backward(model, ids)
        with pytest.raises(StepError):
            optimizer.step()
    for block in model.blocks:
        block.kind = ""
    backward(model, ids)
    optimizer.step()
    moved = torch.stack([(p - q).square().sum() for p, q in zip(model.parameters(), before, strict=True)]).sum().sqrt()
    assert float(moved) <= 0.1 * (1 + 1e-5)


@pytest.mark.parametrize(
    "made", [lambda w: w * 2.0, lambda w: w.contiguous(), lambda w: w.to(w.dtype)], ids=["scaled", "itself", "no cast"]
)
def test_weights_that_a_block_keeps_are_no_data(made: Callable[[Tensor], Tensor]) -> None:
    class Cached(Block):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            self.cache = [made(self.up.weight)]  # in a list: a module would take it for a parameter of its own
            return x + self.down(F.gelu(F.linear(self.norm(x), self.cache[0]))) * scale

    torch.manual_seed(0)
    model, ids = Model(2, Cached).eval(), torch.randint(0, V, (B, T))
    norms, sums, _ = run(model, ids, None)
    again_norms, again, _ = run(model, ids, 1)
    torch.testing.assert_close(again_norms, norms)
    close(again, sums)


class Halved(torch.autograd.Function):
    """Of no torch function: its result is not seen to be made in the block."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad / 2


def kept_as_it_is(block: nn.Module, x: Tensor) -> Tensor:
    block.kept = h = block.up(block.norm(x))
    return block.down(F.gelu(h))


def kept_and_written_to(block: nn.Module, x: Tensor) -> Tensor:
    block.kept = h = block.up(block.norm(x))
    h.mul_(1.5)
    return block.down(F.gelu(h))


def kept_view(block: nn.Module, x: Tensor) -> Tensor:
    h = block.up(block.norm(x))
    block.kept = h.unflatten(-1, (3, D))[..., 1:, :]
    return block.down(F.gelu(h))


def view_of_what_is_written_to(block: nn.Module, x: Tensor) -> Tensor:
    h = block.up(block.norm(x))
    block.kept = h[..., :D]
    h.mul_(1.5)
    return block.down(F.gelu(h))


def side_branch(block: nn.Module, x: Tensor) -> Tensor:
    h = block.norm(x)
    block.kept = block.up(h).tanh()  # of which the output is not made
    return block.down(F.pad(h, (0, 2 * D)))


def output_of_a_view(block: nn.Module, x: Tensor) -> Tensor:
    block.kept = block.up(block.norm(x))
    return block.down(F.gelu(block.kept)).transpose(0, 1)[:].transpose(0, 1)


def scalar_of_each(block: nn.Module, x: Tensor) -> Tensor:
    h = block.up(block.norm(x))
    block.kept = h.square().mean((1, 2))  # as auxiliary losses of experts are
    return block.down(F.gelu(h))


def input_as_it_is(block: nn.Module, x: Tensor) -> Tensor:
    same = x.to(x.dtype)  # the input itself, a leaf in the second run
    block.kept = h = block.up(block.norm(same))
    return block.down(F.gelu(h.to(h.dtype)))


WITHIN = (
    kept_as_it_is, kept_and_written_to, kept_view, side_branch, output_of_a_view, scalar_of_each, input_as_it_is,
    view_of_what_is_written_to,
)  # fmt: skip


class Penalised(Model):
    """Blocks that keep a tensor from within; `losses` add a penalty on it."""

    def __init__(self, within: Callable[[nn.Module, Tensor], Tensor]) -> None:
        class Within(Block):
            def forward(self, x: Tensor, scale: float) -> Tensor:
                return x + self.dropout(within(self, x)) * scale

        super().__init__(2, Within)

    def losses(self, ids: Tensor) -> Tensor:
        torch.manual_seed(3)  # of dropout
        first = F.cross_entropy(self(ids).flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape).mean(1)
        return first + 3 * sum(block.kept.square().reshape(len(ids), -1).mean(1) for block in self.blocks)


def penalised(model: Penalised, ids: Tensor, budget: int | None) -> tuple[Tensor, dict[str, Tensor], str]:
    engine = PerSampleGradients(model, memory_budget=budget)
    try:
        model.losses(ids).mean().backward()
        norms = engine.norms()
        return norms, engine.clipped_sum((0.1 / norms).clamp(max=1)), engine.explain()
    finally:
        engine.detach()


@pytest.mark.parametrize("within", WITHIN)
def test_a_loss_on_tensors_within_a_block_is_exact(within: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, ids = Penalised(within), torch.randint(0, V, (B, T))
    norms, sums, _ = penalised(model, ids, None)
    again_norms, again, plan = penalised(model, ids, 1)
    assert any("two backwards" in line for line in plan.splitlines() if "blocks.0.up.weight" in line)
    torch.testing.assert_close(again_norms, norms)
    close(again, sums)
    model.eval()
    for budget in (None, 1):
        assert fastdp.verify(model, lambda m, b: m.losses(b).mean(), ids, memory_budget=budget).ok


def test_a_loss_on_a_hooked_module_within_a_block_is_exact() -> None:
    model, _, ids = models(layers=2)
    seen: list[Tensor] = []
    for block in model.blocks:
        block.up.register_forward_hook(lambda module, args, out: seen.append(out))

    def both(m: nn.Module, b: Tensor) -> Tensor:
        seen.clear()
        logits = m(b)
        first = F.cross_entropy(logits.flatten(0, 1), b.flatten(), reduction="none").view(b.shape).mean(1)
        return (first + 3 * sum(h.square().mean((1, 2)) for h in seen[:2])).mean()

    assert fastdp.verify(model.eval(), both, ids, memory_budget=1).ok


def test_a_loss_on_what_no_torch_function_made_within_a_block_is_refused() -> None:
    def of_a_custom_function(block: nn.Module, x: Tensor) -> Tensor:
        block.kept = Halved.apply(block.up(block.norm(x)))
        return block.down(F.gelu(block.kept))

    torch.manual_seed(0)
    model, ids = Penalised(of_a_custom_function), torch.randint(0, V, (B, T))
    with pytest.raises(StepError, match=r"'blocks.1' was run backward a second time"):
        penalised(model, ids, 1)


def test_a_nan_sample_stays_alone() -> None:
    class Poisoned(Model):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, 0.5, use_reentrant=False)
            return self.head(x)

    torch.manual_seed(0)
    model, x = Poisoned(2).eval(), torch.randn(B, T, D)
    without = x.clone()
    x[2, 3] = float("nan")

    def sums(data: Tensor) -> dict[str, Tensor]:
        engine = PerSampleGradients(model, memory_budget=1, loss_reduction="sum")
        model(data).square().sum().backward()
        norms = engine.norms()
        c = torch.where(norms.isfinite(), 0.1 / norms, torch.zeros_like(norms))
        c[2] = 0
        found = engine.clipped_sum(c)
        engine.detach()
        return found

    clean, spoiled = sums(without), sums(x)
    assert all(torch.isfinite(s).all() for s in spoiled.values())
    close(clean, spoiled)


def test_a_step_of_the_optimizer() -> None:
    model, plain, ids = models()
    for m, budget in ((model, 1), (plain, None)):
        optimizer = fastdp.DPSGD(
            m, lr=1.0, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=B, memory_budget=budget
        )
        backward(m, ids)
        optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("budget", [0, -1, True])
def test_budgets_are_positive(budget: int) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        PerSampleGradients(nn.Linear(2, 2), memory_budget=budget)


@pytest.mark.parametrize("budget", [None, 1])
@pytest.mark.parametrize("run_number", [1, 2, 3])
def test_training_goes_on_after_an_interrupt(run_number: int, budget: int | None) -> None:
    """Ctrl-C in the forward, in checkpointing's second one, or in that of the second backward."""

    class Stopped(Block):
        runs = 0

        def forward(self, x: Tensor, scale: float) -> Tensor:
            self.runs += 1
            if self.runs == run_number:
                raise KeyboardInterrupt
            return super().forward(x, scale)

    torch.manual_seed(0)
    model, ids = Model(2, Stopped).eval(), torch.randint(0, V, (B, T))
    optimizer = fastdp.DPSGD(
        model, lr=1.0, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=B, memory_budget=budget
    )
    plain = copy.deepcopy(model)
    plain.checkpointed = False
    if run_number < 3 or budget:
        with pytest.raises(KeyboardInterrupt):
            backward(model, ids)
    for block in (*model.blocks, *plain.blocks):
        block.runs = 3
    optimizer.zero_grad()
    backward(model, ids)
    engine = PerSampleGradients(plain)
    backward(plain, ids)
    torch.testing.assert_close(optimizer.norms, engine.norms())
    optimizer.step()
    assert not torch.overrides._get_current_function_mode_stack()
