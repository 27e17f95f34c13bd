"""`finetune --task lm --fused-loss`: the steps of stored logits, and what it does not go with."""

from __future__ import annotations

import pytest

from .finetune_models import classifier, language_model, reviews
from .test_finetune_command import QUICK, command, refused


def losses(folder):
    lines = (folder / "metrics.csv").read_text().splitlines()
    place = lines[0].split(",").index("loss")
    return [float(line.split(",")[place]) for line in lines[1:] if line.split(",")[place]]


def test_the_command(tmp_path, capsys):
    model, data = language_model(tmp_path / "lm"), reviews(tmp_path / "reviews.csv")
    found = []
    for more in ((), ("--fused-loss",)):
        out = tmp_path / f"out{len(more)}"
        words = ("--task", "lm", "--text-column", "text", "--seed", 1, "--out", out, *QUICK, *more)
        assert command(model, data, *words) == 0, capsys.readouterr().err
        found.append(losses(out))
    assert found[0] and found[0] == pytest.approx(found[1], rel=1e-4)


def test_it_goes_with_language_models(tmp_path, capsys):
    model, data = classifier(tmp_path / "bert"), reviews(tmp_path / "reviews.csv")
    words = ("--task", "classify", "--fused-loss", "--out", tmp_path / "out", *QUICK)
    assert "--fused-loss goes with --task lm" in refused(capsys, model, data, *words)
