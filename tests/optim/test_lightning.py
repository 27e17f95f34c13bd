"""Lightning's Trainer around a private optimizer: automatic and manual optimization."""

from __future__ import annotations

import gc
import importlib
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import fastdp
from fastdp import mechanisms
from fastdp.errors import StepError

from ..by_hand import EXPECTED, RECORDS, Loop, R, network, records

pytest.importorskip("lightning")
from lightning import pytorch as lightning

from fastdp.lightning import DPCallback, most_steps, stream

Q, STEPS = EXPECTED / RECORDS, 4
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def module_of(package=lightning, manual=False, base=None, truth=True, part=False, **options):
    """A LightningModule with what it has seen by hand beside it."""

    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = network(), not manual
            self.truth = Loop(self.net) if truth else None
            self.calls, self.seen = 0, []

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, number):
            x, y = batch
            self.calls += 1
            loss = F.cross_entropy(self(x), y)
            if self.truth is not None:
                self.truth.see(x, y)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                assert len(optimizer.norms) == len(x) and optimizer.history == self.private.history
            return loss

        def on_train_batch_end(self, outputs, batch, number):
            if self.private.stepped and self.truth is not None:
                self.truth.step()

        def validation_step(self, batch, number):
            self.log("val", F.cross_entropy(self(batch[0]), batch[1]), batch_size=len(batch[0]))

        def configure_optimizers(self):
            settings = {"lr": 1.0, "noise_multiplier": 0.0, "max_grad_norm": R, **options}
            self.private = (base or fastdp.DPSGD)(self.net if part else self, **settings)
            return self.private

    return Module()


def loader_of(limit=None, steps=STEPS, seed=1, **options):
    return fastdp.poisson_loader(
        records(), expected_batch_size=EXPECTED, max_physical_batch_size=limit, steps=steps, seed=seed, **options
    )


def trainer_of(tmp_path, package=lightning, **options):
    settings = {"max_epochs": 1, "enable_checkpointing": False, **options}
    return package.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(tmp_path), **settings
    )  # fmt: skip


# --------------------------------------------------------------------------- the update


@pytest.mark.parametrize("package, manual, limit", [
    ("lightning.pytorch", False, 4), ("lightning.pytorch", True, None), ("lightning.pytorch", True, 4),
    ("pytorch_lightning", False, None),
])  # fmt: skip
def test_the_update_is_the_truth(tmp_path, package, manual, limit):
    """One noised step a logical batch over two epochs, with validation (and its sanity check) between."""
    package = pytest.importorskip(package)
    module, loader = module_of(package, manual), loader_of(limit)
    trainer = trainer_of(
        tmp_path, package, max_epochs=2, num_sanity_val_steps=2, callbacks=[DPCallback(delta=1e-5)]
    )  # fmt: skip
    trainer.fit(module, stream(loader) if limit else loader, DataLoader(records(), batch_size=16))
    assert module.private.history == [(0.0, Q, 2 * STEPS)] and module.truth.steps == 2 * STEPS
    assert (module.calls > 2 * STEPS) == bool(limit) and trainer.global_step == module.calls
    assert trainer.callback_metrics["noised_steps"] == 2 * STEPS and "val" in trainer.callback_metrics
    module.truth.assert_equal(module.net)


def test_without_anything_of_ours_but_the_optimizer_and_the_loader(tmp_path):
    """The loader from train_dataloader(), its length that of the epoch; and Lightning leaves it as it is."""
    module = module_of(part=True)
    module.train_dataloader = loader_of
    trainer = trainer_of(tmp_path, max_epochs=2)
    trainer.fit(module)
    assert trainer.num_training_batches == STEPS and trainer.global_step == 2 * STEPS == module.calls
    assert isinstance(trainer.train_dataloader, fastdp.sampling.PoissonLoader)
    assert module.private.history == [(0.0, Q, 2 * STEPS)]
    module.truth.assert_equal(module.net)
    assert fastdp.sampling.current() is None or len(fastdp.batch_axis.current_batch.ACTIVE) == 0


# --------------------------------------------------------------------------- correlated noise


@pytest.mark.parametrize("limit", [None, 3])
def test_correlated_noise_keeps_a_budget_and_goes_on_from_a_checkpoint(tmp_path, limit):
    """5 steps a pass. Who resumes begins a block, and the budget is that of both."""
    noise, sigma, target = mechanisms.Bisr(4), 3.0, 2.75

    def fit(epochs, path=None):
        module = module_of(truth=False, noise_multiplier=sigma, noise=noise)
        loader = mechanisms.fixed_order_loader(records(), batch_size=8, max_physical_batch_size=limit)
        trainer = trainer_of(
            tmp_path, max_epochs=epochs, callbacks=[DPCallback(delta=1e-3, target_epsilon=target)]
        )  # fmt: skip
        trainer.fit(module, stream(loader) if limit else loader, ckpt_path=path, weights_only=False)
        return trainer, list(module.private._privacy.mechanism.all.values()), loader.participation

    def epsilon(*steps):
        blocks = [mechanisms.Block(f"{first}", sigma, count, promise, first % 5) for first, count in steps]
        return mechanisms.epsilon_of_blocks(noise, blocks, 1e-3)

    trainer, blocks, promise = fit(1)
    assert [block.steps for block in blocks] == [5]
    assert float(trainer.callback_metrics["epsilon"]) == pytest.approx(epsilon((0, 5)))
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    _, blocks, _ = fit(99, str(tmp_path / "first.ckpt"))
    first, more = [block.steps for block in blocks]
    assert first == 5 and blocks[1].first == 0 and more > 5
    assert epsilon((0, 5), (5, more)) <= target < epsilon((0, 5), (5, more + 1))


# --------------------------------------------------------------------------- checkpoints, the budget


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("every", ["epoch", "steps"])
def test_a_checkpoint_is_taken_up(tmp_path, limit, every):
    """The accountant and, within an epoch, the loader's place are in the checkpoint: under seeds the run is the same.

    At an epoch's end Lightning does not look at the loader's place, and a new pass begins.
    """

    def fit(path=None, **options):
        module = module_of(base=fastdp.DPAdamW, truth=False, lr=0.05, noise_multiplier=1.0, seed=3)
        loader = loader_of(limit)
        trainer = trainer_of(tmp_path, callbacks=[DPCallback(), *options.pop("callbacks", [])], **options)
        trainer.fit(module, stream(loader) if limit else loader, ckpt_path=path)
        return module

    keeps = lightning.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "kept", filename="{step}", save_top_k=-1,
        **({"every_n_epochs": 1} if every == "epoch" else {"every_n_train_steps": 3}),
    )  # fmt: skip
    whole = fit(max_epochs=2, callbacks=[keeps], enable_checkpointing=True)
    first = sorted((tmp_path / "kept").glob("*.ckpt"), key=lambda p: p.stat().st_mtime)[0]
    saved = torch.load(first, weights_only=True)["optimizer_states"][0]["fastdp"]["history"]
    assert sum(n for *_, n in saved) < 2 * STEPS
    again = fit(str(first), max_epochs=2)
    assert again.private.history == whole.private.history == [(1.0, Q, 2 * STEPS)]
    a, b = (torch.nn.utils.parameters_to_vector(m.net.parameters()).detach() for m in (whole, again))
    assert torch.equal(a, b) or every == "epoch"


@pytest.mark.parametrize("limit", [None, 4])
def test_the_budget_is_kept(tmp_path, limit):
    module = module_of(base=fastdp.DPAdamW, truth=False, lr=0.05, noise_multiplier=1.0, accountant="rdp")
    loader = loader_of(limit)
    callback = DPCallback(delta=1e-2, target_epsilon=4.0)
    trainer = trainer_of(tmp_path, max_epochs=50, callbacks=[callback])
    trainer.fit(module, stream(loader) if limit else loader)
    steps = module.private.history[0][2]
    assert steps == most_steps([], 1.0, Q, 4.0, 1e-2, "rdp") < 50 * STEPS
    assert module.private.epsilon(1e-2) <= 4.0 < fastdp.accounting.epsilon_of([(1.0, Q, steps + 1)], 1e-2, "rdp")
    assert trainer.callback_metrics["epsilon"] == pytest.approx(module.private.epsilon(1e-2))


@pytest.mark.parametrize("target", [0.01, 4.0])
def test_a_budget_that_is_spent_or_too_small_for_a_step(tmp_path, target):
    options = {"noise_multiplier": 1.0, "accountant": "rdp"} if target < 1 else {}  # else without noise
    module = module_of(truth=False, **options)
    trainer_of(tmp_path, callbacks=[DPCallback(delta=1e-2, target_epsilon=target)]).fit(module, loader_of())
    assert module.private.history == []
    with pytest.raises(StepError, match="min_epochs"):
        callback = DPCallback(delta=1e-2, target_epsilon=target)
        trainer_of(tmp_path, callbacks=[callback], min_epochs=1).fit(module_of(truth=False, **options), loader_of())


# --------------------------------------------------------------------------- refused


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("callback", [False, True])
def test_accumulation_by_the_trainer_is_refused(tmp_path, plain, callback):
    """It divides the losses. Without the callback too, whatever the loader."""
    module = module_of(truth=False, expected_batch_size=EXPECTED)
    loader = DataLoader(records(), batch_size=5) if plain else loader_of()
    trainer = trainer_of(tmp_path, accumulate_grad_batches=2, callbacks=[DPCallback()] if callback else [])
    with pytest.raises(StepError, match="accumulate_grad_batches"):
        trainer.fit(module, loader)
    assert module.private.history == []


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("left_out", ["last", "middle"])
def test_a_batch_that_manual_optimization_passes_over_is_refused(tmp_path, limit, left_out):
    module, loader = module_of(manual=True, truth=False), loader_of(limit)
    number = len(list(loader_of(limit)))
    wanted, step = number - 1 if left_out == "last" else number // 2, module.training_step
    module.training_step = lambda batch, batch_idx: None if batch_idx == wanted else step(batch, batch_idx)
    with pytest.raises(StepError, match="loop skipped"):
        trainer_of(tmp_path, max_epochs=2, callbacks=[DPCallback()]).fit(module, stream(loader) if limit else loader)


def test_physical_batches_need_the_stream_and_the_callback(tmp_path):
    with pytest.raises(StepError, match="fetches batches ahead"):
        module = module_of(truth=False, expected_batch_size=EXPECTED)
        trainer_of(tmp_path).fit(module, stream(loader_of(4)))
    with pytest.raises(StepError, match="stream"):
        trainer_of(tmp_path, callbacks=[DPCallback()]).fit(module_of(truth=False), loader_of(4))
    with pytest.raises(StepError, match="DataLoader"):
        stream(DataLoader(records()))
    with pytest.raises(StepError, match="no private optimizer"):
        trainer_of(tmp_path, callbacks=[DPCallback()]).fit(module_of(base=plain_sgd, truth=False), loader_of())
    with warnings.catch_warnings(record=True) as caught:  # left alone, an epoch ends too soon: no step, and a warning
        warnings.simplefilter("always")
        module = module_of(truth=False)
        trainer_of(tmp_path, max_epochs=2).fit(module, loader_of(3))
    assert any("dropped" in str(w.message) for w in caught)
    gc.collect()  # of the fits that failed, whose passes are still waiting


def plain_sgd(module, lr, **_):
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    optimizer.stepped = True
    return optimizer


def test_importing_fastdp_does_not_import_lightning():
    import subprocess
    import sys

    code = "import fastdp, sys; assert not any(m.split('.')[0] in ('lightning', 'accelerate') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert importlib.import_module("fastdp.lightning")
