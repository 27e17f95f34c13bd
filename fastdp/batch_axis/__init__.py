"""Which rows of a tensor belong to which sample, followed through every torch function of a forward.

Importing the package registers the layout rules.
"""

from . import (  # noqa: F401
    cat_ops,
    index_read_ops,
    index_write_ops,
    loss_ops,
    matrix_ops,
    module_ops,
    reduction_ops,
    scatter_ops,
    sort_ops,
    view_ops,
)  # fmt: skip
from .layout import Layout, samplewise, tag, tag_of
from .propagate import propagate
from .view_ops import reshaped

__all__ = ["Layout", "propagate", "reshaped", "samplewise", "tag", "tag_of"]
