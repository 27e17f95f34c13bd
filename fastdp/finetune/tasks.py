"""What can be learnt from a table: for each task its model, its columns, its defaults and its figure. Nothing heavy."""

from __future__ import annotations

from typing import NamedTuple

_TEXTS = (
    "text", "sentence", "content", "review", "document", "body", "message", "comment", "tweet", "question", "utterance",
    "review_text", "review_body", "sentence1", "headline", "post", "description",
)  # fmt: skip
_LABELS = (
    "label", "labels", "class", "target", "category", "sentiment", "polarity", "rating", "stars", "score", "label_text",
    "label_name", "coarse_label", "intent", "topic", "emotion", "genre", "gold", "gold_label", "y", "is_spam", "spam",
    "toxic", "classification", "outcome",
)  # fmt: skip


class Task(NamedTuple):
    """One kind of learning.

    about: help. auto: the class of transformers that makes the model. peft: the name that peft has for it. length: of a
    text, in tokens, at most. headline: the figure by which a run is judged. texts, labels: usual names of the columns.
    flag: the option that names the label's column. names: whether labels are a set of names. problem: transformers'
    problem_type.
    """

    about: str
    auto: str
    peft: str | None
    length: int
    lr: float
    headline: str
    texts: tuple[str, ...] = _TEXTS
    labels: tuple[str, ...] = _LABELS
    flag: str = "--label-column"
    names: bool = False
    problem: str | None = None


_HEAD = ("AutoModelForSequenceClassification", "SEQ_CLS", 128, 2e-4)
TASKS = {
    "classify": Task("predict one label per text", *_HEAD, "accuracy", names=True,
                     problem="single_label_classification"),
    "multi-label": Task("predict any number of labels per text", *_HEAD, "micro_f1", names=True,
                        problem="multi_label_classification"),
    "regression": Task("predict a number per text", *_HEAD, "r2", problem="regression"),
    "tokens": Task(
        "predict one tag per word", "AutoModelForTokenClassification", "TOKEN_CLS", 128, 2e-4, "f1",
        ("tokens", "words", *_TEXTS), ("tags", "ner_tags", "pos_tags", "chunk_tags", "labels", "label", "ner", "pos"),
        names=True,
    ),
    "images": Task(
        "predict one label per image (DATA: a folder with a folder for each class)", "AutoModelForImageClassification",
        None, 0, 2e-4, "accuracy", names=True,
    ),
    "lm": Task("predict the next token", "AutoModelForCausalLM", "CAUSAL_LM", 256, 5e-4, "perplexity", labels=()),
    "seq2seq": Task(
        "write a text for a text", "AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM", 128, 5e-4, "token_accuracy",
        ("source", "input", "article", "dialogue", "prompt", *_TEXTS),
        ("target", "summary", "output", "answer", "translation", "highlights", "response", "completion", "label"),
        "--target-column",
    ),
    "preference": Task(
        "prefer one answer to another (DPO)", "AutoModelForCausalLM", "CAUSAL_LM", 256, 1e-4, "reward_accuracy",
        ("prompt", "instruction", "question", "input", "text"), ("chosen",), "--chosen-column",
    ),
}  # fmt: skip
LOWER = ("perplexity", "rmse", "nll")  # figures that are better when they are lower


def headline(task: str) -> str:
    """The figure by which a run of this task is judged."""
    return TASKS[task].headline


def one_answer(task: str) -> bool:
    """Whether the model has one vector of logits for a record."""
    return TASKS[task].auto in ("AutoModelForSequenceClassification", "AutoModelForImageClassification")


def generates(task: str) -> bool:
    """Whether the model writes text, so that none of it may be new."""
    return TASKS[task].auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
