"""What mode "ghost_fsdp" refuses, on two processes, and what all of them raise if one refuses."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fastdp.compat.opacus import PrivacyEngine, optimizers
from fastdp.compat.opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from fastdp.compat.opacus.grad_sample import GradSampleModuleFastGradientClippingFSDP
from fastdp.compat.opacus.utils.fsdp_utils import FSDP2Wrapper
from fastdp.errors import ParameterError, SampleMixingError, StepError

from ..by_hand import EXPECTED, R, network, records


def private(model: nn.Module, mode: str = "ghost_fsdp", seed: int = 4, lr: float = 1.0, **options: Any) -> Any:
    """(engine, module, optimizer, criterion, loader). The loader's batch is that of all processes."""
    engine = options.pop("engine", None) or PrivacyEngine(accountant="rdp", secure_mode=options.pop("secure", False))
    generator = None if engine.secure_mode else torch.Generator().manual_seed(seed)
    batches = DataLoader(records(), batch_size=EXPECTED, generator=torch.Generator().manual_seed(seed))
    given = {"noise_multiplier": 1.0, "max_grad_norm": R, "noise_generator": generator, **options}
    return engine, *engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), data_loader=batches, grad_sample_mode=mode,
        **given,
    )  # fmt: skip


def _made(model: nn.Module | None = None, **options: Any) -> Any:
    return private(FSDP2Wrapper(network()) if model is None else model, poisson_sampling=False, **options)


def _loss(module: nn.Module, criterion: Any) -> Any:
    x, y = records()[:4]
    return criterion(module(x), y)


def _inner() -> nn.Module:
    model = network()
    fully_shard(model[0])
    return model


def _made_early() -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return PrivacyEngine().make_private(
        module=FSDP2Wrapper(model), optimizer=optimizer, data_loader=DataLoader(records(), 10), noise_multiplier=1.0,
        max_grad_norm=R, grad_sample_mode="ghost_fsdp",
    )  # fmt: skip


def _of_another_class(kind: str) -> None:
    module = GradSampleModuleFastGradientClippingFSDP(FSDP2Wrapper(network()), max_grad_norm=R)
    optimizer = getattr(optimizers, kind)(
        torch.optim.SGD(module.parameters(), lr=1.0), noise_multiplier=1.0, max_grad_norm=R, expected_batch_size=5
    )
    _loss(module, F.cross_entropy).backward()
    optimizer.step()


class Factors(GradSampleModuleFastGradientClippingFSDP):
    def get_clipping_coef(self) -> torch.Tensor:
        return torch.ones(4)


def opacus_fsdp_refused(rank: int, world: int) -> None:
    batch_norm = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    refused: list[tuple[Any, str, Any]] = [
        (ValueError, "this one is whole: call FSDP2Wrapper", lambda: private(network())),
        (ValueError, "this one is whole", lambda: private(DPDDP(network()))),
        (NotImplementedError, "takes whole modules", lambda: private(FSDP2Wrapper(network()), "ghost")),
        (NotImplementedError, "'hooks' takes whole modules", lambda: private(FSDP2Wrapper(network()), "hooks")),
        (NotImplementedError, "by FSDP2Wrapper", lambda: private(DistributedDataParallel(network()))),
        (NotImplementedError, "'ghost_tp' takes", lambda: private(FSDP2Wrapper(network()), "ghost_tp")),
        (ValueError, "Unsupported combination", lambda: _made(clipping="per_layer", max_grad_norm=[0.1] * 4)),
        (ValueError, "Unsupported combination", lambda: _made(clipping="adaptive")),
        (ParameterError, "not on the model itself", lambda: private(_inner())),
        (ParameterError, "CPUOffloadPolicy",
         lambda: private(FSDP2Wrapper(network(), offload_policy=CPUOffloadPolicy(pin_memory=False)))),
        (ValueError, "parameters are different than.* after that", _made_early),
        (Exception, "BatchNorm", lambda: private(FSDP2Wrapper(batch_norm))),
        (StepError, "lie in parts", lambda: _of_another_class("DPOptimizerFastGradientClipping")),
        (StepError, "lie in parts", lambda: _of_another_class("DistributedDPOptimizerFastGradientClipping")),
        (NotImplementedError, "get_clipping_coef was replaced", lambda: Factors(FSDP2Wrapper(network()))),
        (StepError, "rank 1 has 'max_grad_norm: 2.0'", lambda: _steps(max_grad_norm=1.0 + rank)),
        (StepError, "rank 1 has 'a part of a batch: False'", lambda: _steps(skips=rank == 0)),
        (StepError, "a collective of torch.distributed", lambda: _steps(between=dist.barrier)),
    ]  # fmt: skip
    for kind, match, run in refused:
        with pytest.raises(kind, match=match):
            run()
        gc.collect()  # the modes of forwards that no backward followed end here, not within a call of torch's


def _steps(skips: bool | None = None, between: Any = lambda: None, **options: Any) -> None:
    _, module, optimizer, criterion, _ = _made(**options)
    if skips is not None:
        optimizer.signal_skip_step(do_skip=skips)
    loss = _loss(module, criterion)
    between()
    loss.backward()
    optimizer.step()


def opacus_fsdp_refused_by_one(rank: int, world: int) -> None:
    """An error of the last rank is raised by all, soon, and nobody has stepped."""

    def couples(module: Any, out: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))

    def fails(module: Any, out: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        module.clip = lambda squares: 1 / 0
        return loss

    def again(module: Any, out: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        module.forbid_grad_accumulation()
        return loss

    for one, kind in ((couples, SampleMixingError), (fails, ZeroDivisionError), (again, ValueError)):
        model = FSDP2Wrapper(network())
        engine, module, optimizer, criterion, _ = _made(model)
        x, y = records()[:4]
        before, begun = [p.to_local().detach().clone() for p in model.parameters()], time.monotonic()
        if one is again:
            _loss(module, criterion).backward()
        with pytest.raises(kind if rank == world - 1 or kind is SampleMixingError else StepError) as caught:
            out = module(x)
            loss = criterion(out, y)
            (one(module, out, loss) if rank == world - 1 else loss).backward()
            optimizer.step()
        assert rank == world - 1 or f"rank {world - 1} refused" in str(caught.value)
        assert time.monotonic() - begun < 10 and not engine.accountant.history
        assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), before, strict=True))
        module.cleanup()
        del caught, out, loss, module, optimizer, criterion
        gc.collect()


CASES: dict[str, Any] = {case.__name__: case for case in (opacus_fsdp_refused, opacus_fsdp_refused_by_one)}
