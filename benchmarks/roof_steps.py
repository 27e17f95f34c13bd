"""An ordinary and a private step of a workload on the meta device, as lists of the kernels that they would run.

Nothing is computed and no memory is taken: the engine itself runs, hooks, planner, optimizer and all, on tensors
without numbers. Where it asks for a number it is told what holds in a step that goes through ("yes", 1). What it asks
and does once is left out: the second step is the one that is written down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fastdp
from fastdp.engine import tracked_parameters
from fastdp.grad_sample import cost_model
from fastdp.ops.registry import watched

from .models import Workload
from .roof_jobs import Job, Part, operator_job, sizes, tensors, torch_job
from .roof_kernels import seen

META = torch.device("meta")
TENSORS, ELEMENTS = 36, 320 * 65536  # of a launch of torch's fused AdamW, at most


class Steps(NamedTuple):
    """The kernels of both steps, and the private one's plan."""

    ordinary: list[Job]
    private: list[Job]
    plan: str


class Recorder(TorchDispatchMode):
    """Writes down every call below it."""

    def __init__(self, known: dict[Any, Job]) -> None:
        super().__init__()
        self.jobs: list[Job] = []
        self.known = known  # of operators: the same call on the same shapes is looked into once

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or 1
        out = func(*args, **kwargs)
        if not any(t.device.type == "meta" for t in tensors((args, kwargs, out))):
            return out  # the host's own
        job = self.operator(func, args, kwargs, out) if func.namespace == "fastdp" else None
        job = job or (torch_job(func, args, kwargs, out) if func.namespace == "aten" else None)
        if job is not None:
            self.jobs.append(job)
        return out

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Job:
        given = tensors((args, kwargs))
        rest = [str(a) for a in (*args, *kwargs.values()) if isinstance(a, str | int | list)] if len(given) < 9 else []
        key = (func, sizes(given), *[(t.dtype, t.stride()) for t in given], *[r for r in rest if "tensor" not in r])
        if key not in self.known:
            self.known[key] = operator_job(func, args, kwargs, out, self.within)
        return self.known[key]

    def within(self, run: Callable[[], Any]) -> list[Job]:
        """The calls that a function makes."""
        inner = Recorder(self.known)
        with _disable_current_modes(), torch.no_grad(), inner:
            run()
        return inner.jobs


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """What a GPU takes for attention in 16 bits; the meta device would take it apart."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within it tensors on the meta device stand for a GPU's: for attention, autocast, the planner and the engine."""
    asked = torch.is_autocast_enabled
    config = torch.fx.experimental._config
    before = config.meta_nonzero_assume_all_nonzero
    for short in (True, False):
        cost_model.keep(META, short, cost_model.DEFAULTS["cuda"])
    try:
        torch.is_autocast_enabled = lambda *kind: False if kind == ("meta",) else asked(*kind)
        config.meta_nonzero_assume_all_nonzero = True
        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
            yield
    finally:
        torch.is_autocast_enabled = asked
        config.meta_nonzero_assume_all_nonzero = before
        cost_model.forget()


@contextmanager
def _without_values() -> Iterator[None]:
    """Within it an engine may be made for parameters without numbers, which it refuses otherwise."""
    before = tracked_parameters.is_lazy
    tracked_parameters.is_lazy = lambda parameter: True  # type: ignore[assignment]
    try:
        yield
    finally:
        tracked_parameters.is_lazy = before


def _placed(work: Workload, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """The model and a batch, on the meta device."""
    x, y = work.batch(work.batch_size)
    with META:
        model = work.build().to(dtype)
    x, y = x.to(META), y.to(META)
    return model, x.to(dtype) if x.is_floating_point() else x, y


def adamw(parameters: list[nn.Parameter]) -> Job:
    """torch's fused AdamW: weights, gradients and both moments read, all but the gradients written."""
    count, size = sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)
    launches = max(math.ceil(len(parameters) / TENSORS), math.ceil(count / ELEMENTS))
    return Job("fused_adamw", f"{count / 1e6:.1f}M in {len(parameters)}", (Part(0.0, 7.0 * size, launches),))


def steps_of(work: Workload, dtype: torch.dtype = torch.bfloat16) -> Steps:
    """The kernels of an ordinary step (fused AdamW) and of a private one (flat clipping, noise, AdamW)."""
    known: dict[Any, Job] = {}
    with as_on_a_gpu():
        model, x, y = _placed(work, dtype)
        plain = Recorder(known)
        with plain:
            work.losses(model(x), y).mean().backward()
        model.zero_grad()
        plain.jobs.append(adamw([p for p in model.parameters() if p.requires_grad]))
        with _without_values():
            optimizer = fastdp.DPAdamW(
                model, lr=1e-3, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=work.batch_size
            )
        for _ in range(2):
            private = Recorder(known)
            with private, watched(), seen(private.within, private.jobs.append):
                work.losses(model(x), y).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        plan = optimizer.explain()
        optimizer.detach()
    return Steps(plain.jobs, private.jobs, plan)
