"""Lightning's Trainer on one process or two."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastdp.errors import StepError

from ..by_hand import network, records
from .models import single
from .parts import found, loader, no_accelerator, sgd


def fit(
    rank: int, world: int, module: Any, batches: Any, validate: bool = True, ckpt_path: Any = None, **options: Any
) -> Any:
    from lightning import pytorch as lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    no_accelerator()
    os.environ["LOCAL_RANK"] = str(rank)
    given = {"strategy": "ddp" if world > 1 else "auto", "max_epochs": 2, "enable_checkpointing": False, **options}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world, plugins=[LightningEnvironment()], logger=False, enable_progress_bar=False,
        enable_model_summary=False, **given,
    )  # fmt: skip
    others = torch.utils.data.DataLoader(records(), batch_size=8) if validate else None
    trainer.fit(module, batches, others, ckpt_path=ckpt_path)
    return trainer


def module_of(manual: bool = False, part: bool = False, optimizer: Any = sgd) -> Any:
    """part: the optimizer is given the network within the module."""
    from lightning import pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = network(), not manual

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, number: int) -> Any:
            loss = F.cross_entropy(self(batch[0]), batch[1]) if len(batch[0]) else self(batch[0]).sum()
            if manual:
                self.manual_backward(loss)
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            self.private = optimizer(self.net if part else self)
            return self.private

    return Module()


def _trains(
    rank: int, world: int, callback: bool = True, streamed: bool = True, listed: bool = False, **options: Any
) -> Any:
    """listed: Lightning is given a list with the loader."""
    from fastdp.lightning import DPCallback, stream

    with single() if callback else contextlib.nullcontext():  # before Lightning begins, there is one process
        batches = loader(4 if streamed else None)
    module = module_of(**options)
    callbacks = [DPCallback(delta=1e-3)] if callback else []
    given: Any = stream(batches) if streamed else batches
    if listed:
        step, given = module.training_step, [given]
        module.training_step = lambda batch, batch_idx: step(batch[0], batch_idx)
    trainer = fit(rank, world, module, given, callbacks=callbacks)
    private = module.private
    logged = [{k: float(v) for k, v in trainer.callback_metrics.items() if k in ("epsilon", "noised_steps")}]
    result = *found(module, private.history, private.epsilon(1e-3)), logged
    private.detach()
    return result


def lightning_refused(rank: int, world: int) -> None:
    """Other strategies by name; and what one process refuses, all refuse."""
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

    for kind, part in ((FSDPStrategy, False), (DeepSpeedStrategy, False), (DeepSpeedStrategy, True)):
        module, strategy = module_of(part=part), kind.__new__(kind)
        strategy._lightning_module = strategy._model = module
        module._trainer = type("Trainer", (), {"strategy": strategy})()
        with pytest.raises(StepError, match=f"{kind.__name__} with 2 processes is refused.*ModelParallelStrategy"):
            module.configure_optimizers()
    module = module_of()
    if rank:
        module.on_before_zero_grad = _spoil
    with pytest.raises(StepError, match="spoilt"):
        fit(rank, world, module, loader(None))
    module.private.detach()


def _spoil(*_: Any) -> None:
    raise StepError("the step is spoilt")


CASES = {
    "lightning": _trains,
    "lightning, in a list": functools.partial(_trains, streamed=False, listed=True),
    "lightning, a stream in a list": functools.partial(_trains, listed=True, manual=True),
    "lightning, a part, manual": functools.partial(_trains, manual=True, part=True),
    "lightning, without the callback": functools.partial(_trains, callback=False, streamed=False),
    "lightning_refused": lightning_refused,
}
