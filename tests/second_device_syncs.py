"""Where the host waits for a device: a private step must not ask a device for numbers that an ordinary one does not."""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastdp
from fastdp.batch_axis.deferred_checks import doubt
from fastdp.errors import SampleMixingError

aten = torch.ops.aten
_WAITING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.is_nonzero.default,
    aten.masked_select.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
    aten.bincount.default,
}  # fmt: skip
_BY_INDEX = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")

# What is asked for beyond an ordinary step, where whose the rows of a batch are stands in its numbers (indices, masks,
# offsets), or where constants of the batch's size may be numbers by place. Everything else asks for nothing.
CEILINGS = {
    "routed_rows": 15, "masked_tokens": 9, "bag_sum": 4, "bag_mean": 4, "bag_weights": 4,
    "bag_padding": 4, "bag_offsets": 5, "bag_max": 42, "mask_token_setitem": 16, "written_into_zeros": 2,
    "mha_bias_kv": 34, "bmm_expanded": 24, "last_token": 5,
    "transformers: padded texts": 0, "transformers: texts of one length": 0, "peft: LoRA": 0,
    "transformers: labels=": 0, "cross_entropy with a mean": 0,
}  # fmt: skip


class Waits(TorchDispatchMode):
    """Counts the calls within it that make the host wait for a device, by what is asked and where."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.found = kind, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("device")
        moves = to is not None and torch.device(to).type == self.kind
        if moves or any(isinstance(t, Tensor) and t.device.type == self.kind for t in tree_leaves((args, kwargs))):
            if self._waits(func, args, kwargs):
                frames = [f for f in traceback.extract_stack() if "/fastdp/" in f.filename]
                where = (
                    f"{frames[-1].filename.rpartition('/fastdp/')[2]}:{frames[-1].lineno}" if frames else "the model"
                )
                if not where.startswith("ops/noise_reference.py"):  # a card has kernels for that
                    self.found[f"{func._schema.name} in {where}"] += 1
        return func(*args, **kwargs)

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = func._schema.name
        if name == "aten::repeat_interleave":
            return kwargs.get("output_size") is None and isinstance(args[-1], Tensor)
        if name in _BY_INDEX:  # a mask becomes an index first
            return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        if name == "aten::_to_copy":
            to = kwargs.get("device")
            return to is not None and torch.device(to).type != args[0].device.type and not kwargs.get("non_blocking")
        if name == "aten::copy_" and (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
            return False  # (a card's, from or into pinned memory, is asked for by an event)
        if name == "aten::copy_":
            return args[0].device.type != args[1].device.type
        return func in _WAITING


def waits_of(model: Any, step: Callable[[Any], None], kind: str) -> Counter[str]:
    """Of the third step: what is found out once is known by then."""
    step(model)
    step(model)
    with Waits(kind) as waits:
        step(model)
    return waits.found


def check_waits(
    name: str, model: Any, batch: Any, losses: Callable[[Any, Any], Tensor], device: str, ceiling: int | None = None
) -> None:
    """A private step of AdamW asks for no more than its ceiling beyond what an ordinary one does."""
    kind = torch.device(device).type
    plain, private = copy.deepcopy(model), model
    ordinary = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    noisy = fastdp.DPAdamW(private, lr=1e-3, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)

    def step(which: Any) -> None:
        optimizer = ordinary if which is plain else noisy
        losses(which, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    allowed = sum(waits_of(plain, step, kind).values()) + (CEILINGS.get(name, 0) if ceiling is None else ceiling)
    found = waits_of(private, step, kind)
    assert sum(found.values()) <= allowed, f"the host waits {sum(found.values())} times, not {allowed}: {dict(found)}"


def check_seen(device: str) -> None:
    """That the count counts."""
    x, kind = torch.arange(6.0).to(device), torch.device(device).type
    seen: dict[str, Callable[[], Any]] = {
        "item": lambda: x.sum().item(), "bool": lambda: bool((x > 2).any()), "cpu": x.cpu, "tolist": x.tolist,
        "to": lambda: torch.ones(3).to(device),
        "nonzero": x.nonzero, "mask": lambda: x[x > 2], "equal": lambda: torch.equal(x, x), "index": lambda: x[2:4][0],
        "sum": lambda: x.sum(),
    }  # fmt: skip
    for name, ask in seen.items():
        with Waits(kind) as waits:
            ask()
        assert (sum(waits.found.values()) > 0) == (name not in ("index", "sum")), name


class Mixing(torch.autograd.Function):
    """The identity; only the device knows that its backward mixed samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        doubt((grad + 1).isfinite().all(), "it was asked")
        return grad


def check_late(device: str) -> None:
    """Such a step moves nothing, and raises once the device's answer has come: some steps later, or for epsilon."""
    events = torch.get_device_module(device).events
    for asks_for_epsilon in (False, True):
        model = torch.nn.Linear(3, 1).to(device)
        optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=4)
        before, x = [p.detach().clone() for p in model.parameters()], torch.randn(4, 3).to(device)
        events.clear()
        Mixing.apply(model(x)).square().sum(1).mean().backward()
        optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert events == [torch.device(device).index], "an event of another device says nothing of this one"
        with pytest.raises(SampleMixingError, match=r"it was asked|behind the step"):
            if asks_for_epsilon:
                optimizer.epsilon(1e-5, sample_rate=0.1)
            for _ in range(0 if asks_for_epsilon else 4):
                model(x).square().sum(1).mean().backward()
                optimizer.step()
        assert asks_for_epsilon or not torch.equal(model.weight, before[0]), "the host waited at once"
        optimizer.detach()


class RowsByPlace(torch.nn.Module):
    """Each sample begins with a row of a parameter that its place in the batch chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = torch.nn.Parameter(torch.randn(8, 3)), torch.nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3, 3)
        out[:, 0] = self.rows.tanh()[: len(x)]
        out[:, 1:] = x
        return self.layer(out).tanh()


def check_by_place(device: str) -> None:
    """What only the device can tell of a parameter's rows refuses the step, behind it."""
    model = RowsByPlace().to(device)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=4)
    before = model.rows.detach().clone()
    model(torch.randn(4, 2, 3).to(device)).square().sum((1, 2)).mean().backward()
    optimizer.step()
    assert torch.equal(model.rows, before)
    with pytest.raises(SampleMixingError, match=r"a parameter meets .* by their place in the batch"):
        optimizer.epsilon(1e-5, sample_rate=0.1)
    optimizer.detach()


# --------------------------------------------------------------------------- models of libraries


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=16, use_cache=False, pad_token_id=0))


def _lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(_llama(), LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))


def library_cases() -> dict[str, Callable[[], tuple[Any, dict[str, Tensor], Any]]]:
    """{name: make}; make() gives (model, batch, losses)."""

    def losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = model(**batch).logits, batch["input_ids"]
        return torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none").mean(1)

    ids = torch.arange(24).reshape(3, 8) % 31 + 1
    mask = (torch.arange(8) < torch.tensor([[8], [5], [3]])).long()
    return {
        "transformers: texts of one length": lambda: (_llama(), {"input_ids": ids}, losses),
        "transformers: padded texts": lambda: (_llama(), {"input_ids": ids * mask, "attention_mask": mask}, losses),
        "peft: LoRA": lambda: (_lora(), {"input_ids": ids}, losses),
        "transformers: labels=": lambda: (
            _llama(), {"input_ids": ids}, lambda m, b: m(**b, labels=b["input_ids"]).loss,
        ),
        "cross_entropy with a mean": lambda: (
            _llama(), {"input_ids": ids},
            lambda m, b: F.cross_entropy(m(**b).logits[:, :-1].flatten(0, 1), b["input_ids"][:, 1:].flatten()),
        ),
    }  # fmt: skip
