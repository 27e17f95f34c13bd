"""Private training with Hugging Face's Trainer. Needs the extra `hf`: transformers 5, accelerate, peft."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..utils.extras import install_command

try:
    import accelerate as _accelerate  # noqa: F401
    import transformers as _transformers
except ImportError as problem:
    raise ImportError(
        f"fastdp.hf needs transformers (version 5) and accelerate: {install_command('hf')} ({problem})"
    ) from problem

if int(_transformers.__version__.split(".")[0]) < 5:
    raise ImportError(f"fastdp.hf needs transformers 5 or later, not {_transformers.__version__}")

from .options import PrivacyArguments
from .seq2seq import DPSeq2SeqTrainer
from .trainer import DPTrainer

if TYPE_CHECKING:
    from .sentences import DPSentenceTransformerTrainer as DPSentenceTransformerTrainer
    from .trl import DPDPOTrainer as DPDPOTrainer
    from .trl import DPSFTTrainer as DPSFTTrainer

__all__ = ["DPSeq2SeqTrainer", "DPTrainer", "PrivacyArguments"]

# trainers of other packages, which are imported when they are asked for: where they are, and what is to be installed
_OTHERS = {
    "DPSFTTrainer": ("trl", "TRL", "trl"),
    "DPDPOTrainer": ("trl", "TRL", "trl"),
    "DPSentenceTransformerTrainer": ("sentences", "sentence-transformers", "sentences"),
}


def __getattr__(name: str) -> Any:
    if name not in _OTHERS:
        raise AttributeError(f"module 'fastdp.hf' has no attribute {name!r}")
    module, package, extra = _OTHERS[name]
    try:
        return getattr(importlib.import_module(f".{module}", __name__), name)
    except ImportError as problem:
        raise ImportError(f"fastdp.hf.{name} needs {package}: {install_command(extra)} ({problem})") from problem


def __dir__() -> list[str]:
    return sorted([*globals(), *_OTHERS])
