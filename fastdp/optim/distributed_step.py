"""A private step of several processes: agreement on its settings, and the all-reduce of clipped sums before the noise.

Every process draws the same noise, since the noise is a function of the key, the step and the element's index alone,
and adds it after the sums were added up. So the released weights are those of one process with all samples.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..accounting.ledger import Ledger
from ..accounting.ledger_file import open_ledger, share_ledger
from ..batch_axis.deferred_checks import DeferredCheck, withhold
from ..distributed.fingerprints import mark, mark_of_model, mark_of_parameters, mark_of_shapes
from ..distributed.frameworks import check_schedulers, equal_later
from ..distributed.reduce import Reduction, riding
from ..distributed.world import World
from ..distributed.wrappers import Replica
from ..engine.per_sample import PerSampleGradients
from ..ops.noise import Noise
from .clipped_sums import DROPPED, Sums
from .clipping import Clipping


def agree_on_setup(
    world: World, replica: Replica, engine: PerSampleGradients, noise: Noise, ledger: Ledger, path: Any,
    settings: Callable[[], Mapping[str, object]],
) -> None:  # fmt: skip
    """All processes have the same model and the same settings, and take the key of the noise from the first.

    path: the file of the ledger, or None.
    """
    open_ledger(ledger, path, world)
    if world.size == 1:
        return
    said = {
        "making": "a private optimizer",
        # of a model that is made equal later the weights are compared before the first step
        "model (its weights, in names, shapes and values)": (mark_of_shapes if equal_later() else mark_of_model)(
            engine.model
        ),
        "seed": noise.seed,
        "ledger": "in no file" if path is None else "in a file",
        **settings(),
    }
    world.agree(said)
    replica.check_copies()
    noise.restore(world.from_first(noise.key), noise.step)
    # a checkpoint is written by any of them: its steps are those that all have made
    ledger.name = world.from_first(ledger.name.encode()).decode()
    if path is not None:
        share_ledger(ledger, world)


def settings_of_step(privacy: Any, first: bool, **settings: object) -> dict[str, object]:
    """What all processes must have alike at a step. first: it is the optimizer's first."""
    draws, pass_, step = privacy._loader_position
    return {
        "step": privacy.noise.step, "loader draws by": draws or "no poisson_loader", "pass": pass_,
        "step of the pass": step, "update": privacy.replica.rule,
        "key": mark("noise", privacy.noise.key), "history": mark(privacy.ledger.spent),
        **settings, "weights": weights_mark(privacy, privacy.engine.model) if first else "",
    }  # fmt: skip


def rule_of(world: World, kind: type, optimizer: torch.optim.Optimizer) -> str:
    """An optimizer's class and the options of its groups, which several processes must have alike; "" of one process.

    Tensors on a device are left out, as they would be waited for, and so is what others than the optimizer's class keep
    in its groups (a scheduler's first rate, notes of a loop).
    """
    if world.size == 1:
        return ""
    told = []
    for group in optimizer.param_groups:
        options = {name: _plain(group.get(name)) for name in sorted({*optimizer.defaults, "lr"})}
        shown = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
        told.append(f"{shown}, for {len(group['params'])} parameters")
    text = "; ".join(told)
    return f"{kind.__name__}: {text}" if len(text) < _SHOWN else f"{kind.__name__}: {text[:_SHOWN]}... ({mark(told)})"


_SHOWN = 600  # letters


def _plain(value: Any) -> Any:
    """A number, a word or several numbers; None for all else."""
    if isinstance(value, Tensor):
        return _plain(value.item()) if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value if not isinstance(each, tuple | list)]
    if isinstance(value, numbers.Real):
        return value if isinstance(value, int) and abs(value) > 2**53 else float(value)
    return value if isinstance(value, str) else None


def weights_mark(privacy: object, model: nn.Module) -> str:
    """A mark of the weights with which an optimizer's first step begins. Raises StepError for its schedulers."""
    check_schedulers(privacy)
    return mark_of_parameters(model)


def reduce_sums(
    world: World, held: Sums, sums: dict[int, Tensor], dropped: Tensor | int, records: int,
    said: Mapping[str, object], settle: Callable[[list[DeferredCheck]], None], look: Callable[[], None] | None = None,
) -> tuple[dict[int, Tensor], Tensor, int]:  # fmt: skip
    """Add up clipped sums over the processes, once all have agreed on the step.

    Args:
        world: of several processes.
        held: what says over whom sums are added up.
        sums: by any keys, in the same order everywhere. They are overwritten.
        dropped: the samples that contribute nothing. No process reads this number here: a device may be behind.
        records: the records of this process.
        said: what must be the same everywhere, and what the step is of.
        settle: what reads flags, at once or later.
        look: what all do once they have agreed, before anything is added up; it raises on all or none.

    Returns:
        The sums by the same keys; dropped samples and records of all processes.

    Raises:
        FastDPError: if a process refuses, is at another step, or is gone. Nothing was released before.
    """
    sums = {**sums, DROPPED: riding(dropped, next(iter(sums.values())))}
    # before all agree: its memory may not suffice
    reductions = [(group, own, Reduction(list(own.values()))) for group, own in held.shares(sums)]
    everywhere = world.agree(said, records if world.speaks else 0)
    if look is not None:
        look()
    found: dict[int, Tensor] = {}
    for group, own, reduction in reductions:
        found.update(zip(own, world.sums(reduction, group), strict=True))
    found, doubts = held.settled(sums | found)
    count = found.pop(DROPPED).long()
    withhold(doubts, (), found)
    settle(doubts)
    return found, count, everywhere


def settings_of(clipping: Clipping, engine: PerSampleGradients, **more: object) -> dict[str, Any]:
    """What a step depends on beside its batch; functions and long lists by a mark."""
    function = clipping.clipping if isinstance(clipping.clipping, str) else "a function"
    named = engine.named_parameters()
    return {
        **more,
        "clipping": (function, clipping.max_grad_norm, clipping.gamma),
        "groups": mark([(g.name, g.parameters, g.max_grad_norm) for g in clipping.groups]),
        "trained parameters": mark([(name, engine.shape_of(p), str(p.dtype)) for name, p in named.items()]),
        "their places": mark(sorted(engine.offsets().items())),
    }
