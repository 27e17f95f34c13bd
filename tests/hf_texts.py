"""A tokenizer of words, a tiny model for it, and the truth of a step on any loss of one record."""

from __future__ import annotations

import torch

from .hf_models import PrivacyArguments, transformers, weights

WORDS = [*"abcdefghijklmnopqrstuvwxyz", "<eos>", "<pad>", "<unk>"]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("<eos>", "isolated")]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def ids(text):
    return [WORDS.index(word) for word in text.replace("<eos>", " <eos>").split()]


def llama(seed=0, **options):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=27, eos_token_id=26, bos_token_id=26, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def draw(count, low, high, seed=0):
    """Texts of low to high words."""
    generator = torch.Generator().manual_seed(seed)

    def number(least, most):
        return int(torch.randint(least, most, (1,), generator=generator))

    return [" ".join(WORDS[number(0, 26)] for _ in range(number(low, high))) for _ in range(count)]


def private(**options):
    return PrivacyArguments(**{"noise_multiplier": 0.0, "accountant": "gdp", "sample_rate": 1.0, **options})


def truth(model, losses, lr, norm=None):
    """(weights after one step of SGD of all samples, norms) by hand: each sample's loss in float64, clipped.

    losses: for each sample a function of no arguments. The norm is the median of the samples' where none is given.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found, sizes = [], []
    for loss in losses:
        grads = torch.autograd.grad(loss(), list(named.values()), allow_unused=True)
        found.append([torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), grads, strict=True)])
        sizes.append(float(torch.stack([g.square().sum() for g in found[-1]]).sum().sqrt()))
    norm = sorted(sizes)[len(sizes) // 2] if norm is None else norm
    after = {name: p.double() for name, p in weights(model).items() if name in named}
    for size, grads in zip(sizes, found, strict=True):
        for name, g in zip(named, grads, strict=True):
            after[name] = after[name] - lr / len(sizes) * min(1.0, norm / size / (1 + 4e-6)) * g
    return after, norm
