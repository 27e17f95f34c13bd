"""The models of the fine-tuning examples as workloads: their real sizes with random weights (nothing is downloaded)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from fastdp.losses import causal_lm_loss, classification_loss

from .models import Logits, Workload

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))


class Sentences(nn.Module):
    """The classifier of finetune_sst2.py on one tensor [B, 2, T]: token ids, and the mask of what is no padding."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier((x[:, 0], x[:, 1]))


def minilm(method: str) -> nn.Module:
    import finetune_sst2
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return Sentences(trained_a_little(finetune_sst2.prepare(BertModel(config, add_pooling_layer=False), method)))


def smollm2() -> nn.Module:
    import finetune_shakespeare
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                         num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
                         use_cache=False)  # fmt: skip
    return Logits(trained_a_little(finetune_shakespeare.with_lora(LlamaForCausalLM(config), 8)))


def squeezenet() -> nn.Module:
    import cifar10_networks
    import finetune_cifar10

    body = cifar10_networks.SqueezeNet()
    return trained_a_little(finetune_cifar10.Classifier(body, body.width, 96))


def vit() -> nn.Module:
    import cifar10_networks
    import finetune_cifar10
    from transformers import Dinov2Config, Dinov2Model

    body = Dinov2Model(Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14))
    made = cifar10_networks.ViT(cifar10_networks.resized(body, 70))
    return trained_a_little(finetune_cifar10.Classifier(made, made.width, 70))


def trained_a_little(model: nn.Module) -> nn.Module:
    """Zeros (heads, LoRA's second factors) made small numbers: behind zeros there is no gradient to check."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=0.02)
    return model


def sentences(b: int) -> tuple[Tensor, Tensor]:
    """Of 32 tokens, of which the last are padding, as sorted by length in training: few."""
    ids, mask = torch.randint(1000, 30000, (b, 32)), torch.ones(b, 32, dtype=torch.long)
    mask[::4, -3:] = 0
    return torch.stack([ids * mask, mask], 1), torch.randint(0, 2, (b,))


def images(b: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (b, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (b,))


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
    "squeezenet-full": Workload(squeezenet, images, of_classes, 16),
    "vit-full": Workload(vit, images, of_classes, 16),
    "smollm2-lora": Workload(smollm2, words, of_words, 4),
}
