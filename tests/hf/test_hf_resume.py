"""Checkpoints of DPTrainer: taken up exactly under a seed; without one no key is kept and no step goes uncounted."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch

from fastdp.accounting import epsilon_of
from fastdp.errors import AccountingError

from ..hf_models import bert, gpt2, private, texts, trainer_of, transformers, weights

from fastdp.hf import ledger  # isort: skip

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:noise_seed")]


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def run(folder, model, privacy, stop=None, **options):
    """10 records a step of 50, 5 steps an epoch, a checkpoint every second."""
    options = {
        "max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch",
        "lr_scheduler_type": "linear", "per_device_train_batch_size": 5, "gradient_accumulation_steps": 2,
        "logging_strategy": "steps", "logging_steps": 1, "learning_rate": 0.01, **options,
    }  # fmt: skip
    trainer = trainer_of(folder, model, texts(50, "next"), privacy, **options)
    if stop is not None:
        trainer.add_callback(StopAt(stop))
    return trainer


@pytest.mark.parametrize("checkpoint", [2, 6])
def test_taken_up_bit_for_bit(checkpoint, tmp_path):
    """In either epoch: dropout, moments, schedule, samples and noise are those of the whole run."""
    privacy = private(noise_multiplier=1.0, noise_seed=3)
    whole = run(tmp_path / "whole", gpt2(dropout=0.1), privacy)
    whole.train()
    assert whole.state.global_step == 10
    part = run(tmp_path / "part", gpt2(dropout=0.1), privacy, stop=checkpoint + 1)
    with pytest.raises(KeyboardInterrupt):
        part.train()
    assert not part.model._forward_hooks  # the engine is off, whatever happened
    for state in (random.seed, np.random.seed, torch.manual_seed):
        state(99)
    again = run(tmp_path / "part", gpt2(seed=7, dropout=0.1), privacy)
    again.train(resume_from_checkpoint=True)
    assert again.history == whole.history == [(1.0, 0.2, 10)]
    ours, theirs = weights(again.model), weights(whole.model)
    assert all(torch.equal(ours[name], p) for name, p in theirs.items())
    logs = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (whole, again)]
    assert logs[0] == logs[1]


def test_without_a_seed_lost_steps_stay_counted(tmp_path):
    """Stopped after step 5, taken up at 4: the fifth has been seen, perhaps, and is another one now."""
    part = run(tmp_path, gpt2(), private(noise_multiplier=1.0), stop=5)
    with pytest.raises(KeyboardInterrupt):
        part.train()
    spent = ledger.read(tmp_path)
    assert spent.steps == 5 and ledger.read(tmp_path / "checkpoint-4").steps == 4
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    again = run(tmp_path, gpt2(), private(noise_multiplier=1.0))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 10 and again.history == [(1.0, 0.2, 11)]
    assert ledger.read(tmp_path).steps == ledger.read(tmp_path / "checkpoint-10").steps == 11
    assert again.epsilon() == pytest.approx(epsilon_of([(1.0, 0.2, 11)], 0.002, "gdp"))
    unseen = run(tmp_path.with_name("copy"), gpt2(), private(noise_multiplier=1.0, count_lost_steps=False))
    unseen.train(resume_from_checkpoint=str(tmp_path.with_name("copy") / "checkpoint-4"))
    assert unseen.history == [(1.0, 0.2, 10)]


def test_lost_steps_are_taken_out_of_the_budget(tmp_path):
    privacy = private(noise_multiplier=None, target_epsilon=1.5)
    part = run(tmp_path, gpt2(), privacy, stop=5)
    with pytest.raises(KeyboardInterrupt):
        part.train()
    again = run(tmp_path, gpt2(), privacy)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 9 and sum(n for _, _, n in again.history) == 10
    assert again.epsilon() <= 1.5


def test_a_finished_run_makes_no_further_step(tmp_path):
    """Its last checkpoint lies within an epoch, where Trainer would go on by one step, beyond the budget."""
    privacy, options = private(noise_multiplier=None, target_epsilon=1.5), dict(max_steps=4)
    run(tmp_path, gpt2(), privacy, **options).train()
    again = run(tmp_path, gpt2(), privacy, **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4 == sum(n for _, _, n in again.history) and again.epsilon() <= 1.5


def test_the_account_of_another_run_in_the_same_folder_does_not_replace_the_checkpoints(tmp_path):
    """A run of large noise in the folder of one of small noise that is taken up later: its 3 steps stood for all."""
    run(tmp_path, gpt2(), private(noise_multiplier=0.5), max_steps=2).train()
    other = run(tmp_path, gpt2(), private(noise_multiplier=8.0), max_steps=3, save_strategy="no")
    other.train()
    assert ledger.read(tmp_path).history == [(8.0, 0.2, 3)]
    again = run(tmp_path, gpt2(), private(noise_multiplier=0.5), max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.history == [(0.5, 0.2, 2), (8.0, 0.2, 3), (0.5, 0.2, 2)]


def test_a_history_of_cut_samples_is_kept(tmp_path):
    cut = [(1.0, 0.1, 5, 1e-9), (1.0, 0.1, 3)]
    ledger.write(tmp_path, ledger.Spent(cut, {"pass": 0, "step": 8}, {}), 1.0)
    assert ledger.read(tmp_path).history == cut and ledger.read(tmp_path).steps == 8
    assert ledger.continues([(1.0, 0.1, 6, 1e-9)], cut[:1]) and ledger.continues([*cut, (2.0, 0.1, 1)], cut)
    assert not ledger.continues([(1.0, 0.1, 6)], cut[:1])  # other steps: theirs cost less


def test_no_key_is_written(tmp_path):
    """Checkpoints get uploaded: whoever had the key of the noise could take it off."""
    keys = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            keys.append((trainer._private.noise_state()["key"], trainer._source.loader.sampler.key))

    trainer = run(tmp_path, bert("MaskedLM"), private(noise_multiplier=1.0), num_train_epochs=1)
    trainer.add_callback(Look())
    trainer.train()
    (noise, sampling), *_ = set(keys)
    trainer.save_model(tmp_path / "final")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10 and len(set(keys)) == 1
    secrets = [noise, noise.hex().encode(), str(sampling).encode(), f"{sampling:x}".encode(),
               sampling.to_bytes(32, "little"), sampling.to_bytes(32, "big")]  # fmt: skip
    for path in files:
        content = path.read_bytes()
        assert not any(secret in content for secret in secrets), path
    said = json.loads((tmp_path / "final" / "privacy.json").read_text())
    assert said["steps"] == 5 and said["epsilon"] == pytest.approx(trainer.epsilon(), abs=1e-5)
    assert said["delta"] == 0.002 and said["noise_seed"] is None and said["sampling"] == "Poisson"


def test_checkpoints_that_cannot_be_taken_up(tmp_path):
    plain = run(tmp_path / "plain", gpt2(), None, stop=None, trainer=transformers.Trainer, num_train_epochs=1)
    plain.train()
    only = run(tmp_path / "only", gpt2(), private(noise_multiplier=1.0), save_only_model=True, num_train_epochs=1)
    only.train()
    for folder in ("plain", "only"):
        with pytest.raises(AccountingError, match="what it has spent and where it stood is not known"):
            run(tmp_path / folder, gpt2(), private(noise_multiplier=1.0)).train(resume_from_checkpoint=True)
    ours = run(tmp_path / "ours", gpt2(), private(noise_multiplier=1.0), num_train_epochs=1)
    ours.train()
    for changed in ({"noise_multiplier": 2.0}, {"per_sample_max_grad_norm": 2.0}, {"style": "layerwise"}):
        other = run(tmp_path / "ours", gpt2(), private(**{"noise_multiplier": 1.0, **changed}))
        with pytest.raises(AccountingError, match="the checkpoint's run had"):
            other.train(resume_from_checkpoint=True)
    (tmp_path / "ours" / "checkpoint-4" / "privacy.json").write_text("{}")
    with pytest.raises(AccountingError, match="cannot be read"):
        run(tmp_path / "ours", gpt2(), private(noise_multiplier=1.0)).train(str(tmp_path / "ours" / "checkpoint-4"))
    with pytest.raises(ValueError, match="no checkpoint"):
        run(tmp_path / "none", gpt2(), private(noise_multiplier=1.0)).train(resume_from_checkpoint=True)


def test_adaptive_clipping_goes_on_with_its_norm_and_its_settings(tmp_path):
    options = {"clipping": "adaptive", "noise_multiplier": 1.0, "target_quantile": 0.3, "count_noise": 2.0}

    def of(trainer):
        return trainer.optimizer.optimizer._privacy

    def norm(trainer):
        return of(trainer).clipping.max_grad_norm

    first = run(tmp_path, gpt2(), private(**options), max_steps=2)
    first.train()
    assert norm(first) != 1.0
    for wrong in ({"target_quantile": None}, {"count_noise": 3.0}, {"quantile_rate": 0.1}):
        with pytest.raises(AccountingError, match=f"the checkpoint's run had {next(iter(wrong))}="):
            run(tmp_path, gpt2(), private(**{**options, **wrong}), max_steps=3).train(resume_from_checkpoint=True)
    again = run(tmp_path, gpt2(), private(**options), max_steps=3)
    again.train(resume_from_checkpoint=True)
    assert again.history == [(1.0, 0.2, 3)]
    assert norm(again) / norm(first) == pytest.approx(1, abs=0.3)  # one step's way, from where it was
    assert of(again).quantile.state() == {"target": 0.3, "rate": 0.2, "count_noise": 2.0}
