"""Renamed parameters: Opacus's own."""

from opacus.layers.param_rename import (
    RenameParamsMixin,
    filter_out_old_keys,
)

__all__ = [
    "RenameParamsMixin",
    "filter_out_old_keys",
]
