"""PrivacyEngine: Opacus's entry point, with fastdp's engine."""

from __future__ import annotations

import warnings
from typing import Any

from opacus import privacy_engine as theirs
from torch import nn, optim
from torch.utils.data import DataLoader

from ...accounting import warn_of_delta
from .accountants import create_accountant, get_noise_multiplier
from .data_loader import DPDataLoader, SecureGenerator, switch_generator
from .grad_sample import AbstractGradSampleHooks, AbstractGradSampleModule, get_gsm_class, prepare_module
from .optimizers import DPOptimizer, get_optimizer_class
from .preparation import (
    check_parameters,
    expected_batch_size_of,
    is_distributed,
    note_optimizer,
    or_as_it_was,
    records_of,
    sample_rate_of,
)
from .utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from .validators import ModuleValidator

GHOST = ("ghost", "ghost_fsdp", "ghost_tp")


class PrivacyEngine(theirs.PrivacyEngine):  # type: ignore[misc]
    """Makes a module, an optimizer and a data loader private, and accounts for the steps.

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
        self.secure_rng: Any = None
        self.dataset: Any = None  # of the first make_private
        if secure_mode:
            self.secure_rng = SecureGenerator()
        else:
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
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        expected_batch_size: float,
        loss_reduction: str = "mean",
        distributed: bool = False,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        **kwargs: Any,
    ) -> DPOptimizer:
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        made: Any = get_optimizer_class(clipping, distributed, grad_sample_mode)
        return made(  # type: ignore[no-any-return]
            optimizer=optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=self.secure_rng if self.secure_mode else noise_generator,
            secure_mode=self.secure_mode,
            **kwargs,
        )

    def _prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        *,
        poisson_sampling: bool,
        distributed: bool,
        batch_first: bool = True,
        rand_on_empty: bool = False,
    ) -> DataLoader[Any]:
        if self.dataset is None:
            self.dataset = data_loader.dataset
        elif self.dataset is not data_loader.dataset:
            warnings.warn(
                f"PrivacyEngine detected new dataset object. Was: {self.dataset}, got: {data_loader.dataset}. "
                "The accountant counts the steps on one dataset: make another PrivacyEngine for other data, or go on "
                "if both are the same.",
                stacklevel=3,
            )
        if poisson_sampling:
            return DPDataLoader.from_data_loader(
                data_loader, generator=self.secure_rng, distributed=distributed, batch_first=batch_first,
                rand_on_empty=rand_on_empty,
            )  # fmt: skip
        if self.secure_mode:
            return switch_generator(data_loader=data_loader, generator=self.secure_rng)
        return data_loader

    def _prepare_model(
        self,
        module: nn.Module,
        *,
        batch_first: bool = True,
        max_grad_norm: float | list[float] = 1.0,
        loss_reduction: str = "mean",
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
    ) -> Any:
        self.validate(module=module, optimizer=None, data_loader=None)
        if wrap_model and isinstance(module, AbstractGradSampleModule):
            found = (module.batch_first, module.loss_reduction, type(module))
            asked = (batch_first, loss_reduction, get_gsm_class(grad_sample_mode))
            if found != asked:
                raise ValueError(
                    "Pre-existing GradSampleModule doesn't match new arguments: (batch_first, loss_reduction, class) "
                    f"is {found}, asked for was {asked}. Give the plain module."
                )
            return module
        options: dict[str, Any] = {"batch_first": batch_first, "loss_reduction": loss_reduction}
        if grad_sample_mode in GHOST:
            options["max_grad_norm"] = max_grad_norm
        return prepare_module(module, grad_sample_mode=grad_sample_mode, wrap_model=wrap_model, **options)

    def _prepare_criterion(
        self, *, module: Any, optimizer: Any, criterion: Any, loss_reduction: str = "mean", **kwargs: Any
    ) -> DPLossFastGradientClipping:
        return DPLossFastGradientClipping(module, optimizer, criterion, loss_reduction)

    # ------------------------------------------------------------------ modules

    def is_compatible(
        self, *, module: nn.Module, optimizer: optim.Optimizer | None, data_loader: DataLoader[Any] | None
    ) -> bool:
        """Return whether the module can be trained privately."""
        return bool(ModuleValidator.is_valid(module))

    def validate(
        self, *, module: nn.Module, optimizer: optim.Optimizer | None, data_loader: DataLoader[Any] | None
    ) -> None:
        """Raise UnsupportedModuleError if the module cannot be trained privately."""
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return a copy without layers that cannot be trained privately. Raises UnsupportedModuleError."""
        module = ModuleValidator.fix(module)
        ModuleValidator.validate(module, strict=True)
        return module

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
            grad_sample_mode: "hooks", "functorch" and "ew" offer per-sample gradients in `p.grad_sample`, which are
                computed on access; "ghost" does not. All run on one engine. "ghost_fsdp" is "ghost" on a module that
                `FSDP2Wrapper` has cut. "ghost_tp" is refused.
            wrap_model: False leaves the module as it is, and returns hooks with `cleanup()` in its place.
            rand_on_empty: whether an empty sample becomes a batch of one row of random zeros and ones.

        Returns (module, optimizer, data_loader), or in the modes "ghost" (module, optimizer, criterion, data_loader).
        Raises UnsupportedModuleError if the module cannot be trained privately, ValueError if an argument is invalid,
        and NotImplementedError if a mode, or the module's wrapper, is not supported.
        """
        if noise_generator and self.secure_mode:
            raise ValueError("Passing seed is prohibited in secure mode")
        distributed, given = is_distributed(module, grad_sample_mode), module
        check_parameters(module, optimizer)
        module = self._prepare_model(
            module,
            batch_first=batch_first,
            max_grad_norm=max_grad_norm,
            loss_reduction=loss_reduction,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
        )
        hooks: Any = module
        with or_as_it_was(hooks, given):
            if poisson_sampling:
                hooks.forbid_grad_accumulation()
            data_loader = self._prepare_data_loader(
                data_loader,
                distributed=distributed,
                poisson_sampling=poisson_sampling,
                batch_first=batch_first,
                rand_on_empty=rand_on_empty,
            )
            sample_rate = sample_rate_of(data_loader)
            made = self._prepare_optimizer(
                optimizer=optimizer,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                expected_batch_size=expected_batch_size_of(data_loader, sample_rate, distributed),
                loss_reduction=loss_reduction,
                noise_generator=noise_generator,
                distributed=distributed,
                clipping=clipping,
                grad_sample_mode=grad_sample_mode,
                **kwargs,
            )
            note_optimizer(hooks, made)
            made.attach_step_hook(self.accountant.get_optimizer_hook_fn(sample_rate=sample_rate))
            if grad_sample_mode not in GHOST:
                return module, made, data_loader
            criterion = self._prepare_criterion(
                module=module, optimizer=made, criterion=criterion, loss_reduction=loss_reduction, **kwargs
            )
            return module, made, criterion, data_loader

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
        warn_of_delta(target_delta, records_of(data_loader))
        sample_rate, length = 1 / len(data_loader), {"epochs": epochs}
        if not poisson_sampling and sample_rate_of(data_loader) != sample_rate:
            sample_rate, length = sample_rate_of(data_loader), {"steps": epochs * len(data_loader)}
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate,
            **length,
            accountant=self.accountant.mechanism(),
            **kwargs,
        )
        return self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            criterion=criterion,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            wrap_model=wrap_model,
            **kwargs,
        )

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon at delta for the steps so far. Warns if delta is 1 / records or more."""
        warn_of_delta(delta, records_of(self))
        return max(0.0, float(self.accountant.get_epsilon(delta)))


__all__ = ["AbstractGradSampleHooks", "PrivacyEngine"]
