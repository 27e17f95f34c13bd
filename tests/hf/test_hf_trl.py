"""TRL's trainers with private steps: SFT exact by hand, complete tables of fields, refusals with reasons, logs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ..hf_models import error, weights
from ..hf_texts import llama, private, tokenizer, truth
from ..hf_trl import (
    TYPES,
    completion_losses,
    config,
    datasets,
    dpo,
    logps,
    pairs,
    peft,
    plain,
    prompts,
    quiet,
    sft,
    trl,
)

from fastdp.errors import StepError  # isort: skip
from fastdp.hf import DPDPOTrainer, DPSFTTrainer, DPTrainer, arguments, argument_table  # isort: skip

assert quiet
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


def test_a_step_of_sft_by_hand(tmp_path):
    """Completions alone count, each sample's as a mean of its own tokens."""
    model, data = llama().double(), prompts()
    want, norm = truth(model, completion_losses(model, data), 0.1)
    before = weights(model)
    trainer = sft(tmp_path, model, data, private(per_sample_max_grad_norm=norm))
    trainer.train()
    assert trainer.history == [(0.0, 1.0, 1)]
    assert error(weights(model), want, before) < 1e-6


def test_a_step_of_sft_on_whole_texts(tmp_path):
    model, data = llama().double(), plain()
    whole = [lambda row=row: -logps(model, row["text"][:1], row["text"][1:] + "<eos>").mean() for row in data]
    want, norm = truth(model, whole, 0.1)
    before = weights(model)
    sft(tmp_path, model, data, private(per_sample_max_grad_norm=norm)).train()
    assert error(weights(model), want, before) < 1e-6


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
    assert trainer.delta() == 0.02
    assert error(weights(trainer.model), want, before) < 1e-6


@pytest.mark.parametrize("kind", TYPES)
def test_replayed_steps(kind, tmp_path):
    """graphed: the reference is computed anew for each batch, within what is replayed."""
    found = []
    for graphed in (False, True):
        privacy = private(graphed=graphed, noise_seed=1, sample_rate=0.7, per_sample_max_grad_norm=0.05)
        model = llama().double()
        make, data = (sft, prompts()) if kind == "SFT" else (dpo, pairs())
        with pytest.warns(UserWarning, match="noise_seed is for experiments"):
            make(tmp_path, model, data, privacy, pad_to_multiple_of=16, max_steps=4).train()
        found.append(weights(model))
    assert error(found[1], found[0], weights(llama().double())) < 1e-6


@pytest.mark.parametrize("kind", TYPES)
def test_tables_are_complete(kind):
    """A newer TRL may have more fields, which are refused until their tables have them; an older one fewer."""
    fields = {f.name for f in dataclasses.fields(TYPES[kind])}
    table = argument_table.fields_of(TYPES[kind])
    assert {f.status for f in table.values()} <= {"supported", "refused", "no effect"}
    assert all(f.why for f in table.values() if f.status != "supported")
    if trl.__version__.startswith("1.16."):
        assert fields == set(table)


@pytest.mark.parametrize("kind", TYPES)
def test_what_is_refused_is_refused(kind, tmp_path):
    make, data = (sft, plain()) if kind == "SFT" else (dpo, pairs())
    arguments.check(config(kind, tmp_path))
    for name, field in argument_table.fields_of(TYPES[kind]).items():
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
    assert trainer.history == [(1.0, 0.2, 4)] and trainer.epsilon() > 0 and trainer.delta() == 0.005
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


def test_online_trainers_are_refused():
    with pytest.raises(StepError, match="GRPOTrainer is not made private this way: it samples completions"):
        type("Mine", (DPTrainer, trl.GRPOTrainer), {})
    with pytest.raises(StepError, match="use fastdp.hf.DPSFTTrainer"):
        type("Mine", (DPTrainer, trl.SFTTrainer), {})
    with pytest.raises((StepError, TypeError)):
        type("Mine", (trl.SFTTrainer, DPTrainer), {})
    with pytest.raises(StepError, match="KTOTrainer"):
        type("Mine", (DPTrainer, trl.KTOTrainer), {})


def test_what_a_trainer_does_not_take_is_said_before_trl_stumbles(tmp_path):
    both = dict(processing_class=tokenizer(), privacy=private())
    for kind, trainer, data in (("SFT", DPDPOTrainer, pairs()), ("DPO", DPSFTTrainer, plain())):
        own = "SFT" if kind == "DPO" else "DPO"
        with pytest.raises(arguments.ArgumentError, match=f"args is a {kind}Config, .*takes a {own}Config"):
            trainer(model=llama(), args=config(kind, tmp_path), train_dataset=data, **both)
    with pytest.raises(arguments.ArgumentError, match="Give ref_model=copy.deepcopy"):
        dpo(tmp_path, llama(), pairs(), more={})
    llama().save_pretrained(tmp_path / "model")
    loaded = type(llama()).from_pretrained(tmp_path / "model")
    assert dpo(tmp_path, loaded, pairs(), more={}).train().global_step == 1  # TRL loads the reference from there


class Pictures:
    """TRL's collator, and as many rows of pixels as are asked for."""

    def __init__(self, each):
        self.each = each
        self.texts = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(pad_token_id=27)

    def __call__(self, records):
        return {**self.texts(records), "pixel_values": torch.zeros(self.each * len(records), 3, 4, 4)}


def test_several_images_in_a_record_are_refused(tmp_path):
    with pytest.raises(StepError, match="4 records have 8 rows of pixel_values"):
        sft(tmp_path, llama(), plain(), more={"data_collator": Pictures(2)}).train()


def test_arguments_of_other_trainers(tmp_path):
    """A field that the trainer would not read is no field that it takes."""

    def made(kind, **options):
        arguments_of = kind(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
        return DPTrainer(model=llama(), args=arguments_of, train_dataset=plain(), privacy=private())

    with pytest.raises(arguments.ArgumentError, match="GRPOConfig is for GRPOTrainer, which is not made private"):
        made(trl.GRPOConfig)
    with pytest.raises(arguments.ArgumentError, match="max_length=5: this trainer does not.*hf.DPSFTTrainer does"):
        made(trl.SFTConfig, max_length=5)
    made(trl.SFTConfig)
