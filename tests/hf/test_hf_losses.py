"""Which loss a head means, on models beyond BERT and GPT-2; what is refused by name; groups and columns of datasets."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import fastdp
from fastdp.errors import BatchReadWarning, StepError

from ..hf_models import (
    Collate,
    DPTrainer,
    bert,
    error,
    gpt2,
    middle_norm,
    private,
    texts,
    trainer_of,
    transformers,
    truth_of_step,
    weights,
)

from fastdp.hf.losses import LoggedLoss, find_head  # isort: skip

SMALL = dict(vocab_size=40, d_model=16, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)


def t5():
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**SMALL, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0)
    )


def bart():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        **SMALL, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, dropout=0.0, bos_token_id=2,
        forced_eos_token_id=1,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                 num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32)
    )  # fmt: skip


def mixtral(routers):
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                   num_attention_heads=2, num_key_value_heads=1, num_local_experts=3,
                                   max_position_embeddings=32, output_router_logits=routers)
    )  # fmt: skip


def prompted():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def heads(model, kind):
    with torch.no_grad():
        return find_head(model.eval(), Collate()(texts(6, kind)), 1e-3)


@pytest.mark.parametrize(
    "make, kind, name",
    [
        (t5, "next", "a label for each token"),
        (bart, "next", "a label for each token"),
        (llama, "next", "next token"),
        (gpt2, "next", "next token"),
        (lambda: bert("MaskedLM"), "next", "a label for each token"),
        (lambda: bert("TokenClassification", num_labels=3), "each", "a label for each token"),
        (lambda: bert(num_labels=3), "class", "class"),
        (lambda: bert(num_labels=1), "number", "regression"),
        (lambda: bert(num_labels=3, problem_type="multi_label_classification"), "several", "several labels"),
        (lambda: bert(num_labels=3, problem_type="regression"), "several", "regression"),
        (lambda: bert("QuestionAnswering"), "answer of one length", "answer in a text"),
    ],
)
def test_the_head_is_told_by_its_loss(make, kind, name):
    assert heads(make(), kind).name == name


@pytest.mark.parametrize("make", [t5, bart, llama])
def test_a_step_of_other_models(make, tmp_path):
    model, records = make().double(), texts(8, "next")
    norm, before = middle_norm(model, records), weights(model)
    truth = truth_of_step(model, records, 8, 0.1, norm)
    privacy = private(verify=make is bart, per_sample_max_grad_norm=norm)
    trainer_of(tmp_path, model, records, privacy, gradient_accumulation_steps=2, max_steps=1).train()
    assert error(weights(model), truth, before) < 1e-4


def test_what_has_no_loss_of_a_sample(tmp_path):
    with pytest.raises(StepError, match="MixtralForCausalLM adds an auxiliary loss .*output_router_logits = False"):
        trainer_of(tmp_path, mixtral(True), texts(12, "next")).train()
    trainer = trainer_of(tmp_path, mixtral(False), texts(12, "next"))
    trainer.train()
    assert trainer.history == [(0.0, pytest.approx(1 / 3), 2)]
    with pytest.raises(StepError, match="BertForNextSentencePrediction .*compute_loss_func"):
        trainer_of(tmp_path, strange(), texts(12, "class")).train()
    with pytest.raises(StepError, match="no labels"):
        trainer_of(tmp_path, bert(num_labels=3), [{"input_ids": [1, 2]}] * 12).train()


def strange():
    """A head with a loss of its own."""

    class BertForNextSentencePrediction(transformers.BertForSequenceClassification):
        def forward(self, input_ids=None, attention_mask=None, labels=None):
            out = super().forward(input_ids=input_ids, attention_mask=attention_mask)
            out.loss = None if labels is None else out.logits.square().mean()
            return out

    torch.manual_seed(0)
    return BertForNextSentencePrediction(bert(num_labels=3).config)


def test_a_batch_without_tensors(tmp_path):
    with pytest.raises(StepError, match="dict of tensors"):
        trainer_of(tmp_path, gpt2(), texts(12, "next"), collate=lambda records: {"n": 3}).train()


def test_persons(tmp_path):
    """group_by: the records of a person are clipped as one; delta and the rate are of persons."""
    records = [{**record, "user": number // 3} for number, record in enumerate(texts(12, "next"))]
    model = gpt2().double()
    before, plain, total = weights(model), copy.deepcopy(model), None
    for user in range(4):
        own = [Collate()([record]) for record in records if record["user"] == user]
        loss = sum(plain(**batch).loss for batch in own)
        grads = torch.autograd.grad(loss, list(plain.parameters()))
        size = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        clipped = [g * min(1.0, 1 / float(size)) for g in grads]
        total = clipped if total is None else [a + b for a, b in zip(total, clipped, strict=True)]
    trainer = trainer_of(
        tmp_path, model, records, private(group_by="user", sample_rate=1.0, verify=True), max_steps=1
    )  # fmt: skip
    assert trainer.delta() == 0.02
    trainer.train()
    truth = {name: before[name] - 0.1 * g / 4 for name, g in zip(before, total, strict=True)}
    assert error(weights(model), truth, before) < 1e-4
    with pytest.raises(ValueError, match="'person': the records have no such column"):
        trainer_of(tmp_path, gpt2(), records, private(group_by="person")).train()


def test_columns_of_a_dataset(tmp_path):
    """A datasets.Dataset: columns that the model does not take are left out, but for the one that groups."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{**r, "user": n % 6} for n, r in enumerate(texts(12, "class"))])
    model, collate = bert(num_labels=3), Collate()
    trainer = trainer_of(tmp_path, model, data, private(group_by="user", noise_multiplier=1.0), collate, max_steps=3)
    trainer.train()
    assert trainer.history == [(1.0, pytest.approx(4 / 6), 3)]
    assert all(set(record) == {"input_ids", "labels"} for batch in collate.seen for record in batch)


def test_the_share_clipped_is_of_the_norm_that_adaptive_clipping_has_come_to(tmp_path):
    """At first no sample is clipped, so that the norm falls by exp(-0.5 * 100) at once."""
    privacy = private(
        log_clipped_share=True, per_sample_max_grad_norm=1e9, clipping="adaptive", quantile_rate=100.0,
        noise_multiplier=0.0, sample_rate=1.0,
    )  # fmt: skip
    trainer = trainer_of(
        tmp_path, gpt2(), texts(12, "next"), privacy, logging_strategy="steps", logging_steps=1, max_steps=2
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["clipped_share_not_private"] for entry in logs] == [0.0, 1.0]
    for entry in logs:
        assert 0 < entry["norm_p10_not_private"] < entry["norm_median_not_private"] < entry["norm_p90_not_private"]


def test_a_loss_that_calls_the_trainers(tmp_path):
    """The head is found for it, too."""

    class Doubled(DPTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return 2 * super().compute_loss(model, inputs, False, num_items_in_batch)

    model, records = gpt2().double(), texts(8, "next")
    norm, before = 2 * middle_norm(model, records), weights(model)
    twice = lambda model, batch: 2 * model(**batch).loss
    truth = truth_of_step(model, records, 8, 0.1, norm, loss=twice)
    options = dict(output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=1, learning_rate=0.1, optim="sgd",
                   lr_scheduler_type="constant", report_to="none", use_cpu=True, save_strategy="no")  # fmt: skip
    Doubled(
        model=model, args=transformers.TrainingArguments(**options), train_dataset=records, data_collator=Collate(),
        privacy=private(sample_rate=1.0, verify=True, per_sample_max_grad_norm=norm),
    ).train()  # fmt: skip
    assert error(weights(model), truth, before) < 1e-4


@pytest.mark.parametrize(
    "make, kind, graphed",
    [
        (llama, "next", False),
        (llama, "next", True),
        (t5, "each", False),
        (prompted, "next", False),
        (lambda: bert(num_labels=3), "class", True),
    ],
)
def test_losses_of_training_and_of_evaluation_are_comparable(make, kind, graphed, tmp_path):
    """Both are means over tokens, in which texts of one token count little."""
    records = texts(12, kind)
    for record in records[::3] if kind != "class" else ():
        record["input_ids"], record["labels"] = record["input_ids"][:2], record["labels"][:2]
    trainer = trainer_of(
        tmp_path, make(), records, private(sample_rate=1.0, graphed=graphed), learning_rate=0.0, max_steps=3,
        logging_strategy="steps", logging_steps=1, per_device_eval_batch_size=12,
    )  # fmt: skip
    trainer.train()
    evaluated = trainer.evaluate(records)["eval_loss"]
    if make is prompted:  # Trainer divides by a token too few of each text; the model's own loss does not
        evaluated = float(trainer.model(**Collate()(records)).loss)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx([evaluated] * 3, rel=1e-5)


def test_batches_without_a_labelled_token_count_in_no_loss(tmp_path):
    """Half of the texts have no label, the others are equal; many batches are empty."""
    records = [{"input_ids": [3, 4, 5], "labels": [-100] * 3 if number % 2 else [3, 4, 5]} for number in range(12)]
    trainer = trainer_of(
        tmp_path, llama(), records, private(sample_rate=0.1, noise_seed=0), learning_rate=0.0, max_steps=12,
        logging_strategy="steps", logging_steps=2,
    )  # fmt: skip
    loss = trainer.train().training_loss
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    kept = [value for value in logged if value == value]
    assert 0 < len(kept) < len(logged) == 6
    assert [loss, *kept] == pytest.approx([trainer.evaluate(records[:1])["eval_loss"]] * (1 + len(kept)), rel=1e-5)


def test_the_logged_loss_is_none_of_the_losses_that_are_followed():
    """A trainer's own figures of a batch warn of nothing, whoever computes the loss."""
    data = torch.utils.data.TensorDataset(torch.randn(5, 3), torch.randint(0, 2, (5,)))
    optimizer = fastdp.DPSGD(model := torch.nn.Linear(3, 2), lr=0.1, noise_multiplier=0.0)
    logged = LoggedLoss(torch.device("cpu"), filtered=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BatchReadWarning)
        for x, y in fastdp.poisson_loader(data, sample_rate=1.0, steps=3):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            logged.add(loss.detach(), len(x), None)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert logged.take(lambda sums: sums) > 0
