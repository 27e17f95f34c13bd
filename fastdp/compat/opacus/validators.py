"""ModuleValidator: which modules couple samples, and what replaces them. Opacus's, but for what fastdp is exact on."""

from __future__ import annotations

from typing import Any

from opacus import validators as theirs
from opacus.utils.module_utils import clone_module, trainable_modules
from opacus.validators.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from opacus.validators.instance_norm import fix, validate
from opacus.validators.utils import register_module_fixer as _register_fixer
from opacus.validators.utils import register_module_validator as _register_validator
from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

__path__: list[str] = []  # see aliases.py
__all__ = ["ModuleValidator", "fix", "register_module_fixer", "register_module_validator", "validate"]

EXACT = (nn.LSTM, nn.GRU, nn.MultiheadAttention)  # Opacus replaces them


def _without_exact(table: dict[type, Any]) -> dict[type, Any]:
    return {kind: function for kind, function in table.items() if kind not in EXACT}


class ModuleValidator(theirs.ModuleValidator):  # type: ignore[misc]
    """Class methods only; VALIDATORS and FIXERS hold a function by module class.

    nn.LSTM, nn.GRU and nn.MultiheadAttention, which Opacus replaces, are valid and stay. A norm that trains nothing but
    takes statistics of the batch is valid, too: the first forward refuses it.
    """

    VALIDATORS: dict[type, Any] = _without_exact(theirs.ModuleValidator.VALIDATORS)
    FIXERS: dict[type, Any] = _without_exact(theirs.ModuleValidator.FIXERS)

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        """Return the reasons why the model cannot be trained privately; if strict, raise them."""
        errors: list[Any] = []
        if not module.training:
            errors.append(IllegalModuleConfigurationError("the model must be in training mode: call model.train()"))
        for _, sub in trainable_modules(module):
            errors.extend(_of(cls.VALIDATORS, sub)(sub) or ())
        if strict and errors:
            raise UnsupportedModuleError(errors)
        return errors

    @classmethod
    def fix(cls, module: nn.Module, **kwargs: Any) -> nn.Module:
        """Return a copy of the model with its trainable modules replaced by what their fixers make of them.

        Args: kwargs: for the fixers (replace_bn_with_in, num_groups). Replacements get the device, the type and the
        mode of what they replace.
        """
        fixed: nn.Module = clone_module(module)
        for path, sub in list(trainable_modules(fixed)):
            new = _of(cls.FIXERS, sub)(sub, **kwargs)
            if new is not None and new is not sub:
                old = next(sub.parameters())
                new.to(device=old.device, dtype=old.dtype).train(sub.training)
                fixed = cls._replace_sub_module(root=fixed, sub_module_name=path, new_sub_module=new)
        for sub in fixed.modules():
            if isinstance(sub, _InstanceNorm) and not sub.track_running_stats:  # Opacus leaves the statistics there
                sub.running_mean = sub.running_var = sub.num_batches_tracked = None
        return fixed


def _of(table: dict[type, Any], module: nn.Module) -> Any:
    """The function of a module's class, or of the first class it derives from that has one."""
    return next((table[kind] for kind in type(module).__mro__ if kind in table), lambda module, **kwargs: None)


def register_module_validator(target_class_or_classes: Any, validator_class: Any = ModuleValidator) -> Any:
    """Decorator of a function module -> list of UnsupportedModuleError, run on every module of these classes."""
    return _register_validator(target_class_or_classes, validator_class)


def register_module_fixer(target_class_or_classes: Any, validator_class: Any = ModuleValidator) -> Any:
    """Decorator of a function (module, **kwargs of fix()) -> the module that replaces it."""
    return _register_fixer(target_class_or_classes, validator_class)
