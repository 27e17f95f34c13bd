"""Kernels and streams of a device: which stream a launch goes to, in the interpreter and on the emulation; and on a GPU
norms, sums and steps whose inputs come late, on streams of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp.ops import cuda

triton = pytest.importorskip("triton")
from fastdp.kernels import clipped, conv, linear, many, norm, rows, segments  # noqa: E402

GPU = torch.cuda.is_available()
ON_GPU = pytest.mark.skipif(not GPU, reason="no CUDA device")
IN_INTERPRETER = pytest.mark.skipif(GPU, reason="runs in the interpreter")


def calls() -> dict[str, Callable[[], Any]]:
    """Every launcher, on small tensors."""
    a, g, c = torch.randn(3, 40, 16), torch.randn(3, 40, 32), torch.ones(3)
    half, pairs = (a.bfloat16(), g.bfloat16()), [(a.bfloat16() + n, g.bfloat16()) for n in range(2)]
    odd = (torch.randn(3, 40, 17).bfloat16(), g.bfloat16())
    x, y = torch.randn(2, 16, 5, 5).bfloat16(), torch.randn(2, 4, 5, 5).bfloat16()
    starts, mean = torch.tensor([0, 10, 40]), torch.randn(3, 40)
    limits = (1e-6, 5e-5)
    return {
        "gram": lambda: linear.linear_norm_sq_and_bound(*half, "gram", *limits),
        "direct": lambda: linear.linear_norm_sq_and_bound(a, g, "direct", *limits),
        "filled up": lambda: linear.linear_norm_sq(*odd, "gram"),
        "vector": lambda: linear.linear_norm_sq(a[:, :1], g[:, :1]),
        "per sample": lambda: linear.linear_per_sample(a, g, tile=linear.Tile(16, 16, 16, 4, 2)),
        "sum": lambda: clipped.linear_clipped_sum(*half, c),
        "sum, parts": lambda: clipped.linear_clipped_sum(*half, c, parts=2),
        "sum, filled up": lambda: clipped.linear_clipped_sum(*odd, c),
        "many": lambda: many.linear_norm_sq(pairs, "gram", *limits),
        "many sums": lambda: many.linear_clipped_sum(list(pairs), c),
        "conv": lambda: conv.conv_norm_sq(x, y, 3, 1, 1, 1, 1, "direct"),
        "conv gram": lambda: conv.conv_norm_sq(x, y, 3, 1, 1, 1, 1, "gram"),
        "conv sum": lambda: conv.conv_clipped_sum(x, y, torch.ones(2), 3, 1, 1),
        "layer norm": lambda: norm.norm_affine_per_sample(a, a, mean, mean),
        "RMS": lambda: norm.rms_affine_per_sample(a, a, mean),
        "group norm": lambda: norm.group_affine_per_sample(x, x, torch.ones(2, 4), torch.ones(2, 4), 4),
        "square sum": lambda: rows.square_sum(a), "weighted sum": lambda: rows.weighted_sum(a, c),
        "segments": lambda: segments.norm_sq(a[0], g[0], starts),
        "segments' sums": lambda: segments.overwrite_sums(a[0], g[0], starts, torch.empty(2, 32, 16), torch.ones(40)),
    }  # fmt: skip


@IN_INTERPRETER
@pytest.mark.parametrize("name", calls())
def test_every_launch_is_made_on_its_tensors_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current stream of the current device: that of the tensors is current at every launch."""
    from triton.runtime import interpreter

    entered: list[torch.device] = []
    launched: list[str] = []
    own = interpreter.GridExecutor.__call__

    @contextlib.contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        entered.append(tensor.device)
        yield
        entered.pop()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.fn.__name__)
        assert entered, f"{self.fn.__name__} is launched wherever"
        assert {t.device for t in args if isinstance(t, Tensor)} == {entered[-1]}
        return own(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)
    calls()[name]()
    assert launched and not entered


@IN_INTERPRETER
def test_compiled_kernels_are_given_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in CUDA C++ take device and stream as their last arguments: the current one of the first tensor's."""
    asked: list[torch.device] = []
    given: list[tuple[Any, ...]] = []

    class Native:
        def __getattr__(self, name: str) -> Callable[..., int]:
            if name in ("workspace", "embedding_partials", "embedding_chunks"):
                return lambda *args: 64
            return lambda *args: given.append(args[-2:])

    def current(device: torch.device) -> Any:
        asked.append(device)
        return SimpleNamespace(device_index=3, cuda_stream=777)

    monkeypatch.setattr(cuda, "_native", Native)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    w, key, ids = torch.randn(8), [1] * 8, torch.zeros(2, 3, dtype=torch.long)
    draw = dict(key=key, step=1, std=1.0, scale=1.0)
    runs: list[Callable[[], Any]] = [
        lambda: cuda.noise_(w, 1.0, key, 1), lambda: cuda.add_scaled_(w, 1.0, 1.0, key, 1),
        lambda: cuda.clip_factors(w.abs(), 1.0), lambda: cuda.embedding_norm_sq(ids, torch.randn(2, 3, 4)),
        lambda: cuda.embedding_clipped_sum(ids, torch.randn(2, 3, 4), torch.ones(2), 5),
        lambda: cuda.noisy_sgd_step_([w], [w.clone()], [w.clone()], [0], lr=0.1, momentum=0.9, **draw),
        lambda: cuda.noisy_adamw_step_([w], [w.clone()], [w.clone()], [w.abs()], [0], lr=0.1, beta1=0.9, beta2=0.9,
                                       eps=1e-8, weight_decay=0.0, t=1, **draw),
    ]  # fmt: skip
    for run in runs:
        run()
    assert given == [(3, 777)] * len(runs) and asked == [w.device] * len(runs)


# ---------------------------------------------------------------------- on a GPU


def sleep_before_gradients(module: nn.Module, cycles: int = 200_000_000) -> None:
    """What comes of this module's backward comes late, on the stream of its forward."""
    module.register_forward_hook(
        lambda module, args, out: out.register_hook(lambda grad: torch.cuda._sleep(cycles)) and None
    )


class Deep(nn.Module):
    """Layers of equal shape, which kernels take by their addresses; a convolution; a table; a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.conv = nn.Embedding(30, 32), nn.Conv1d(32, 32, 3, padding=1)
        self.layers, self.norm = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), nn.RMSNorm(32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.conv(self.table(ids).mT).mT
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


def step_of(model: nn.Module, ids: Tensor, optimizer: Any) -> Tensor:
    model(ids).float().square().flatten(1).sum(1).mean().backward()
    optimizer.step()
    norms: Tensor = optimizer.norms.clone()
    optimizer.zero_grad()
    return norms


def steps(device: str, dtype: torch.dtype, run: Callable[[Any], Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Norms of three private steps, and the parameters behind them."""
    model = Deep().to(device, dtype)
    optimizer = fastdp.DPAdamW(model, lr=1e-3, noise_multiplier=0.5, expected_batch_size=6, seed=3)
    if device == "cuda":
        sleep_before_gradients(model.conv)
        sleep_before_gradients(model.layers[3])
    norms = [run(lambda seed=seed: (model, batch_of(seed), optimizer)) for seed in range(3)]
    return [found.cpu() for found in norms], [p.detach().float().cpu() for p in model.parameters()]


def batch_of(seed: int) -> Tensor:
    return torch.randint(0, 30, (6, 48), generator=torch.Generator().manual_seed(seed))


def plainly(given: Callable[[], Any]) -> Tensor:
    model, ids, optimizer = given()
    return step_of(model, ids.to(next(model.parameters()).device), optimizer)


def half_aside(given: Callable[[], Any]) -> Tensor:
    """The forward alone on a side stream: norms, sums and noise run on the caller's, which must wait."""
    model, ids, optimizer = given()
    side, ids = torch.cuda.Stream(), ids.cuda()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = model(ids).float().square().flatten(1).sum(1).mean()
    loss.backward()
    optimizer.step()
    norms: Tensor = optimizer.norms.clone()
    optimizer.zero_grad()
    return norms


def prefetched(given: Callable[[], Any]) -> Tensor:
    """The batch is copied on a stream of its own; once backward is queued, its memory is given to the next batch."""
    model, ids, optimizer = given()
    copies, pinned = torch.cuda.Stream(), ids.pin_memory()
    with torch.cuda.stream(copies):
        batch = pinned.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(copies)
    model(batch).float().square().flatten(1).sum(1).mean().backward()
    done = torch.cuda.Event()
    done.record()
    del batch
    torch.cuda._sleep(200_000_000)  # the step comes late
    optimizer.step()
    copies.wait_event(done)
    with torch.cuda.stream(copies):
        following = [torch.full_like(pinned, 7, device="cuda") for _ in range(8)]
    norms: Tensor = optimizer.norms.clone()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    del following
    return norms


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [half_aside, prefetched])
def test_kernels_wait_for_what_they_read(run: Callable[[Any], Any], dtype: torch.dtype) -> None:
    """By Triton and CUDA C++, with gradients that come late: the same steps, bit by bit, as on one stream."""
    want, found = steps("cuda", dtype, plainly), steps("cuda", dtype, run)
    for ours, theirs in zip(want, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
