"""DPTrainer: every step equals one-sample truth, noised steps are counted, and the model comes back as it was."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import fastdp
from fastdp.accounting import epsilon_of
from fastdp.errors import AccountingError, ParameterError, StepError, VerificationError

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

pytestmark = pytest.mark.slow  # `make test-all` runs it


def test_what_others_have_spent_on_the_model_is_counted_or_said(tmp_path):
    """An optimizer in whose place the trainer's comes, and a trainer that is detached by now."""
    model, records = gpt2(), texts(12, "next")
    before = fastdp.DPSGD(model, lr=0.1, noise_multiplier=2.0, expected_batch_size=4, sample_rate=0.1)
    words = Collate()(records[:4])["input_ids"]
    for _ in range(3):
        model(input_ids=words).logits.square().mean((1, 2)).mean().backward()
        before.step()
        before.zero_grad()
    first = trainer_of(tmp_path, model, records, private(noise_multiplier=1.0, sample_rate=0.5), max_steps=2)
    with pytest.warns(fastdp.errors.OptimizerReplacedWarning, match="3 noised"):
        first.train()
    assert first.history == [(2.0, 0.1, 3), (1.0, 0.5, 2)]
    assert first.epsilon() == epsilon_of(first.history, first.delta(), "gdp")
    first.train()
    assert first.history == [(2.0, 0.1, 3), (1.0, 0.5, 4)]
    second = trainer_of(tmp_path, model, records, private(noise_multiplier=1.0, sample_rate=0.5), max_steps=1)
    with pytest.warns(UserWarning, match=r"^7 noised step\(s\) were made on this model's parameters by another"):
        second.train()


def with_lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    )
    return stirred(wrapped)


def stirred(model):
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)  # zero, as it begins, would hide lora_A's gradient
    return model


def with_head_saved(model):
    peft = pytest.importorskip("peft")
    return stirred(
        peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
        )
    )


def frozen(model):
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith("bert.embeddings"))
    return model


CASES = {
    "causal": (gpt2, "next"),
    "causal lora": (lambda: with_lora(gpt2()), "next"),
    "classes": (lambda: bert(num_labels=3), "class"),
    "classes lora and head": (lambda: with_head_saved(bert(num_labels=3)), "class"),
    "classes, embeddings frozen": (lambda: frozen(bert(num_labels=3)), "class"),
    "tokens": (lambda: bert("TokenClassification", num_labels=3), "each"),
    "masked": (lambda: bert("MaskedLM"), "next"),
    "answers": (lambda: bert("QuestionAnswering"), "answer of a text of one length"),
    "numbers": (lambda: bert(num_labels=1), "number"),
    "several": (lambda: bert(num_labels=3, problem_type="multi_label_classification"), "several"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_sum_of_clipped_samples(case, tmp_path):
    make, labels = CASES[case]
    model, records = make().double(), texts(12, labels)
    before, lr, norm = weights(model), 0.1, middle_norm(model, records)
    truth = truth_of_step(model, records, 12, lr, norm)
    trainer = trainer_of(
        tmp_path, model, records, private(per_sample_max_grad_norm=norm), gradient_accumulation_steps=3, max_steps=1
    )
    trainer.train()
    found = weights(trainer.model)
    assert error(found, truth, before) < 1e-4  # factors are shrunk by the rounding of float32 norms
    for name, p in trainer.model.named_parameters():
        assert torch.equal(found[name], before[name]) != p.requires_grad, name  # all that trains, and only that
    assert trainer.history == [(0.0, 1.0, 1)] and trainer.state.global_step == 1


def test_poisson_batches_by_physical_ones(tmp_path, monkeypatch):
    """Each step takes the records that were drawn, whatever their number; divided by the expected one."""
    monkeypatch.setattr("fastdp.data.collate_mixing.refuse_mixing", lambda *_: None)  # it would be seen, too
    model, records, collate = gpt2().double(), texts(30, "next"), Collate()
    states = [weights(model)]

    class Keep(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            states.append(weights(model))
            drawn.append(sum(collate.seen[len(drawn_batches) :], []))
            drawn_batches.extend(collate.seen[len(drawn_batches) :])

    drawn, drawn_batches = [], []
    trainer = trainer_of(
        tmp_path, model, records, private(noise_seed=5), collate, gradient_accumulation_steps=2, max_steps=4
    )
    trainer.add_callback(Keep())
    whole = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="voids"):
        trainer.train()
    collate.seen = collate.seen[-len(drawn_batches) :] if drawn_batches else []
    sizes = []
    for number, records_of_step in enumerate(drawn[1:], 1):  # the first holds the examination's records too
        whole.load_state_dict({**whole.state_dict(), **states[number]})
        truth = truth_of_step(whole, records_of_step, 8, 0.1)
        assert error(states[number + 1], truth, states[number]) < 1e-5
        sizes.append(len(records_of_step))
    assert len(set(sizes)) > 1 and all(len(batch) <= 4 for batch in drawn_batches[-3:])


def test_noised_steps_are_what_is_counted(tmp_path):
    """Steps, epochs, schedule, logs and checkpoints; epsilon as logged is epsilon computed anew."""
    trainer = trainer_of(
        tmp_path, bert(num_labels=3), texts(40), private(target_epsilon=4.0, noise_multiplier=None),
        gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2, logging_strategy="steps", logging_steps=5,
        lr_scheduler_type="linear", save_strategy="steps", save_steps=5, optim="adamw_torch",
    )  # fmt: skip
    trainer.train()
    (sigma, rate, steps), *others = trainer.history
    assert not others and rate == 0.2 and steps == 10 == trainer.state.global_step
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [5, 10] and logs[-1]["epoch"] == 2.0
    for entry in logs:
        assert entry["epsilon"] == pytest.approx(epsilon_of([(sigma, 0.2, entry["step"])], 0.002, "gdp"))
        assert "grad_norm" not in entry
    assert 3.9 < trainer.epsilon() <= 4.0 and trainer.delta() == 0.002
    card = trainer.privacy_card().facts
    assert card["epsilon"] == trainer.epsilon() and card["delta"] == 0.002 and card["steps"] == 10
    assert logs[0]["learning_rate"] == pytest.approx(0.06)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-5"]
    trainer.privacy.target_epsilon = 6.0  # a second training plans with what the first has spent
    trainer.train()
    assert trainer.state.global_step == 10 and 5.9 < trainer.epsilon() <= 6.0


def test_the_model_comes_back_as_it_was(tmp_path):
    model = gpt2()
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    trainer = trainer_of(tmp_path, model, texts(12, "next"), private(noise_multiplier=1.0), save_strategy="steps",
                         save_steps=2)  # fmt: skip
    trainer.train()
    assert trainer.model is model
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    trainer.save_model(tmp_path / "final")
    for folder in (tmp_path / "final", tmp_path / "checkpoint-2"):
        again = transformers.GPT2LMHeadModel.from_pretrained(folder)
        assert all(torch.equal(a, b) for a, b in zip(weights(model).values(), weights(again).values(), strict=True))
        assert (folder / "privacy.json").is_file()
    loss = model(**Collate()(texts(3, "next"))).loss
    loss.backward()  # plain again
    assert all(p.grad is not None for p in model.parameters())


def test_evaluation_is_the_ordinary_one(tmp_path):
    """In the middle of training too; predictions alike."""
    data, model = texts(16), bert(num_labels=3)
    metrics = lambda prediction: {"mean": float(prediction.predictions.mean())}
    ours = trainer_of(tmp_path, model, data, private(noise_multiplier=1.0), eval_strategy="steps", eval_steps=2,
                      more={"eval_dataset": data, "compute_metrics": metrics})  # fmt: skip
    ours.train()
    within = [entry for entry in ours.state.log_history if "eval_loss" in entry][-1]
    plain = trainer_of(tmp_path, model, data, trainer=transformers.Trainer,
                       more={"eval_dataset": data, "compute_metrics": metrics})  # fmt: skip
    want = plain.evaluate()
    assert within["eval_loss"] == pytest.approx(want["eval_loss"], abs=1e-6)
    assert within["eval_mean"] == pytest.approx(want["eval_mean"], abs=1e-6)
    assert (ours.predict(data).predictions == plain.predict(data).predictions).all()


def test_empty_batches(tmp_path):
    """A step without a sample is a step of noise alone."""
    model = gpt2()
    before = weights(model)
    trainer = trainer_of(
        tmp_path, model, texts(50, "next"), private(noise_multiplier=1.0, sample_rate=1e-6, delta=1e-3), max_steps=3,
        logging_strategy="steps", logging_steps=1,
    )  # fmt: skip
    losses = [trainer.train().training_loss, trainer.state.log_history[0]["loss"]]
    assert trainer.history == [(1.0, 1e-6, 3)] and trainer.state.global_step == 3
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(math.isnan(loss) for loss in losses)


def test_it_stops_when_the_budget_is_spent(tmp_path):
    privacy = private(noise_multiplier=1.0, target_epsilon=1.0)
    trainer = trainer_of(tmp_path, bert(num_labels=3), texts(40), privacy, max_steps=200, save_strategy="steps")
    trainer.train()
    steps = trainer.state.global_step
    assert 1 <= steps < 200 and trainer.epsilon() <= 1.0
    assert epsilon_of([(1.0, 0.1, steps + 1)], 0.002, "gdp") > 1.0
    assert (tmp_path / f"checkpoint-{steps}").is_dir()
    with pytest.raises(AccountingError, match="budget is spent"):  # the same trainer's second training
        trainer.train()


def test_the_users_own_loss(tmp_path):
    def good(outputs, labels, num_items_in_batch=None):
        assert num_items_in_batch is None
        return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")

    def coupled(outputs, labels, num_items_in_batch=None):
        return (outputs.logits - outputs.logits.mean(0)).square().sum(1).mean()

    for function in (good, coupled):
        model, records = bert(num_labels=3).double(), texts(12)
        truth, before = truth_of_step(model, records, 12, 0.1), weights(model)
        trainer = trainer_of(
            tmp_path, model, records, private(verify=True, sample_rate=1.0), max_steps=1,
            more={"compute_loss_func": function},
        )  # fmt: skip
        if function is good:
            trainer.train()
            assert error(weights(model), truth, before) < 1e-4
        else:
            with pytest.raises(VerificationError, match="each sample's own loss"):
                trainer.train()
            assert all(torch.equal(p, before[name]) for name, p in weights(model).items())


def test_label_smoothing(tmp_path):
    model, records = gpt2().double(), texts(12, "next")

    def smooth(model, batch):
        outputs = model(**batch)
        smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.2)
        return smoother(outputs, batch["labels"], shift_labels=True)

    norm, before = middle_norm(model, records), weights(model)
    truth = truth_of_step(model, records, 12, 0.1, norm, loss=smooth)
    privacy = private(sample_rate=1.0, per_sample_max_grad_norm=norm)
    trainer = trainer_of(tmp_path, model, records, privacy, max_steps=1, label_smoothing_factor=0.2)
    trainer.train()
    assert error(weights(model), truth, before) < 1e-4
    numbers = trainer_of(tmp_path, bert(num_labels=1), texts(12, "number"), label_smoothing_factor=0.2)
    with pytest.raises(StepError, match="label_smoothing_factor"):
        numbers.train()


def test_parameters_that_would_not_be_trained(tmp_path):
    model = bert(num_labels=3)
    optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.1)
    trainer = trainer_of(tmp_path, model, texts(12), more={"optimizers": (optimizer, None)})
    with pytest.raises(ParameterError, match="require grad but are not the optimizer's"):
        trainer.train()
    model.bert.requires_grad_(False)
    trainer.train()
    assert trainer.history == [(0.0, pytest.approx(1 / 3), 2)]
    with pytest.raises(ParameterError, match="tied to the first training"):
        trainer.train()


def test_what_a_trainer_needs(tmp_path):
    with pytest.raises(TypeError, match="privacy="):
        DPTrainer(model=bert(), args=transformers.TrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.raises(ValueError, match="not below 1/12"):
        trainer_of(tmp_path, bert(), texts(12), private(delta=0.1)).train()
    with pytest.raises(ValueError, match="more than there are samples"):
        trainer_of(tmp_path, bert(), texts(3)).train()
    trainer = trainer_of(tmp_path, bert(), texts(12))
    with pytest.raises(AccountingError, match="once a trial"):
        trainer.hyperparameter_search()

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(texts(4))

    with pytest.raises(StepError, match="iterable"):
        trainer_of(tmp_path, bert(), Stream())
