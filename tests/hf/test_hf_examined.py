"""What is looked at before the first step, and that what is said of it names what the user has."""

from __future__ import annotations

import shutil

import pytest
import torch

from fastdp.errors import AccountingError, StepError, VerificationError

from ..hf_models import Collate, bert, private, texts, trainer_of

pytestmark = pytest.mark.slow  # `make test-all` runs it


class Unmasked(Collate):
    def __call__(self, records):
        batch = super().__call__(records)
        del batch["attention_mask"]
        return batch


@pytest.mark.parametrize("verify", [True, False])
def test_records_are_taken_from_everywhere(verify, tmp_path):
    """Of data sorted by length, the first records are all as long, and would not show that padding counts."""
    short = [{**record, "input_ids": record["input_ids"][:3]} for record in texts(30)]
    data = [*short, *({**record, "input_ids": [5] * 9} for record in texts(4))]
    with pytest.raises(StepError, match="depends on how far its batch is padded"):
        trainer_of(tmp_path, bert(num_labels=3), data, private(verify=verify), Unmasked()).train()


def test_a_loss_that_is_a_sum(tmp_path):
    """The remedy is one that a trainer has: loss_reduction is an argument of other functions."""

    def total(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")

    with pytest.raises(VerificationError, match="one number a sample .B., or their mean") as found:
        trainer_of(
            tmp_path, bert(num_labels=3), texts(), private(verify=True), more={"compute_loss_func": total}
        ).train()
    assert "loss_reduction" not in str(found.value)


def test_persons_who_do_not_fit(tmp_path):
    data = [{**record, "user": number // 3} for number, record in enumerate(texts())]
    with pytest.raises(ValueError, match="larger per_device_train_batch_size") as found:
        trainer_of(tmp_path, bert(num_labels=3), data, private(group_by="user"), per_device_train_batch_size=2).train()
    assert "max_physical_batch_size" not in str(found.value)


def test_keys_that_are_none(tmp_path):
    data = [{**record, "user": [number]} for number, record in enumerate(texts())]
    with pytest.raises(ValueError, match="'user' cannot be keys of persons .unhashable"):
        trainer_of(tmp_path, bert(num_labels=3), data, private(group_by="user")).train()


def test_steps_for_records_and_for_persons_are_not_added_up(tmp_path):
    """Neither in one trainer, nor from a checkpoint, nor from another run in its folder."""
    data = [{**record, "user": number // 2} for number, record in enumerate(texts())]

    def made(**privacy):
        options = private(noise_multiplier=1.0, sample_rate=0.5, **privacy)
        return trainer_of(tmp_path, bert(num_labels=3), data, options, save_strategy="steps", save_steps=2)

    first = made()
    first.train()
    for persons in (made(group_by="user"), first):
        persons.privacy.group_by = "user"
        with pytest.raises(AccountingError, match="no one epsilon holds for the steps of both"):
            persons.train(resume_from_checkpoint=persons is not first)
    assert first.history == [(1.0, 0.5, 2)]
    shutil.move(tmp_path / "checkpoint-2", tmp_path / "checkpoint-1")
    made(group_by="user").train()  # replaces privacy.json
    with pytest.raises(AccountingError, match="no one epsilon"):
        made().train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_loss_that_is_not_finite(tmp_path):
    """Not "a loss that is none of those fastdp knows", nor "fastdp's loss is nan and TRL's nan"."""
    pytest.importorskip("trl")
    from ..hf_texts import llama
    from ..hf_trl import dpo, pairs, plain, sft

    for make, data, words in (sft, plain(), "not finite on any of 4"), (dpo, pairs(), "is nan: nothing can be learnt"):
        model = llama()
        with torch.no_grad():
            model.lm_head.weight[0, 0] = float("nan")
        with pytest.raises(StepError, match=words):
            make(tmp_path, model, data).train()
