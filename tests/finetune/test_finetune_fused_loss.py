"""`finetune --task lm --fused-loss`: the steps of stored logits, and what it does not go with."""

from __future__ import annotations

import pytest

from fastdp.finetune import evaluation

from .finetune_models import classifier, language_model, reviews
from .test_finetune_command import QUICK, command, refused

pytestmark = pytest.mark.slow  # `make test-all` runs it


def column(folder, name):
    lines = (folder / "metrics.csv").read_text().splitlines()
    place = lines[0].split(",").index(name)
    return [float(line.split(",")[place]) for line in lines[1:] if line.split(",")[place]]


def test_the_command(tmp_path, capsys, monkeypatch):
    model, data = language_model(tmp_path / "lm"), reviews(tmp_path / "reviews.csv")
    found = []
    for more in ((), ("--fused-loss",)):
        out = tmp_path / f"out{len(more)}"
        words = ("--task", "lm", "--text-column", "text", "--seed", 1, "--out", out, *QUICK, *more)
        if more:  # evaluation, too
            monkeypatch.setattr(evaluation, "logits_of", lambda model: None)
        assert command(model, data, *words) == 0, capsys.readouterr().err
        found.append((column(out, "loss"), column(out, "perplexity")))
    for stored, fused in zip(*found, strict=True):
        assert stored and stored == pytest.approx(fused, rel=1e-4)


def test_it_goes_with_language_models(tmp_path, capsys):
    model, data = classifier(tmp_path / "bert"), reviews(tmp_path / "reviews.csv")
    words = ("--task", "classify", "--fused-loss", "--out", tmp_path / "out", *QUICK)
    assert "--fused-loss goes with --task lm" in refused(capsys, model, data, *words)
