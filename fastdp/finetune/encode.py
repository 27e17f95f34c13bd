"""Texts to tokens: one record is one sample, cut where it is too long, never joined with another."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..losses import IGNORE, causal_lm_loss, classification_loss
from ..training.fused_head import FusedHead
from ..training.words import count
from .job import FinetuneError, Graphed
from .records import Records

_AT_ONCE = 1000
_DEFAULT_LENGTH = {"classify": 128, "lm": 256}
_UNSET = 10**6  # a tokenizer without a limit says 1e30


class Encoded(Dataset[dict[str, Any]]):
    """Items {"input_ids", "token_type_ids"?: int32 [T], "label"?: int}; `cut`: records that were longer than T."""

    def __init__(self, rows: Sequence[Sequence[int]], kinds: Sequence[Sequence[int]] | None,
                 labels: Sequence[int] | None, cut: int) -> None:  # fmt: skip
        lengths = torch.tensor([0, *(len(row) for row in rows)])
        self.starts = lengths.cumsum(0)
        self.tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        self.kinds = None if kinds is None else torch.tensor([kind for row in kinds for kind in row], dtype=torch.int32)
        self.labels, self.cut = labels, cut

    def __len__(self) -> int:
        return len(self.starts) - 1

    def length(self, i: int) -> int:
        """Tokens of a record."""
        return int(self.starts[i + 1] - self.starts[i])

    def by_length(self) -> Encoded:
        """The same records, short ones first. Physical batches are cut in the order of the data, so that little is
        padded; the order has no part in what is sampled."""
        order = sorted(range(len(self)), key=self.length)

        def rows(values: Tensor) -> list[Tensor]:
            return [values[int(self.starts[i]) : int(self.starts[i + 1])] for i in order]

        made = copy.copy(self)
        made.starts = torch.tensor([0, *(self.length(i) for i in order)]).cumsum(0)
        made.tokens = torch.cat(rows(self.tokens)) if order else self.tokens
        made.kinds = None if self.kinds is None else torch.cat(rows(self.kinds)) if order else self.kinds
        made.labels = None if self.labels is None else [self.labels[i] for i in order]
        return made

    def __getitem__(self, i: int) -> dict[str, Any]:
        at = slice(int(self.starts[i]), int(self.starts[i + 1]))
        item: dict[str, Any] = {"input_ids": self.tokens[at]}
        if self.kinds is not None:
            item["token_type_ids"] = self.kinds[at]
        if self.labels is not None:
            item["label"] = self.labels[i]
        return item


class Collate:
    """Items -> {"input_ids", "attention_mask", "token_type_ids"?, "labels"} [B, T], padded on the right.

    For lm the labels are the tokens themselves, padding left out of the loss. T is the length of the longest item, or
    the next of `widths`.
    """

    def __init__(self, pad: int, widths: Sequence[int] = ()) -> None:
        self.pad, self.widths = pad, sorted(widths)

    def width(self, longest: int) -> int:
        """T of a batch with items of this length at most."""
        return next((width for width in self.widths if width >= longest), longest)

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        def padded(name: str, fill: int) -> Tensor:
            rows = [item[name].long() for item in items]
            found = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
            return nn.functional.pad(found, (0, width - found.size(1)), value=fill)

        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        width = self.width(int(lengths.max()))
        batch = {"input_ids": padded("input_ids", self.pad)}
        batch["attention_mask"] = (torch.arange(width)[None] < lengths[:, None]).long()
        if "token_type_ids" in items[0]:
            batch["token_type_ids"] = padded("token_type_ids", 0)
        if "label" in items[0]:
            batch["labels"] = torch.tensor([item["label"] for item in items])
        else:
            batch["labels"] = padded("input_ids", IGNORE)
        return batch


def longest(model: nn.Module, tokenizer: Any, task: str, wanted: int | None) -> int:
    """Tokens of a record at most. Raises FinetuneError where more is wanted than the model has positions for."""
    limits = [int(tokenizer.model_max_length)] if tokenizer.model_max_length < _UNSET else []
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        for module in model.modules():  # a table of positions that begins behind its padding row holds fewer
            if (
                isinstance(module, nn.Embedding)
                and module.num_embeddings == positions
                and module.padding_idx is not None
            ):
                positions -= module.padding_idx + 1
                break
        limits.append(positions)
    if wanted is not None and limits and wanted > min(limits):
        raise FinetuneError(f"--max-length {wanted}: the model and its tokenizer take at most {min(limits)} tokens")
    return wanted or min([_DEFAULT_LENGTH[task], *limits])


def widths(most: int) -> list[int]:
    """The lengths that batches are padded to so that few shapes are recorded: up to eight, by `most` tokens alone.

    >>> widths(128), widths(30)
    ([16, 32, 48, 64, 80, 96, 112, 128], [8, 16, 24, 30])
    """
    step = max(8, -(-most // 8))
    return [min(step * k, most) for k in range(1, -(-most // step) + 1)]


def padding(tokenizer: Any) -> str:
    """See that there is a token to pad with; what to say of it. Raises FinetuneError."""
    if tokenizer.pad_token_id is not None:
        return ""
    if tokenizer.eos_token_id is None:
        raise FinetuneError(
            "the tokenizer has no padding token and no end-of-text token to use instead: name one that the model "
            'knows in its tokenizer_config.json, such as "pad_token": "[PAD]"'
        )
    tokenizer.pad_token = tokenizer.eos_token
    return f"The tokenizer has no padding token: {tokenizer.eos_token!r} pads, and padding is masked out"


def encode(records: Records, tokenizer: Any, model: nn.Module, task: str, most: int) -> Encoded:
    """Tokenise; a text of lm is ended by the end-of-text token where it is not cut.

    Raises FinetuneError where a token is none of the model's.
    """
    rows: list[list[int]] = []
    kinds: list[list[int]] = []
    takes_kinds = records.pairs is not None and "token_type_ids" in accepted(model)
    cut = 0
    for start in range(0, len(records), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        texts = records.texts[part] if records.pairs is None else list(
            zip(records.texts[part], records.pairs[part], strict=True))  # fmt: skip
        found = tokenizer(texts, truncation=True, max_length=most, return_attention_mask=False)
        ids = [list(row) for row in found["input_ids"]]
        at_limit = [i for i, row in enumerate(ids) if len(row) >= most]
        over: set[int] = set()
        if at_limit:  # as long as that, or longer?
            more = tokenizer([texts[i] for i in at_limit], truncation=True, max_length=most + 1)["input_ids"]
            over = {i for i, row in zip(at_limit, more, strict=True) if len(row) > most}
        if task == "lm" and tokenizer.eos_token_id is not None:
            for i, row in enumerate(ids):
                if i not in over and len(row) < most and (not row or row[-1] != tokenizer.eos_token_id):
                    row.append(tokenizer.eos_token_id)
        empty = next((i for i, row in enumerate(ids) if not row), None)
        if empty is not None:
            raise FinetuneError(f"the tokenizer makes no token of the text {records.texts[start + empty][:40]!r}")
        rows += ids
        if takes_kinds and "token_type_ids" in found:
            kinds += [list(row) for row in found["token_type_ids"]]
        cut += len(over)
    _check_vocabulary(rows, model)
    return Encoded(rows, kinds or None, records.labels, cut)


def _check_vocabulary(rows: Sequence[Sequence[int]], model: nn.Module) -> None:
    owner: Any = model
    table = owner.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    size = getattr(table, "num_embeddings", None)
    highest = max((max(row) for row in rows), default=0)
    if size is not None and highest >= size:
        raise FinetuneError(
            f"the tokenizer makes the token {highest}, but the model knows {count(size)}: they do not belong together"
        )


def accepted(model: nn.Module) -> set[str]:
    """Names that the model's forward takes (of the model within adapters)."""
    inner: Any = model
    if hasattr(model, "get_base_model"):
        inner = inner.get_base_model()
    return set(inspect.signature(inner.forward).parameters)


def loss_of(model: nn.Module, task: str) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    """loss(model, batch) -> the mean over records of their own losses, none of which another record changes."""
    logits = logits_of(model)
    own = classification_loss if task == "classify" else causal_lm_loss
    return lambda model, batch: own(logits(model, batch), batch["labels"])


def fused_loss_of(model: nn.Module, fused: FusedHead) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    """The same of a language model whose logits are not stored."""
    takes = accepted(model)
    return lambda model, batch: fused.losses(model, inputs_of(model, batch, takes), batch["labels"]).mean()


def graphed_of(model: nn.Module, task: str, data: Encoded, collate: Collate) -> Graphed:
    """What replayed steps of these records need."""
    logits = logits_of(model)
    own = classification_loss if task == "classify" else causal_lm_loss
    width_of = [collate.width(data.length(i)) for i in range(len(data))]

    def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return own(logits(model, batch), batch["labels"], reduction="none")

    def example(batch: dict[str, Tensor], size: int) -> dict[str, Tensor] | None:
        width = batch["input_ids"].size(1)
        longest = [i for i, own in enumerate(width_of) if own == width]
        fitting = [i for i, own in enumerate(width_of) if own <= width]  # short ones too: padded and not
        if len(fitting) < 2 or not longest:
            return None
        count = max(size, 2)
        chosen = [fitting[k * (len(fitting) - 1) // (count - 1)] for k in range(count)]
        return collate([data[i] for i in [longest[-1], *chosen[:-1]]])

    return Graphed(losses, example)


def logits_of(model: nn.Module) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    """logits(model, batch), of the inputs that the model takes."""
    takes = accepted(model)

    def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = model(**inputs_of(model, batch, takes)).logits
        return found  # type: ignore[no-any-return]

    return logits


def inputs_of(model: nn.Module, batch: dict[str, Tensor], takes: set[str] | None = None) -> dict[str, Any]:
    """The inputs of a batch that the model takes, without labels."""
    takes = accepted(model) if takes is None else takes
    fixed = {"use_cache": False} if "use_cache" in takes else {}
    return {name: value for name, value in batch.items() if name in takes and name != "labels"} | fixed


def first_rows(batch: dict[str, Tensor], most: int) -> dict[str, Tensor]:
    """The first records of a batch."""
    return {name: copy.copy(value[:most]) for name, value in batch.items()}
