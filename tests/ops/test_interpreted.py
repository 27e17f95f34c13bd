"""Triton's interpreter as the tests run it (tests/interpreted.py): patched by a launch, and as before after it."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a GPU", allow_module_level=True)
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def doubled(x):
    return tl.where(x > 0, x + x, -tl.abs(x)) + tl.sum(tl.zeros_like(x), axis=0)


@triton.jit
def twice(x):
    return doubled(doubled(x))


@triton.jit
def kernel(x, out, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out + at, twice(tl.load(x + at)))


@triton.jit
def wrong(x, out):
    tl.store(out, tl.load(x) + missing)  # noqa: F821


def test_a_launch_patches_seldom_and_leaves_the_language_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, look = [], interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *a: (looked.append(a[0]), look(*a)))
    before = {name: getattr(tl, name) for name in ("load", "abs", "where")}
    x, out = torch.linspace(-2, 2, 8), torch.empty(8)
    for times in (1, 2):
        kernel[(1,)](x, out, 8)
        assert torch.equal(out, torch.where(x > 0, 4 * x, x)) and max(map(looked.count, (tl, tl.core))) <= 2 * times
        assert all(getattr(tl, name) is value for name, value in before.items())
    with pytest.raises(Exception, match="missing"):
        wrong[(1,)](x, out)
    assert all(getattr(tl, name) is value for name, value in before.items())
    kernel[(1,)](x, out.zero_(), 8)
    assert torch.equal(out, torch.where(x > 0, 4 * x, x))
