"""Numbers, sets of labels, tags, targets and preferences: each from its file to its model, one loss a record."""

from __future__ import annotations

import json

import pytest
import torch

from fastdp.finetune import figures
from fastdp.finetune.encode import Collate, Encoded, encode
from fastdp.finetune.plan import FinetuneError
from fastdp.finetune.records import load_data
from fastdp.finetune.task_losses import answer_scores, losses_of, reference_of

from .finetune_models import (
    card_of,
    classifier,
    command,
    language_model,
    options_of,
    texts,
    tokenizer_of,
    transformers,
    writer,
)
from .test_finetune_command import QUICK, refused

pytestmark = pytest.mark.slow  # `make test-all` runs it

COUNT = 40


def table_of(path, task):
    """A file for a task, as people have them."""
    found, labels = texts(COUNT)
    rows = []
    for i, (text, label) in enumerate(zip(found, labels, strict=True)):
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
    else:
        found = getattr(transformers, kind).from_pretrained(out / "model")
        before = getattr(transformers, kind).from_pretrained(model)
        assert any(not torch.equal(p, q) for p, q in zip(found.parameters(), before.parameters(), strict=True)
                   if p.shape == q.shape)  # fmt: skip
    if task == "tokens":
        assert found.config.id2label == {0: "B-X", 1: "O"}
    if task == "regression":
        assert found.config.num_labels == 1 and found.config.problem_type == "regression"


@pytest.mark.parametrize("task", ["preference", "seq2seq"])
def test_a_run_that_is_resumed_is_the_one_that_would_have_been(tmp_path, task, monkeypatch):
    from fastdp.finetune.run import Trainer

    model, data, weights = model_for(tmp_path / "m", task), table_of(tmp_path / "d.jsonl", task), []
    words = ("--task", task, "--seed", 1, "--checkpoint-every", 1, *QUICK[2:], "--epochs", 1, "--out")
    assert command(model, data, *words, tmp_path / "whole") == 0
    saved = Trainer._save_checkpoint

    def full(self, *arguments):
        saved(self, *arguments)
        if self.state.global_step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_save_checkpoint", full)
    assert command(model, data, *words, tmp_path / "part") == 130
    monkeypatch.setattr(Trainer, "_save_checkpoint", saved)
    assert command(model, data, *words, tmp_path / "part", "--resume") == 0
    for name in ("whole", "part"):
        weights.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


# ---------------------------------------------------------------------- what is read


def load(path, task, *words):
    return load_data(options_of("m", path, "--task", task, "--epsilon", 1, "--eval-fraction", 0, *words))


def written(path, text):
    path.write_text(text)
    return path


def test_numbers_and_their_range(tmp_path):
    path = written(tmp_path / "a.csv", "text,rating\na,1\nb,2.5\nc,5\n")
    assert load(path, "regression").train.labels == [1.0, 2.5, 5.0]
    assert load(path, "regression", "--label-range", "1,5").train.labels == [-1.0, -0.25, 1.0]
    with pytest.raises(FinetuneError, match="line 4: the label 5 is outside --label-range 1,4"):
        load(path, "regression", "--label-range", "1,4")
    for cell, words in (("nan", "no label"), ("many", "'many' is no number"), ("inf", "not finite"), ("", "no label")):
        with pytest.raises(FinetuneError, match=f"line 3: .*{words}"):
            load(written(tmp_path / "b.csv", f"text,rating\na,1\nb,{cell}\nc,2\n"), "regression")
    with pytest.raises(FinetuneError, match="same number"):
        load(written(tmp_path / "c.csv", "text,rating\na,1\nb,1\n"), "regression")
    many = written(tmp_path / "d.csv", "text,price\n" + "".join(f"t {i},{i}\n" for i in range(50)))
    with pytest.raises(FinetuneError, match="50 different values.*--task regression"):
        load(many, "classify")
    with pytest.raises(FinetuneError, match="fraction.*--task regression"):
        load(path, "classify")


def test_sets_of_labels(tmp_path):
    expected = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    lists = written(tmp_path / "a.jsonl", "".join(json.dumps({"text": "t", "labels": each}) + "\n"
                                                  for each in (["a"], ["b", "a"], [])))  # fmt: skip
    assert load(lists, "multi-label").train.labels == expected
    cells = written(tmp_path / "b.csv", "text,labels\nt,a\nu,a|b\nv,[]\n")
    assert load(cells, "multi-label").train.labels == expected
    columns = written(tmp_path / "c.csv", "text,a,b\nt,1,0\nu,true,1\nv,0,no\n")
    data = load(columns, "multi-label", "--label-column", "a,b")
    assert data.train.labels == expected and data.names == ["a", "b"] and data.public_labels
    with pytest.raises(FinetuneError, match="line 3: a is '2', expected 0 or 1"):
        load(written(tmp_path / "d.csv", "text,a,b\nt,1,0\nu,2,0\n"), "multi-label", "--label-column", "a,b")
    with pytest.raises(FinetuneError, match="no column 'x'"):
        load(columns, "multi-label", "--label-column", "a,x")
    with pytest.raises(FinetuneError, match=r"line 3: no labels \(\[\] stands"):
        load(written(tmp_path / "e.csv", "text,labels\nt,a|b\nu,\n"), "multi-label")
    with pytest.raises(FinetuneError, match="needs two labels"):
        load(written(tmp_path / "f.csv", "text,labels\nt,a\nu,[]\n"), "multi-label")


def test_words_and_tags(tmp_path):
    path = written(tmp_path / "a.csv", "words,tags\ngood film,O B-X\nbad,O\n")
    data = load(path, "tokens")
    assert data.names == ["B-X", "O"] and data.train.labels == [(["good", "film"], [1, 0]), (["bad"], [1])]
    with pytest.raises(FinetuneError, match="line 2: 2 words, but 1 tags"):
        load(written(tmp_path / "b.csv", "words,tags\ngood film,O\nbad,B\n"), "tokens")
    with pytest.raises(FinetuneError, match="same tag"):
        load(written(tmp_path / "c.csv", "words,tags\ngood film,O O\nbad,O\n"), "tokens", "--labels", "O,B")


def test_a_word_a_line(tmp_path):
    path = written(tmp_path / "a.conll", "-DOCSTART- -X- O\n\ngood JJ O\nfilm NN B-X\n\n\nbad JJ O\n")
    data = load(path, "tokens")
    assert data.train.labels == [(["good", "film"], [1, 0]), (["bad"], [1])] and data.names == ["B-X", "O"]
    with pytest.raises(FinetuneError, match="line 1: line 2 has the word 'film' and no tag"):
        load(written(tmp_path / "b.conll", "good O\nfilm\n\nbad B\n"), "tokens")


def test_preferences(tmp_path):
    path = written(tmp_path / "a.csv", "prompt,chosen,rejected\np,good,bad\nq,fine,fine\n")
    with pytest.raises(FinetuneError, match="line 3: the chosen and the rejected answer are the same"):
        load(path, "preference")
    with pytest.raises(FinetuneError, match="no column 'lost'"):
        load(path, "preference", "--rejected-column", "lost")
    with pytest.raises(FinetuneError, match="given twice: prompt, chosen and rejected"):
        load(path, "preference", "--rejected-column", "chosen", "--chosen-column", "chosen")


def test_options_of_other_tasks_are_refused(tmp_path, capsys):
    model, data = classifier(tmp_path / "m"), table_of(tmp_path / "d.jsonl", "regression")
    for words, said in ((("--label-range", "1,5"), "--label-range goes with --task regression"),
                        (("--chosen-column", "text"), "--chosen-column goes with --task preference"),
                        (("--beta", 0.2), "--beta goes with --task preference")):  # fmt: skip
        assert said in refused(capsys, model, data, "--task", "classify", "--out", tmp_path / "o", *words, *QUICK)
    for words in (("--graphed",), ("--labels", "a,b"), ("--label-column", "summary")):
        assert "does not go with --task seq2seq" in refused(
            capsys, writer(tmp_path / "t5"), table_of(tmp_path / "s.jsonl", "seq2seq"), "--task", "seq2seq", "--out",
            tmp_path / "o", *words, *QUICK,
        )  # fmt: skip


def test_models_that_do_not_fit_the_task(tmp_path, capsys):
    bert, t5 = classifier(tmp_path / "bert"), writer(tmp_path / "t5")
    rest = ("--out", tmp_path / "o", *QUICK)
    target, pairs = table_of(tmp_path / "s.jsonl", "seq2seq"), table_of(tmp_path / "p.jsonl", "preference")
    said = refused(capsys, bert, target, "--task", "seq2seq", *rest)
    assert "is a bert model, and this task needs an encoder and decoder" in said
    assert "needs a language model" in refused(capsys, t5, pairs, "--task", "preference", *rest)
    numbers = table_of(tmp_path / "n.jsonl", "regression")  # T5 wants an end of text, which this tokenizer does not add
    said = refused(capsys, t5, numbers, "--task", "regression", *rest)
    assert "the model fails on the first records: ValueError: " in said and "eos" in said


def test_another_range_is_no_resumed_run(tmp_path, capsys):
    model, data = classifier(tmp_path / "m"), table_of(tmp_path / "d.jsonl", "regression")
    words = ("--task", "regression", "--out", tmp_path / "o", *QUICK)
    assert command(model, data, *words, "--label-range", "1,5") == 0
    said = refused(capsys, model, data, *words, "--label-range", "0,5", "--resume")
    assert "--label-range: was 1.0,5.0, now 0.0,5.0" in said
    assert "--label-range: was 1.0,5.0, now not given" in refused(capsys, model, data, *words, "--resume")
    rest = (*words, "--label-range", "1,5", "--lr", 0.2, "--resume")
    assert "--lr: was not given, now 0.2" in refused(capsys, model, data, *rest)


# ---------------------------------------------------------------------- what is learnt and measured


def test_the_loss_of_a_preference_is_dpos(tmp_path):
    """By hand, one record at a time, without padding."""
    tokenizer = tokenizer_of(tmp_path / "t")
    model = transformers.AutoModelForCausalLM.from_pretrained(language_model(tmp_path / "m")).eval()
    data = load(table_of(tmp_path / "d.jsonl", "preference"), "preference")
    encoded = encode(data.train, tokenizer, model, "preference", 12)
    collate = Collate(tokenizer, model, "preference")
    encoded.add_reference(reference_of(model, encoded, collate, 7, torch.device("cpu")))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        batch = collate([encoded[i] for i in range(6)])
        found = losses_of(model, "preference", 0.3, None)(model, batch).mean()
        each = []
        for i in range(6):
            prompt, chosen, rejected = (encoded[i][name] for name in ("prompt", "input_ids", "rejected_ids"))
            assert len(chosen) <= 12 and chosen[:prompt] == rejected[:prompt]
            sums = []
            for row in (chosen, rejected):
                logs = model(torch.tensor([row])).logits[0].log_softmax(-1)
                sums.append(sum(logs[t - 1, row[t]] for t in range(prompt, len(row))))
            before = encoded[i]["reference"]
            each.append(-torch.nn.functional.logsigmoid(0.3 * ((sums[0] - sums[1]) - (before[0] - before[1]))))
    assert float(found) == pytest.approx(float(sum(each)) / 6, rel=1e-5)
    torch.testing.assert_close(
        answer_scores(model, batch, lambda m, b: m(b["input_ids"], attention_mask=b["attention_mask"]).logits)[0],
        torch.stack([sums_of(model, encoded[0][side], encoded[0]["prompt"]) for side in ("input_ids", "rejected_ids")]),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def sums_of(model, row, prompt):
    with torch.no_grad():
        logs = model(torch.tensor([row])).logits[0].log_softmax(-1)
    return sum(logs[t - 1, row[t]] for t in range(prompt, len(row)))


def test_targets_are_shifted_and_padding_is_left_out(tmp_path):
    tokenizer, model = tokenizer_of(tmp_path / "t"), transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
                              decoder_start_token_id=9, pad_token_id=1)
    )  # fmt: skip
    data = Encoded({"input_ids": [[5, 6], [7]], "targets": [[3, 4, 2], [8, 2]]}, 0)
    batch = Collate(tokenizer, model, "seq2seq")([data[0], data[1]])
    assert batch["labels"].tolist() == [[3, 4, 2], [8, 2, -100]]
    assert batch["decoder_input_ids"].tolist() == [[9, 3, 4], [9, 8, 2]]
    assert [data.length(i) for i in (0, 1)] == [5, 3] and data.by_length()[0]["targets"] == [8, 2]


def test_padding_is_on_the_right_and_to_few_widths(tmp_path):
    """Whatever side the tokenizer pads on; an end of text that also pads stays a label."""
    tokenizer = tokenizer_of(tmp_path / "t", pad=False)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    batch = Collate(tokenizer, None, "lm", 4)([{"input_ids": [5, 6, 1]}, {"input_ids": [7]}])
    assert batch["input_ids"].tolist() == [[5, 6, 1, 1], [7, 1, 1, 1]] and tokenizer.padding_side == "left"
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, 1, -100], [7, -100, -100, -100]]


def test_the_first_token_of_a_word_has_its_tag(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "t")
    model = transformers.AutoModel.from_pretrained(classifier(tmp_path / "m"))
    path = written(tmp_path / "a.csv", "words,tags\nfilm. good,B O\nbad,O\n")  # "film." is two tokens
    encoded = encode(load(path, "tokens").train, tokenizer, model, "tokens", 16)
    assert encoded[0]["labels"] == [0, -100, 1] and len(encoded[0]["input_ids"]) == 3


def added(measure, *batches):
    for given, labels in batches:
        measure.add(torch.tensor(given), {"labels": torch.tensor(labels)})
    return measure.result()


def test_figures():
    numbers = figures.Numbers(scale=10.0)
    found = added(numbers, ([[1.0], [2.0]], [1.0, 3.0]), ([[4.0]], [5.0]))
    assert found["rmse"] == pytest.approx(10 * (2 / 3) ** 0.5) and found["r2"] == pytest.approx(1 - 2 / 8)
    sets = figures.LabelSets()
    found = added(sets, ([[1.0, -1.0], [1.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]))
    assert found["micro_f1"] == pytest.approx(4 / 5) and found["exact_match"] == 0.5
    assert sets.simple.value == 0  # no label is of most records
    sets = figures.LabelSets()
    added(sets, ([[1.0, -1.0]] * 3, [[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
    assert sets.simple.value == pytest.approx(2 * 4 / (6 + 4))  # both are of two records in three
    tags = figures.Tags(["O", "B-X", "I-X"])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0, 1], [0, 1, 1, 0]]), 3).float().tolist()
    found = added(tags, (logits, [[1, 2, 0, -100], [0, 1, 2, 0]]))
    # entities said: (0, 2); (1, 2), (2, 3). True: (0, 2); (1, 3)
    assert found["f1"] == pytest.approx(2 / 5) and found["accuracy"] == pytest.approx(6 / 7)
    written = figures.Written(shifted=False)
    logits = 9 * torch.nn.functional.one_hot(torch.tensor([[1, 2], [1, 1]]), 3).float()
    found = added(written, (logits.tolist(), [[1, 2], [1, 2]]), (logits[:1].tolist(), [[1, -100]]))
    assert found["exact_match"] == pytest.approx(2 / 3) and found["token_accuracy"] == pytest.approx(4 / 5)
    likes = figures.Preferences()
    found = added(likes, ([1e-6, 1.0, -1.0, 2.0], [0]))
    assert (
        found["reward_accuracy"] == 0.625
        and found["margin"] == pytest.approx(0.5, abs=1e-5)
        and likes.simple.value == 0.5
    )


def test_what_greedy_generation_writes_is_what_exact_match_counts(tmp_path):
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(writer(tmp_path / "t5")).eval()
    collate, source = Collate(tokenizer_of(tmp_path / "t"), model, "seq2seq"), [3, 4, 5]
    with torch.no_grad():
        target = model.generate(torch.tensor([source]), max_new_tokens=6, do_sample=False)[0].tolist()[1:]
        measure = figures.Written(shifted=False)
        for wanted in (target, [*target[:-1], (target[-1] + 1) % 20]):
            batch = collate([{"input_ids": source, "targets": wanted}])
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            measure.add(model(**inputs).logits, batch)
    assert measure.result()["exact_match"] == 0.5
