"""Opacus's module paths that are not files here: modules of Opacus as they are, and classes that share a file.

`import fastdp.compat.opacus.X` of a path in `SAME` gives the module `opacus.X`; of one in `MERGED`, the module beside
it that holds the names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = __name__.rpartition(".")[0]
SAME = (
    "accountants.accountant",
    "accountants.analysis",
    "accountants.analysis.gdp",
    "accountants.analysis.prv",
    "accountants.analysis.prv.compose",
    "accountants.analysis.prv.domain",
    "accountants.analysis.prv.prvs",
    "accountants.analysis.rdp",
    "accountants.rdp",
    "grad_sample.conv",
    "grad_sample.dp_multihead_attention",
    "grad_sample.dp_rnn",
    "grad_sample.embedding",
    "grad_sample.embedding_norm_sample",
    "grad_sample.functorch",
    "grad_sample.group_norm",
    "grad_sample.gsm_base",
    "grad_sample.gsm_no_op",
    "grad_sample.instance_norm",
    "grad_sample.layer_norm",
    "grad_sample.linear",
    "grad_sample.rms_norm",
    "layers.param_rename",
    "optimizers.utils",
    "schedulers",
    "schedulers.grad_clip_scheduler",
    "schedulers.noise_scheduler",
    "utils.module_utils",
    "utils.packed_sequences",
    "utils.tensor_utils",
    "version",
    "validators.batch_norm",
    "validators.errors",
    "validators.gru",
    "validators.instance_norm",
    "validators.lstm",
    "validators.multihead_attention",
)
MERGED = {
    "accountants.gdp": "accountants",
    "accountants.prv": "accountants",
    "accountants.registry": "accountants",
    "accountants.utils": "accountants",
    "grad_sample.grad_sample_module_fast_gradient_clipping_tp": "grad_sample.grad_sample_module_fast_gradient_clipping",
    "grad_sample.gsm_exp_weights": "grad_sample.grad_sample_module",
    "layers.dp_multihead_attention": "layers",
    "layers.dp_rnn": "layers",
    "optimizers.ddp_perlayeroptimizer": "optimizers.ddpoptimizer",
    "optimizers.ddpoptimizer_fast_gradient_clipping": "optimizers.ddpoptimizer",
    "utils.adaptive_clipping.adaptive_clipping_utils": "utils.adaptive_clipping",
    "validators.module_validator": "validators",
    "validators.utils": "validators",
}
_TARGETS = {
    **{f"{_PACKAGE}.{path}": f"opacus.{path}" for path in SAME},
    **{f"{_PACKAGE}.{path}": f"{_PACKAGE}.{target}" for path, target in MERGED.items()},
}


class _AliasFinder(MetaPathFinder, Loader):
    """Imports the target in place of an alias. sys.modules then holds one module under both names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _TARGETS else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_TARGETS[module.__name__])


def install() -> None:
    """Find the aliases, before the finder of files: it would load files of Opacus's packages a second time."""
    sys.meta_path.insert(0, _AliasFinder())
