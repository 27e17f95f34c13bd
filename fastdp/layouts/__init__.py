"""Which rows of a tensor belong to which sample, followed through every torch function of a forward.

Importing the package registers the layout rules.
"""

from . import index_read, index_write, join, modules, reduce, shapes, sorting  # noqa: F401
from .layout import Layout, tag, tag_of
from .propagate import propagate
from .rearranged import reshaped, samplewise

__all__ = ["Layout", "propagate", "reshaped", "samplewise", "tag", "tag_of"]
