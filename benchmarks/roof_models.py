"""The same models as transformers builds them from its configurations: with its projections, attention and norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .host import Logits
from .models import Workload
from .suites import images, words

WORDS, SPOKEN = 50257, 32000


def _gpt2(layers: int, d: int, heads: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet: dict[str, Any] = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    return Logits(GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=d, n_head=heads, **quiet)))


def _llama(rank: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(vocab_size=SPOKEN, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=4, use_cache=False)
    )
    if rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))
    return Logits(model)


class _Images(nn.Module):
    """A classifier of transformers as one from images to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(pixel_values=x).logits


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    options: dict[str, Any] = dict(num_labels=1000)
    return _Images(ViTForImageClassification(ViTConfig(**options)))


def _of_words(build: Callable[[], nn.Module], t: int, vocabulary: int, batch_size: int) -> Workload:
    return words(lambda length: build(), t, vocabulary, batch_size)


HF: dict[str, Workload] = {
    "hf-gpt2": _of_words(lambda: _gpt2(12, 768, 12), 1024, WORDS, 16),
    "hf-gpt2-large": _of_words(lambda: _gpt2(36, 1280, 20), 512, WORDS, 8),
    "hf-llama-1b": _of_words(_llama, 1024, SPOKEN, 4),
    "hf-llama-lora": _of_words(lambda: _llama(8), 1024, SPOKEN, 4),
    "hf-vit-b16": images(_vit, 224, 1000, 64),
}
