"""Models to fine-tune as workloads: real sizes with random weights (nothing is downloaded)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastdp.losses import causal_lm_loss, classification_loss

from .models import Logits, Workload


class Sentences(nn.Module):
    """A linear classifier of a sentence's mean over its tokens, which is normalised; body: a BERT."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Sequential(nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 2, T], token ids and the mask of what is no padding, to [B, 2]."""
        ids, mask = x.unbind(1)
        tokens = self.body(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.head((tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def minilm(method: str) -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    body = BertModel(config, add_pooling_layer=False)
    return Sentences(with_lora(body, "query", "value") if method == "lora" else body, 384)


def smollm2() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                         num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
                         use_cache=False)  # fmt: skip
    return Logits(with_lora(LlamaForCausalLM(config), "q_proj", "v_proj"))


def with_lora(model: nn.Module, *targets: str) -> nn.Module:
    """Only adapters of rank 8 train, their second factors made small numbers: behind zeros is no gradient to check."""
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=list(targets)))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=0.02)
    return made


def sentences(b: int) -> tuple[Tensor, Tensor]:
    """Of 32 tokens, of which the last are padding, as sorted by length in training: few."""
    ids, mask = torch.randint(1000, 30000, (b, 32)), torch.ones(b, 32, dtype=torch.long)
    mask[::4, -3:] = 0
    return torch.stack([ids * mask, mask], 1), torch.randint(0, 2, (b,))


def words(b: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 49152, (b, 64))
    return ids, ids


def of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    return classification_loss(logits, labels, "none")


def of_words(logits: Tensor, ids: Tensor) -> Tensor:
    return causal_lm_loss(logits, ids, reduction="none")


FINETUNING = {
    "sst2-full": Workload(lambda: minilm("full"), sentences, of_classes, 16),
    "sst2-lora": Workload(lambda: minilm("lora"), sentences, of_classes, 16),
    "sst2-lora-64": Workload(lambda: minilm("lora"), sentences, of_classes, 64),  # as in training
    "smollm2-lora": Workload(smollm2, words, of_words, 4),
}
