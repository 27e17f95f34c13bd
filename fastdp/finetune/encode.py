"""Texts to tokens: one record is one sample, cut where it is too long, never joined with another."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..losses import IGNORE
from ..utils.formatting import count
from .plan import FinetuneError
from .records import Record
from .tasks import TASKS, one_answer

_UNSET = 10**6  # a tokenizer without a limit says 1e30


def encode(records: list[Record], tokenizer: Any, model: nn.Module, task: str, most: int, sort: bool = False) -> Any:
    """A `datasets.Dataset` in memory: "input_ids", "labels" (a class, a number, numbers of 0 and 1, tags of the tokens
    with IGNORE for none, or the tokens to write), "token_type_ids" of pairs, and "length", in tokens.

    Of preferences, "input_ids" are the prompt and the chosen answer, "rejected_ids" the prompt and the other, and
    "prompt" its length. sort: short records first, so that little is padded; the order has no part in what is sampled.
    Raises FinetuneError where a token is none of the model's, or a text has none.
    """
    from datasets import Dataset

    make = {"tokens": _tagged, "preference": _answers}.get(task, _texts)
    columns = make(records, tokenizer, task, most)
    if "token_type_ids" in columns and ("pair" not in records[0] or "token_type_ids" not in accepted(model)):
        del columns["token_type_ids"]
    counted = [columns[name] for name in ("input_ids", "rejected_ids") if name in columns]
    counted += [columns["labels"]] if task == "seq2seq" else []
    for number, rows in enumerate(zip(*counted, strict=True)):
        if not all(rows):
            raise FinetuneError(f"the tokenizer makes no token of the text {str(records[number]['text'])[:40]!r}")
    columns["length"] = [sum(map(len, rows)) for rows in zip(*counted, strict=True)]
    owner: Any = model
    known = getattr(owner.get_input_embeddings(), "num_embeddings", None)
    highest = max(max(row) for rows in counted for row in rows)
    if known is not None and highest >= known:
        raise FinetuneError(
            f"the tokenizer makes the token {highest}, but the model knows {count(known)}: they do not belong together"
        )
    order = sorted(range(len(records)), key=columns["length"].__getitem__) if sort else range(len(records))
    return Dataset.from_dict({name: [values[i] for i in order] for name, values in columns.items()})


def _texts(records: list[Record], tokenizer: Any, task: str, most: int) -> dict[str, list[Any]]:
    texts = [[each["text"] for each in records]]
    if "pair" in records[0]:
        texts.append([each["pair"] for each in records])
    found = tokenizer(*texts, truncation=True, max_length=most)
    columns = {name: found[name] for name in ("input_ids", "token_type_ids") if name in found}
    if task == "lm":
        columns["input_ids"] = _ended(columns["input_ids"], tokenizer, most)
    elif task == "seq2seq":
        targets = tokenizer(text_target=[each["label"] for each in records], truncation=True, max_length=most)
        columns["labels"] = _ended(targets["input_ids"], tokenizer, most)
    else:
        columns["labels"] = [each["label"] for each in records]
    return columns


def _ended(rows: Iterable[list[int]], tokenizer: Any, most: int) -> list[list[int]]:
    """Rows that end with the end-of-text token if there is one, and room for it."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [row + end if len(row) < most and row[-1:] != end else row for row in rows]


def _tagged(records: list[Record], tokenizer: Any, task: str, most: int) -> dict[str, list[Any]]:
    """The first token of a word has its tag, the others none."""
    if not tokenizer.is_fast:
        raise FinetuneError("--task tokens needs a fast tokenizer (a tokenizer.json), which knows words from tokens")
    found = tokenizer([each["text"] for each in records], is_split_into_words=True, truncation=True, max_length=most)
    tags = []
    for number, record in enumerate(records):
        words = found.word_ids(number)
        before = [None, *words[:-1]]
        tags.append([IGNORE if word is None or word == last else record["label"][word]
                     for word, last in zip(words, before, strict=True)])  # fmt: skip
    return {"input_ids": found["input_ids"], "labels": tags}


def _answers(records: list[Record], tokenizer: Any, task: str, most: int) -> dict[str, list[Any]]:
    """Prompt and chosen answer, prompt and rejected answer. What is too long loses the beginning of the prompt, down to
    half of the length, then the end of the answer."""
    prompts = tokenizer([each["text"] for each in records])["input_ids"]
    columns: dict[str, list[Any]] = {"input_ids": [], "rejected_ids": [], "prompt": []}
    both = [
        _ended(tokenizer([each["label"][side] for each in records], add_special_tokens=False)["input_ids"], tokenizer,
               _UNSET) for side in (0, 1)
    ]  # fmt: skip
    for prompt, chosen, rejected in zip(prompts, *both, strict=True):
        if len(prompt) > 1 and prompt[-1] == tokenizer.eos_token_id:  # what ends a text does not end a prompt
            prompt = prompt[:-1]
        kept = prompt[-max(most - max(len(chosen), len(rejected)), most // 2) :]
        columns["input_ids"].append((kept + chosen)[:most])
        columns["rejected_ids"].append((kept + rejected)[:most])
        columns["prompt"].append(len(kept))
    return columns


def digest(rows: Iterable[Any]) -> str:
    """SHA-256 of records or tokens, in order."""
    found = hashlib.sha256()
    for row in rows:
        found.update(f"{row!r}\n".encode(errors="surrogateescape"))
    return found.hexdigest()


class Collate:
    """Items -> {"input_ids", "attention_mask", "token_type_ids"?, "labels", "decoder_input_ids"?} by transformers'
    collators, padded on the right to the longest item, or to a multiple.

    Of preferences, the rejected answers are "rejected_ids", "rejected_mask" and "rejected_labels"; labels are IGNORE
    where a prompt is.
    """

    def __init__(self, tokenizer: Any, model: nn.Module | None, task: str, multiple: int | None = None) -> None:
        from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

        tokenizer = copy.deepcopy(tokenizer)  # the saved one keeps its side
        tokenizer.padding_side = "right"
        self.task = task
        if one_answer(task):
            self.padded: Any = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
        else:
            decoder = model if task == "seq2seq" else None
            self.padded = DataCollatorForSeq2Seq(tokenizer, decoder, pad_to_multiple_of=multiple)

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        if self.task != "preference":
            return self._padded(items, "input_ids")
        chosen, rejected = self._padded(items, "input_ids"), self._padded(items, "rejected_ids")
        found = chosen | {
            "rejected_ids": rejected["input_ids"], "rejected_mask": rejected["attention_mask"],
            "rejected_labels": rejected["labels"],
        }  # fmt: skip
        if "reference" in items[0]:
            found["reference"] = torch.tensor([item["reference"] for item in items])
        return found

    def _padded(self, items: list[dict[str, Any]], side: str) -> dict[str, Tensor]:
        rows = []
        for item in items:
            ids = item[side]
            row = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": item.get("labels", ids)}
            if self.task == "preference":
                row["labels"] = [IGNORE] * item["prompt"] + ids[item["prompt"] :]
            if "token_type_ids" in item:
                row["token_type_ids"] = item["token_type_ids"]
            rows.append(row)
        return dict(self.padded(rows))


def longest(model: nn.Module, tokenizer: Any, task: str, wanted: int | None) -> int:
    """Tokens of a record at most. Raises FinetuneError where more is wanted than the model has positions for."""
    positions = getattr(model.config, "max_position_embeddings", None) or _UNSET
    for table in model.modules():  # one of positions that begins behind its padding row holds fewer
        if isinstance(table, nn.Embedding) and table.num_embeddings == positions and table.padding_idx is not None:
            positions -= table.padding_idx + 1
    limit = min(int(tokenizer.model_max_length), positions)
    if wanted is not None and wanted > limit:
        raise FinetuneError(f"--max-length {wanted}: the model and its tokenizer take at most {limit} tokens")
    return wanted or min(TASKS[task].length, limit)


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


def accepted(model: nn.Module) -> set[str]:
    """Names that the model's forward takes (of the model within adapters)."""
    inner: Any = model
    if hasattr(model, "get_base_model"):
        inner = inner.get_base_model()
    return set(inspect.signature(inner.forward).parameters)


def inputs_of(batch: dict[str, Tensor], takes: set[str]) -> dict[str, Any]:
    """The inputs of a batch that the model takes, without labels."""
    fixed = {"use_cache": False} if "use_cache" in takes else {}
    return {name: value for name, value in batch.items() if name in takes and name != "labels"} | fixed
