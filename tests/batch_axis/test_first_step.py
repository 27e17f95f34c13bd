"""What the first step costs: whether a call couples samples is asked with few numbers, whatever the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastdp
from fastdp.errors import SampleMixingError

WORDS, B, T = 20_011, 8, 16
Loss = Callable[[Tensor, Tensor], Tensor]


class Work(TorchDispatchMode):
    """Counts the numbers that calls make."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        seen = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
        self.numbers += (
            0 if seen else sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_meta)
        )
        return out


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def _each(terms: Tensor) -> Tensor:
    return terms.view(B, -1).mean(1).mean()


LOSSES: dict[str, Loss] = {
    "sliced, transposed and cast": lambda out, ids: _each(
        F.cross_entropy(out[:, :-1].transpose(1, 2).float(), ids[:, 1:], reduction="none")
    ),
    "flattened rows": lambda out, ids: F.cross_entropy(out[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()),
    "as transformers had it": lambda out, ids: F.cross_entropy(
        out[..., :-1, :].contiguous().view(-1, WORDS), ids[..., 1:].contiguous().view(-1)
    ),
    "as transformers has it": lambda out, ids: F.cross_entropy(
        out.float().view(-1, WORDS), F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1), ignore_index=-100
    ),
    "log_softmax and gather": lambda out, ids: _each(
        -out.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    ),
    "the largest ones": lambda out, ids: _each(out.topk(5, -1).values.sum(-1)),
    "padded": lambda out, ids: _each(F.pad(out, (0, 3)).logsumexp(-1)),
    "joined": lambda out, ids: _each(torch.cat([out, out * 2], -1).logsumexp(-1)),
    "picked by constants": lambda out, ids: _each(out[:, torch.arange(T - 1)].logsumexp(-1)),
    "a distance": lambda out, ids: _each(
        F.kl_div(out.log_softmax(-1), torch.full_like(out, 1e-4), reduction="none").sum(-1)
    ),
    "einsum": lambda out, ids: _each(torch.einsum("btv->bt", out)),
    "norms": lambda out, ids: _each(out.norm(dim=-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_the_first_step_costs_little_more_than_others(name: str) -> None:
    model = Words()
    fastdp.PerSampleGradients(model)
    work = []
    for _ in range(3):
        ids = torch.randint(0, WORDS, (B, T))
        with Work() as counted:
            LOSSES[name](model(ids), ids).backward()
        work.append(counted.numbers)
    assert work[0] < 2 * work[2], work


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "the batch is rolled": lambda h: torch.cat([h, h.roll(1, 0)], -1),
    "samples are sorted": lambda h: h.sort(0).values,
    "the largest of the batch": lambda h: h - h.amax(0, keepdim=True),
    "norms over the batch": lambda h: h / h.norm(dim=0, keepdim=True),
    "a mirror": lambda h: F.pad(h.movedim(0, -1), (1, 1), mode="circular")[..., 2:].movedim(-1, 0),
    "by place": lambda h: torch.einsum("btv,b->btv", h, torch.arange(float(len(h)))),
    "einsum over samples": lambda h: torch.einsum("btv,ctv->btv", h, h),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("long", [7, 9_001])
def test_what_couples_samples_is_refused_at_any_length(name: str, long: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, long)

        def forward(self, x: Tensor) -> Tensor:
            return COUPLED[name](self.layer(x))

    model = Model()
    fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError):
        model(torch.randn(B, 2, 3)).square().flatten(1).mean(1).mean().backward()


@torch.library.custom_op("fastdp_tests::next_if_long", mutates_args=())
def next_if_long(x: Tensor) -> Tensor:
    return x.roll(1, 0) if x.size(-1) > 1000 else x.clone()


def test_a_users_operator_is_asked_at_its_own_size() -> None:
    """Whatever it does may depend on sizes."""
    torch.library.register_autograd("fastdp_tests::next_if_long", lambda ctx, g: g.roll(-1, 0))
    torch.library.register_fake("fastdp_tests::next_if_long", lambda x: torch.empty_like(x))
    model = nn.Linear(3, 9_001)
    fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError):
        next_if_long(model(torch.randn(B, 2, 3))).square().flatten(1).mean(1).mean().backward()
