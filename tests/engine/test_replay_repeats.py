"""Two backwards of blocks that do not repeat themselves, or are stopped: refused, and nothing is released."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp import PerSampleGradients
from fastdp.errors import StepError

from ..replayed import B, Block, D, Model, Penalised, T, V, assert_two_backwards, backward, penalised, run


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
