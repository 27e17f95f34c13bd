"""DPO with private steps: exact by hand, TRL's losses pair by pair, references."""

from __future__ import annotations

import copy

import pytest
import torch

from ..hf_models import error, weights
from ..hf_texts import llama, private, truth
from ..hf_trl import (
    datasets,
    dpo,
    pairs,
    peft,
    quiet,
    sigmoid_losses,
    trl,
)

from fastdp.errors import StepError  # isort: skip
from fastdp.hf import arguments, argument_table  # isort: skip

assert quiet
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


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


@pytest.mark.parametrize("kind", [*argument_table.PAIR_LOSSES, "weighted"])
def test_losses_of_pairs_are_those_of_trl(kind, tmp_path):
    """Pair by pair, at a reference that is another model; and the sum over a batch is that over its pairs."""
    weighted = {"loss_type": ["sft", "ipo"], "loss_weights": [0.7, 0.2]}
    options = weighted if kind == "weighted" else {"loss_type": kind}
    if kind == "robust":
        options["label_smoothing"] = 0.1
    trainer = dpo(tmp_path, llama(), pairs(), **options)
    records = [trainer.train_dataset[n] for n in range(8)]
    collate = trainer._samples_first(trainer.data_collator)
    trainer.model.eval()
    together = trainer._losses(trainer.model, collate(records))
    assert together.shape == (8,) and together.std() > 0
    for number, record in enumerate(records):
        with torch.no_grad():
            own = trl.DPOTrainer.compute_loss(trainer, trainer.model, trainer.data_collator([record]))
        assert float(together[number]) == pytest.approx(float(own), rel=1e-4, abs=1e-6)


def test_losses_that_couple_pairs_are_refused(tmp_path):
    for kind in ("aot", ["sigmoid", "aot_unpaired"]):
        with pytest.raises(arguments.ArgumentError, match="aot and aot_unpaired sort the log ratios"):
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
