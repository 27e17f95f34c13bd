"""The scripts of docs/recipes.md, run as they are: short, and what they print is what they are for."""

from __future__ import annotations

import random
import re
import runpy
import secrets
import tempfile
from pathlib import Path

import pytest
import torch

from fastdp.errors import StepError

pytestmark = pytest.mark.slow  # `make test-all` runs it

EXAMPLES = Path(__file__).parents[2] / "examples"
# What must hold of the numbers of each line of a script, in its order. Margins are of what a dozen runs gave.
CLAIMS = {
    "federated": lambda phones, clinics: min(phones[0], clinics[0]) > 0.6  # one clinic alone knows two digits
    and 7.9 < phones[1] <= 8 and 2.9 < clinics[1] <= 3,
    "flower_client": lambda clinics: clinics[0] > 0.6 and 2.9 < clinics[1] <= 3,
    "gan": lambda found: found[0] > 0.4 and 2.9 < found[2] <= 3,
    "public_data": lambda public, private, both: public[0] > 0.6 and both[0] > max(public[0], private[0]) + 0.01
    and public[1] == 0 and 0.49 < both[1] <= private[1] <= 0.5,
    "imbalance": lambda without, weighted, *_: without[0] < 0.3 and weighted[0] > 0.6 and weighted[1] > without[1]
    and 2.9 < without[2] == weighted[2] <= 3,
    "stream": lambda sgd, ftrl: ftrl[0] > sgd[0] and ftrl[0] > 0.65 and 2.9 < ftrl[1] <= 3 and 2.9 < sgd[1] <= 3,
}  # fmt: skip


@pytest.fixture
def drawn_alike(monkeypatch):
    """Noise and batches of a script are drawn by secret keys: here by known ones, so that no test fails by chance."""
    keys = random.Random(0)
    monkeypatch.setattr(secrets, "token_bytes", keys.randbytes)
    monkeypatch.setattr(secrets, "randbits", keys.getrandbits)
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CLAIMS)
def test_the_script_is_short_and_does_what_it_is_for(name, drawn_alike, monkeypatch, tmp_path, capsys):
    pytest.importorskip("sklearn")
    if name == "flower_client":
        pytest.importorskip("flwr")
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text().splitlines()) < 60
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    space = runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    numbers = [[float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)] for line in lines]
    assert CLAIMS[name](*numbers), lines
    if name == "imbalance":
        assert "WeightedRandomSampler" in lines[-1] and lines[-1].startswith("refused")
    if name == "flower_client":  # the server asks for a round more than was agreed
        with pytest.raises(StepError, match="the budget is spent"):
            space["Clinic"](0).fit([torch.zeros(650).numpy()], {})
