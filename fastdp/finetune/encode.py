"""Texts to tokens: one record is one sample, cut where it is too long, never joined with another."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..losses import IGNORE
from ..utils.formatting import count
from .plan import FinetuneError
from .records import Records
from .tasks import TASKS, one_answer

_UNSET = 10**6  # a tokenizer without a limit says 1e30


class Encoded:
    """Records as tokens, in memory: items {"input_ids", "token_type_ids"?, "labels"?}; `cut`: records that were longer.

    labels are a class, a number, numbers of 0 and 1, tags of the tokens (IGNORE for none), or the tokens to write. Of
    preferences, an item has "input_ids" (prompt and chosen answer), "rejected_ids", "prompt" (its length), and
    "reference": the log-probabilities of both answers under the model as it was.
    """

    def __init__(self, columns: dict[str, Any], cut: int) -> None:
        from datasets import Dataset

        self.cut = cut
        self.rows = Dataset.from_dict({name: values for name, values in columns.items() if values is not None})
        counted = [name for name in ("input_ids", "rejected_ids", "targets") if name in columns]
        self.lengths = [sum(map(len, rows)) for rows in zip(*(columns[name] for name in counted), strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]  # type: ignore[no-any-return]

    def length(self, i: int) -> int:
        """Tokens of a record, those to be written included."""
        return self.lengths[i]

    def digest(self) -> str:
        """Of all tokens."""
        found = hashlib.sha256()
        for name in sorted(set(self.rows.column_names) - {"reference"}):
            found.update(f"{name} {list(self.rows[name])}".encode())
        return found.hexdigest()

    def by_length(self) -> Encoded:
        """The same records, short ones first. Physical batches are cut in the order of the data, so that little is
        padded; the order has no part in what is sampled."""
        order = sorted(range(len(self)), key=self.length)
        made = copy.copy(self)
        made.rows, made.lengths = self.rows.select(order), [self.lengths[i] for i in order]
        return made

    def add_reference(self, values: Tensor) -> None:
        """[N, 2]."""
        self.rows = self.rows.add_column("reference", values.tolist())


class Collate:
    """Items -> {"input_ids", "attention_mask", "token_type_ids"?, "labels", "decoder_input_ids"?} by transformers'
    collators, padded on the right to the longest item, or the next multiple.

    Of preferences, the rejected answers are "rejected_ids", "rejected_mask" and "rejected_labels"; labels are IGNORE
    where a prompt is.
    """

    def __init__(self, tokenizer: Any, model: nn.Module, task: str, multiple: int | None = None) -> None:
        from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

        tokenizer = copy.deepcopy(tokenizer)  # the saved one keeps its side
        tokenizer.padding_side = "right"
        self.task, self.multiple = task, multiple
        if one_answer(task):
            self.padded: Any = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
        else:
            decoder = model if task == "seq2seq" else None
            self.padded = DataCollatorForSeq2Seq(tokenizer, decoder, pad_to_multiple_of=multiple)

    def width(self, length: int) -> int:
        """Tokens of a batch whose longest item has this length."""
        return length if self.multiple is None else -(-length // self.multiple) * self.multiple

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        if self.task == "preference":
            return self._answers(items)
        rows = [{name: value for name, value in item.items() if name != "targets"} for item in items]
        for row, item in zip(rows, items, strict=True):
            row["attention_mask"] = [1] * len(row["input_ids"])
            if self.task in ("lm", "seq2seq"):
                row["labels"] = item["input_ids" if self.task == "lm" else "targets"]
        return dict(self.padded(rows))

    def _answers(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for side, names in (("rejected_ids", ("rejected_ids", "rejected_mask", "rejected_labels")),
                            ("input_ids", ("input_ids", "attention_mask", "labels"))):  # fmt: skip
            rows = []
            for item in items:
                labels = [IGNORE] * item["prompt"] + item[side][item["prompt"] :]
                rows.append({"input_ids": item[side], "attention_mask": [1] * len(item[side]), "labels": labels})
            padded = self.padded(rows)
            found |= {
                name: padded[own] for name, own in zip(names, ("input_ids", "attention_mask", "labels"), strict=True)
            }
        if "reference" in items[0]:
            found["reference"] = torch.tensor([item["reference"] for item in items])
        return found


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


def multiple_of(most: int) -> int:
    """Batches are padded to its multiples, so that few shapes are recorded: up to eight, by `most` tokens alone."""
    return max(8, -(-most // 8))


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
    texts: list[Any] = records.texts
    if records.pairs is not None:
        texts = list(zip(records.texts, records.pairs, strict=True))
    rows, kinds, cut = _rows(texts, tokenizer, most, ended=task == "lm")
    if records.pairs is None or "token_type_ids" not in accepted(model):
        kinds = None
    if task != "seq2seq":
        return Encoded({"input_ids": rows, "token_type_ids": kinds, "labels": records.labels}, len(cut))
    targets, _, more = _rows(list(records.labels or ()), tokenizer, most, ended=True, side="text_target")
    return Encoded({"input_ids": rows, "targets": targets}, len(cut | more))


def _rows(texts: list[Any], tokenizer: Any, most: int, ended: bool, side: str = "text",
          special: bool = True) -> tuple[list[list[int]], Any, set[int]]:  # fmt: skip
    """(tokens of each text, their kinds, those that were cut). ended: by the end-of-text token if a text is not cut."""
    how = {side: texts, "add_special_tokens": special, "return_attention_mask": False}
    found, end = tokenizer(**how, truncation=True, max_length=most), tokenizer.eos_token_id
    whole = tokenizer(**how)["input_ids"]
    rows = [list(row) for row in found["input_ids"]]
    cut = {i for i, row in enumerate(whole) if len(row) > most}
    for i, row in enumerate(rows):
        if ended and end is not None and i not in cut and len(row) < most and row[-1:] != [end]:
            row.append(end)
        if not row:
            text = texts[i] if isinstance(texts[i], str) else texts[i][0]
            raise FinetuneError(f"the tokenizer makes no token of the text {text[:40]!r}")
    return rows, found.get("token_type_ids"), cut


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
    return Encoded({"input_ids": rows, "labels": tags}, cut)


def _answers(records: Records, tokenizer: Any, most: int) -> Encoded:
    """Prompt and chosen answer, prompt and rejected answer. What is too long loses the beginning of the prompt, down to
    half of the length, then the end of the answer."""
    pairs, whole, end = records.labels or [], 1 << 20, tokenizer.eos_token_id
    prompts, _, _ = _rows(records.texts, tokenizer, whole, ended=False)
    chosen, rejected = (
        _rows([pair[side] for pair in pairs], tokenizer, whole, ended=True, special=False)[0] for side in (0, 1)
    )
    found: dict[str, list[Any]] = {"input_ids": [], "rejected_ids": [], "prompt": []}
    cut = 0
    for prompt, good, bad in zip(prompts, chosen, rejected, strict=True):
        if len(prompt) > 1 and prompt[-1] == end:  # what ends a text does not end a prompt
            prompt.pop()
        answer = max(len(good), len(bad))
        kept = prompt[-max(most - answer, most // 2) :]
        cut += len(kept) + answer > most or len(kept) < len(prompt)
        found["input_ids"].append((kept + good)[:most])
        found["rejected_ids"].append((kept + bad)[:most])
        found["prompt"].append(len(kept))
    return Encoded(found, cut)


def _check_vocabulary(made: Encoded, model: nn.Module) -> None:
    owner: Any = model
    size = getattr(
        owner.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None, "num_embeddings", None
    )
    texts = [name for name in ("input_ids", "rejected_ids", "targets") if name in made.rows.column_names]
    highest = max(max(row, default=0) for name in texts for row in made.rows[name])
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
