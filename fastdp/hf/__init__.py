"""Private training with Hugging Face's Trainer. Needs `pip install 'fastdp[hf]'`."""

from __future__ import annotations

try:
    import accelerate as _accelerate  # noqa: F401
    import transformers as _transformers
except ImportError as problem:
    raise ImportError(
        f"fastdp.hf needs transformers (version 5) and accelerate: pip install 'fastdp[hf]' ({problem})"
    ) from problem

if int(_transformers.__version__.split(".")[0]) < 5:
    raise ImportError(f"fastdp.hf needs transformers 5 or later, not {_transformers.__version__}")

from .options import PrivacyArguments
from .trainer import DPTrainer

__all__ = ["DPTrainer", "PrivacyArguments"]
