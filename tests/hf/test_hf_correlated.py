"""PrivacyArguments(noise=): the steps of a plain loop with the same noise, blocks over checkpoints, and refusals."""

from __future__ import annotations

import json

import pytest
import torch

import fastdp
from fastdp import mechanisms
from fastdp.errors import AccountingError
from fastdp.mechanisms import Bisr, Block, epsilon_of_blocks

from ..hf_models import Collate, PrivacyArguments, gpt2, private, texts, transformers, weights
from .test_hf_resume import run

from fastdp.hf import ledger  # isort: skip

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:noise_seed")]
DELTA, SIGMA = 0.002, 2.0


def loader_of(trainer, **options):
    """The loader of the documentation: shuffled once, by TrainingArguments.seed."""
    order = torch.randperm(50, generator=torch.Generator().manual_seed(trainer.args.seed)).tolist()
    return mechanisms.fixed_order_loader(texts(50, "next"), batch_size=10, order=order, collate_fn=Collate(), **options)


def blocks_of(trainer):
    return [(block.steps, block.first) for block in trainer._blocks.all.values()]


def test_the_steps_are_those_of_a_plain_loop(tmp_path):
    privacy = private(target_epsilon=3.0, noise_multiplier=None, noise="bisr:4", noise_seed=3)
    trainer = run(tmp_path, gpt2(), privacy, optim="sgd", lr_scheduler_type="constant", learning_rate=0.1)
    trainer.train()
    model = gpt2().train()
    loader = loader_of(trainer, max_physical_batch_size=5)
    optimizer = fastdp.privatize(
        torch.optim.SGD(model.parameters(), lr=0.1), model, noise=Bisr(4), target_epsilon=3.0, delta=DELTA, epochs=2,
        loader=loader, seed=3,
    )  # fmt: skip
    for _ in range(2):
        for batch in loader:
            labels = batch.pop("labels")
            logits = model(**batch).logits[:, :-1]
            token = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
            kept = labels[:, 1:] != -100
            ((token * kept).sum(1) / kept.sum(1)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, p in weights(model).items():
        torch.testing.assert_close(weights(trainer.model)[name], p, atol=1e-5, rtol=1e-4)
    with pytest.warns(UserWarning, match="seed="):
        assert trainer.epsilon() == optimizer.epsilon(DELTA)
    assert 2.99 < trainer.epsilon() <= 3.0 and blocks_of(trainer) == [(10, 0)]
    logged = [entry["epsilon"] for entry in trainer.state.log_history if "epsilon" in entry]
    assert logged == sorted(logged) and logged[-1] == trainer.epsilon() and len(logged) == 11
    with pytest.raises(AccountingError, match="budget is spent"):
        trainer.train()
    privacy.target_epsilon = 4.0
    trainer.train()
    assert 3.98 < trainer.epsilon() <= 4.0 and blocks_of(trainer) == [(10, 0), (10, 0)]


@pytest.mark.parametrize("how", ["lost", "dropped", "seeded"])
def test_a_run_that_resumes_begins_a_block_and_lost_steps_count(how, tmp_path):
    options = {"lost": {}, "dropped": {"count_lost_steps": False}, "seeded": {"noise_seed": 3}}[how]
    privacy = private(noise_multiplier=SIGMA, noise="bisr:4", **options)
    part = run(tmp_path, gpt2(), privacy, stop=5)
    with pytest.raises(KeyboardInterrupt):
        part.train()
    digest = next(iter(part._blocks.all.values())).participation.mark.split()[-1]
    assert digest not in (tmp_path / ledger.NAME).read_text()
    again = run(tmp_path, gpt2(seed=7), privacy)
    again.train(resume_from_checkpoint=True)
    expected = {"lost": [(5, 0), (6, 4)], "dropped": [(4, 0), (6, 4)], "seeded": [(10, 0)]}[how]
    assert again.state.global_step == 10 and blocks_of(again) == expected
    promise = loader_of(again).participation
    blocks = [Block(f"{first}", SIGMA, steps, promise, first) for steps, first in expected]
    assert again.epsilon() == pytest.approx(epsilon_of_blocks(Bisr(4), blocks, DELTA), rel=1e-9)
    said = json.loads((tmp_path / ledger.NAME).read_text())
    assert said["epsilon"] == pytest.approx(again.epsilon(), rel=1e-6) and said["sampling"] == "fixed_order"
    assert "sensitivity" in str(again.privacy_card())
    if how == "seeded":
        whole = run(tmp_path / "whole", gpt2(), privacy)
        whole.train()
        assert all(torch.equal(weights(again.model)[name], p) for name, p in weights(whole.model).items())
    with pytest.raises(AccountingError, match="noise='bisr:4', this one has None"):
        run(tmp_path, gpt2(), private(noise_multiplier=SIGMA, **options)).train(resume_from_checkpoint=True)


def test_a_block_that_no_checkpoint_holds_counts_and_the_budget_ends_earlier(tmp_path):
    """Stopped twice after the same checkpoint: the second time, what was lost is in privacy.json alone."""
    privacy = private(noise_multiplier=SIGMA, target_epsilon=2.9, noise="bisr:4")
    for stop in (5, 6):
        part = run(tmp_path, gpt2(), privacy, stop=stop, save_steps=4)
        with pytest.raises(KeyboardInterrupt):
            part.train(resume_from_checkpoint=stop > 5)
    again = run(tmp_path, gpt2(), privacy, save_steps=4)
    again.train(resume_from_checkpoint=True)
    assert blocks_of(again)[:2] == [(5, 0), (2, 4)]
    made = blocks_of(again)[2][0]
    promise = loader_of(again).participation
    mine = [Block("1", SIGMA, 5, promise, 0), Block("2", SIGMA, 2, promise._replace(mark=""), 4)]
    spent = [epsilon_of_blocks(Bisr(4), [*mine, Block("3", SIGMA, n, promise, 4)], DELTA) for n in (made, made + 1)]
    assert again.epsilon() == pytest.approx(spent[0], rel=1e-9) and spent[0] <= 2.9 < spent[1] and made < 6


def test_samples_of_parts(tmp_path):
    privacy = private(
        target_epsilon=2.0, noise_multiplier=None, noise="banded:2", sampling="cyclic_poisson", accountant="rdp"
    )
    trainer = run(tmp_path, gpt2(), privacy, max_steps=4, save_strategy="no")
    trainer.train()
    (block,) = trainer._blocks.all.values()
    assert (block.participation.kind, block.participation.period, block.participation.rate) == (
        "cyclic Poisson",
        2,
        0.4,
    )
    assert block.steps == 4 and trainer._blocks.strategy.bands == 2 and 1.9 < trainer.epsilon() <= 2.0
    assert trainer.epsilon() == epsilon_of_blocks(trainer._blocks.strategy, [block], DELTA, "rdp")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clipping": "adaptive"}, "clipping='adaptive' with noise: .* take clipping='local'"),
        ({"group_by": "user"}, "group_by with noise"),
        ({"sample_rate": 0.1}, "sample_rate with noise"),
        ({"repeat_lost_steps": True}, "repeat_lost_steps with noise"),
        ({"sampling": "poisson"}, "takes 'fixed_order' or 'cyclic_poisson'"),
        ({"sampling": "cyclic_poisson"}, "as 'banded:8', not 'bisr:4'"),
        ({"noise": None, "sampling": "fixed_order"}, "goes with noise"),
        ({"noise": "bisr"}, "write bisr:4"),
        ({"noise": "tree:3"}, "write bisr:4"),
        ({"noise": "white"}, "write bisr:4"),
        ({"noise": "lambda:1.5"}, r"must lie in \[0, 1\)"),
    ],
)
def test_what_does_not_go_with_it(wrong, said):
    with pytest.raises(ValueError, match=said):
        PrivacyArguments(target_epsilon=1.0, **{"noise": "bisr:4", **wrong})


def test_noise_on_a_command_line():
    parser = transformers.HfArgumentParser(PrivacyArguments)
    (found,) = parser.parse_args_into_dataclasses(["--target_epsilon", "1", "--noise", "lambda:0.9"])
    assert found.noise == "lambda:0.9" and found.sampling is None
    assert PrivacyArguments(target_epsilon=1.0, noise=Bisr(4)).noise == Bisr(4)
