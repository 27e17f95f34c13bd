"""What the experiments on pre-trained networks share: the frozen part, whose output is computed once and kept.

A frozen part in evaluation mode gives the same output in every step, so training on kept outputs is the same training,
many times faster. `FrozenBert` gives the states that enter the last block of a BERT, `vit_features` what a ViT says of
an image.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout's root


CLASSES = ("entailment", "neutral", "contradiction")
BERT = "sentence-transformers/all-MiniLM-L6-v2"
VIT = "facebook/dinov2-small"


# ---------------------------------------------------------------------- text


class States(torch.utils.data.Dataset[Any]):
    """Token states of texts, one behind the other, without padding; items are (states [L, width], label).

    Args: states [sum of lengths, width], lengths [N], labels [N].
    """

    def __init__(self, states: Tensor, lengths: Tensor, labels: Tensor) -> None:
        self.states, self.lengths, self.labels = states, lengths, labels
        self.starts = lengths.cumsum(0) - lengths

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        start = int(self.starts[number])
        return self.states[start : start + int(self.lengths[number])], self.labels[number]


def collate(items: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Items (tensors of one length [L, ...], ..., label) -> those tensors, padded with zeros to the longest, the mask
    of what is no padding [B, L], labels [B]."""
    lengths = torch.tensor([len(item[0]) for item in items])
    parts = [nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in list(zip(*items, strict=True))[:-1]]
    return *parts, torch.arange(parts[0].shape[1])[None] < lengths[:, None], torch.stack([item[-1] for item in items])


def read_pairs(path: Path) -> tuple[list[tuple[str, str]], Tensor]:
    """Lines "label TAB premise TAB hypothesis" -> pairs and labels [N], by CLASSES. Raises ValueError on others."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    bad = [number for number, row in enumerate(rows, start=1) if len(row) != 3 or row[0] not in CLASSES]
    if bad:
        raise ValueError(f"{path.name}, line {bad[0]}: expected label TAB premise TAB hypothesis")
    return [(row[1].strip(), row[2].strip()) for row in rows], torch.tensor([CLASSES.index(row[0]) for row in rows])


class Tokens(torch.utils.data.Dataset[Any]):
    """Token ids of texts, for frozen blocks that run in every step: kept states of many texts fill no memory.

    Args: ids and segments [N] of tensors [L], labels [N].
    """

    def __init__(self, ids: Sequence[Tensor], segments: Sequence[Tensor], labels: Tensor) -> None:
        self.ids, self.segments, self.labels = ids, segments, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.ids[number], self.segments[number], self.labels[number]


def tokens_of(tokenizer: Any, pairs: Sequence[tuple[str, str]], labels: Tensor, longest: int) -> Tokens:
    """The tokens of each pair, cut at `longest`; the shortest come first."""
    made = tokenizer([p for p, _ in pairs], [h for _, h in pairs], truncation=True, max_length=longest)
    ids, segments = ([torch.tensor(row) for row in made[name]] for name in ("input_ids", "token_type_ids"))
    order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
    return Tokens([ids[k] for k in order], [segments[k] for k in order], labels[order])


class FrozenBert(nn.Module):
    """All of a BERT but its last block and its pooler.

    Args: body: transformers' BertModel without dropout. `last` is the block taken off; `pooler` is None if it has none.
    """

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.width: int = body.config.hidden_size
        self.last: nn.Module = body.encoder.layer[-1]
        self.pooler: nn.Module | None = body.pooler
        self.body = body.requires_grad_(False).eval()
        self.body.encoder.layer, self.body.pooler = self.body.encoder.layer[:-1], None

    def forward(self, ids: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        """Token ids, their segments (0, 1) and mask [B, L] -> states [B, L, width]; padding has states, too."""
        return self.body(input_ids=ids, token_type_ids=types, attention_mask=mask).last_hidden_state


def bert(where: str | None = None) -> tuple[FrozenBert, Any]:
    """The frozen blocks and the tokenizer: of a folder or hub name, else MiniLM of the hub."""
    from transformers import AutoModel, AutoTokenizer

    name = where or BERT
    body = AutoModel.from_pretrained(name, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return FrozenBert(body), AutoTokenizer.from_pretrained(name)


def states_of(model: FrozenBert, tokenizer: Any, pairs: Sequence[tuple[str, str]], labels: Tensor, longest: int,
              batch: int = 64) -> States:  # fmt: skip
    """The states that enter the last block, of each pair cut at `longest` tokens; the shortest come first.

    Like lengths stand together, so that physical batches pad little; the order has no part in what is sampled.
    """
    data = tokens_of(tokenizer, pairs, labels, longest)
    lengths, found = torch.tensor([len(ids) for ids in data.ids]), []
    device = next(model.parameters()).device
    with torch.no_grad():
        for start in range(0, len(data), batch):
            rows = [data[number] for number in range(start, min(start + batch, len(data)))]
            padded, segments, mask = (part.to(device) for part in collate(rows)[:3])
            found.append(model(padded, segments, mask)[mask].cpu())
    return States(torch.cat(found), lengths, data.labels)


class LastBlock(nn.Module):
    """The block that is trained and a new classifier: on the model's pooler, which is trained, too, as in the paper;
    without one on the normalised mean of the tokens.

    Args: block: of a BERT; width; pooler; classes; scale: the mean that the classifier reads has norm
    scale x sqrt(width). A classifier's gradients are as large as its input, and would fill the clipping norm.
    """

    def __init__(self, block: nn.Module, width: int, pooler: nn.Module | None = None, classes: int = len(CLASSES),
                 scale: float = 0.125) -> None:  # fmt: skip
        super().__init__()
        self.block, self.scale = block.requires_grad_(True), scale
        self.pooler = None if pooler is None else pooler.requires_grad_(True)
        self.head = nn.Linear(width, classes)
        nn.init.zeros_(self.head.bias)
        nn.init.normal_(self.head.weight, std=0.01)

    def forward(self, batch: Any) -> Tensor:
        """(states [B, L, width], mask [B, L], ...) -> logits [B, classes]."""
        states, mask = batch[0], batch[1]
        out = self.block(states, attention_mask=mask[:, None, None, :])
        if self.pooler is not None:
            return self.head(self.pooler(out))
        mean = (out * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return self.head(F.layer_norm(mean, mean.shape[-1:]) * self.scale)


# ---------------------------------------------------------------------- images


class Features(NamedTuple):
    """Features [N, width] and labels [N] to train on, to tune on and to test on."""

    train: tuple[Tensor, Tensor]
    dev: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def vit_features(body: nn.Module, images: Tensor, size: int = 70, batch: int = 64) -> Tensor:
    """Images [N, 3, H, W] as bytes, or as floats of 0 to 1 -> features [N, width], enlarged to `size` pixels."""
    found = []
    with torch.no_grad():
        for part in images.split(batch):
            x = part.float() / 255 if part.dtype == torch.uint8 else part
            x = F.interpolate(x, (size, size), mode="bilinear", align_corners=False, antialias=False)
            found.append(body.eval()(x))
    return torch.cat(found)


class ViT(nn.Module):
    """Images [B, 3, H, W] of 0 to 1 -> features: the class token's and the mean of the patches', side by side."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.body((images - self.mean) / self.std).last_hidden_state
        return torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1)


def load_vit(where: str | None = None) -> ViT:
    """A ViT-S/14: of a folder or hub name, else DINOv2 of the hub."""
    from transformers import Dinov2Model

    return ViT(Dinov2Model.from_pretrained(where or VIT))
