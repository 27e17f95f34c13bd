"""PrivacyEngine: Opacus's entry point, with fastdp's engine."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from opacus import privacy_engine as theirs
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Sampler

from ...accounting import warn_of_delta
from ...data.weighted_samplers import REMEDY, sampler_of, uneven
from ...distributed.sharded import is_sharded, to_parts
from ...errors import SampleRateWarning
from .accountants import create_accountant, get_noise_multiplier
from .data_loader import DPDataLoader, SecureGenerator, switch_generator
from .distributed import DifferentiallyPrivateDistributedDataParallel
from .grad_sample import AbstractGradSampleHooks, AbstractGradSampleModule, get_gsm_class, prepare_module
from .grad_sample.grad_sample_module import owners_of
from .optimizers import DPOptimizer, get_optimizer_class
from .utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from .validators import ModuleValidator

__all__ = ["AbstractGradSampleHooks", "PrivacyEngine"]
_OPTIMIZERS: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()  # of each module


class PrivacyEngine(theirs.PrivacyEngine):  # type: ignore[misc]
    """Makes a module, an optimizer and a data loader private, and accounts for the steps. `make_private` is Opacus's.

    Args:
        accountant: "prv", "rdp" or "gdp".
        secure_mode: whether noise and sampling come from the operating system's entropy (ChaCha20 for the noise;
            torchcsprng is not needed). Without it, a run is repeatable by torch.manual_seed, and a warning says that it
            is for experiments.

    >>> import torch, warnings
    >>> warnings.simplefilter("ignore")
    >>> data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randint(0, 2, (64,)))
    >>> model = nn.Linear(3, 2)
    >>> model, optimizer, loader = PrivacyEngine().make_private(
    ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, 8),
    ...     noise_multiplier=1.0, max_grad_norm=1.0,
    ... )
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     nn.functional.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        self.accountant: Any = create_accountant(mechanism=accountant)
        self.secure_mode = secure_mode
        self.secure_rng = SecureGenerator() if secure_mode else None
        self.dataset: Any = None  # of the first make_private
        if not secure_mode:
            warnings.warn(
                "Secure RNG turned off: noise and sampling follow torch's generator, and whoever knows its seed can "
                "undo them. That is for experiments; train what you release with secure_mode=True.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------ what make_private is made of

    def _prepare_optimizer(
        self,
        *,
        optimizer: optim.Optimizer,
        expected_batch_size: float,
        distributed: bool = False,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        **options: Any,
    ) -> DPOptimizer:
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        return get_optimizer_class(clipping, self._distributed, grad_sample_mode)(
            optimizer=optimizer,
            expected_batch_size=self._expected_batch_size,
            generator=self.secure_rng if self.secure_mode else noise_generator,
            secure_mode=self.secure_mode,
            **options,
        )

    def _prepare_data_loader(
        self, data_loader: DataLoader[Any], *, poisson_sampling: bool, distributed: bool, **options: Any
    ) -> DataLoader[Any]:
        if self.dataset is None:
            self.dataset = data_loader.dataset
        elif self.dataset is not data_loader.dataset:
            warnings.warn(
                f"PrivacyEngine detected new dataset object. Was: {self.dataset}, got: {data_loader.dataset}. "
                "The accountant counts the steps on one dataset: make another PrivacyEngine for other data, or go on "
                "if both are the same.",
                stacklevel=4,
            )
        if poisson_sampling:
            data_loader = DPDataLoader.from_data_loader(
                data_loader, generator=self.secure_rng, distributed=self._distributed, **options
            )
        elif self.secure_mode:
            data_loader = switch_generator(data_loader=data_loader, generator=self.secure_rng)
        self._sample_rate = _sample_rate_of(data_loader)
        size = max(1, int(len(data_loader.dataset) * self._sample_rate * (1 + 1e-12)))  # type: ignore[arg-type]
        self._expected_batch_size = size / torch.distributed.get_world_size() if self._distributed else size
        return data_loader

    def _prepare_model(
        self,
        module: nn.Module,
        *,
        max_grad_norm: float | list[float] = 1.0,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        **options: Any,
    ) -> Any:
        self.validate(module=module, optimizer=None, data_loader=None)
        if wrap_model and isinstance(module, AbstractGradSampleModule):
            asked = {**options, "class": get_gsm_class(grad_sample_mode)}
            found = {name: getattr(module, name) for name in options} | {"class": type(module)}
            if found != asked:
                raise ValueError(
                    f"Pre-existing GradSampleModule doesn't match new arguments: it has {found}, asked for was "
                    f"{asked}. Give the plain module."
                )
            return module
        if "ghost" in grad_sample_mode:
            options["max_grad_norm"] = max_grad_norm
        return prepare_module(module, grad_sample_mode=grad_sample_mode, wrap_model=wrap_model, **options)

    def _prepare_criterion(
        self, *, module: Any, optimizer: Any, criterion: Any, loss_reduction: str = "mean", **kwargs: Any
    ) -> DPLossFastGradientClipping:
        return DPLossFastGradientClipping(module, optimizer, criterion, loss_reduction)

    # ------------------------------------------------------------------ modules

    def is_compatible(self, *, module: nn.Module, optimizer: Any, data_loader: Any) -> bool:
        """Return whether the module can be trained privately."""
        return bool(ModuleValidator.is_valid(module))

    def validate(self, *, module: nn.Module, optimizer: Any, data_loader: Any) -> None:
        """Raise UnsupportedModuleError if the module cannot be trained privately."""
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return a copy without layers that cannot be trained privately. Raises UnsupportedModuleError."""
        return ModuleValidator.fix_and_validate(module)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ make_private

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = nn.CrossEntropyLoss(),  # noqa: B008  (Opacus's default; used in mode "ghost" only)
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Make the parts of an ordinary training loop private.

        Args:
            module, optimizer, data_loader: those of an ordinary training loop.
            criterion: the loss that the returned criterion averages over each sample first, in the modes "ghost".
            noise_multiplier: the standard deviation of the noise on the sum of gradients, over max_grad_norm.
            max_grad_norm: the clipping norm; for clipping="per_layer", a list with one for each parameter.
            batch_first: whether samples lie along the first dimension of the inputs; False means the second.
            loss_reduction: "mean" or "sum", which is how the loss combines the samples' losses.
            poisson_sampling: whether to sample as accounted for. Without it, the loader stays, and epsilon is an
                approximation.
            clipping: "flat", "per_layer" or "adaptive" (with the further arguments of `AdaClipDPOptimizer`).
            noise_generator: a torch.Generator that makes the noise repeatable.
            grad_sample_mode: "hooks", "functorch", "ew" and "ghost" run on one engine, and offer per-sample gradients
                in `p.grad_sample`, which are computed on access. "ghost_fsdp" is for a module that `FSDP2Wrapper` has
                cut. "ghost_tp" is refused.
            wrap_model: False leaves the module as it is, and returns hooks with `cleanup()` in its place.
            rand_on_empty: whether an empty sample becomes a batch of one row of random zeros and ones.

        Returns (module, optimizer, data_loader), or in the modes "ghost" (module, optimizer, criterion, data_loader).
        Raises UnsupportedModuleError if the module cannot be trained privately, ValueError if an argument is invalid,
        and NotImplementedError if a mode, or the module's wrapper, is not supported.
        """
        self._distributed = _is_distributed(module, grad_sample_mode)
        known = {id(p) for p in module.parameters()}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "Module parameters are different than optimizer Parameters. Make the optimizer of this very module's "
                "parameters; if FSDP2Wrapper or fully_shard has cut it, after that and before any forward."
            )
        before = owners_of(module.parameters())
        try:
            made = super().make_private(
                module=module, optimizer=optimizer, criterion=criterion, data_loader=data_loader,
                noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, batch_first=batch_first,
                loss_reduction=loss_reduction, poisson_sampling=poisson_sampling, clipping=clipping,
                noise_generator=noise_generator, grad_sample_mode=grad_sample_mode, wrap_model=wrap_model,
                rand_on_empty=rand_on_empty, **kwargs,
            )  # fmt: skip
        except Exception:  # the module is then as it was
            for hooks in owners_of(module.parameters()):
                if hooks not in before:
                    hooks.cleanup()
            raise
        made[1].attach_step_hook(self.accountant.get_optimizer_hook_fn(sample_rate=self._sample_rate))
        _warn_of_others(made[0], made[1])
        return made

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = nn.CrossEntropyLoss(),  # noqa: B008
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run `make_private` with the noise that spends target_epsilon at target_delta in this many epochs."""
        if len(self.accountant) > 0:
            warnings.warn(
                "You're calling make_private_with_epsilon with non-zero privacy budget already spent: the noise "
                "multiplier is for target_epsilon from here on, so the whole run will cost more.",
                stacklevel=2,
            )
        warn_of_delta(target_delta, _records_of(data_loader))
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=1 / len(data_loader) if poisson_sampling else _sample_rate_of(data_loader),
            steps=int(epochs * len(data_loader)),
            accountant=self.accountant.mechanism(),
            **kwargs,
        )
        return self.make_private(
            module=module, optimizer=optimizer, data_loader=data_loader, criterion=criterion,
            noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, batch_first=batch_first,
            loss_reduction=loss_reduction, noise_generator=noise_generator, grad_sample_mode=grad_sample_mode,
            poisson_sampling=poisson_sampling, clipping=clipping, wrap_model=wrap_model, **kwargs,
        )  # fmt: skip

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon at delta for the steps so far. Warns if delta is 1 / records or more."""
        warn_of_delta(delta, _records_of(self))
        return max(0.0, float(self.accountant.get_epsilon(delta)))


def _is_distributed(module: Any, grad_sample_mode: str) -> bool:
    """Whether the module trains in a process group. What fully_shard has cut is left in its parts by this.

    Raises NotImplementedError if it is wrapped in another way, or in one that the mode does not know.
    """
    plain = module._module if isinstance(module, AbstractGradSampleModule) else module
    if is_sharded(plain):
        if grad_sample_mode != "ghost_fsdp":
            raise NotImplementedError(
                f"grad_sample_mode {grad_sample_mode!r} takes whole modules, and fully_shard has cut this one "
                f"({type(plain).__name__}): take grad_sample_mode='ghost_fsdp'"
            )
        to_parts(plain)
        return True
    if isinstance(plain, DistributedDataParallel):
        raise NotImplementedError(
            f"{type(plain).__name__} is not supported by make_private: give each process the whole module in "
            "fastdp.compat.opacus.distributed.DifferentiallyPrivateDistributedDataParallel, or a part of it by "
            "FSDP2Wrapper and grad_sample_mode='ghost_fsdp'."
        )
    return isinstance(plain, DifferentiallyPrivateDistributedDataParallel)


def _sample_rate_of(data_loader: Any) -> float:
    """The rate that is accounted for: at which the loader or its batch sampler says that it samples, else 1 / len.

    Where a pass draws more records than there are (with replacement) 1 / len is the part of a pass, and of the records
    a batch takes so many times as much. Raises ValueError where some records are drawn more often than others.
    """
    for part in (data_loader, getattr(data_loader, "batch_sampler", None)):
        if isinstance(rate := getattr(part, "sample_rate", None), float | int):
            return float(rate)
    if why := uneven(sampler_of(data_loader), _records_of(data_loader) or 0):
        raise ValueError(f"{why}, so no sample rate is that of every record, and epsilon would be too small. {REMEDY}")
    rate, sampler = 1 / len(data_loader), getattr(data_loader, "sampler", None)
    if (own := getattr(data_loader, "batch_sampler", None)) is not None and not isinstance(own, BatchSampler):
        warnings.warn(
            f"the batch sampler {type(own).__name__} has no attribute sample_rate: epsilon takes its "
            f"{len(data_loader)} batches for one pass over the records (a rate of {rate:.3g}). If they take more, give "
            "it this attribute, the probability that a record is in a batch.",
            SampleRateWarning,
            stacklevel=4,
        )
    if not isinstance(sampler, Sampler) or not isinstance(data_loader.batch_sampler, BatchSampler):
        return rate
    return min(1.0, rate * max(1.0, len(sampler) / len(data_loader.dataset)))  # type: ignore[arg-type]


def _records_of(holder: Any) -> int | None:
    """How many records the data set of a loader or an engine has; None where they cannot be counted."""
    try:
        return len(holder.dataset)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def _warn_of_others(hooks: Any, made: DPOptimizer) -> None:
    """Warn if the module already has another private optimizer."""
    others = _OPTIMIZERS.setdefault(hooks, weakref.WeakSet())
    if len(others):
        warnings.warn(
            "this module has another private optimizer: if both step on the same batch, its samples are released "
            "twice, which is accounted as if two batches had been drawn, and epsilon is understated. Use one optimizer "
            "with parameter groups, or delete the other.",
            stacklevel=3,
        )
    others.add(made)
