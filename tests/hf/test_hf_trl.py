"""TRL's trainers with private steps: exact by hand, complete tables of fields, refusals with reasons."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from ..hf_models import error, weights
from ..hf_texts import draw, ids, llama, private, tokenizer, truth

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

from fastdp.errors import StepError  # noqa: E402
from fastdp.hf import DPDPOTrainer, DPSFTTrainer, DPTrainer, arguments, more_arguments  # noqa: E402

TYPES = {"SFT": trl.SFTConfig, "DPO": trl.DPOConfig}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("CI", "1")  # TRL sends no telemetry there
    datasets.disable_progress_bars()


def config(kind, folder, **options):
    common = dict(output_dir=str(folder), per_device_train_batch_size=4, max_steps=1, learning_rate=0.1, optim="sgd",
                  lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
                  logging_strategy="no", bf16=False, gradient_checkpointing=False)  # fmt: skip
    return TYPES[kind](**{**common, **options})


def prompts(count=8):
    return datasets.Dataset.from_dict(
        {"prompt": draw(count, 1, 5), "completion": [" " + t for t in draw(count, 1, 7, 1)]}
    )


def plain(count=8):
    return datasets.Dataset.from_dict({"text": draw(count, 2, 9)})


def pairs(count=8):
    return datasets.Dataset.from_dict(
        {"prompt": draw(count, 1, 5), "chosen": [" " + t for t in draw(count, 1, 7, 1)],
         "rejected": [" " + t for t in draw(count, 1, 7, 2)]}
    )  # fmt: skip


def sft(folder, model, data, privacy=None, more=None, **options):
    return DPSFTTrainer(
        model=model, args=config("SFT", folder, **options), train_dataset=data, processing_class=tokenizer(),
        privacy=privacy or private(), **(more or {}),
    )  # fmt: skip


def dpo(folder, model, data, privacy=None, more=None, **options):
    more = {"ref_model": llama(1).to(model.dtype)} if more is None else more
    return DPDPOTrainer(
        model=model, args=config("DPO", folder, **options), train_dataset=data, processing_class=tokenizer(),
        privacy=privacy or private(), **more,
    )  # fmt: skip


def logps(model, prompt, answer):
    """Log probabilities of the answer's tokens after a prompt; virtual tokens may stand before it."""
    tokens = torch.tensor([ids(prompt) + ids(answer)])
    scores = model(input_ids=tokens).logits[0, -tokens.shape[1] :].log_softmax(-1)
    first = len(ids(prompt))
    return scores[torch.arange(first - 1, tokens.shape[1] - 1), tokens[0, first:]]


def completion_losses(model, data, weight=lambda logp: 1.0):
    return [
        lambda row=row: -(weight(logp := logps(model, row["prompt"], row["completion"] + "<eos>")) * logp).mean()
        for row in data
    ]


def test_a_step_of_sft_by_hand(tmp_path):
    """Completions alone count, each sample's as a mean of its own tokens."""
    model, data = llama().double(), prompts()
    want, norm = truth(model, completion_losses(model, data), 0.1)
    before = weights(model)
    trainer = sft(tmp_path, model, data, private(per_sample_max_grad_norm=norm))
    trainer.train()
    assert trainer.history == [(0.0, 1.0, 1)]
    assert error(weights(model), want, before) < 1e-6


def test_a_step_of_sft_on_whole_texts_and_of_dft(tmp_path):
    model, data = llama().double(), plain()
    whole = [lambda row=row: -logps(model, row["text"][:1], row["text"][1:] + "<eos>").mean() for row in data]
    want, norm = truth(model, whole, 0.1)
    before = weights(model)
    sft(tmp_path, model, data, private(per_sample_max_grad_norm=norm)).train()
    assert error(weights(model), want, before) < 1e-6
    model, data = llama().double(), prompts()
    want, norm = truth(model, completion_losses(model, data, lambda logp: logp.detach().exp()), 0.1)
    sft(tmp_path, model, data, private(per_sample_max_grad_norm=norm), loss_type="dft").train()
    assert error(weights(model), want, weights(llama().double())) < 1e-6


def test_sft_with_lora_checkpointing_and_groups(tmp_path):
    """Groups: the samples are persons, whose records are clipped together."""
    data = prompts().add_column("user", [0, 0, 1, 2, 2, 2, 3, 3])
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    trainer = sft(tmp_path, llama().double(), data, private(group_by="user"), {"peft_config": lora},
                  gradient_checkpointing=True, per_device_train_batch_size=8)  # fmt: skip
    for p in trainer.model.parameters():
        p.data = p.data.double()
    model = trainer.model  # a copy's forward would be the original's, which TRL has put into it
    records = completion_losses(model, data)
    users = [[0, 1], [2], [3, 4, 5], [6, 7]]
    want, norm = truth(model, [lambda mine=mine: sum(records[n]() for n in mine) for mine in users], 0.1)
    before = weights(trainer.model)
    trainer.privacy.per_sample_max_grad_norm = norm
    trainer.train()
    assert trainer.delta() == 1 / 8
    assert error(weights(trainer.model), want, before) < 1e-6


def test_persons_of_pairs(tmp_path):
    data, model, reference = pairs().add_column("user", list("abbacddd")), llama().double(), llama(1).double()
    records = sigmoid_losses(model, reference, data)
    users = [[0, 3], [1, 2], [4], [5, 6, 7]]
    want, norm = truth(model, [lambda mine=mine: sum(records[n]() for n in mine) for mine in users], 0.1)
    before = weights(model)
    privacy = private(group_by="user", per_sample_max_grad_norm=norm)
    dpo(tmp_path, model, data, privacy, {"ref_model": reference}, per_device_train_batch_size=5).train()
    assert error(weights(model), want, before) < 1e-6


def sigmoid_losses(model, reference, data, beta=0.1):
    def loss(row):
        ratio = [
            (logps(model, row["prompt"], row[side] + "<eos>") - logps(reference, row["prompt"], row[side] + "<eos>"))
            for side in ("chosen", "rejected")
        ]
        return -torch.nn.functional.logsigmoid(beta * (ratio[0].sum() - ratio[1].sum()))

    return [lambda row=row: loss(row) for row in data]


@pytest.mark.parametrize("precompute", [False, True])
def test_a_step_of_dpo_by_hand(precompute, tmp_path):
    model, reference, data = llama().double(), llama(1).double(), pairs()
    want, norm = truth(model, sigmoid_losses(model, reference, data), 0.1)
    before = weights(model)
    trainer = dpo(
        tmp_path, model, data, private(per_sample_max_grad_norm=norm), {"ref_model": reference},
        precompute_ref_log_probs=precompute,
    )  # fmt: skip
    trainer.train()
    assert trainer.history == [(0.0, 1.0, 1)]
    # log probabilities that are computed beforehand are stored in float32
    assert error(weights(model), want, before) < (1e-4 if precompute else 1e-5)


def test_dpo_with_lora(tmp_path):
    """The reference is the model without the adapter; what the user has frozen stays frozen."""
    base, data = llama().double(), pairs()
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    more = {"peft_config": lora, "eval_dataset": pairs(3)}
    trainer = dpo(tmp_path, copy.deepcopy(base), data, None, more, eval_on_start=True, eval_strategy="steps")
    for name, p in trainer.model.named_parameters():
        p.data = p.data.double()
        p.requires_grad_("lora_B" in name)
    want, norm = truth(trainer.model, sigmoid_losses(trainer.model, base, data), 0.1)
    before = weights(trainer.model)
    trainer.privacy.per_sample_max_grad_norm = norm
    trainer.train()
    assert error(weights(trainer.model), want, before) < 1e-6
    assert all(torch.equal(p, before[n]) for n, p in weights(trainer.model).items() if "lora_B" not in n)


@pytest.mark.parametrize("make, data", [(sft, prompts), (dpo, pairs)])
def test_soft_prompts_with_evaluation_before(make, data, tmp_path):
    """TRL's evaluation runs in between, and switches adapters."""
    base, records = llama().double(), data()
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    trainer = make(
        tmp_path, copy.deepcopy(base), records, more={"peft_config": tuning, "eval_dataset": data(3)},
        eval_on_start=True, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    trainer.model.double()
    by_hand = completion_losses(trainer.model, records)
    if make is dpo:
        by_hand = sigmoid_losses(trainer.model, base, records)
    want, norm = truth(trainer.model, by_hand, 0.1)
    before = weights(trainer.model)
    trainer.privacy.per_sample_max_grad_norm = norm
    trainer.train()
    assert set(want) == {"prompt_encoder.default.embedding.weight"}
    assert error(weights(trainer.model), want, before) < 1e-6


def test_an_adapter_that_is_trained_further(tmp_path):
    """TRL keeps its copy as the reference: nothing is drawn onto that."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0, init_lora_weights=False)
    model = peft.get_peft_model(llama(), lora)
    trainer = dpo(tmp_path, model, pairs(), private(noise_multiplier=1.0), {})
    before = weights(trainer.model)
    assert [n for n in before if ".ref." in n]
    trainer.train()
    changed = {n for n, p in weights(trainer.model).items() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if ".default." in n}


OPTIONS = {
    "exo_pair": {"label_smoothing": 0.1}, "robust": {"label_smoothing": 0.1}, "ld": {"ld_alpha": 0.3},
    "weighted": {"use_weighting": True, "ld_alpha": 0.5, "loss_type": ["sft", "ipo"], "loss_weights": [0.7, 0.2]},
    "forward_kl": {"f_divergence_type": "forward_kl"}, "js": {"f_divergence_type": "js_divergence"},
    "alpha": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.4},
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [*more_arguments.PAIR_LOSSES, *[k for k in OPTIONS if k not in more_arguments.PAIR_LOSSES]]
)
def test_losses_of_pairs_are_those_of_trl(kind, tmp_path):
    """Pair by pair, at a reference that is another model; and the sum over a batch is that over its pairs."""
    options = {"loss_type": kind} if kind in more_arguments.PAIR_LOSSES else {}
    trainer = dpo(tmp_path, llama(), pairs(), **{**options, **OPTIONS.get(kind, {})})
    records = [trainer.train_dataset[n] for n in range(8)]
    collate = trainer._samples_first(trainer.data_collator)
    trainer.model.eval()
    together = trainer._losses(trainer.model, collate(records))
    assert together.shape == (8,) and together.std() > 0
    for number, record in enumerate(records):
        with torch.no_grad():
            own = trl.DPOTrainer.compute_loss(trainer, trainer.model, trainer.data_collator([record]))
        assert float(together[number]) == pytest.approx(float(own), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", TYPES)
def test_tables_are_complete(kind):
    """A newer TRL may have more fields, which are refused until their tables have them; an older one fewer."""
    fields = {f.name for f in dataclasses.fields(TYPES[kind])} - set(arguments.FIELDS)
    table = more_arguments.of(TYPES[kind])
    assert {f.status for f in table.values()} <= {"supported", "refused", "no effect"}
    assert all(f.why for f in table.values() if f.status != "supported")
    if trl.__version__.startswith("1.16."):
        assert fields == set(table)


@pytest.mark.parametrize("kind", TYPES)
def test_what_is_refused_is_refused(kind, tmp_path):
    make, data = (sft, plain()) if kind == "SFT" else (dpo, pairs())
    arguments.check(config(kind, tmp_path))
    for name, field in more_arguments.of(TYPES[kind]).items():
        if field.status != "refused":
            continue
        made = config(kind, tmp_path)
        object.__setattr__(made, name, field.example)
        with pytest.raises(arguments.ArgumentError, match=f"{name}=.*refused"):
            arguments.check(made)
    with pytest.raises(arguments.ArgumentError, match="padding_free=True is refused: it joins the samples"):
        make(tmp_path, llama(), data, padding_free=True, max_length=None)
    with pytest.raises(arguments.ArgumentError, match="use_liger_kernel=True is refused"):
        make(tmp_path, llama(), data, use_liger_kernel=True)


def test_packing_is_refused(tmp_path):
    with pytest.raises(arguments.ArgumentError, match="packing=True is refused: .*block would become the protected"):
        sft(tmp_path, llama(), plain(), packing=True)
    packed = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]], "seq_lengths": [[1, 1]]})
    with pytest.raises(StepError, match="column seq_lengths.*the block would become the protected record"):
        sft(tmp_path, llama(), packed)
    flat = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(pad_token_id=27, padding_free=True)
    with pytest.raises(StepError, match="records into a batch of one row"):
        sft(tmp_path, llama(), plain(), more={"data_collator": flat}).train()


def test_losses_that_couple_pairs_are_refused(tmp_path):
    for kind in ("aot", ["sigmoid", "aot_unpaired"]):
        with pytest.raises(arguments.ArgumentError, match="aot .it sorts the log ratios of the whole batch"):
            dpo(tmp_path, llama(), pairs(), loss_type=kind)


def test_a_loss_that_is_not_trls(tmp_path, monkeypatch):
    """Another TRL's loss of the same name is found out before the first step."""
    from fastdp.hf import preferences

    monkeypatch.setitem(preferences.LOSSES, "bco_pair", lambda p, o: 0.1 + preferences.LOSSES["nca_pair"](p, o))
    model = llama()
    before = weights(model)
    with pytest.raises(StepError, match="of one sample alone fastdp's loss is .* and TRL .*'s"):
        dpo(tmp_path, model, pairs(), loss_type="bco_pair").train()
    assert all(torch.equal(p, before[n]) for n, p in weights(model).items())


def test_routers(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    def model():
        return MixtralForCausalLM(
            MixtralConfig(vocab_size=29, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                          num_key_value_heads=1, num_local_experts=2)
        )  # fmt: skip

    with pytest.raises(arguments.ArgumentError, match="set router_aux_loss_coef=0.0"):
        sft(tmp_path, model(), plain())
    sft(tmp_path, model(), plain(), router_aux_loss_coef=0.0, max_steps=1).train()


@pytest.mark.parametrize("make, data", [(sft, prompts), (dpo, pairs)])
def test_logs_and_evaluation(make, data, tmp_path):
    """No metric of training batches beside the loss; TRL's own of evaluation; epsilon as DPTrainer's."""
    more = {"eval_dataset": data(4)} | ({"ref_model": llama(1)} if make is dpo else {})
    trainer = make(
        tmp_path, llama(), data(20), private(noise_multiplier=1.0, sample_rate=0.2), more, max_steps=4,
        logging_strategy="steps", logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=2,
    )  # fmt: skip
    trainer.train()
    assert trainer.history == [(1.0, 0.2, 4)] and trainer.epsilon() > 0 and trainer.delta() == 1 / 40
    logs = trainer.state.log_history
    steps = [entry for entry in logs if "loss" in entry]
    assert len(steps) == 4
    for entry in steps:
        assert set(entry) <= {"loss", "learning_rate", "epoch", "step", "epsilon", "noise_multiplier"}
    final = next(entry for entry in logs if "train_loss" in entry)
    assert not [name for name in final if "accuracy" in name or "entropy" in name or "rewards" in name]
    seen = [entry for entry in logs if "eval_loss" in entry]
    assert len(seen) == 2 and all("eval_mean_token_accuracy" in entry for entry in seen)
    assert all("eval_num_tokens" not in entry for entry in seen)
    assert (tmp_path / "checkpoint-4" / "privacy.json").exists()
    again = make(
        tmp_path, llama(), data(20), private(noise_multiplier=1.0, sample_rate=0.2), more, max_steps=6
    )  # fmt: skip
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.history == [(1.0, 0.2, 6)]


def test_online_trainers_are_refused():
    with pytest.raises(StepError, match="GRPOTrainer is not made private this way: it samples completions"):
        type("Mine", (DPTrainer, trl.GRPOTrainer), {})
    with pytest.raises(StepError, match="use fastdp.hf.DPSFTTrainer"):
        type("Mine", (DPTrainer, trl.SFTTrainer), {})
    with pytest.raises((StepError, TypeError)):
        type("Mine", (trl.SFTTrainer, DPTrainer), {})
    with pytest.raises(StepError, match="KTOTrainer"):
        type("Mine", (DPTrainer, trl.KTOTrainer), {})


def test_pairs_without_a_preference(tmp_path):
    """Their gradient is rounding alone, which padding may change; and answers without a prompt."""
    data = pairs(8)
    same = {"prompt": ["", *data["prompt"][1:]], "chosen": [" a", " b", *data["chosen"][2:]],
            "rejected": [" c", " b", *data["rejected"][2:]]}  # fmt: skip
    trainer = dpo(tmp_path, llama(), datasets.Dataset.from_dict(same), loss_type=["sigmoid", "sigmoid_norm"])
    trainer.train()
    assert trainer.history == [(0.0, 1.0, 1)]


def test_references_that_follow(tmp_path):
    """sync_ref_model: the reference moves towards the private weights."""
    reference = llama(1)
    before = weights(reference)
    trainer = dpo(
        tmp_path, llama(), pairs(), private(noise_multiplier=1.0), {"ref_model": reference}, sync_ref_model=True,
        ref_model_sync_steps=1, ref_model_mixup_alpha=1.0, max_steps=2,
    )  # fmt: skip
    trainer.train()
    assert any(not torch.equal(p, before[n]) for n, p in weights(reference).items())
    assert trainer.history == [(1.0, 1.0, 2)]
