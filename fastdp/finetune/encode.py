"""Texts to tokens: one record is one sample, cut where it is too long, never joined with another."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..losses import IGNORE
from ..training.words import count
from .plan import FinetuneError
from .records import Records
from .tasks import TASKS

_AT_ONCE = 1000
_UNSET = 10**6  # a tokenizer without a limit says 1e30


class Encoded(Dataset[dict[str, Any]]):
    """Items {"input_ids", "token_type_ids"?: int32 [T], and what is to be predicted}; `cut`: records that were longer.

    labels: for each record an int (a class), a float, floats (0 or 1 for every label), or with `what`
    "tags": the numbers of tags, one for each token (IGNORE where there is none);
    "target": the tokens to write;
    "answers": (tokens of the prompt alone, the tokens of the prompt and the rejected answer).
    reference: [N, 2] log-probabilities of the chosen and the rejected answer under the model as it was.
    """

    def __init__(self, rows: Sequence[Sequence[int]], kinds: Sequence[Sequence[int]] | None,
                 labels: Sequence[Any] | None, cut: int, what: str = "label") -> None:  # fmt: skip
        lengths = torch.tensor([0, *(len(row) for row in rows)])
        self.starts = lengths.cumsum(0)
        self.tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        self.kinds = None if kinds is None else torch.tensor([kind for row in kinds for kind in row], dtype=torch.int32)
        self.labels, self.cut, self.what = labels, cut, what
        self.reference: Tensor | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def length(self, i: int) -> int:
        """Tokens of a record, those to be written included."""
        more = 0
        if self.labels is not None and self.what in ("target", "answers"):
            more = len(self.labels[i] if self.what == "target" else self.labels[i][1])
        return self._own(i) + more

    def digest(self) -> str:
        """Of all tokens."""
        found = hashlib.sha256(self.starts.numpy().tobytes())
        found.update(self.tokens.numpy().tobytes())
        if self.what in ("target", "answers"):
            found.update(repr(self.labels).encode())
        return found.hexdigest()

    def _own(self, i: int) -> int:
        return int(self.starts[i + 1] - self.starts[i])

    def by_length(self) -> Encoded:
        """The same records, short ones first. Physical batches are cut in the order of the data, so that little is
        padded; the order has no part in what is sampled."""
        order = sorted(range(len(self)), key=self.length)

        def rows(values: Tensor) -> list[Tensor]:
            return [values[int(self.starts[i]) : int(self.starts[i + 1])] for i in order]

        made = copy.copy(self)
        made.starts = torch.tensor([0, *(self._own(i) for i in order)]).cumsum(0)
        made.tokens = torch.cat(rows(self.tokens)) if order else self.tokens
        made.kinds = None if self.kinds is None else torch.cat(rows(self.kinds)) if order else self.kinds
        made.labels = None if self.labels is None else [self.labels[i] for i in order]
        made.reference = None if self.reference is None else self.reference[order]
        return made

    def __getitem__(self, i: int) -> dict[str, Any]:
        at = slice(int(self.starts[i]), int(self.starts[i + 1]))
        item: dict[str, Any] = {"input_ids": self.tokens[at]}
        if self.kinds is not None:
            item["token_type_ids"] = self.kinds[at]
        if self.labels is not None:
            item[self.what] = self.labels[i]
        if self.reference is not None:
            item["reference"] = self.reference[i]
        return item


class Collate:
    """Items -> {"input_ids", "attention_mask", "token_type_ids"?, "labels"} [B, T], padded on the right.

    For lm the labels are the tokens themselves, padding left out of the loss. T is the length of the longest item, or
    the next of `widths`. Targets to be written are "labels" [B, L], with "decoder_input_ids" that begin with `start`;
    of answers, the rejected ones are "rejected_ids", "rejected_mask" and "rejected_labels".
    """

    def __init__(self, pad: int, widths: Sequence[int] = (), start: int | None = None) -> None:
        self.pad, self.widths, self.start = pad, sorted(widths), start

    def width(self, longest: int) -> int:
        """T of a batch with items of this length at most."""
        return next((width for width in self.widths if width >= longest), longest)

    def _padded(self, rows: list[Any], fill: int, width: int) -> Tensor:
        found = nn.utils.rnn.pad_sequence(
            [torch.as_tensor(row).long() for row in rows], batch_first=True, padding_value=fill
        )
        return nn.functional.pad(found, (0, width - found.size(1)), value=fill)

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        rows = [item["input_ids"] for item in items]
        lengths = torch.tensor([len(row) for row in rows])
        width = self.width(int(lengths.max()))
        batch = {"input_ids": self._padded(rows, self.pad, width)}
        batch["attention_mask"] = (torch.arange(width)[None] < lengths[:, None]).long()
        if "token_type_ids" in items[0]:
            batch["token_type_ids"] = self._padded([item["token_type_ids"] for item in items], 0, width)
        if "label" in items[0]:
            batch["labels"] = torch.tensor([item["label"] for item in items])
        elif "tags" in items[0]:
            batch["labels"] = self._padded([item["tags"] for item in items], IGNORE, width)
        elif "target" in items[0]:
            targets = [item["target"] for item in items]
            assert self.start is not None
            before = [[self.start, *target[:-1]] for target in targets]
            longest = max(len(target) for target in targets)
            batch["labels"] = self._padded(targets, IGNORE, longest)
            batch["decoder_input_ids"] = self._padded(before, self.pad, longest)
        elif "answers" in items[0]:
            self._answers(batch, items, width)
        else:
            batch["labels"] = self._padded(rows, IGNORE, width)
        return batch

    def _answers(self, batch: dict[str, Tensor], items: list[dict[str, Any]], width: int) -> None:
        """The rejected answers, and of both which tokens are answers."""
        prompts, others = zip(*(item["answers"] for item in items), strict=True)
        lengths = torch.tensor([len(row) for row in others])
        longest = int(lengths.max())
        batch["rejected_ids"] = self._padded(list(others), self.pad, longest)
        batch["rejected_mask"] = (torch.arange(longest)[None] < lengths[:, None]).long()
        for name, rows, most in (("labels", [item["input_ids"] for item in items], width),
                                 ("rejected_labels", list(others), longest)):  # fmt: skip
            found = self._padded(rows, IGNORE, most)
            batch[name] = found.masked_fill(torch.arange(most)[None] < torch.tensor(prompts)[:, None], IGNORE)
        if "reference" in items[0]:
            batch["reference"] = torch.stack([item["reference"] for item in items])


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
    return wanted or min([TASKS[task].length, *limits])


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
    if task == "tokens":
        made = _tagged(records, tokenizer, most)
    elif task == "preference":
        made = _answers(records, tokenizer, most)
    else:
        made = _texts(records, tokenizer, model, task, most)
    _check_vocabulary(made, model)
    return made


def _texts(records: Records, tokenizer: Any, model: nn.Module, task: str, most: int) -> Encoded:
    kinds: list[list[int]] | None = None
    if records.pairs is not None and "token_type_ids" in accepted(model):
        kinds = []
    texts: list[Any] = records.texts
    if records.pairs is not None:
        texts = list(zip(records.texts, records.pairs, strict=True))
    rows, cut = _rows(texts, tokenizer, most, ended=task == "lm", kinds=kinds)
    if task != "seq2seq":
        return Encoded(rows, kinds or None, records.labels, len(cut))
    targets, more = _rows(list(records.labels or ()), tokenizer, most, ended=True, side="text_target")
    return Encoded(rows, None, targets, len(cut | more), "target")


def _rows(texts: list[Any], tokenizer: Any, most: int, ended: bool, side: str = "text",
          kinds: list[list[int]] | None = None, special: bool = True) -> tuple[list[list[int]], set[int]]:  # fmt: skip
    """(tokens of each text, those that were cut). ended: by the end-of-text token where a text is not cut."""
    rows: list[list[int]] = []
    cut: set[int] = set()
    for start in range(0, len(texts), _AT_ONCE):
        part = texts[start : start + _AT_ONCE]
        how = {"truncation": True, "add_special_tokens": special}
        found = tokenizer(**{side: part}, max_length=most, return_attention_mask=False, **how)
        ids = [list(row) for row in found["input_ids"]]
        at_limit = [i for i, row in enumerate(ids) if len(row) >= most]
        over: set[int] = set()
        if at_limit:  # as long as that, or longer?
            more = tokenizer(**{side: [part[i] for i in at_limit]}, max_length=most + 1, **how)["input_ids"]
            over = {i for i, row in zip(at_limit, more, strict=True) if len(row) > most}
        if ended and tokenizer.eos_token_id is not None:
            for i, row in enumerate(ids):
                if i not in over and len(row) < most and (not row or row[-1] != tokenizer.eos_token_id):
                    row.append(tokenizer.eos_token_id)
        empty = next((i for i, row in enumerate(ids) if not row), None)
        if empty is not None:
            text = part[empty] if isinstance(part[empty], str) else part[empty][0]
            raise FinetuneError(f"the tokenizer makes no token of the text {text[:40]!r}")
        rows += ids
        if kinds is not None and "token_type_ids" in found:
            kinds += [list(row) for row in found["token_type_ids"]]
        cut |= {start + i for i in over}
    return rows, cut


def _tagged(records: Records, tokenizer: Any, most: int) -> Encoded:
    """Words and their tags: the first token of a word has its tag, the others none."""
    if not tokenizer.is_fast:
        raise FinetuneError("--task tokens needs a fast tokenizer (a tokenizer.json), which knows words from tokens")
    rows, tags, cut = [], [], 0
    for words, numbers in records.labels or ():
        found = tokenizer(words, is_split_into_words=True, truncation=True, max_length=most)
        places = found.word_ids()
        first = [i == 0 or place != places[i - 1] for i, place in enumerate(places)]
        tags.append([numbers[place] if place is not None and begins else IGNORE
                     for place, begins in zip(places, first, strict=True)])  # fmt: skip
        rows.append(list(found["input_ids"]))
        cut += max((place for place in places if place is not None), default=-1) < len(words) - 1
        if all(tag == IGNORE for tag in tags[-1]):
            raise FinetuneError(f"the tokenizer makes no token of the words {' '.join(words)[:40]!r}")
    return Encoded(rows, None, tags, cut, "tags")


def _answers(records: Records, tokenizer: Any, most: int) -> Encoded:
    """Prompt and chosen answer, prompt and rejected answer. What is too long loses the beginning of the prompt, down to
    half of the length, then the end of the answer."""
    pairs = records.labels or []
    prompts, _ = _rows(records.texts, tokenizer, 1 << 20, ended=False)
    end = tokenizer.eos_token_id
    for prompt in prompts:  # what ends a text does not end a prompt
        if len(prompt) > 1 and prompt[-1] == end:
            prompt.pop()
    chosen, rejected = ([], []) if not pairs else (
        _rows([pair[side] for pair in pairs], tokenizer, 1 << 20, ended=True, special=False)[0] for side in (0, 1)
    )  # fmt: skip
    rows, others, cut = [], [], 0
    for prompt, good, bad in zip(prompts, chosen, rejected, strict=True):
        answer = max(len(good), len(bad))
        kept = prompt[-max(most - answer, most // 2) :]
        cut += len(kept) + answer > most or len(kept) < len(prompt)
        rows.append((kept + good)[:most])
        others.append((len(kept), (kept + bad)[:most]))
    return Encoded(rows, None, others, cut, "answers")


def _check_vocabulary(made: Encoded, model: nn.Module) -> None:
    owner: Any = model
    table = owner.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    size = getattr(table, "num_embeddings", None)
    highest = int(made.tokens.max()) if len(made.tokens) else 0
    if made.what in ("target", "answers"):
        more = (label if made.what == "target" else label[1] for label in made.labels or ())
        highest = max([highest, *(max(row) for row in more)])
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
