"""Validation of models by the names and paths of opacus.validators."""

from . import batch_norm, gru, instance_norm, lstm, multihead_attention  # noqa: F401  (registers them)
from .module_validator import ModuleValidator
from .multihead_attention import fix, validate  # noqa: F401  (Opacus has these two names here)
from .utils import register_module_fixer, register_module_validator

__all__ = ["ModuleValidator", "register_module_fixer", "register_module_validator"]
