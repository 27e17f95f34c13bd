"""examples/papers/snli.py and pretrained.py: kept states are the frozen forward's, mix-up training switches as said."""

from __future__ import annotations

import argparse
import csv
import math

import pytest
import torch

import fastdp
from examples.papers import common, pretrained, snli

pytestmark = pytest.mark.slow  # `make test-all` runs it

transformers = pytest.importorskip("transformers")

PAIRS = [("a b c", "d"), ("a", "b c d e f g h"), ("b b", "c c"), ("d e f", "a b")]


class Tokenizer:
    """One token a letter: 1 first, 2 after each text; the second text is segment 1."""

    def __call__(self, first, second, truncation, max_length):
        found = {"input_ids": [], "token_type_ids": []}
        for a, b in zip(first, second, strict=True):
            parts = [
                [1, *(3 + ord(x) - ord("a") for x in a.split()), 2],
                [*(3 + ord(x) - ord("a") for x in b.split()), 2],
            ]
            found["input_ids"].append((parts[0] + parts[1])[:max_length])
            found["token_type_ids"].append(([0] * len(parts[0]) + [1] * len(parts[1]))[:max_length])
        return found


def body(seed=0):
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def data(count=48):
    """States of pairs whose first letter of the second text is the label."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (count,), generator=draw)
    pairs = [("a b", " ".join(["dfh"[int(y)], *"abc"[: i % 3]])) for i, y in enumerate(labels)]
    model = pretrained.FrozenBert(body())
    return model, pretrained.states_of(model, Tokenizer(), pairs, labels, 12, batch=16)


def options(**more):
    return argparse.Namespace(**{
        "small": 0.1, "large": 10.0, "switch": 0.5, "sigma": 0.8, "delta": 1e-5, "batch": 12, "epochs": 2,
        "lr": 1e-3, "head_lr": 1e-2, "every": 1, "checkpoints": None, "device": "cpu", **more,
    })  # fmt: skip


def trained(model, kept, case, given):
    return snli.run(pretrained.LastBlock(model.last, 16), kept, case, 0, given, common.Checkpoint(given, "run", {}))


def test_kept_states_are_those_of_the_whole_model():
    """Also segments, padding and the order by length: the last block on kept states = all blocks on the pairs."""
    labels = torch.tensor([0, 1, 2, 0])
    model = pretrained.FrozenBert(body())
    kept = pretrained.states_of(model, Tokenizer(), PAIRS, labels, 10, batch=3)
    states, mask, found = pretrained.collate([kept[i] for i in range(4)])
    with torch.no_grad():
        out = pretrained.LastBlock(model.last, 16).block(states, attention_mask=mask[:, None, None, :])
    order = sorted(range(4), key=lambda i: min(10, len("".join(PAIRS[i]).replace(" ", "")) + 3))
    assert found.tolist() == labels[order].tolist()
    made = Tokenizer()([p for p, _ in PAIRS], [h for _, h in PAIRS], True, 10)
    for place, number in enumerate(order):
        ids, types = (torch.tensor([made[name][number]]) for name in ("input_ids", "token_type_ids"))
        with torch.no_grad():
            whole = body()(input_ids=ids, token_type_ids=types).last_hidden_state[0]
        assert int(mask[place].sum()) == len(whole)
        torch.testing.assert_close(out[place, : len(whole)], whole, rtol=1e-4, atol=1e-5)


def test_with_its_pooler_the_model_is_exact():
    """As the paper trains it: the last block, the pooler and the classifier."""
    torch.manual_seed(0)
    with_pooler = transformers.BertModel(body().config, add_pooling_layer=True).eval()
    model, (_, kept) = pretrained.FrozenBert(with_pooler), data()
    block = pretrained.LastBlock(model.last, 16, model.pooler)
    parts = {name.partition(".")[0] for name, p in block.named_parameters() if p.requires_grad}
    assert parts == {"block", "pooler", "head"} and not any(p.requires_grad for p in model.body.parameters())
    report = fastdp.verify(block, snli.losses, pretrained.collate([kept[i] for i in (0, 20, 47)]))
    assert report.ok, str(report)


def test_rescaled_moments_make_a_jump_of_r_invisible():
    """All gradients are clipped: with another R they are only longer, and Adam's steps are the same. (By a power of 2,
    so that noise is rounded to a grid as much longer.)"""
    found = []
    for jump in (False, True):
        model, kept = data()
        torch.manual_seed(1)
        block = pretrained.LastBlock(model.last, 16)
        optimizer = fastdp.DPAdamW(block, lr=1e-2, weight_decay=0.0, eps=1e-20, noise_multiplier=0.5,
                                   max_grad_norm=1e-4, expected_batch_size=16, sample_rate=0.3, seed=5)  # fmt: skip
        for number in range(6):
            if jump and number == 3:
                optimizer.set_clipping(max_grad_norm=128e-4)
                snli.rescale(optimizer, 128.0)
            batch = pretrained.collate([kept[i] for i in range(8 * number, 8 * number + 8)])
            snli.losses(block, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.detach()
        found.append(torch.cat([p.detach().flatten() for p in block.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


def test_all_cases_end_to_end(tmp_path, monkeypatch):
    (tmp_path / "snli_dev.tsv").write_text(
        "".join(f"{pretrained.CLASSES[i % 3]}\ta b\t{'dfh'[i % 3]} a\n" for i in range(40))
    )
    (tmp_path / "snli_test.tsv").write_text("entailment\ta b\td\nneutral\ta\tf b\ncontradiction\ta\th\n" * 4)
    monkeypatch.setattr(pretrained, "bert", lambda name: (pretrained.FrozenBert(body()), Tokenizer()))
    out = tmp_path / "out.csv"
    arguments = ["--data", str(tmp_path), "--quick", "--epochs", "1", "--out", str(out), "--cases",
                 *(case.name for case in snli.CASES), "--cache", str(tmp_path / "c")]  # fmt: skip
    rows = snli.main([*arguments, "--plots", str(tmp_path)])
    assert (tmp_path / "snli_reliability.png").exists()
    with out.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(rows) == 7 * len(snli.CASES) - 3 and tuple(written[0]) == common.COLUMNS
    assert {row["case"] for row in written} == {f"{case.name}; trained on dev" for case in snli.CASES}
    private = [row for row in written if not row["case"].startswith("non-private")]
    assert len({row["epsilon"] for row in private}) == 1 and 0 < float(private[0]["epsilon"]) < 100
    assert all(math.isinf(float(row["epsilon"])) for row in written if row not in private)
    (tmp_path / "snli_test.tsv").unlink()
    arguments[arguments.index("--cases") : arguments.index("--cache")] = ["--cases", "non-private"]
    assert len(snli.main(arguments)) == 4  # from the kept states
    with pytest.raises(SystemExit, match="snli_test.tsv"):  # those of --quick are no full run's
        snli.main([argument for argument in arguments if argument != "--quick"])
    with pytest.raises(SystemExit, match="2"):  # the paper's training set is not there
        snli.main([*arguments, "--full"])


@pytest.mark.parametrize("style", ["flat", "layerwise"])
def test_mix_up_switches_once_and_goes_on_where_it_was_stopped(style, tmp_path, monkeypatch):
    """One step in each process: clipping switches where planned, moments are rescaled there, all steps are counted."""
    case, seen, ratios = snli.Case("mix-up", "local", "global", style), [], []
    step, rescale, given = fastdp.DPAdamW.step, snli.rescale, options(epochs=1, checkpoints=tmp_path)

    def watched(self, closure=None):
        kind = self._privacy.clipping.clipping, self.max_grad_norm, self._privacy.clipping.style
        seen.append((*kind, sum(n for *_, n in self.history), self.param_groups[1]["params"][0].detach().clone()))
        return step(self, closure)

    monkeypatch.setattr(fastdp.DPAdamW, "step", watched)
    monkeypatch.setattr(snli, "rescale", lambda optimizer, ratio: ratios.append(ratio) or rescale(optimizer, ratio))
    keep = common.Checkpoint.keep

    def stopped(self, **state):
        keep(self, **state)
        if state["steps"] < 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(common.Checkpoint, "keep", stopped)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            trained(*data(), case, given)
        state = torch.load(next(tmp_path.glob("*.pt")), weights_only=True)
    columns, beyond = trained(*data(), case, given)
    assert [place[:4] for place in seen] == [("local", 0.1, style, 0), ("local", 0.1, style, 1),
                                             ("global", 10.0, style, 2), ("global", 10.0, style, 3)]  # fmt: skip
    assert ratios == [100.0] and torch.equal(state["model"]["head.weight"], seen[3][-1])
    assert columns["R"] == "0.1 then 10" and columns["clipping"] == "local then global" and 0 < beyond < 1
    assert columns["steps"] == 4 and columns["epsilon"] == fastdp.accounting.epsilon_of([(0.8, 0.25, 4)], 1e-5, "prv")


def test_the_papers_settings_are_the_defaults():
    """Batch 32, one rate, sigma 0.4, R 0.1, 128 tokens, 54,076 steps of which 2,500 clip globally; (1.25, 1/550152)."""
    found = snli.options_of([])
    assert (found.batch, found.lr, found.head_lr, found.sigma, found.small) == (32, 5e-4, 5e-4, 0.4, 0.1)
    assert found.longest == 128 and found.head == "pooler"
    steps = round(found.epochs * 550_152 / 32)
    assert steps == 54_076 and steps - round(found.switch * steps) == 2_500
    spent = fastdp.accounting.epsilon_of([(0.4, 32 / 550_152, 51_576)], 1 / 550_152, "gdp")
    assert round(spent, 2) == 1.25  # of 51,576 steps, 3 epochs


def test_frozen_blocks_in_every_step_give_the_same_training():
    """Tokens and kept states: the same weights, where nothing is private and the batches are the same."""
    model, kept = data()
    labels = torch.randint(0, 3, (48,), generator=torch.Generator().manual_seed(0))
    pairs = [("a b", " ".join(["dfh"[int(y)], *"abc"[: i % 3]])) for i, y in enumerate(labels)]
    tokens, found = pretrained.tokens_of(Tokenizer(), pairs, labels, 12), []
    for given in (kept, tokens):
        torch.manual_seed(3)
        block = pretrained.LastBlock(body().encoder.layer[-1], 16)
        snli.run(block, given, snli.CASES[0], 0, options(), common.Checkpoint(options(), "run", {}), model)
        found.append(torch.cat([p.detach().flatten() for p in block.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
