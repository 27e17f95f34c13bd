"""When a run says that nothing was learnt, and what it then proposes."""

from __future__ import annotations

import pytest

from fastdp.finetune.figures import Simple
from fastdp.finetune.plan import Plan
from fastdp.finetune.plots import in_text
from fastdp.finetune.verdict import next_tries, nothing_learnt

from .finetune_models import classifier, command, options_of, texts
from .test_finetune_command import QUICK

HALF = Simple(0.5, "the share of the most frequent label", 100)


@pytest.mark.parametrize("task, figures, simple, learnt", [
    ("classify", [{"accuracy": 0.5}, {"accuracy": 0.54}], HALF, False),  # within a standard error, 0.05
    ("classify", [{"accuracy": 0.5}, {"accuracy": 0.56}], HALF, True),
    ("regression", [{"r2": -3.0}, {"r2": -0.1}], Simple(0.0, "R2 of the mean", 9), False),
    ("regression", [{"r2": -3.0}, {"r2": 0.1}], Simple(0.0, "R2 of the mean", 9), True),
    ("tokens", [{"f1": 0.0}, {"f1": 0.0}], Simple(0.0, "F1 of the tag 'O'", 9), False),
    ("lm", [{"perplexity": 20.0}, {"perplexity": 21.0}], None, False),
    ("lm", [{"perplexity": 20.0}, {"perplexity": 19.0}], None, True),
    ("seq2seq", [{"token_accuracy": 0.2}, {"token_accuracy": 0.2}], None, False),
    ("classify", [{"accuracy": float("nan")}], HALF, False),
    ("classify", [{"loss": 1.0}], None, True),  # not known
    ("lm", [{"perplexity": 20.0}], None, True),
])  # fmt: skip
def test_what_counts_as_learnt(task, figures, simple, learnt):
    assert (nothing_learnt(task, dict(enumerate(figures)), simple) == "") == learnt


def tries(*words, share=1.0, units=1000, **changes):
    plan = Plan(**{"noise_multiplier": 1.0, "sample_rate": 0.1, "expected_batch_size": 100, "steps": 30, "lr": 1e-3,
                   "delta": 1e-5, "new_lr": 1e-3, "target_epsilon": 8.0} | changes)  # fmt: skip
    return [line.split(":")[0].split(",")[0] for line in
            next_tries(plan, options_of("m", "d", "--task", "lm", "--epsilon", 8, *words), units, share)]  # fmt: skip


def test_what_to_try_depends_on_the_run():
    assert tries() == ["--batch-size 400", "--lora 8"]
    assert tries("--lora", 4, share=0.01) == ["--batch-size 400", "--lr 0.003"]
    assert tries(sample_rate=0.5, expected_batch_size=500) == ["--lora 8", "--lr 0.003"]
    assert tries("--epsilon", 1, sample_rate=0.5, expected_batch_size=500, share=0.1) == ["--epsilon 4", "--lr 0.003"]
    assert tries(clipping="automatic") == ["--batch-size 400", "--clipping local"]
    assert tries(sample_rate=0.5, expected_batch_size=500, share=0.1) == ["--lr 0.003", "--epochs 12"]


def test_a_run_that_learnt_nothing_says_so(tmp_path, capsys):
    model, data = classifier(tmp_path / "m"), tmp_path / "d.csv"
    rows = [f"{text},{'rare' if i % 5 == 0 else 'usual'}\n" for i, text in enumerate(texts(40)[0])]
    data.write_text("text,label\n" + "".join(rows))
    words = ("--task", "classify", "--eval-fraction", 0.4, "--lr", 1e-9, "--new-lr", 1e-9, *QUICK)
    assert command(model, data, "--out", tmp_path / "out", *words) == 0
    said = capsys.readouterr().out
    assert "Nothing was learnt: accuracy" in said and "the share of the most frequent label" in said
    assert said.count("\n  --") == 2 and "another budget" in said and "are few" in said


def test_the_text_has_the_line_too():
    text = in_text({0: {"accuracy": 0.5}, 1: {"loss": 0.7}}, "classify", simple=HALF)
    assert text.endswith("the share of the most frequent label: 0.5\n")
