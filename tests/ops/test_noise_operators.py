"""The operators that draw noise, what they refuse, and keys: copies, forks, seeds."""

import copy
import math
import os
import pickle

import pytest
import torch
from torch import Tensor, nn

from fastdp.ops import noise
from fastdp.ops.noise import Noise, noise_
from fastdp.optim.private_step import PrivateStep

from .noise_truth import KEY, SINGLE_ERROR, draw

# ---------------------------------------------------------------------- operators


def assert_noised(found: Tensor, sums: Tensor, normal: Tensor, std: float, scale: float, backend: str) -> None:
    """found = (sums + std * normal) * scale in its type, of float64 sums and normals.

    Rounded once by the reference and in float64 (up to float64's own rounding); in float, normals have their error,
    and the sum and the product are rounded to 24 bits each, before the rounding to a shorter type.
    """
    total, exact = sums.double() + std * normal, (sums.double() + std * normal) * scale
    if found.dtype == torch.float64:
        torch.testing.assert_close(found, exact, rtol=1e-14, atol=1e-15)
        return
    smallest = {torch.bfloat16: -133, torch.float16: -24, torch.float32: -149}[found.dtype]
    last = (torch.finfo(found.dtype).eps * 2.0 ** exact.abs().log2().floor()).clamp(min=2.0**smallest)
    allowed = (0.5 + 1e-7) * last
    if backend == "native":
        allowed = allowed + (total.abs() * 2.0**-24 + 6.5 * SINGLE_ERROR * std) * abs(scale)
        allowed = allowed + (exact.abs() * 2.0**-24 if found.dtype != torch.float32 else 0)
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (70_001,)])
@pytest.mark.parametrize(("std", "scale"), [(1.7, 0.3), (1e-3, -1.0), (1e-25, 1e24), (1e-50, 1e50), (1e25, 1e-30)])
def test_add_scaled_is_right_to_rounding(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], std: float, scale: float
) -> None:
    """Of large and small std, too: what float cannot hold is computed in double."""
    source = Noise(seed=4)
    source.step = 9
    tensor = torch.randn(shape, dtype=dtype) * std
    normal = draw(tensor.numel(), noise.key_of(4), 9, 1001, torch.float64).view(shape)
    before, version = tensor.clone(), tensor._version
    assert source.add_scaled_(tensor, std, scale, 1001) is tensor
    assert_noised(tensor, before, normal, std, scale, backend)
    assert tensor._version > version or not tensor.numel()  # autograd can see that it changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("std", [1.0, 1e-7, 1e5, 1e-30])
def test_16_bit_noise_is_that_of_wider_types_rounded(backend: str, dtype: torch.dtype, std: float) -> None:
    found = noise_(torch.full((3001,), math.nan, dtype=dtype), std, KEY, 2, 77)
    normal = draw(3001, KEY, 2, 77, torch.float64)
    if dtype == torch.float16:
        overflow = (std * normal).abs() >= 65520
        assert torch.equal(found.double().isinf(), overflow)
        found, normal = found[~overflow], normal[~overflow]
    assert_noised(found, torch.zeros_like(normal), normal, std, 1.0, backend)
    single = noise_(torch.empty(3001), std, KEY, 2, 77)
    assert backend == "reference" or torch.equal(single.to(dtype)[: len(found)], noise_(
        torch.empty(3001, dtype=dtype), std, KEY, 2, 77)[: len(found)])  # fmt: skip


def test_memory_around_is_untouched(backend: str) -> None:
    whole = torch.full((3000,), math.pi)
    noise_(whole[700:1900], 2.0, KEY, 0, 3)
    assert (whole[:700] == math.pi).all() and (whole[1900:] == math.pi).all()
    normal = draw(1200, offset=3, dtype=torch.float64)
    assert_noised(whole[700:1900], torch.zeros(1200), normal, 2.0, 1.0, backend)


def test_without_noise_only_the_scale_is_left(backend: str) -> None:
    tensor = torch.tensor([1.0, -2.0])
    assert Noise().add_scaled_(tensor, 0.0, 0.5, 0).tolist() == [0.5, -1.0]
    torch.ops.fastdp.add_noise_(tensor, 0.0, -0.5, noise.words_of(KEY), 0, 0)  # the operator itself
    assert tensor.tolist() == [-0.25, 0.5]
    for dtype in noise.DTYPES:
        found = noise_(torch.full((1300,), math.nan, dtype=dtype), 0.0, KEY, 0, 5)
        assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (TypeError, {"out": torch.zeros(4, dtype=torch.int32)}),
        (ValueError, {"key": [1, 2]}),
        (ValueError, {"key": [0] * 7 + [1 << 32]}),
        (ValueError, {"out": torch.zeros(4, 4).t()[1:]}),
        (ValueError, {"out": torch.zeros(4, requires_grad=True)}),
        (ValueError, {"key": b"short"}),
        (ValueError, {"key": "0" * 32}),
        (ValueError, {"step": -1}),
        (ValueError, {"step": 2**48}),
        (ValueError, {"offset": -1}),
        (ValueError, {"offset": 2**62}),
        (ValueError, {"std": -1.0}),
        (ValueError, {"std": math.nan}),
        (ValueError, {"std": math.inf}),
    ],
)
def test_refusals(backend: str, error: type[Exception], change: dict[str, object]) -> None:
    call = {"out": torch.zeros(4), "std": 1.0, "key": KEY, "step": 0, "offset": 0}
    noise_(**call)  # type: ignore[arg-type]
    with pytest.raises(error):
        noise_(**{**call, **change})  # type: ignore[arg-type]


# ---------------------------------------------------------------------- keys


def first(source: Noise) -> list[float]:
    return source.add_scaled_(torch.zeros(4), 1.0, 1.0, 0).tolist()


def test_seeds_reproduce_and_secret_keys_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first(Noise(3)) == first(Noise(3)) != first(Noise(4))
    assert first(Noise(-3)) != first(Noise(3)) and first(Noise(2**200)) != first(Noise(0))
    assert not Noise(3).secure and Noise().secure
    assert first(Noise()) != first(Noise())
    with pytest.raises(TypeError):
        Noise(1.5)  # type: ignore[arg-type]


def test_copies_and_forks_do_not_repeat_secret_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    source, seeded = Noise(), Noise(3)
    source.step = seeded.step = 5
    drawn = first(source)
    assert first(source) == drawn
    for other in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert other.step == 5 and first(other) != drawn
    assert source._key not in pickle.dumps(source)
    assert first(copy.deepcopy(seeded)) == first(seeded)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert first(source) != drawn


def test_freezing_a_parameter_does_not_move_the_noise_of_others() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    privacy = PrivateStep(model, model.parameters(), noise_multiplier=1.0, expected_batch_size=5, seed=0)

    def ranges_of_a_step() -> list[tuple[int, int]]:
        model(torch.ones(5, 3)).sum(1).mean().backward()
        assert privacy.ready()
        release = privacy.release()
        privacy.finish()
        return [(release.offsets[id(p)], p.numel()) for p in model.parameters() if id(p) in release.sums]

    assert ranges_of_a_step() == [(0, 12), (12, 4), (16, 8), (24, 2)]
    model[0].bias.requires_grad_(False)
    assert ranges_of_a_step() == [(0, 12), (16, 8), (24, 2)]
