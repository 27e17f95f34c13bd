"""Registering validators and fixers by module class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .module_validator import ModuleValidator

DEFAULT_MODULE_VALIDATOR = ModuleValidator


def register_module_validator(
    target_class_or_classes: type | Sequence[type], validator_class: Any = DEFAULT_MODULE_VALIDATOR
) -> Callable[[Any], Any]:
    """Decorator of a function module -> list of UnsupportedModuleError, run on every module of these classes."""
    return _registrar(validator_class.VALIDATORS, target_class_or_classes)


def register_module_fixer(
    target_class_or_classes: type | Sequence[type], validator_class: Any = DEFAULT_MODULE_VALIDATOR
) -> Callable[[Any], Any]:
    """Decorator of a function (module, **kwargs of fix()) -> the module that replaces it."""
    return _registrar(validator_class.FIXERS, target_class_or_classes)


def _registrar(table: dict[type, Any], classes: type | Sequence[type]) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        for cls in classes if isinstance(classes, Sequence) else [classes]:
            table[cls] = function
        return function

    return register


def advice(function: Any) -> Any:
    """Mark a validator or fixer of modules that are exact as they are: ModuleValidator skips it unless asked."""
    function.advice = True
    return function
