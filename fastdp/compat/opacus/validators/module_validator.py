"""ModuleValidator: which modules couple samples, and what replaces them, by Opacus's interface."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ..utils.module_utils import clone_module, trainable_modules
from .errors import IllegalModuleConfigurationError, UnsupportedModuleError

logger = logging.getLogger("opacus.validators.module_validator")  # the name that scripts set up


class ModuleValidator:
    """Class methods only; VALIDATORS and FIXERS hold a function by module class.

    A module is looked up by its class and then by the classes that it derives from (Opacus: its very class only). What
    Opacus has replaced and fastdp is exact on (nn.LSTM, nn.GRU, nn.MultiheadAttention) is valid and stays, unless
    `fix(..., replace_supported=True)` asks for Opacus's replacement.
    """

    VALIDATORS: dict[type, Any] = {}
    FIXERS: dict[type, Any] = {}

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        """Everything in the model that private training refuses; [] where nothing.

        Args: strict: raise UnsupportedModuleError with the list instead of returning it.
        """
        errors: list[Any] = []
        if not module.training:
            errors.append(IllegalModuleConfigurationError("the model must be in training mode: call model.train()"))
        trainable = dict(trainable_modules(module))
        for sub in trainable.values():
            validator = _registered(cls.VALIDATORS, sub)
            if validator is not None:
                errors.extend(validator(sub))
        for path, sub in module.named_modules():
            if path not in trainable and sub.training and _takes_statistics(sub):
                warnings.warn(
                    f"'{path}', a {type(sub).__name__}, trains nothing but takes statistics of the batch: the first "
                    "forward will refuse it. Call eval() on it after model.train(), or replace it.",
                    stacklevel=2,
                )
        if strict and errors:
            raise UnsupportedModuleError(errors)
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether `validate` finds nothing."""
        return not cls.validate(module, strict=False)

    @classmethod
    def fix(cls, module: nn.Module, *, replace_supported: bool = False, **kwargs: Any) -> nn.Module:
        """A copy of the model with its trainable modules replaced by what their fixers make of them.

        Args: replace_supported: also replace what fastdp is exact on; kwargs: for the fixers (replace_bn_with_in,
        num_groups). Replacements get the device, the type and the mode of what they replace.
        """
        fixed: nn.Module = clone_module(module)
        for path in [path for path, _ in trainable_modules(fixed)]:
            sub = fixed.get_submodule(path)
            fixer = _registered(cls.FIXERS, sub, replace_supported)
            if fixer is None:
                continue
            new = fixer(sub, **_accepted(fixer, kwargs))
            if new is not sub:
                old = next(sub.parameters())
                new.to(device=old.device, dtype=old.dtype).train(sub.training)
                fixed = cls._replace_sub_module(root=fixed, sub_module_name=path, new_sub_module=new)
                logger.info(f"Replaced sub_module {path} : {sub} with {new}")
        return fixed

    @classmethod
    def _replace_sub_module(cls, *, root: nn.Module, sub_module_name: str, new_sub_module: nn.Module) -> nn.Module:
        if not sub_module_name:
            return new_sub_module
        parent, _, name = sub_module_name.rpartition(".")
        root.get_submodule(parent)._modules[name] = new_sub_module
        return root

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **kwargs: Any) -> nn.Module:
        """`fix`, then `validate` strictly. Raises UnsupportedModuleError."""
        fixed = cls.fix(module, **kwargs)
        cls.validate(fixed, strict=True)
        return fixed


def _registered(table: dict[type, Any], module: nn.Module, with_advice: bool = False) -> Any:
    for cls in type(module).__mro__:
        found = table.get(cls)
        if found is not None:
            if getattr(found, "advice", False) and (not with_advice or cls is not type(module)):
                return None  # of a derived class nothing is known: it may do more
            return found
    return None


def _accepted(function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords that a fixer takes: others are for other modules' fixers."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return copy.copy(kwargs)
    return {name: value for name, value in kwargs.items() if name in {p.name for p in parameters}}


def _takes_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.running_mean is not None)
