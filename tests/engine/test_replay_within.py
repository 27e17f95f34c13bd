"""Two backwards where the loss, or somebody else, holds tensors from within a checkpointed block."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import StepError

from ..replayed import B, Block, D, Model, Penalised, T, V, assert_two_backwards, close, models, penalised
from ..truth import against, truth


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


@pytest.mark.parametrize("within", WITHIN)
def test_a_loss_on_tensors_within_a_block_is_exact(within: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, ids = Penalised(within).eval(), torch.randint(0, V, (B, T))
    exact = truth(model, ids, Penalised.losses)
    for budget in (None, 1):
        assert against(exact, model, ids, Penalised.losses, memory_budget=budget).worst < 1e-5
    model.train()
    norms, sums, _ = penalised(model, ids, None)
    again_norms, again, plan = penalised(model, ids, 1)
    assert any("two backwards" in line for line in plan.splitlines() if "blocks.0.up.weight" in line)
    torch.testing.assert_close(again_norms, norms)
    close(again, sums)


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


class Halved(torch.autograd.Function):
    """Of no torch function: its result is not seen to be made in the block."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad / 2


@pytest.mark.parametrize(
    "made", [lambda w: w * 2.0, lambda w: w.contiguous(), lambda w: w.to(w.dtype)], ids=["scaled", "itself", "no cast"]
)
def test_weights_that_a_block_keeps_are_no_data(made: Callable[[Tensor], Tensor]) -> None:
    class Cached(Block):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            self.cache = [made(self.up.weight)]  # in a list: a module would take it for a parameter of its own
            return x + self.down(F.gelu(F.linear(self.norm(x), self.cache[0]))) * scale

    torch.manual_seed(0)
    assert_two_backwards(Model(2, Cached).eval(), torch.randint(0, V, (B, T)))
