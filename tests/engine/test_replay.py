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

from ..replayed import (
    B,
    Block,
    D,
    Model,
    Penalised,
    T,
    V,
    assert_two_backwards,
    backward,
    close,
    models,
    penalised,
    run,
)


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
    _, _, plan = run(model, ids, 10**9)
    assert "two backwards" not in plan
    _, _, half = run(model, ids, 40_000)
    rows = [line for line in half.splitlines() if "two backwards" in line]
    assert 0 < len(rows) < 18 and all("blocks.2" not in row for row in rows), half  # the last block fits
    engine = PerSampleGradients(model, memory_budget=1)
    backward(model, ids)
    assert engine.planner.held < 10_000


def test_what_is_used_elsewhere_too_is_kept() -> None:
    class Twice(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for _ in range(2):
                x = checkpoint(self.blocks[0], x, 0.5, use_reentrant=False)
            x = checkpoint(self.blocks[1], x, 0.5, use_reentrant=False)
            return self.head(x) + F.linear(self.embedding(ids), self.blocks[1].up.weight)[..., :V]

    torch.manual_seed(0)
    kept = ("blocks.0", "blocks.1.up.weight")
    assert_two_backwards(Twice(2), torch.randint(0, V, (B, T)), again=("blocks.1.down",), kept=kept)


def test_a_nan_sample_stays_alone() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2)]), torch.randn(B, T, D)
    without = x.clone()
    x[2, 3] = float("nan")

    def sums(data: Tensor) -> dict[str, Tensor]:
        engine = PerSampleGradients(model, memory_budget=1, loss_reduction="sum")
        model(checkpoint(model, data, use_reentrant=False)).square().sum().backward()
        norms = engine.norms()
        c = torch.where(norms.isfinite(), 0.1 / norms, torch.zeros_like(norms))
        c[2] = 0
        found = engine.clipped_sum(c)
        engine.detach()
        return found

    clean, spoiled = sums(without), sums(x)
    assert all(torch.isfinite(s).all() for s in spoiled.values())
    close(clean, spoiled)


@pytest.mark.parametrize("budget", [0, -1, True])
def test_budgets_are_positive(budget: int) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        PerSampleGradients(nn.Linear(2, 2), memory_budget=budget)


# --------------------------------------------------------------------------- a loss on tensors within a block


def kept_as_it_is(block: nn.Module, x: Tensor) -> Tensor:
    block.kept = h = block.up(block.norm(x))
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


@pytest.mark.parametrize("within", [kept_as_it_is, view_of_what_is_written_to, side_branch])
def test_a_block_from_within_which_the_loss_takes_tensors_is_kept(within: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, ids = Penalised(within), torch.randint(0, V, (B, T))
    norms, sums, _ = penalised(model, ids, None)
    again_norms, again, plan = penalised(model, ids, 1)
    assert "two backwards" not in plan
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


def test_a_loss_on_what_no_torch_function_made_within_a_block_is_refused() -> None:
    def of_a_custom_function(block: nn.Module, x: Tensor) -> Tensor:
        block.kept = Halved.apply(block.up(block.norm(x)))
        return block.down(F.gelu(block.kept))

    torch.manual_seed(0)
    model, ids = Penalised(of_a_custom_function), torch.randint(0, V, (B, T))
    with pytest.raises(StepError, match=r"'blocks.1' was run backward a second time"):
        penalised(model, ids, 1)


def test_weights_that_a_block_keeps_are_no_data() -> None:
    class Cached(Block):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            self.cache = [self.up.weight * 2.0]  # in a list: a module would take it for a parameter of its own
            return x + self.down(F.gelu(F.linear(self.norm(x), self.cache[0]))) * scale

    torch.manual_seed(0)
    assert_two_backwards(Model(2, Cached).eval(), torch.randint(0, V, (B, T)), again=("blocks.1.down",))


# --------------------------------------------------------------------------- blocks that do not repeat themselves


class Whim(Block):
    """Runs another way the third time: after the forward and checkpointing's it is the second backward's."""

    kind, runs = "", 0

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(D, D)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        self.runs += 1
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
@pytest.mark.parametrize("kind", ["larger", "nan", "other parameters"])
def test_a_block_that_does_not_repeat_itself_is_refused(kind: str, autocast: bool) -> None:
    model, ids = whims(kind)
    with (
        pytest.raises(StepError, match=r"'blocks.1' was run backward a second time.*memory_budget"),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
    ):
        run(model, ids, 1)


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
            h = self.norm(x) * (1 + 1e-7 * (self.runs % 2))
            return x + F.scaled_dot_product_attention(h, self.key(h), self.down(self.up(h)))

    torch.manual_seed(0)
    assert_two_backwards(Model(2, Attention).eval(), torch.randint(0, V, (B, T)), again=("blocks.1",))


@pytest.mark.parametrize("style", ["flat", "layerwise"])
def test_of_a_refused_backward_nothing_is_released(style: str) -> None:
    """Neither in the next step nor after several refusals: groups whose sums were taken before are dropped with it."""
    model, ids = whims("larger")
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = fastdp.DPSGD(
        model, lr=1.0, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=1, memory_budget=1, style=style
    )
    for _ in range(2):
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


@pytest.mark.parametrize("run_number", [1, 2, 3])
def test_training_goes_on_after_an_interrupt(run_number: int) -> None:
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
        model, lr=1.0, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=B, memory_budget=1
    )
    plain = copy.deepcopy(model)
    plain.checkpointed = False
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
    engine.detach()
    assert not torch.overrides._get_current_function_mode_stack()
