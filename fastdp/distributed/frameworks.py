"""Refuses settings of Accelerate, DeepSpeed and the like that would change the guarantee.

Nothing here asks other processes: a framework rules all of them.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

from torch import nn

from ..errors import StepError
from ..utils.code_location import frames
from .world import processes

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_INSTEAD = "docs/distributed.md has an example of each"
# of Lightning: the first two have whole copies of a model, and configure_model() lays it in parts for the last
STRATEGIES = ("DDPStrategy", "SingleDeviceStrategy", "ModelParallelStrategy")
# some of these are derived from the above, and none takes the gradient and the step as the optimizer makes them
OTHERS = ("DeepSpeedStrategy", "FSDPStrategy", "XLAStrategy", "XLAFSDPStrategy")


def check_frameworks(model: nn.Module) -> None:
    """Raises StepError if a framework trains the model in parts, in a way that is not known to be exact."""
    for trainer in {id(trainer): trainer for trainer in (*_trainers(model), *_calling())}.values():
        strategy, count = trainer.strategy, processes()
        names = {kind.__name__ for kind in type(strategy).__mro__}
        if names & {*OTHERS} or (count > 1 and not names & {*STRATEGIES}):
            raise StepError(
                f"Lightning's {type(strategy).__name__} with {count} process{'es' * (count > 1)} is refused: it does "
                "not keep the whole model on every process. Use Trainer(strategy='ddp'), or ModelParallelStrategy with "
                f"fully_shard (FSDP2) in configure_model() for a model in parts. {_INSTEAD}"
            )
    if processes() == 1:
        return
    kind = _accelerate()
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise StepError(
            f"Accelerate with distributed_type {kind} and {processes()} processes is refused: it does not keep the "
            f"whole model on every process. Use accelerate launch --multi_gpu (or --cpu), or FSDP with fsdp_version=2."
        )
    if kind == "FSDP" and not lays_in_parts():
        raise StepError(
            "Accelerate with FSDP1 is refused: it joins parameters into flat ones, whose parts are not known to be of "
            "one layer each. Use FullyShardedDataParallelPlugin(fsdp_version=2) (fsdp_version: 2 in the file of "
            "accelerate config, fsdp_config={'version': 2} of transformers)."
        )


def unwrap(model: nn.Module) -> None:
    """Take DistributedDataParallel off a LightningModule: a strategy makes steps through its forward."""
    for trainer in _trainers(model):
        strategy = trainer.strategy
        if strategy.model is not strategy.lightning_module and getattr(strategy.model, "module", None) is model:
            strategy.model = strategy.lightning_module


def accumulates() -> int:
    """By how much Lightning divides the loss of the step within which this is called; 1 outside of Lightning."""
    counts = [getattr(trainer, "accumulate_grad_batches", 1) for trainer in _calling()]
    return counts[0] if counts else 1


def equal_later() -> bool:
    """Whether a framework makes the weights equal on all processes once the optimizer was made."""
    if lays_in_parts():  # of each process's own weights, unless only the first has loaded them
        return bool(getattr(_plugin(), "cpu_ram_efficient_loading", False))
    return processes() > 1 and _accelerate() is not None


def lays_in_parts() -> bool:
    """Whether Accelerate calls `fully_shard` on the model that it prepares, once the optimizer was made."""
    return _accelerate() == "FSDP" and getattr(_plugin(), "fsdp_version", 1) == 2


def check_schedulers(privacy: object) -> None:
    """Raises StepError if Accelerate steps a scheduler of this optimizer (its `_privacy`) once for each process.

    Nothing of the optimizer knows its schedulers, so all objects are looked at, before the first step alone.
    """
    kind = getattr(sys.modules.get("accelerate.scheduler"), "AcceleratedScheduler", None)
    if kind is None or processes() == 1:
        return
    for found in [each for each in gc.get_objects() if type(each) is kind]:
        several = found.step_with_optimizer and not found.split_batches
        if several and any(getattr(each.optimizer, "_privacy", None) is privacy for each in found.optimizers):
            raise StepError(
                f"the scheduler that prepare() was given steps {processes()} times where it is called once: Accelerate "
                "takes it that the number of processes multiplies the batch, and poisson_loader's batch is that of all "
                "processes. Use Accelerator(step_scheduler_with_optimizer=False), or leave it out of prepare()."
            )


def _accelerate() -> str | None:
    """The distributed type of the Accelerator of this process, if there is one."""
    for name in ("AcceleratorState", "PartialState"):
        state = getattr(getattr(sys.modules.get("accelerate.state"), name, None), "_shared_state", None)
        if state and "distributed_type" in state:
            return str(getattr(state["distributed_type"], "value", state["distributed_type"]))
    return None


def _plugin() -> Any:
    """Accelerate's settings of FSDP, if they are in force."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return getattr(state, "_shared_state", {}).get("fsdp_plugin")


def _trainers(model: nn.Module) -> list[Any]:
    """Of the LightningModules in a model, those that a Trainer holds."""
    kinds = _modules()
    modules = [module for module in model.modules() if isinstance(module, kinds)] if kinds else []
    return [trainer for module in modules if (trainer := getattr(module, "_trainer", None)) is not None]


def _calling() -> list[Any]:
    """The Trainer within whose step or configure_optimizers() this is called, if any.

    An optimizer need not know of it: it may have been given the network within the LightningModule alone. Only frames
    of Lightning's own, and that method, are asked for their locals: asking keeps what they hold alive, batches and all.
    """
    kinds, packages = _modules(), tuple(f"{name}." for name in _LIGHTNING)
    for caller in frames(sys._getframe(1) if kinds else None):
        name = str(caller.f_globals.get("__name__", ""))
        if caller.f_code.co_name == "configure_optimizers" or name.startswith(packages):
            owner = caller.f_locals.get("self")
            for each in (owner, vars(owner).get("_lightning_module") if hasattr(owner, "__dict__") else None):
                if isinstance(each, kinds) and (trainer := getattr(each, "_trainer", None)) is not None:
                    return [trainer]
    return []


def _modules() -> tuple[type, ...]:
    """LightningModule, of each of Lightning's packages that was imported."""
    found = (getattr(sys.modules.get(name), "LightningModule", None) for name in _LIGHTNING)
    return tuple(kind for kind in found if isinstance(kind, type))
