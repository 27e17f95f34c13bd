"""Mixtures of experts on the second device: norms and sums are the CPU's, and a step asks for few numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fastdp
from fastdp.errors import SampleMixingError

from . import cases_experts
from .cases_experts import SIZES, _ends, _sorted, grouped_mm
from .second_device_syncs import check_waits

# Beyond what an ordinary step asks for. Where rows are sorted by expert: whether they are divided where groups end,
# one read of all layers before the release. Where experts come in a loop, the ordinary step asks for each, and so do
# the layout rules.
CEILINGS = {
    "grouped": 1, "grouped_biased": 4, "batched": 0, "batched_by_matmul": 0, "batched_by_einsum": 0, "batched_twice": 0,
    "mixtral by gathered matrices": 0, "mixtral by a loop": 52, "eager": 44, "modules": 40, "split_and_back": 45,
}  # fmt: skip
Built = tuple[Any, Any, Callable[[Any, Any], Tensor]]


def _mixtral(kind: str) -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = MixtralForCausalLM(
        MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, use_cache=False, pad_token_id=0)
    )
    model.set_experts_implementation(kind)

    def losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits = model(**batch).logits
        return torch.nn.functional.cross_entropy(logits.mT, batch["input_ids"], reduction="none").mean(1)

    return model, {"input_ids": torch.arange(24).reshape(3, 8) % 31 + 1}, losses


def build(name: str) -> Built:
    if name.startswith("mixtral"):
        return _mixtral("eager" if name.endswith("loop") else "batched_mm")
    model, batch, losses = cases_experts.build(name, SIZES["usual"])
    return model.float(), batch, losses


def check_exact(name: str, device: str, moved: Callable[[Any, str], Any]) -> None:
    """Norms and clipped sums of three batches are those on the CPU."""
    model, batch, losses = build(name)
    other = copy.deepcopy(model).to(device)
    engines = fastdp.PerSampleGradients(model), fastdp.PerSampleGradients(other)
    for seed in range(3):
        torch.manual_seed(seed)
        if isinstance(batch, tuple):
            batch = tuple(torch.randn_like(t) for t in batch)
        else:
            batch = {key: torch.randint(1, 40, t.shape) for key, t in batch.items()}
        losses(model, batch).mean().backward()
        losses(other, moved(batch, device)).mean().backward()
        want, found = (engine.norms() for engine in engines)
        assert found.device == torch.device(device)
        torch.testing.assert_close(found.cpu(), want, rtol=1e-4, atol=1e-6)
        factors = torch.tensor([0.0, 0.4, 1.0])
        wanted, sums = engines[0].clipped_sum(factors), engines[1].clipped_sum(factors.to(device))
        for key, total in wanted.items():
            torch.testing.assert_close(sums[key].cpu(), total, rtol=1e-3, atol=1e-5)


def _shifted(m: Any, x: Tensor, chosen: Tensor, weights: Tensor, size: Any) -> Tensor:
    """The last row of each expert's is given to the next."""
    ids, order, rows = _sorted(x, chosen, size)
    ends = (_ends(ids, size) - 1).clamp(min=0)
    ends[-1] += 1
    y = grouped_mm(rows, m.up.transpose(-2, -1), offs=ends).tanh()
    y = grouped_mm(y, m.down.transpose(-2, -1), offs=ends)
    return y[order.argsort()].view(*chosen.shape, -1).sum(1)


def check_refused(device: str, moved: Callable[[Any, str], Any]) -> None:
    """Of rows divided by what other samples hold nothing is released, and steps after that are refused."""
    cases_experts.EXPERTS["shifted"] = _shifted
    cases_experts.NEEDS["shifted"] = cases_experts.STACKS
    model, batch, losses = cases_experts.build("shifted", SIZES["usual"])
    model, batch = model.float().to(device), moved(batch, device)
    before = copy.deepcopy(model.state_dict())
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=3)
    refused = 0
    for _ in range(8):
        losses(model, batch).mean().backward()
        try:
            optimizer.step()  # of nothing: the device alone knows yet
        except SampleMixingError as problem:
            assert "grouped_mm() in module 'Net': divides rows into groups by what other" in str(problem), problem
            assert "of noise alone" in str(problem)
            refused += 1
        optimizer.zero_grad()
        assert all(torch.equal(value.cpu(), before[key].cpu()) for key, value in model.state_dict().items())
    assert refused >= 2, "steps were made of rows that other samples divide"


def checks(device: str, moved: Callable[[Any, str], Any]) -> Iterator[tuple[str, Callable[[], None]]]:
    """What `tests.second_device` runs."""
    for name, ceiling in CEILINGS.items():

        def waits(name: str = name, ceiling: int = ceiling) -> None:
            model, batch, losses = build(name)
            check_waits(name, model.to(device), moved(batch, device), losses, device, ceiling)

        yield f"experts, {name}", lambda name=name: check_exact(name, device, moved)
        yield f"waits of experts, {name}", waits
    yield "experts, rows that others divide", lambda: check_refused(device, moved)
