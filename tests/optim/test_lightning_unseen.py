"""What Lightning's callbacks, loops and strategies do beside the optimizer: exact, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import default_collate

import fastdp
from fastdp.errors import ParameterError, StepError

from ..by_hand import RECORDS, records

pytest.importorskip("lightning")
from lightning import pytorch as lightning
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, XLAStrategy

from fastdp.lightning import DPCallback, stream

from .test_lightning import STEPS, Q, loader_of, module_of, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("callback", [False, True])
def test_accumulation_that_begins_later_in_epochs_of_one_batch(tmp_path, callback):
    """No gradient waits for a second batch, and the loss is divided all the same."""
    module = module_of(truth=False)
    callbacks = [lightning.callbacks.GradientAccumulationScheduler({1: 2}), *([DPCallback()] if callback else [])]
    with pytest.raises(StepError, match="GradientAccumulationScheduler.*divides every loss by 2"):
        trainer_of(tmp_path, max_epochs=2, callbacks=callbacks).fit(module, loader_of(steps=1))
    assert module.private.history == [(0.0, Q, 1)]


@pytest.mark.parametrize("manual", [False, True])
def test_a_batch_that_is_none_is_not_passed_over(tmp_path, manual, monkeypatch):
    """All batches have as many records: by their number they could be taken for each other."""
    monkeypatch.setattr("fastdp.data.collate_mixing.refuse_mixing", lambda *_: None)  # it calls collate_fn, too
    calls = []

    def collate(samples):
        calls.append(len(samples))
        return None if len(calls) == 2 else default_collate(samples)

    loader = fastdp.poisson_loader(
        records(), sample_rate=1.0, steps=1, max_physical_batch_size=RECORDS // 4, collate_fn=collate
    )
    module = module_of(manual=manual, truth=False)
    with pytest.raises(StepError, match="collate_fn returned None"):
        trainer_of(tmp_path, callbacks=[DPCallback()]).fit(module, stream(loader))
    assert module.private.history == [] and set(calls) == {RECORDS // 4}


@pytest.mark.parametrize("finder", ["LearningRateFinder", "BatchSizeFinder"])
def test_what_trains_with_the_callback_taken_off(tmp_path, finder):
    module, finds = module_of(truth=False), getattr(lightning.callbacks, finder)()
    module.batch_size, module.lr, module.train_dataloader = 4, 1.0, loader_of
    with pytest.raises(StepError, match=f"{finder} makes steps on the training data"):
        trainer_of(tmp_path, callbacks=[finds, DPCallback()]).fit(module)


@pytest.mark.parametrize("kind", [DeepSpeedStrategy, FSDPStrategy, XLAStrategy])
@pytest.mark.parametrize("part", [False, True])
def test_strategies_that_are_refused_by_name(kind, part):
    """Two of them are derived from DDPStrategy. A part: the optimizer is not given the LightningModule."""
    module, strategy = module_of(truth=False, part=part), kind.__new__(kind)
    strategy._lightning_module = strategy._model = module
    module._trainer = type("Trainer", (), {"strategy": strategy})()
    with pytest.raises(StepError, match=f"{kind.__name__} with 1 process is refused"):
        module.configure_optimizers()


class Unfreezes(lightning.callbacks.BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.net[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=1.0)
        self.make_trainable(module.net[0] if epoch == 2 else [])  # of a run that was resumed


def test_a_layer_that_was_unfrozen_is_trained_when_the_run_resumes(tmp_path):
    """Lightning then replaces the optimizer's groups; without the callback, that is refused."""

    def fit(epochs, path=None, **options):
        module = module_of(truth=False)
        trainer = trainer_of(tmp_path, max_epochs=epochs, **options)
        trainer.fit(module, loader_of(), ckpt_path=path)
        return module, trainer

    module, trainer = fit(2, callbacks=[Unfreezes(), DPCallback()])
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    other, _ = fit(3, tmp_path / "two.ckpt", callbacks=[Unfreezes(), DPCallback()])
    truth = module_of(truth=False)  # the same epoch by itself
    truth.net.load_state_dict(module.net.state_dict())
    trainer_of(tmp_path).fit(truth, loader_of())
    assert other.private.history == [(0.0, Q, 3 * STEPS)]
    assert not torch.equal(other.net[0].weight, module.net[0].weight)
    for p, q in zip(other.net.parameters(), truth.net.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    with pytest.raises(ParameterError, match="net.0.weight.*without add_param_group.*BaseFinetuning"):
        fit(3, tmp_path / "two.ckpt", callbacks=[Unfreezes()])
