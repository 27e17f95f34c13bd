"""Lightning's ModelParallelStrategy: models in parts (FSDP2) and split layers make the steps of one process, by two."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fastdp
from fastdp.distributed.sharded import is_sharded
from fastdp.errors import FastDPError, ParameterError, StepError

from ..by_hand import network, records
from .loops_lightning import fit, module_of
from .models import LoRA, single, whole
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


def _lora() -> nn.Module:
    net = network()
    net[0] = LoRA(net[0])
    net.requires_grad_(False)
    for part in (net[0].a, net[0].b):
        part.requires_grad_(True)
    nn.init.ones_(net[0].b.weight)
    return net


def _fitted(rank: int, world: int, module: Any, batches: Any, how: str = "net", **options: Any) -> Any:
    """how: what is cut; one process cuts nothing."""
    files = options.pop("files", {})
    if world > 1 and how != "whole":
        module.configure_model = functools.partial(_cut, module, how)
        options["strategy"] = strategy(*((1, 2) if how == "split" else (2, 1)), **files)
    return fit(rank, world, module, batches, **options)


def _trains(
    rank: int, world: int, how: str = "net", net: Any = network, manual: bool = False, part: bool = False,
    callback: bool = True, **options: Any,
) -> Any:  # fmt: skip
    """A run with validation before and between; some ranks have no sample in some batches."""
    from fastdp.lightning import DPCallback, stream

    module = module_of(manual, part)
    module.net = net()
    if callback:
        with single():
            batches = stream(loader(4, **options))
    else:
        batches, module.train_dataloader = None, functools.partial(loader, None, **options)
    trainer = _fitted(rank, world, module, batches, how, callbacks=[DPCallback(delta=1e-3)] if callback else [])
    assert is_sharded(module) == (world > 1 and how != "split")
    private = module.private
    logged = [{k: float(v) for k, v in trainer.callback_metrics.items() if k in ("epsilon", "noised_steps")}]
    result = *found(module, private.history, private.epsilon(1e-3)), logged
    private.detach()
    return result


def parts_bits(rank: int, world: int) -> None:
    """Sums of whole numbers are the same bits in any order: so are the weights, noise and all; in 16-bit forwards."""
    from lightning import pytorch as lightning

    options = dict(lr=0.5, noise_multiplier=0.7, max_grad_norm=1e6, expected_batch_size=8, loss_reduction="sum",
                   seed=3)  # fmt: skip
    for precision in ("32-true", "bf16-mixed"):

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.one = nn.Sequential(nn.Linear(40, 31)), [nn.Linear(40, 31)]
                for parameter in (*self.net.parameters(), *self.one[0].parameters()):
                    nn.init.zeros_(parameter)

            def training_step(self, batch: Any, number: int) -> Any:
                data = torch.randint(-3, 4, (4 * world, 40), generator=torch.Generator().manual_seed(number)).float()
                with single(), torch.autocast("cpu", enabled=False):
                    if number:
                        self.truth.step()
                        self.compare()
                    self.one[0](data).sum().backward()
                return self.net(data[rank::world]).float().sum()

            def compare(self) -> None:
                for p, q in zip(self.net.parameters(), self.one[0].parameters(), strict=True):
                    assert torch.equal(whole(p), q)

            def configure_optimizers(self) -> Any:
                self.private = fastdp.DPAdamW(self.net, **options)
                with single():
                    self.truth = fastdp.DPAdamW(self.one[0], **options)
                return self.private

        module, each = Module(), torch.utils.data.DataLoader(torch.zeros(4 * world, 1), batch_size=1)
        _fitted(rank, world, module, each, precision=precision, max_epochs=1, validate=False)
        with single():
            module.truth.step()
        module.compare()
        module.private.detach()
        module.truth.detach()


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
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

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
    module = module_of(optimizer=functools.partial(sgd, momentum=0.9))
    _fitted(rank, world, module, loader(None), max_epochs=1)
    plain = torch.optim.SGD(module.net.parameters(), lr=0.1, momentum=0.9).state_dict()
    state = {f"net.{name}": {"momentum_buffer": torch.zeros(p.shape)} for name, p in module.net.named_parameters()}
    groups = [{**plain["param_groups"][0], "params": list(state)}]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(StepError, match="without a record of privacy"):
        set_optimizer_state_dict(module, module.private, {"state": state, "param_groups": groups}, options=options)
    assert module.private.history == [(1.0, 0.25, 4)]
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
    "lightning, a part in parts, LoRA": functools.partial(_trains, part=True, net=_lora),
    "lightning, in parts, persons": functools.partial(
        _trains, expected_batch_size=4, group_by=[number // 3 for number in range(len(records()))]
    ),
    "lightning, in parts, without the callback": functools.partial(_trains, callback=False),
    "lightning, split": functools.partial(_trains, how="split"),
    "parts_bits": parts_bits,
    "parts_resumed": parts_resumed,
    "parts_refused": parts_refused,
}

warnings.filterwarnings("ignore", message=".*pytree.*")
