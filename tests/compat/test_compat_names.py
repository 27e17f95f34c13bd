"""docs/opacus.md and the names of Opacus: complete and true."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from . import compat_names

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "opacus.md"
pytestmark = pytest.mark.filterwarnings("ignore")


def part(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end of {name} -->", DOCUMENT.read_text(), re.S)
    assert found is not None
    return found.group(1)


def needs_lightning() -> None:
    pytest.importorskip("pytorch_lightning")  # opacus.lightning imports it


def test_every_public_name_is_there_or_has_a_reason():
    needs_lightning()
    assert compat_names.missing() == []


def test_no_reason_is_stale():
    needs_lightning()
    for name in compat_names.ABSENT:
        module, _, attribute = name.partition(":")
        if attribute:
            assert attribute in compat_names.public(module)
            assert not hasattr(compat_names.ours(module), attribute)


def test_the_document_says_what_is_not_there():
    text = DOCUMENT.read_text()
    assert all(f"`{name.rpartition(':')[2]}`" in text for name in compat_names.ABSENT)


SIGNATURES = [
    ("privacy_engine", "PrivacyEngine.__init__"),
    ("privacy_engine", "PrivacyEngine.make_private"),
    ("privacy_engine", "PrivacyEngine.make_private_with_epsilon"),
    ("privacy_engine", "PrivacyEngine.get_epsilon"),
    ("data_loader", "DPDataLoader.__init__"),
    ("data_loader", "DPDataLoader.from_data_loader"),
    ("optimizers", "DPOptimizer.__init__"),
    ("utils.uniform_sampler", "UniformWithReplacementSampler.__init__"),
    ("utils.adaptive_clipping", "DPLossFastGradientAdaptiveClipping.__init__"),
    ("utils.per_sample_gradients_utils", "check_per_sample_gradients_are_correct"),
    ("accountants.utils", "get_noise_multiplier"),
    ("validators", "ModuleValidator.validate"),
    ("layers", "DPRNN.__init__"),
]


@pytest.mark.parametrize("module, path", SIGNATURES)
def test_arguments_and_defaults_are_those_of_opacus(module, path):
    found = []
    for package in ("opacus", compat_names.OURS):
        value = import_module(f"{package}.{module}")
        for name in path.split("."):
            value = getattr(value, name)
        parameters = inspect.signature(value).parameters.values()
        found.append([(p.name, p.kind, p.default if not hasattr(p.default, "forward") else "loss") for p in parameters])
    assert found[0] == found[1]
