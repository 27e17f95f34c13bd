"""Noise to the last bit, and what is refused of a model whose layers are split."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, SplitPoint, pipeline
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import _attention
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fastdp
from fastdp.errors import ParameterError, SampleMixingError, StepError, UncapturedUseError

from .messages import WITH_SUMS, Sent
from .models import adamw, single, whole
from .tensor_models import LENGTH, WORDS, D, build, split


def tensor_mesh(copies: int = 1) -> Any:
    return init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("dp", "tp"))


def tokens(seed: int = 0, size: int = 3) -> Tensor:
    return torch.randint(0, WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, given: Tensor) -> Tensor:
    return F.cross_entropy(model(given).flatten(0, 1), given.roll(-1, 1).flatten())


class Columns(nn.Module):
    """Two layers whose gradients are whole numbers: their sums are the same bits in any order."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, size), nn.Linear(size, 3)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        nn.init.ones_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def same_noise(rank: int, world: int) -> None:
    """The weights are those of one process, noise and all, to the last bit."""
    for copies in (1, 2) if world == 4 else (1,):
        mesh = tensor_mesh(copies)
        several, one = Columns(12), Columns(12)
        parallelize_module(several, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if copies > 1:
            fully_shard(several, mesh=mesh["dp"])
        options = dict(lr=0.5, noise_multiplier=0.7, max_grad_norm=1e6, expected_batch_size=8, loss_reduction="sum",
                       seed=3)  # fmt: skip
        optimizer = fastdp.DPSGD(several, mesh=mesh["dp"] if copies > 1 else None, **options)
        with single():
            truth = fastdp.DPSGD(one, **options)
        x = torch.randint(-3, 4, (4 * copies, 4), generator=torch.Generator().manual_seed(0)).float()
        several(x[mesh["dp"].get_local_rank() :: copies]).sum().backward()
        optimizer.step()
        with single():
            one(x).sum().backward()
            truth.step()
        for p, q in zip(several.parameters(), one.parameters(), strict=True):
            assert float(q.abs().max()) > 0 and torch.equal(whole(p), q)
        optimizer.detach()


def records(rank: int, world: int) -> None:
    """A loader that deals over the copies alone gives the ranks of a split model the same records."""
    mesh = tensor_mesh()
    data = torch.utils.data.TensorDataset(tokens(size=40))
    options = dict(expected_batch_size=6, max_physical_batch_size=4, seed=2, steps=4)
    several, one = split(build(), mesh["tp"], "words"), build()
    found = []
    for model, where in ((several, mesh["dp"]), (one, None)):
        with single() if where is None else contextlib.nullcontext():
            loader = fastdp.poisson_loader(data, mesh=where, **options)
            optimizer = fastdp.DPSGD(model, lr=0.5, noise_multiplier=0.5, max_grad_norm=0.3, seed=1, accountant="rdp")
            for (given,) in loader:
                (loss_of(model, given) if len(given) else model(given).sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(optimizer.epsilon(1e-5))
            optimizer.detach()
    assert found[0] == found[1]
    for p, q in zip(several.parameters(), one.parameters(), strict=True):
        assert float((whole(p) - q).abs().max()) < 1e-6
    optimizer = adamw(several)
    with pytest.raises(StepError, match="must have the same samples"):  # dealt over all ranks: each has another part
        for (given,) in fastdp.poisson_loader(data, **options):
            several(given)
    optimizer.detach()


def refused_when_made(rank: int, world: int) -> None:
    mesh = tensor_mesh()["tp"]
    with pytest.raises(ParameterError, match="memory_budget"):
        adamw(split(build(), mesh), memory_budget=1)
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    wrapped.module = split(build(), mesh)
    with pytest.raises(ParameterError, match="leave the wrapper out"):
        adamw(wrapped)
    other = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    experts = split(build(), mesh)
    experts.experts = nn.Module()
    experts.experts.weight = nn.Parameter(distribute_tensor(torch.randn(world, 2, 2), other, [Shard(0)]))
    with pytest.raises(ParameterError, match="Expert parallelism"):
        adamw(experts)
    stage = PipelineStage(build(), rank, world, torch.device("cpu"))
    with pytest.raises(ParameterError, match="Pipeline parallelism"):
        adamw(stage.submod)
    for dimension, what in (("cp", "context"), ("pp", "pipeline"), ("ep", "expert")):
        with pytest.raises(StepError, match=f"{what} parallelism is not supported"):
            both = init_device_mesh("cpu", (world, 1), mesh_dim_names=(dimension, "tp"))
            adamw(split(build(), both["tp"]), mesh=both)
    own = nn.Sequential(nn.Linear(4, 4 * world))
    with pytest.raises(ParameterError, match="a style of tests"):
        adamw(parallelize_module(own, mesh, {"0": OwnStyle()}))
    style: Any = getattr(_attention, "_ContextParallel", None)
    if style is not None:  # torch 2.9 has none
        attention = nn.Sequential(nn.Linear(4, 4), nn.Identity())
        parallelize_module(attention, mesh, {"1": style(2, style.AttentionType.SDPA)})
        with pytest.raises(ParameterError, match="context parallelism"):
            adamw(attention)
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(StepError, match="mesh=mesh"):
        adamw(split(build(), alone["tp"]))
    model = split(build(), mesh)
    optimizer = adamw(model)
    with pytest.raises(StepError, match="works in one process"):
        optimizer.graphed(loss_of)
    optimizer.detach()
    torch.manual_seed(rank)
    with pytest.raises(ParameterError, match="hold different parts"):
        torch.manual_seed(rank)
        copy = nn.Sequential(nn.Linear(4, 4, bias=False))
        parallelize_module(copy, alone["tp"], {"0": ColwiseParallel()}, src_data_rank=None)
        adamw(copy, mesh=alone["dp"])


class ByHand(nn.Module):
    """Attention of DTensors that the forward itself makes of its tensors."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.inner, self.mesh = nn.Linear(6, 6), mesh

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).view(3, 4, 2, 3).transpose(1, 2)
        whole = DTensor.from_local(heads, self.mesh, [Shard(2)], run_check=False)
        return F.scaled_dot_product_attention(whole, whole, whole).to_local().transpose(1, 2).reshape(3, 4, 6)


def refused_pipelines(rank: int, world: int) -> None:
    """Whatever the optimizer is given of a model that is cut into stages, and whether it came first or they."""
    alone, x, here = [dist.new_group([each]) for each in range(world)][rank], torch.ones(4, 6), torch.device("cpu")

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 3)))

    traced, cut, outer = layers(), layers(), layers()
    kept = [  # a model's own modules, the model that was traced, a module of the stage
        pipeline(traced, mb_args=(x[:2],), split_spec={"1": SplitPoint.BEGINNING}).build_stage(rank % 2, here),
        PipelineStage(cut[1], rank, world, here),
        PipelineStage(outer, rank, world, here),
    ]
    for model in (traced, cut, outer[1]):
        with pytest.raises(ParameterError, match="Pipeline parallelism"):
            adamw(model)
    assert len(kept) == 3
    for several in (True, False):  # both stages run in one process, each with a backward of its own
        with contextlib.nullcontext() if several else single():
            model = layers()
            optimizer = adamw(model)
            stages = [PipelineStage(model[k], k, 2, here, group=alone) for k in range(2)]
            schedule = ScheduleInterleaved1F1B(list(stages), 2, loss_fn=F.cross_entropy)
            with pytest.raises(ParameterError, match="Pipeline parallelism"):
                schedule.step(x, target=torch.zeros(4, dtype=torch.long))
            optimizer.detach()


def context_parallel_comes_later(rank: int, world: int) -> None:
    """Its hooks, or its way of attention, were put in place once the optimizer was made."""
    style: Any = getattr(_attention, "_ContextParallel", None)
    if style is None:  # torch 2.9 has none
        return
    for kind in style.AttentionType:
        model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
        optimizer = adamw(model)
        parallelize_module(model, tensor_mesh()["tp"], {"1": style(2, kind)})
        with pytest.raises(ParameterError, match="context parallelism"):
            model(torch.ones(2, 4))
        optimizer.detach()
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = adamw(model)
    _attention._enable_context_parallel_dispatcher()
    try:
        with pytest.raises(StepError, match="context parallelism"):
            model(torch.ones(2, 4))
    finally:
        _attention._disable_context_parallel_dispatcher()
    optimizer.detach()
    refused(ByHand(tensor_mesh()["tp"]), torch.randn(3, 4, 6), SampleMixingError, "combines the samples")


def refused(model: nn.Module, given: Any, kind: type, match: str, step: bool = False) -> None:
    """One backward (or step) of a new optimizer raises this error on every rank."""
    optimizer = adamw(model)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        with pytest.raises(kind, match=match):
            out = model(given)
            F.cross_entropy(out.flatten(0, 1), torch.zeros(out.size(0) * out.size(1), dtype=torch.long)).backward()
            if step:
                optimizer.step()
        assert all(torch.equal(whole(a), whole(b)) for a, b in zip(model.parameters(), before, strict=True))
    finally:
        optimizer.detach()


class Sequence(nn.Module):
    """A norm on a part of the tokens, with something beside it."""

    def __init__(self, beside: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.beside = nn.Embedding(WORDS, D), nn.LayerNorm(D), beside
        self.head = nn.Linear(D, WORDS)

    def forward(self, given: Tensor) -> Tensor:
        return self.head(self.norm(self.beside(self.words(given))))

    def laid_out(self, mesh: Any, **plan: Any) -> Any:
        return parallelize_module(self, mesh, {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(), "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            **plan,
        })  # fmt: skip


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.square()


class OwnStyle(ColwiseParallel):
    @staticmethod
    def _prepare_input_fn(layouts: Any, desired: Any, module: Any, inputs: Any, mesh: Any) -> Any:
        return ColwiseParallel._prepare_input_fn(layouts, desired, module, (inputs[0].flip(0),), mesh)


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(2)


def refused_in_a_forward(rank: int, world: int) -> None:
    mesh = tensor_mesh()["tp"]
    given = tokens()
    torch.manual_seed(0)
    # a whole parameter that meets a part of the sequence: what each rank finds is a part of its gradient
    refused(Sequence(nn.Linear(D, D)).laid_out(mesh), given, StepError, "different norms", step=True)
    copied = Sequence(nn.Linear(D, D)).laid_out(mesh, beside=SequenceParallel())
    refused(copied, given, UncapturedUseError, "meets a weight placed as")
    refused(Sequence(Squared()).laid_out(mesh, beside=SequenceParallel()), given, UncapturedUseError, "'beside.weight'")
    sorted_ = Sequence(Sorted()).laid_out(
        mesh, beside=PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1))
    )
    refused(sorted_, given, UncapturedUseError, "takes a DTensor")
    torch.manual_seed(0)
    by_samples = nn.Sequential(nn.Embedding(WORDS, D), nn.LayerNorm(D), nn.Linear(D, 5))
    parallelize_module(by_samples, mesh, {"1": SequenceParallel(sequence_dim=0)})
    refused(by_samples, given, SampleMixingError, "every sample")
    joined = nn.Sequential(nn.Embedding(WORDS, D), nn.Linear(D, 8), nn.Linear(8, 5))  # samples of all ranks
    parallelize_module(joined, mesh, {"1": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel()})
    refused(joined, given, SampleMixingError, "every sample")
    refused(split(build(), mesh), tokens(seed=rank), StepError, "different batches", step=True)


def other_labels(rank: int, world: int) -> None:
    """Of a model that is split throughout: no parameter lies on each process, whose gradients would differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, D), nn.Linear(D, WORDS, bias=False))
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model, tensor_mesh()["tp"], {"0": rows, "1": ColwiseParallel(output_layouts=Replicate())})
    optimizer = adamw(model)
    for step in range(3):
        labels = tokens(seed=1)
        labels[0, -1] = (labels[0, -1] + rank * (step == 2)) % WORDS  # of one token
        out = model(tokens()[: 3 * (step > 0)])  # first an empty batch
        F.cross_entropy(out.flatten(0, 1), labels[: len(out)].flatten()).backward()
        if step < 2:
            optimizer.step()
    with pytest.raises(StepError, match="other labels"):
        optimizer.step()
    optimizer.detach()


class Flipped(nn.Module):
    """Another sign on every second rank: gradients of equal norms, which are not the same."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.weight, self.sign = nn.Parameter(torch.ones(3)), sign

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.sign


def refused_by_sums(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4 * world), nn.Linear(4 * world, 3), Flipped(1 - 2 * (rank % 2)))
    parallelize_module(model, tensor_mesh()["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = adamw(model, clipping="automatic")
    model(torch.randn(3, 4)).sum(1).mean().backward()
    with pytest.raises(StepError, match="different sums"):
        optimizer.step()
    optimizer.detach()


def messages_of_layers(rank: int, world: int) -> None:
    """A private step's agreement, all-reduce of norms, and mean of what is whole on each process are no more than the
    collectives that DTensors save by it; and what makes them reads no number of them."""
    sent: list[Sent] = []
    for private in (False, True):
        model = split(build(), tensor_mesh()["tp"], "words sequence")
        optimizer: Any = adamw(model) if private else torch.optim.AdamW(model.parameters())
        for step in range(3):
            with Sent() as found:
                loss_of(model, tokens(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        sent.append(found)
    optimizer.detach()
    ordinary, own = sent
    assert own.collectives <= ordinary.collectives, (own.kinds, own.collectives, ordinary.collectives)
    assert not set(own.reads) & set(WITH_SUMS), own.reads


OTHERS: dict[str, Any] = {
    function.__name__: function
    for function in (
        same_noise, records, refused_when_made, refused_in_a_forward, other_labels, refused_by_sums, refused_pipelines,
        context_parallel_comes_later, messages_of_layers,
    )
}  # fmt: skip
