"""Lightning's ModelParallelStrategy: models in parts (FSDP2) and split layers make the steps of one process, by two."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fastdp.distributed.sharded import is_sharded
from fastdp.errors import FastDPError, ParameterError, StepError

from .loops_lightning import fit, module_of
from .models import single
from .parts import found, loader, sgd, shared_folder


def strategy(data: Any, layers: Any, **options: Any) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=layers, **options)


def _cut(module: Any, what: str) -> None:
    """what: of "all" the LightningModule itself, of "net" the network in it, each with its layers; "split" layers."""
    mesh, net = module.device_mesh["data_parallel"], module.net
    if isinstance(net, FSDPModule) or isinstance(module, FSDPModule):
        return
    if what == "split":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net, module.device_mesh["tensor_parallel"], plan)
        return
    for layer in net:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh)
    fully_shard(net if what == "net" else module, mesh=mesh)


def _fitted(rank: int, world: int, module: Any, batches: Any, how: str = "net", **options: Any) -> Any:
    """how: what is cut; one process cuts nothing."""
    files = options.pop("files", {})
    if world > 1 and how != "whole":
        module.configure_model = functools.partial(_cut, module, how)
        options["strategy"] = strategy(*((1, 2) if how == "split" else (2, 1)), **files)
    return fit(rank, world, module, batches, **options)


def _trains(
    rank: int, world: int, how: str = "net", manual: bool = False, part: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """A run with validation before and between; some ranks have no sample in some batches."""
    from fastdp.lightning import DPCallback, stream

    module = module_of(manual, part)
    with single():
        batches = stream(loader(4, **options))
    trainer = _fitted(rank, world, module, batches, how, callbacks=[DPCallback(delta=1e-3)])
    assert is_sharded(module) == (world > 1 and how != "split")
    private = module.private
    logged = [{k: float(v) for k, v in trainer.callback_metrics.items() if k in ("epsilon", "noised_steps")}]
    result = *found(module, private.history, private.epsilon(1e-3)), logged
    private.detach()
    return result


def parts_resumed(rank: int, world: int) -> None:
    """From files of both kinds, and from one of whole copies; the state has its record, and not the secret key."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    ends = []
    for how, distributed in (("net", True), ("net", False), ("whole", False)):
        folder = shared_folder(world)
        files = {"save_distributed_checkpoint": distributed}
        for begun, seed in ((False, 3), (True, 3), (True, None)):
            module, keeps = module_of(optimizer=functools.partial(sgd, lr=0.5, momentum=0.9, seed=seed)), []
            if not begun:
                keeps = [ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=3)]
            _fitted(
                rank, world, module, loader(None), "net" if begun else how, files=files, callbacks=keeps,
                enable_checkpointing=not begun, ckpt_path=folder / "step=3.ckpt" if begun else None, validate=False,
            )  # fmt: skip
            private = module.private
            assert private.history == [(1.0, 0.25, 8)] and "fastdp" not in private.param_groups[0]
            if seed is None:
                assert private.noise_state()["step"] == 5  # by a fresh key: the steps since the checkpoint
            else:
                assert private.noise_state()["step"] == 8
                ends.append(found(module, private.history, private.epsilon(1e-3)))
            private.detach()
        assert (folder / "step=3.ckpt").is_dir() == (distributed and how != "whole")
    for weights, history, epsilon in ends:
        assert (history, epsilon) == ends[0][1:] and torch.allclose(_joined(weights), _joined(ends[0][0]), atol=1e-6)


def _joined(weights: list[list[float]]) -> torch.Tensor:
    return torch.tensor([number for each in weights for number in each])


def parts_refused(rank: int, world: int) -> None:
    """By name; and what one process meets, all raise."""
    from fastdp.lightning import DPCallback

    module = module_of()
    module.configure_model = functools.partial(_cut, module, "net")
    with pytest.raises(ParameterError, match="ModelParallelStrategy has one process in its mesh of data_parallel"):
        fit(rank, world, module, loader(None), strategy=strategy("auto", "auto"))
    module = module_of()
    module.configure_model = lambda: fully_shard(module.net[0], mesh=module.device_mesh["data_parallel"]) and None
    with pytest.raises(ParameterError, match="one around it that has no other parameters"):
        fit(rank, world, module, loader(None), strategy=strategy(2, 1))
    for more, match in (
        ({"accumulate_grad_batches": 3}, "divides the losses"),
        ({"gradient_clip_val": 1.0}, "clipped sample"),
    ):
        module = module_of()
        with pytest.raises(StepError, match=match):
            _fitted(rank, world, module, loader(None), callbacks=[DPCallback()], **more)
        module.private.detach()
    module = module_of(manual=True)
    # whose connections the alarm closes; by its name it is none of the meshes that DTensors have met before
    own = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("spoilt",))
    module.configure_model = lambda: fully_shard(module.net, mesh=own) and None
    if rank:
        module.on_train_batch_start = _Spoils()
    with pytest.raises((FastDPError, RuntimeError), match="spoilt"):
        fit(rank, world, module, loader(None), strategy=strategy(2, 1), callbacks=[DPCallback()])
    module.private.detach()


class _Spoils:
    calls = 0

    def __call__(self, batch: Any, batch_idx: int) -> None:
        self.calls += 1
        if self.calls > 2:
            raise RuntimeError("the batch is spoilt")


CASES: dict[str, Any] = {
    "lightning, in parts": _trains,
    "lightning, itself in parts, manual": functools.partial(_trains, how="all", manual=True, expected_batch_size=2),
    "lightning, split": functools.partial(_trains, how="split"),
    "parts_resumed": parts_resumed,
    "parts_refused": parts_refused,
}

warnings.filterwarnings("ignore", message=".*pytree.*")
