"""ModuleValidator: which modules couple samples, and what replaces them. Opacus's, but for what fastdp is exact on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from opacus import validators as theirs
from opacus.utils.module_utils import clone_module, trainable_modules
from opacus.validators.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from opacus.validators.module_validator import logger
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from .layers import DPGRU, DPLSTM, DPMultiheadAttention

__path__: list[str] = []  # see aliases.py
__all__ = ["ModuleValidator", "register_module_fixer", "register_module_validator"]

EXACT = (nn.LSTM, nn.GRU, nn.MultiheadAttention)  # Opacus replaces them
Classes = type | Sequence[type]


class ModuleValidator(theirs.ModuleValidator):  # type: ignore[misc]
    """Class methods only; VALIDATORS and FIXERS hold a function by module class.

    A module is looked up by its class and then by the classes that it derives from (Opacus: its very class only). What
    Opacus has replaced and fastdp is exact on (nn.LSTM, nn.GRU, nn.MultiheadAttention) is valid and stays, unless
    `fix(..., replace_supported=True)` asks for the replacement.
    """

    VALIDATORS: dict[type, Any] = dict(theirs.ModuleValidator.VALIDATORS)
    FIXERS: dict[type, Any] = dict(theirs.ModuleValidator.FIXERS)

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        """Return the reasons why the model cannot be trained privately; if strict, raise them."""
        errors: list[Any] = []
        if not module.training:
            errors.append(IllegalModuleConfigurationError("the model must be in training mode: call model.train()"))
        trainable = dict(trainable_modules(module))
        for sub in trainable.values():
            if (validator := _registered(cls.VALIDATORS, sub)) is not None:
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
    def fix(cls, module: nn.Module, *, replace_supported: bool = False, **kwargs: Any) -> nn.Module:
        """Return a copy of the model with its trainable modules replaced by what their fixers make of them.

        Args: replace_supported: also replace what fastdp is exact on; kwargs: for the fixers (replace_bn_with_in,
        num_groups). Replacements get the device, the type and the mode of what they replace.
        """
        fixed: nn.Module = clone_module(module)
        for path in [path for path, _ in trainable_modules(fixed)]:
            sub = fixed.get_submodule(path)
            fixer = _registered(cls.FIXERS, sub, replace_supported)
            new = sub if fixer is None else fixer(sub, **kwargs)
            if new is not sub:
                old = next(sub.parameters())
                new.to(device=old.device, dtype=old.dtype).train(sub.training)
                fixed = cls._replace_sub_module(root=fixed, sub_module_name=path, new_sub_module=new)
                logger.info(f"Replaced sub_module {path} : {sub} with {new}")
        return fixed


def _registered(table: dict[type, Any], module: nn.Module, replace_supported: bool = False) -> Any:
    """The function of a module's class or of the first base class that has one."""
    kind = next((cls for cls in type(module).__mro__ if cls in table), None)
    if kind in EXACT and not (replace_supported and kind is type(module)):  # a derived class may do more
        return None
    return None if kind is None else table[kind]


def _takes_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.running_mean is not None)


def register_module_validator(target_class_or_classes: Classes, validator_class: Any = ModuleValidator) -> Any:
    """Decorator of a function module -> list of UnsupportedModuleError, run on every module of these classes."""
    return theirs.register_module_validator(target_class_or_classes, validator_class)


def register_module_fixer(target_class_or_classes: Classes, validator_class: Any = ModuleValidator) -> Any:
    """Decorator of a function (module, **kwargs of fix()) -> the module that replaces it."""
    return theirs.register_module_fixer(target_class_or_classes, validator_class)


# ---------------------------------------------------------------------- where Opacus's functions fall short

INSTANCENORMS = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]


@register_module_validator(INSTANCENORMS)
def validate(module: Any) -> list[UnsupportedModuleError]:
    """Return an IllegalModuleConfigurationError if an InstanceNorm keeps running statistics."""
    if not module.track_running_stats and module.running_mean is None:
        return []
    return [
        IllegalModuleConfigurationError(
            f"{type(module).__name__} keeps running statistics of the data, to which no noise is added: make it with "
            "track_running_stats=False"
        )
    ]


@register_module_fixer(INSTANCENORMS)
def fix(module: Any, **kwargs: Any) -> nn.Module:
    """Return a copy of an InstanceNorm without running statistics; the module itself if it keeps none.

    Opacus only sets track_running_stats to False, and torch goes on updating the buffers that are there.
    """
    if not validate(module):
        return module  # type: ignore[no-any-return]
    new: Any = clone_module(module)
    new.track_running_stats = False
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        new._buffers[name] = None
    return new  # type: ignore[no-any-return]


_RECURRENT = (
    "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size"
)  # fmt: skip
_ATTENTION = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")


@register_module_fixer(nn.LSTM)
def _fix_lstm(module: nn.LSTM, **kwargs: Any) -> nn.Module:
    return _with_weights_of(module, DPLSTM(**{name: getattr(module, name) for name in _RECURRENT}))


@register_module_fixer(nn.GRU)
def _fix_gru(module: nn.GRU, **kwargs: Any) -> nn.Module:
    return _with_weights_of(module, DPGRU(**{name: getattr(module, name) for name in _RECURRENT}))


@register_module_fixer(nn.MultiheadAttention)
def _fix_attention(module: Any, **kwargs: Any) -> nn.Module:
    biases = {"bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
    new: nn.Module = DPMultiheadAttention(**{name: getattr(module, name) for name in _ATTENTION}, **biases)
    new.load_state_dict(module.state_dict())
    return new


def _with_weights_of(module: nn.Module, new: nn.Module) -> nn.Module:
    new.load_state_dict(module.state_dict())
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(module.get_parameter(name).requires_grad)
    return new
