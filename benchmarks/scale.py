"""What a private step of a large model holds and sends on many devices, beside an ordinary step: without any of them.

    python -m benchmarks.scale                          # Llama 8B and 70B, in full and by LoRA
    python -m benchmarks.scale --sizes 8b --ranks 64 --tokens 2048

One process makes the steps of rank 0. Its tensors have no numbers (fake tensors), and its collectives go nowhere (the
fake process group), but fully_shard, the engine and the optimizer are those of every step. Memory is the sum of the
storages that are alive, at its largest; on a device, the allocator's rounding and the kernels' scratch come to it.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.distributed import private_names as names
from fastdp.distributed.world import Ranks
from fastdp.engine import tracked_parameters
from fastdp.ops.registry import forced, watched
from fastdp.optim import private_step

from .large import Llama
from .models import LoRALinear, token_losses
from .scale_meter import GATHERED, Meter, Told
from .timing import append, commit

SIZES: dict[str, dict[str, int]] = {
    "small": {"layers": 2, "d": 64, "heads": 4, "groups": 2, "hidden": 172, "vocabulary": 512},
    "layer": {"layers": 1, "d": 4096, "heads": 32, "groups": 8, "hidden": 14336, "vocabulary": 4096},
    "1b": {"layers": 22, "d": 2048, "heads": 32, "groups": 4, "hidden": 5632, "vocabulary": 32000},
    "8b": {"layers": 32, "d": 4096, "heads": 32, "groups": 8, "hidden": 14336, "vocabulary": 128256},
    "70b": {"layers": 80, "d": 8192, "heads": 64, "groups": 8, "hidden": 28672, "vocabulary": 128256},
}
AGREED = 48  # bytes that each rank says in an agreement
ADAPTED = ("query", "key", "value", "out", "gate", "up", "down")


class Setting(NamedTuple):
    """A model on so many ranks, each with one sample of so many tokens. lora: the adapters' rank, 0 for none.
    copies: ranks that hold the same part (HSDP)."""

    size: str
    ranks: int
    tokens: int = 2048
    lora: int = 0
    copies: int = 1


class Checkpointed(nn.Module):
    """A layer whose forward runs again in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.layer, *args, use_reentrant=False)


class Pretended(Ranks):
    """All processes, of which there is one: the others would say the same."""

    agreements = 0  # so far, of all

    def agree(self, said: Any, records: int = 0) -> int:
        Pretended.agreements += 1
        return records * self.size

    def from_first(self, secret: bytes) -> bytes:
        return secret

    def any_of(self, flags: Tensor) -> Any:
        return _Nothing(flags.shape)


class _Nothing:
    """Which groups must be gathered once more, without a budget: none. (A tensor here would have no numbers.)"""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape

    def tolist(self) -> list[list[int]]:
        return [[0] * self.shape[1] for _ in range(self.shape[0])]


def adapt(model: nn.Module, rank: int) -> None:
    """Adapters on every matrix of the layers; nothing else is trained. Frozen weights are 16-bit."""
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ADAPTED and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child, rank))


def sharded(setting: Setting, mesh: Any) -> nn.Module:
    """The model, cut over all ranks by layers: 16-bit weights in forwards, float32 parts of what is trained."""
    model = Llama(**SIZES[setting.size])
    if setting.lora:
        adapt(model, setting.lora)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    cut = partial(fully_shard, mesh=mesh, mp_policy=policy)
    for place, layer in enumerate(model.layers):
        cut(layer)
        model.layers[place] = Checkpointed(layer)
    cut(model.tokens)
    cut(model.head)
    cut(model)
    return model


@contextmanager
def pretending(setting: Setting) -> Iterator[Any]:
    """Within it there are so many processes, tensors without numbers, and no exchange of words; gives their mesh."""
    dist.init_process_group("fake", rank=0, world_size=setting.ranks, store=FakeStore())
    parts = setting.ranks // setting.copies
    sizes, dims = ((parts,), ("shard",)) if setting.copies == 1 else ((setting.copies, parts), ("copy", "shard"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=dims)
    before = tracked_parameters.is_lazy, private_step.world_for
    tracked_parameters.is_lazy = lambda parameter: True  # type: ignore[assignment]
    private_step.world_for = lambda *_: Pretended(None)  # type: ignore[assignment]
    Ranks.__init__.__globals__["_CONTROL"][:] = [(dist.group.WORLD, dist.group.WORLD)]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Told(), watched(), forced("reference"):
            yield mesh
    finally:
        tracked_parameters.is_lazy, private_step.world_for = before  # type: ignore[assignment]
        Ranks.__init__.__globals__["_CONTROL"].clear()
        dist.destroy_process_group()


def _whole_weights(model: nn.Module) -> Iterator[Tensor]:
    """What fully_shard gathers weights into, which it empties and fills again."""
    for state in filter(None, map(names.state_of, model.modules())):
        for group in names.groups_of(state):
            for entry in group.fsdp_params:
                yield from entry.all_gather_outputs


def _tell(sums: Any, meter: Meter) -> None:
    """What norms and clipped sums bring forth is of these kinds."""
    for name, kind in (("norm_sq", "norms"), ("clipped", "clipped sums")):
        run = getattr(type(sums), name)

        def within(*args: Any, _run: Any = run, _kind: str = kind) -> Any:
            meter.phase(_kind)
            return _run(sums, *args)

        setattr(sums, name, within)


def one_step(setting: Setting, private: bool) -> Meter:
    """What the second step of rank 0 holds and sends."""
    gc.collect()  # what is left of another setting
    with pretending(setting) as mesh:
        model = sharded(setting, mesh)
        trained = [p for p in model.parameters() if p.requires_grad]
        if private:
            optimizer: Any = fastdp.DPAdamW(
                model, lr=1e-4, noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.01, seed=0,
                expected_batch_size=setting.ranks,
            )  # fmt: skip
        else:
            optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=False, foreach=False)
        ids = torch.randint(0, 100, (1, setting.tokens))
        for _ in range(2):
            meter = Meter()
            meter.hold("weights", model.parameters())
            meter.hold(GATHERED, _whole_weights(model))
            meter.hold("moments", [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)])
            if private:
                _tell(optimizer._privacy.sums, meter)
            before = Pretended.agreements
            with meter:
                meter.phase("forward")
                loss = token_losses(model(ids), ids).mean()
                meter.phase("backward: a and g" if private else "backward")
                loss.backward()
                meter.phase("update")
                optimizer.step()
                optimizer.zero_grad()
            del loss
            if agreed := Pretended.agreements - before:
                meter.sent["agreement"] = agreed, agreed * AGREED * setting.ranks
        return meter


def report(setting: Setting, ordinary: Meter, private: Meter) -> list[str]:
    """Lines of text."""
    trained = f"LoRA rank {setting.lora}" if setting.lora else "in full"
    name = f"Llama {setting.size}, {trained}, {setting.ranks} ranks"
    if setting.copies > 1:
        name += f" ({setting.copies} copies of {setting.ranks // setting.copies} parts)"
    lines = [f"{name}, {setting.tokens} tokens a rank"]
    kinds = sorted({*ordinary.peak_by, *private.peak_by})
    lines.append(f"  {'GiB at the peak':24s}{'ordinary':>10s}{'private':>10s}")
    for kind in [*kinds, "all"]:
        values = [sum(m.peak_by.values()) if kind == "all" else m.peak_by.get(kind, 0) for m in (ordinary, private)]
        lines.append(f"  {kind:24s}" + "".join(f"{value / 2**30:10.2f}" for value in values))
    for kind in sorted({*ordinary.sent, *private.sent}):
        counts = [m.sent.get(kind, (0, 0)) for m in (ordinary, private)]
        text = "".join(f"{number:6d} of {size / 2**30:8.2f} GiB" for number, size in counts)
        lines.append(f"  {kind:24s}{text}")
    return lines


def rows(setting: Setting, ordinary: Meter, private: Meter) -> Iterator[dict[str, object]]:
    for step, meter in (("ordinary", ordinary), ("private", private)):
        held = {
            kind.replace(":", "").replace(" ", "_") + "_gib": round(size / 2**30, 3)
            for kind, size in meter.peak_by.items()
        }
        number = sum(count for count, _ in meter.sent.values())
        size = sum(size for _, size in meter.sent.values())
        yield {
            **setting._asdict(), "step": step, "peak_gib": round(sum(meter.peak_by.values()) / 2**30, 3), **held,
            "collectives": number, "sent_gib": round(size / 2**30, 3),
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["8b", "70b"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 1024])
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank's one sample")
    parser.add_argument("--lora", nargs="+", type=int, default=[0, 16], help="ranks of adapters; 0: the whole model")
    parser.add_argument("--copies", type=int, default=1, help="ranks that hold the same part (HSDP)")
    parser.add_argument("--out", type=Path, help="append rows to this CSV file")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    for size in options.sizes:
        for lora in options.lora:
            for ranks in options.ranks:
                setting = Setting(size, ranks, options.tokens, lora, options.copies)
                begun = time.monotonic()
                found = [one_step(setting, private) for private in (False, True)]
                print("\n".join(report(setting, *found)))
                print(f"  ({time.monotonic() - begun:.0f} s)", flush=True)
                if options.out is not None:
                    facts = {"commit": commit(), "torch": torch.__version__}
                    new = [facts | row for row in rows(setting, *found)]
                    append(options.out, new, list(dict.fromkeys(name for row in new for name in row)))


if __name__ == "__main__":
    main(sys.argv[1:])
