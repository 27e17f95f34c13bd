"""Numbers, sets of labels, tags, targets and preferences: a run of each, its loss by hand, its figures."""

from __future__ import annotations

import json

import pytest
import torch

from fastdp.finetune import figures
from fastdp.finetune.encode import Collate, encode
from fastdp.finetune.losses import losses_of, reference_of
from fastdp.finetune.records import load_data

from .finetune_models import (
    QUICK,
    card_of,
    classifier,
    command,
    language_model,
    options_of,
    refused,
    texts,
    tokenizer_of,
    transformers,
    writer,
)

pytestmark = pytest.mark.slow  # `make test-all` runs it


def table_of(path, task, count=40):
    """A file for a task, as people have them."""
    rows = []
    for i, (text, label) in enumerate(zip(*texts(count), strict=True)):
        words = text.split()
        rows.append({
            "regression": {"text": text, "stars": 1 + i % 5},
            "multi-label": {"text": text, "labels": [name for name in ("a", "b", "c") if len(words) % ord(name) % 2]},
            "tokens": {"tokens": words, "ner_tags": ["B-X" if word == "film" else "O" for word in words]},
            "seq2seq": {"document": text, "summary": f"{words[0]} {label == 'pos' and 'good' or 'bad'}"},
            "preference": {"prompt": text, "chosen": "very good", "rejected": "awful " * (1 + i % 3)},
        }[task])  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def model_for(folder, task):
    return (
        writer(folder) if task == "seq2seq" else language_model(folder) if task == "preference" else classifier(folder)
    )


TASKS = {
    "regression": ("r2", "AutoModelForSequenceClassification", ("--label-range", "1,5")),
    "multi-label": ("micro_f1", "AutoModelForSequenceClassification", ("--lora", 2)),
    "tokens": ("f1", "AutoModelForTokenClassification", ()),
    "seq2seq": ("token_accuracy", "AutoModelForSeq2SeqLM", ()),
    "preference": ("reward_accuracy", "AutoModelForCausalLM", ()),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_run_of_each_task(tmp_path, capsys, task):
    figure, kind, more = TASKS[task]
    model, data, out = model_for(tmp_path / "m", task), table_of(tmp_path / "d.jsonl", task), tmp_path / "out"
    words = ("--task", task, "--out", out, "--eval-fraction", 0.3, *more, *QUICK)
    assert command(model, data, *words) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "fastdp.verify on 4 records: exact" in said and f"{figure} " in said
    assert card_of(out)["task"] == task and card_of(out)["steps"] > 0
    if "--lora" in more:
        assert (out / "model" / "adapter_config.json").exists()
        return
    found, before = (getattr(transformers, kind).from_pretrained(place) for place in (out / "model", model))
    assert any(not torch.equal(p, q) for p, q in zip(found.parameters(), before.parameters(), strict=True)
               if p.shape == q.shape)  # fmt: skip
    if task == "tokens":
        assert found.config.id2label == {0: "B-X", 1: "O"}
    if task == "regression":
        assert found.config.problem_type == "regression" and found.config.label_range == [1, 5]
        said = refused(capsys, model, data, *words[:4], "--eval-fraction", 0.3, *QUICK, "--resume")
        assert "--label-range: was 1.0,5.0, now not given" in said


def test_options_and_models_that_do_not_fit_the_task(tmp_path, capsys):
    bert, t5, rest = classifier(tmp_path / "bert"), writer(tmp_path / "t5"), ("--out", tmp_path / "o", *QUICK)
    files = {task: table_of(tmp_path / f"{task}.jsonl", task) for task in ("regression", "seq2seq", "preference")}
    for model, task, words, said in (
        (bert, "regression", ("--chosen-column", "text"), "--chosen-column goes with --task preference"),
        (bert, "regression", ("--beta", 0.2), "--beta goes with --task preference"),
        (t5, "seq2seq", ("--label-range", "1,5"), "--label-range goes with --task regression"),
        (t5, "seq2seq", ("--graphed",), "--graphed does not go with --task seq2seq"),
        (t5, "seq2seq", ("--label-column", "summary"), "--label-column does not go with --task seq2seq"),
        (bert, "seq2seq", (), "is a bert model, and this task needs an encoder and decoder"),
        (t5, "preference", (), "needs a language model"),
        (t5, "regression", (), "the model fails on the first records: ValueError: "),  # it wants an end of text
    ):  # fmt: skip
        assert said in refused(capsys, model, files[task], "--task", task, *words, *rest)


# ---------------------------------------------------------------------- what is learnt and measured


def test_the_loss_of_a_preference_is_dpos(tmp_path):
    """By hand, one record at a time, without padding."""
    tokenizer = tokenizer_of(tmp_path / "t")
    model = transformers.AutoModelForCausalLM.from_pretrained(language_model(tmp_path / "m")).eval()
    path = table_of(tmp_path / "d.jsonl", "preference")
    records = load_data(options_of("m", path, "--task", "preference", "--epsilon", 1, "--eval-fraction", 0)).train
    encoded, collate = encode(records, tokenizer, model, "preference", 12), Collate(tokenizer, model, "preference")
    encoded = encoded.add_column("reference", reference_of(model, encoded, collate, 7, torch.device("cpu")))
    assert all(len(item["input_ids"]) <= 12 for item in encoded)

    def difference(item):
        sums = []
        for row in (item["input_ids"], item["rejected_ids"]):
            logs = model(torch.tensor([row])).logits[0].log_softmax(-1)
            sums.append(sum(logs[t - 1, row[t]] for t in range(item["prompt"], len(row))))
        return sums[0] - sums[1]

    with torch.no_grad():
        before = [difference(encoded[i]) for i in range(6)]
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        found = losses_of(model, "preference", 0.3, None)(model, collate([encoded[i] for i in range(6)]))
        each = [-torch.nn.functional.logsigmoid(0.3 * (difference(encoded[i]) - before[i])) for i in range(6)]
    torch.testing.assert_close(found, torch.stack(each), rtol=1e-4, atol=1e-5)


def test_what_is_too_long_loses_the_beginning_of_its_prompt(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "t")
    model = transformers.AutoModelForCausalLM.from_pretrained(language_model(tmp_path / "m"))
    record = {"text": "good bad fine awful film plot", "label": ["actor scene", "very"]}
    whole = encode([record] * 2, tokenizer, model, "preference", 30)[0]
    cut = encode([record] * 2, tokenizer, model, "preference", 6)[0]
    assert whole["prompt"] == 6 and len(whole["input_ids"]) == 9 and whole["input_ids"][-1] == tokenizer.eos_token_id
    assert cut["input_ids"] == whole["input_ids"][3:] and cut["rejected_ids"] == whole["rejected_ids"][3:]


def test_targets_are_shifted_and_padding_is_left_out(tmp_path):
    tokenizer, model = tokenizer_of(tmp_path / "t"), transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
                              decoder_start_token_id=9, pad_token_id=1)
    )  # fmt: skip
    records = [{"text": "good film", "label": "good"}, {"text": "bad", "label": "very not"}]
    data = encode(records, tokenizer, model, "seq2seq", 16, sort=True)
    batch = Collate(tokenizer, model, "seq2seq")([data[0], data[1]])
    end, (good, very, no) = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(["good", "very", "not"])
    assert data["length"] == [4, 4] and batch["labels"].tolist() == [[good, end, -100], [very, no, end]]
    assert batch["decoder_input_ids"].tolist() == [[9, good, end], [9, very, no]]


def test_padding_is_on_the_right_and_to_few_widths(tmp_path):
    """Whatever side the tokenizer pads on; an end of text that also pads stays a label."""
    tokenizer = tokenizer_of(tmp_path / "t", pad=False)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    batch = Collate(tokenizer, None, "lm", 4)([{"input_ids": [5, 6, 1]}, {"input_ids": [7]}])
    assert batch["input_ids"].tolist() == [[5, 6, 1, 1], [7, 1, 1, 1]] and tokenizer.padding_side == "left"
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, 1, -100], [7, -100, -100, -100]]


def test_the_first_token_of_a_word_has_its_tag(tmp_path):
    model = transformers.AutoModel.from_pretrained(classifier(tmp_path / "m"))
    records = [{"text": ["film.", "good"], "label": [0, 1]}, {"text": ["bad"], "label": [1]}]  # "film." is two tokens
    encoded = encode(records, tokenizer_of(tmp_path / "t"), model, "tokens", 16)
    assert encoded[0]["labels"] == [0, -100, 1] and len(encoded[0]["input_ids"]) == 3


def one_hot(rows, classes=3, scale=1.0):
    return scale * torch.nn.functional.one_hot(torch.tensor(rows), classes).float()


def test_figures():
    found, simple = figures.of_numbers(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 3.0, 5.0]), 10.0)
    assert found["rmse"] == pytest.approx(10 * (2 / 3) ** 0.5) and found["r2"] == pytest.approx(1 - 2 / 8)
    found, simple = figures.of_label_sets(torch.tensor([[1.0, -1], [1, 1]]), torch.tensor([[1.0, 0], [0, 1]]))
    assert found["micro_f1"] == pytest.approx(4 / 5) and found["exact_match"] == 0.5
    assert simple.value == 0  # no label is of most records
    _, simple = figures.of_label_sets(torch.tensor([[1.0, -1]] * 3), torch.tensor([[1.0, 0], [1, 1], [0, 1]]))
    assert simple.value == pytest.approx(2 * 4 / (6 + 4))  # both are of two records in three
    tags = figures.Tokens(False, ["O", "B-X", "I-X"])
    tags.add(one_hot([[1, 2, 0, 1], [0, 1, 1, 0]]), torch.tensor([[1, 2, 0, -100], [0, 1, 2, 0]]))
    found, _ = tags.of_tags()  # entities said: (0, 2); (1, 2), (2, 3). True: (0, 2); (1, 3)
    assert found["f1"] == pytest.approx(2 / 5) and found["accuracy"] == pytest.approx(6 / 7)
    words = figures.Tokens(False, ["O", "A"])
    words.add(one_hot([[1, 1, 0]], 2), torch.tensor([[1, 1, 1]]))
    assert words.of_tags()[0]["f1"] == pytest.approx(4 / 5)
    written = figures.Tokens(False)
    written.add(one_hot([[1, 2], [1, 1], [1, 2]], scale=9), torch.tensor([[1, 2], [1, 2], [1, -100]]))
    found, _ = written.of_text()
    assert found["exact_match"] == pytest.approx(2 / 3) and found["token_accuracy"] == pytest.approx(4 / 5)
    found, simple = figures.of_margins(torch.tensor([1e-6, 1.0, -1.0, 2.0]))
    assert found["reward_accuracy"] == 0.625 and found["margin"] == pytest.approx(0.5, abs=1e-5) and simple.value == 0.5


def test_what_greedy_generation_writes_is_what_exact_match_counts(tmp_path):
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(writer(tmp_path / "t5")).eval()
    collate, source, measure = Collate(tokenizer_of(tmp_path / "t"), model, "seq2seq"), [3, 4, 5], figures.Tokens(False)
    with torch.no_grad():
        target = model.generate(torch.tensor([source]), max_new_tokens=6, do_sample=False)[0].tolist()[1:]
        for wanted in (target, [*target[:-1], (target[-1] + 1) % 20]):
            batch = collate([{"input_ids": source, "labels": wanted}])
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            measure.add(model(**inputs).logits, batch["labels"])
    assert measure.of_text()[0]["exact_match"] == 0.5
