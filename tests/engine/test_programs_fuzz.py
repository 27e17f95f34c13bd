"""Whole programs, drawn at random and of single pieces (tests/programs), against the batch minus one sample.

No sample may move the clipped sum by more than R, or a sum of a batch that it is not in, without an error or a warning;
and what treats every sample by itself must be exact. By hand, and for longer: `python -m benchmarks.fuzz`.
"""

from __future__ import annotations

import collections
from dataclasses import replace
from unittest.mock import Mock

import pytest

from fastdp.engine.per_sample import PerSampleGradients
from fastdp.errors import SampleMixingError

from ..programs.draw import alone, draw, source
from ..programs.judge import Verdict, judge
from ..programs.pieces import COUPLED, ESCAPES, PIECES, RIGHT

pytestmark = pytest.mark.slow  # `make test-all` runs it

PARTS = 8
DRAWN = range(400, 400 + 240)  # seeds
MOST = 3  # samples that are taken away of each batch


def told(task: str, text: str, verdict: Verdict) -> str:
    return f"{verdict}\nagain: python -m benchmarks.fuzz {task}\n{text}"


@pytest.mark.parametrize("part", range(PARTS))
def test_no_piece_is_silently_wrong(part: int) -> None:
    """Each on its own, between a layer, a head and an ordinary loss."""
    faults = []
    for name in sorted(PIECES)[part::PARTS]:
        for seed in range(1, 4 if PIECES[name].label == COUPLED else 2):
            verdict = judge(alone(name, seed), MOST)
            if verdict.fault:
                faults.append(told(f"--piece {name!r} --seed {seed}", source(alone(name, seed)), verdict))
                break
    assert not faults, f"{len(faults)} at fault\n" + "\n".join(faults[:5])


@pytest.mark.parametrize("part", range(PARTS))
def test_no_drawn_program_is_silently_wrong(part: int) -> None:
    kinds: collections.Counter[str] = collections.Counter()
    faults = []
    for seed in DRAWN[part::PARTS]:
        verdict = judge(draw(seed), MOST)
        kinds[verdict.kind] += 1
        if verdict.fault:
            faults.append(told(f"--seed {seed}", source(draw(seed)), verdict))
    assert not faults, f"{len(faults)} at fault\n" + "\n".join(faults[:5])
    assert kinds["exact"] >= 5 and kinds["refused"] >= 3, kinds


def test_the_judge_is_not_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm too small is told of, by the truth and without one; so is an error, and one that is no error of fastdp."""
    whole, drawing = alone("linear", 2), alone("dropout module", 2)
    assert judge(whole, MOST).kind == judge(drawing, MOST).kind == "exact"
    norms = PerSampleGradients.norms
    monkeypatch.setattr(PerSampleGradients, "norms", lambda self: norms(self) / 3)
    assert judge(whole, MOST).kind in ("WRONG", "SILENT")
    found = judge(drawing, MOST)
    assert found.kind == "SILENT" and 1.5 < found.sens < 3.1
    for problem, kind in ((SampleMixingError("refused"), "FALSE REFUSAL"), (KeyError("a"), "CRASH")):
        monkeypatch.setattr(PerSampleGradients, "norms", Mock(side_effect=problem))
        assert judge(whole, MOST).kind == kind


def test_labels_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called right and couples samples is found out by plain autograd, so no right program is coupled."""
    monkeypatch.setitem(PIECES, "linear", replace(PIECES["mean(0)"], label=RIGHT))
    found = judge(alone("linear", 2), MOST)
    assert found.kind == "skipped" and "MISLABELLED" in found.why


def test_few_pieces_may_escape() -> None:
    labels = collections.Counter(piece.label for piece in PIECES.values())
    assert labels[RIGHT] > 150 and labels[COUPLED] > 200 and labels[ESCAPES] < 16, labels
    found = [draw(seed) for seed in range(300)]
    assert len({name for program in found for name in program.names}) > 200
    assert [source(program) for program in found[:9]] == [source(draw(seed)) for seed in range(9)]
