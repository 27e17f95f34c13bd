"""How operators reach their CUDA kernels: by Triton's interpreter and by the emulation of CUDA C++, on CPU tensors.

The kernels themselves have tests of their own; here every operator's hook is called as the dispatcher calls it.
"""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fastdp.ops import cuda, extension, registry
from fastdp.ops.noise import words_of
from fastdp.ops.registry import OPERATORS

from . import emulation

KEY = words_of(bytes(range(32)))
ON_DEVICE = [name for name, operator in OPERATORS.items() if "cuda" in operator.kernels]
TRITON = [name for name in ON_DEVICE if OPERATORS[name].kernels["cuda"].backend == "Triton"]
CUDA = [name for name in ON_DEVICE if name not in TRITON]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def arguments(name: str) -> tuple[list, dict]:
    """Small arguments, and keywords, as the schema has them."""
    a, g, c = draw(3, 5, 18), draw(3, 5, 17), torch.tensor([0.5, 0.0, 2.0])
    x, out_grads, sizes = draw(3, 4, 6), draw(3, 2, 5), ([3], [1], [1], [2])
    sizes = ([3], [1], [1], [1])
    out_grads = draw(3, 2, 6)
    ids, e = torch.tensor([[1, 3, 3], [0, 0, 0], [6, 2, 1]]), draw(3, 3, 4)
    mean, rstd = draw(3, 5), draw(3, 5).abs()
    lists = [[draw(7), draw(2, 3)] for _ in range(2)]
    states = [[draw(7).abs(), draw(2, 3).abs()] for _ in range(2)]
    noise = dict(key=KEY, step=3, std=0.5, scale=0.25, lr=0.1)
    return {
        "linear_norm_sq": ([a, g, "auto"], {"dtype": torch.float64}),
        "linear_per_sample": ([a, g], {}),
        "linear_clipped_sum": ([a, g, c], {}),
        "linear_clipped_sum.out": ([a, g, c, draw(17, 18)], {}),
        "square_sum": ([a], {}),
        "weighted_sum": ([a, c], {}),
        "conv_norm_sq": ([x, out_grads, *sizes, 1, "direct"], {"dtype": torch.float64}),
        "conv_per_sample": ([x, out_grads, *sizes, 1], {}),
        "conv_clipped_sum": ([x, out_grads, c, *sizes, 1], {}),
        "conv_clipped_sum.out": ([x, out_grads, c, *sizes, 1, draw(2, 4, 3)], {}),
        "norm_affine_per_sample": ([a, draw(3, 5, 18), mean, rstd], {}),
        "rms_affine_per_sample": ([a, draw(3, 5, 18), rstd], {}),
        "group_affine_per_sample": ([x, draw(3, 4, 6), draw(3, 2), draw(3, 2).abs(), 2], {}),
        "embedding_norm_sq": ([ids, e, 3], {"dtype": torch.float64}),
        "embedding_clipped_sum": ([ids, e, c, 9, 3], {}),
        "embedding_clipped_sum.out": ([ids, e, c, 9, 3], {"out": draw(9, 4)}),
        "tied_cross_term": ([ids, draw(3, 3, 18), a, g], {"dtype": torch.float64}),
        "clip_factors": ([torch.tensor([0.0, 4.0, float("inf"), 1e-30]), 1.5, "local", 0.01], {}),
        "noise_": ([draw(700), 0.5, KEY, 3, 11], {}),
        "add_noise_": ([draw(700), 0.5, 2.0, KEY, 3, 11], {}),
        "noisy_sgd_step_": ([*lists, states[0], [5, 40]], {**noise, "momentum": 0.9}),
        "noisy_adamw_step_": (
            [*lists, *states, [5, 40]], {**noise, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "t": 3}
        ),
    }[name]  # fmt: skip


def copied(value):
    if isinstance(value, Tensor):
        return value.clone()
    return [copied(v) for v in value] if isinstance(value, list) else value


def tensors(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [t for item in value for t in tensors(item)] if isinstance(value, list | tuple) else []


def compare(name: str) -> None:
    """The hook's result, and what it left in its arguments, against the reference's."""
    args, options = arguments(name)
    operator, found, left = OPERATORS[name], [], []
    device = operator.kernels["cuda"].load()
    assert callable(device), f"{name}: {device}"
    returns = torch.ops.fastdp
    returns = getattr(getattr(returns, operator.packet), operator.overload)._schema.returns
    for function, kinds in ((operator.reference, set()), (device, {"cpu"})):  # the same function for both, perhaps
        mine, more = copied(args), {key: copied(value) for key, value in options.items()}
        with patch.object(extension, "BY_TRITON", kinds):
            result = function(*mine, **more)
        assert (result is None) == (not returns), f"{name}: returns {result} where its schema has {returns}"
        found.append(tensors(result if result is not None else []))
        left.append(tensors([*mine, *more.values()]))
    assert len(found[0]) == len(found[1]) and len(left[0]) == len(left[1])
    for truth, ours in zip(found[0] + left[0], found[1] + left[1], strict=True):
        assert truth.dtype == ours.dtype and truth.shape == ours.shape
        torch.testing.assert_close(ours, truth, rtol=3e-5, atol=3e-6)


def test_every_device_operator_has_a_case_here() -> None:
    for name in ON_DEVICE:
        arguments(name)
    assert set(TRITON) >= {"linear_norm_sq", "conv_norm_sq", "linear_clipped_sum.out"}
    assert set(CUDA) >= {"noise_", "noisy_adamw_step_", "clip_factors", "embedding_norm_sq"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("name", TRITON)
def test_triton(name: str) -> None:
    pytest.importorskip("triton")
    compare(name)


@pytest.mark.parametrize("name", CUDA)
def test_cuda_cpp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if emulation.compiler() is None:
        pytest.skip("no g++ on the PATH")
    module = emulation.module()
    monkeypatch.setattr(registry, "native_cuda", lambda: module)
    monkeypatch.setattr(cuda, "native_cuda", lambda: module)
    monkeypatch.setattr(cuda, "_place", lambda device: (0, 0))
    load = OPERATORS[name].kernels["cuda"]._own
    load.cache_clear()
    try:
        compare(name)
    finally:
        load.cache_clear()
