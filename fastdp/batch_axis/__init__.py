"""Which rows of a tensor belong to which sample, followed through every torch function of a forward.

Importing the package registers the layout rules.
"""

from . import cat_ops, index_read_ops, index_write_ops, module_ops, reduction_ops, sort_ops, view_ops  # noqa: F401
from .layout import Layout, tag, tag_of
from .propagate import propagate
from .rearrangement import reshaped, samplewise

__all__ = ["Layout", "propagate", "reshaped", "samplewise", "tag", "tag_of"]
