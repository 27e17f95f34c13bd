"""The faults of Opacus that docs/opacus.md lists: none of them here.

`python -m tests.compat.compat_faults` runs both.
"""

from __future__ import annotations

import importlib.util

import pytest

from .compat_faults import FAULTS, OURS, number


@pytest.mark.parametrize("name", FAULTS)
def test_not_here(name):
    if name == "lightning_generator" and not importlib.util.find_spec("lightning"):
        pytest.skip("needs lightning")
    found = number(name, OURS)
    assert isinstance(found, float), found
    assert found <= FAULTS[name].limit
