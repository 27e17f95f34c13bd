"""A private step of several processes: what they must agree on, and the sums that they add up before the noise.

Every process draws the same noise, since the noise is a function of the key, the step and the element's index alone,
and adds it after the sums were added up. So the released weights are those of one process with all samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.frameworks import check_schedulers, equal_later
from ..distributed.reduce import Reduction
from ..distributed.replicas import check_others
from ..distributed.same import mark, mark_of_model, mark_of_parameters, mark_of_shapes
from ..distributed.world import World
from ..engine.per_sample import PerSampleGradients
from ..ops.noise import Noise
from .clipping import Clipping


def begin(world: World, engine: PerSampleGradients, noise: Noise, settings: Mapping[str, object]) -> None:
    """All processes have the same model and the same settings, and take the key of the noise from the first."""
    check_others(engine.others(), world)
    said = {
        "making": "a private optimizer",
        # of a model that is made equal later the weights are compared before the first step
        "model (its weights, in names, shapes and values)": (mark_of_shapes if equal_later() else mark_of_model)(
            engine.model
        ),
        "seed": noise.seed,
        **settings,
    }
    world.agree(said)
    noise.restore(world.from_first(noise.key), noise.step)


def first_step_of(privacy: object, model: nn.Module) -> str:
    """A mark of the weights with which an optimizer's first step begins. Raises StepError for its schedulers."""
    check_schedulers(privacy)
    return mark_of_parameters(model)


def summed(
    world: World, sums: dict[int, Tensor], dropped: Tensor | int, records: int, said: Mapping[str, object]
) -> tuple[dict[int, Tensor], Tensor, int]:
    """Add up clipped sums over all processes, once all have agreed on the step.

    Args:
        world: of several processes.
        sums: of every trained parameter, by any keys, in the same order everywhere. They are overwritten.
        dropped: the samples of this process that contribute nothing.
        records: the records of this process.
        said: what must be the same everywhere, and what the step is of.

    Returns:
        The sums, by the same keys; dropped samples and records of all processes.

    Raises:
        FastDPError: if a process refuses, is at another step, or is gone. Nothing was released before.
    """
    reduction = Reduction(list(sums.values()))  # before all agree: its memory may not suffice
    device = next(iter(sums.values())).device
    count = torch.as_tensor(dropped, device=device).to(torch.int64).view(1).clone()
    everywhere = world.agree(said, records)
    totals = world.sums(reduction, count)
    return dict(zip(sums, totals, strict=True)), count[0], everywhere


def settings_of(clipping: Clipping, engine: PerSampleGradients, **more: object) -> dict[str, Any]:
    """What a step depends on beside its batch; functions and long lists by a mark."""
    function = clipping.clipping if isinstance(clipping.clipping, str) else "a function"
    named = engine.named_parameters()
    return {
        **more,
        "clipping": (function, clipping.max_grad_norm, clipping.gamma),
        "groups": mark([(g.name, g.parameters, g.max_grad_norm) for g in clipping.groups]),
        "trained parameters": mark([(name, tuple(p.shape), str(p.dtype)) for name, p in named.items()]),
        "their places": mark(sorted(engine.offsets().items())),
    }
