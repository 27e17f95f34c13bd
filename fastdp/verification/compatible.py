"""Replace what cannot be private: statistics of the batch become statistics of each sample alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from ..errors import ParameterError

MOST_GROUPS = 32
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Change(NamedTuple):
    """One module: its paths, what it was, and what it is now, or why it stayed."""

    paths: tuple[str, ...]
    before: str
    after: str

    def __str__(self) -> str:
        return f"{', '.join(path or '(the model itself)' for path in self.paths)}: {self.before} -> {self.after}"


@dataclass
class CompatibilityReport:
    """What `make_compatible` did, with one `Change` per module. `print` shows a line for each.

    Attributes:
        model: the model.
        changed: modules that were replaced, or had an option switched off.
        kept: constant maps that were left alone (keep_eval).
        left: modules that depend on the whole batch and could not be replaced; `after` says why and what to do.
    """

    model: nn.Module
    changed: list[Change] = field(default_factory=list)
    kept: list[Change] = field(default_factory=list)
    left: list[Change] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no module is left that is known to mix samples. `fastdp.verify` finds unknown ones."""
        return not self.left

    def __str__(self) -> str:
        lines = [f"fastdp.make_compatible: {len(self.changed)} changed, {len(self.kept)} kept, {len(self.left)} left"]
        for title, changes in (("", self.changed), ("kept ", self.kept), ("LEFT ", self.left)):
            lines += [f"  {title}{change}" for change in changes]
        return "\n".join(lines)


class GroupNormThen(nn.GroupNorm):
    """Group norm, then its child modules in order, for norms that hold their activation."""

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        for child in self.children():
            out = child(out)
        return out


class _Irreplaceable(Exception):
    """The reason why a module stays."""


def make_compatible(model: nn.Module, *, keep_eval: bool = False, inplace: bool = True) -> CompatibilityReport:
    """Make modules depend on each sample alone if their output for one sample depends on the others.

    - BatchNorm1d/2d/3d, SyncBatchNorm and derived classes become GroupNorm (see `groups_of`). If a derived class has
      its own forward, that must be the norm and then its child modules in order, which is tested on numbers. Otherwise
      the module is left, because its other work would be lost.
    - InstanceNorm loses its running statistics, which would be released without noise.
    - Embedding and EmbeddingBag lose max_norm and scale_grad_by_freq, which depend on the whole batch.

    The module objects change class in place, so every reference sees the new module, also if it is the model itself.
    Hooks, training mode and the Parameter objects stay, so ties, devices, types, requires_grad and existing optimizers
    remain valid. Running statistics are dropped: load a checkpoint before, not after, and continue training, because
    the outputs of a trained model change. A second call changes nothing.

    Args:
        model: any nn.Module.
        keep_eval: whether to leave batch and instance norms alone that are in eval mode with running statistics. They
            are constant maps, and private as long as nobody calls train() on them. (Whole models often arrive in eval
            mode.)
        inplace: False works on a deep copy, with copied parameters.

    Returns:
        A CompatibilityReport. `report.left` lists what mixes samples and could not be replaced. `fastdp.verify` finds
            code outside known modules that mixes samples.

    Raises:
        ParameterError: if a lazy norm has seen no data.
        TypeError: if model is not a module.

    Source: group normalisation, Wu and He 2018 (arXiv 1803.08494).

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 48, 3), torch.nn.BatchNorm2d(48))
    >>> print(make_compatible(model))
    fastdp.make_compatible: 1 changed, 0 kept, 0 left
      1: BatchNorm2d(48) -> GroupNorm(24, 48)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    _refuse_lazy(model)
    if not inplace:
        model = copy.deepcopy(model)
    report = CompatibilityReport(model)
    for paths, module in _places(model):
        before = f"{type(module).__name__}({getattr(module, 'num_features', '')})"
        try:
            if keep_eval and _is_constant(module):
                report.kept.append(Change(paths, before, "kept: a constant map as long as it stays in eval mode"))
                continue
            after = _changed(module)
        except _Irreplaceable as reason:
            report.left.append(Change(paths, before, str(reason)))
            continue
        if after:
            report.changed.append(Change(paths, before, after))
    return report


def groups_of(channels: int, least: int = 2) -> int:
    """The largest divisor of the channels up to 32 that leaves `least` channels or more in a group; else 1.

    A group of one channel with one value would be normalised to a constant, and one of two values to +-1.
    """
    fitting = [n for n in range(1, MOST_GROUPS + 1) if channels % n == 0 and channels // n >= least]
    return max(fitting, default=1)


def _places(model: nn.Module) -> list[tuple[tuple[str, ...], nn.Module]]:
    """Every module once, with all its paths."""
    found: dict[int, tuple[list[str], nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), ([], module))[0].append(path)
    return [(tuple(paths), module) for paths, module in found.values()]


def _refuse_lazy(model: nn.Module) -> None:
    for path, module in model.named_modules():
        norm = isinstance(module, _BatchNorm | _InstanceNorm) and isinstance(module, LazyModuleMixin)
        if norm and (module.has_uninitialized_params() or not getattr(module, "num_features", 1)):
            raise ParameterError(
                f"'{path}' is a {type(module).__name__} that has seen no data: its number of channels is not known "
                "yet. Run the model on a batch once, then call make_compatible."
            )


def _is_constant(module: nn.Module) -> bool:
    norm = isinstance(module, _BatchNorm | _InstanceNorm)
    return norm and not module.training and getattr(module, "running_mean", None) is not None


# --------------------------------------------------------------------------- one module


def _changed(module: nn.Module) -> str:
    """Change the module if need be; what was done, or ""."""
    if isinstance(module, _InstanceNorm):
        return _drop_instance_statistics(module)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return _switch_off_coupling(module)
    if isinstance(module, _BatchNorm):
        return _become_group_norm(module)
    return ""


def _drop_instance_statistics(norm: Any) -> str:
    if norm.running_mean is None and not norm.track_running_stats:
        return ""
    _check_changeable(norm)
    for name in _STATISTICS:
        norm._buffers[name] = None
    norm.track_running_stats = False
    return f"{type(norm).__name__} without running statistics"


def _switch_off_coupling(table: Any) -> str:
    done = []
    if table.max_norm is not None:
        done.append(f"max_norm={table.max_norm} switched off")
        table.max_norm = None
    if table.scale_grad_by_freq:
        done.append("scale_grad_by_freq switched off")
        table.scale_grad_by_freq = False
    return ", ".join(done)


def _become_group_norm(norm: Any) -> str:
    _check_changeable(norm)
    followers = [name for name, child in norm._modules.items() if child is not None]
    if not type(norm).forward.__module__.startswith("torch."):  # a forward that was written outside of torch
        _try_forward(norm)
    channels = int(norm.num_features)
    if channels == 1 and isinstance(norm, nn.BatchNorm1d):
        raise _Irreplaceable("has one channel: a single number, normalised by itself, is constant. Take it out")
    groups = groups_of(channels, least=8 if isinstance(norm, nn.BatchNorm1d) else 2)
    norm.__class__ = GroupNormThen if followers else nn.GroupNorm
    for name in _STATISTICS:
        norm._buffers.pop(name, None)
        norm._non_persistent_buffers_set.discard(name)
    for name in ("momentum", "track_running_stats", "process_group"):
        norm.__dict__.pop(name, None)
    norm.num_groups, norm.num_channels = groups, channels
    then = f", then {', '.join(followers)}" if followers else ""
    return f"GroupNorm({groups}, {channels}){then}"


def _try_forward(norm: Any) -> None:
    """Raises _Irreplaceable unless a forward of the norm's own is batch norm and then its children in their order."""
    twin = copy.deepcopy(norm).to("cpu", torch.float32)
    generator = torch.Generator().manual_seed(1)
    sizes = {nn.BatchNorm1d: (), nn.BatchNorm3d: (4, 4, 4)}
    spatial = next((size for kind, size in sizes.items() if isinstance(norm, kind)), (4, 4))
    x = torch.randn(4, int(norm.num_features), *spatial, generator=generator)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for tensor in (*twin._parameters.values(), twin.running_mean, twin.running_var):
            if tensor is not None:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        modes = (False,) if isinstance(norm, nn.SyncBatchNorm) else (False, True)  # that one trains on devices only
        if not all(_does_no_more(twin.train(training), x) for training in modes):
            raise _Irreplaceable(
                "its own forward() is not that of a batch norm and then its children in their order, so something "
                "would be lost: replace it by torch.nn.GroupNorm by hand"
            )


def _does_no_more(norm: Any, x: Tensor) -> bool:
    mean, var = (None if t is None else t.clone() for t in (norm.running_mean, norm.running_var))
    want = F.batch_norm(x, mean, var, norm.weight, norm.bias, norm.training or mean is None, 0.0, norm.eps)
    try:
        torch.manual_seed(0)
        for child in norm.children():
            want = child(want)
        torch.manual_seed(0)
        found = type(norm).forward(norm, x)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as problem:
        raise _Irreplaceable(f"its own forward() could not be tried ({problem}): replace it by hand") from None
    alike = isinstance(found, Tensor) and found.shape == want.shape
    return alike and torch.allclose(found, want, 1e-4, 1e-5)


def _check_changeable(norm: nn.Module) -> None:
    if isinstance(norm, torch.jit.ScriptModule):
        raise _Irreplaceable("is compiled by torch.jit: make the model compatible before")
    if parametrize.is_parametrized(norm):
        raise _Irreplaceable(
            "is parametrized: torch.nn.utils.parametrize.remove_parametrizations first, and put it on again after"
        )
    if "forward" in norm.__dict__:
        raise _Irreplaceable("its forward was replaced (by a hook of another library, perhaps): take that off first")
