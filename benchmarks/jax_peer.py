"""JAX-Privacy, compiled, beside fastdp: the same transformers, weights, data and clipped gradients, in one process.

    python -m benchmarks.jax_peer [--models gpt vit] [--small] [--threads 2] [--rounds 9] [--out FILE.csv]

Before anything is timed, JAX-Privacy's sum of clipped gradients is compared with fastdp's. Steps are then interleaved;
`ratio` is to the same library's own ordinary step, `of_torch` to PyTorch's. "jax-privacy one by one" takes the samples
of a batch one after the other (`microbatch_size=1`), and holds one gradient at a time. AdamW, a noise multiplier of 1,
clipping norm 1, medians. JAX's steps are compiled as a whole (`jax.jit`, arguments donated).

Needs, beside fastdp's own needs, `pip install jax jax-privacy`; in an environment of its own, as they ask for other
versions of numpy than torch's other friends.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import fastdp

from .contenders import CONTENDERS, LR, SIGMA, R
from .large import ViT
from .models import GPT, Workload
from .suites import CPU, SMALL
from .timing import Row, begin, interleaved, publish, versions

COLUMNS = ("model", "contender", "batch_size", "ratio", "of_torch", "step_ms", "rounds", "error")
CLOSE = 1e-4  # see `error_of`


class Peer(NamedTuple):
    """A model as a function of its weights, by PyTorch's names, and a batch; and how many of its layers there are."""

    forward: Callable[..., Any]
    layers: int
    heads: int


def _libraries() -> tuple[Any, Any, Any, Any]:
    try:
        import jax
        import jax.numpy
        import jax_privacy.clipping
        import jax_privacy.noise_addition
        import optax
    except ImportError as missing:
        raise SystemExit(f"{missing}. This compares with another library: pip install jax jax-privacy") from None
    return jax, jax.numpy, jax_privacy, optax


def linear(w: Any, name: str, x: Any) -> Any:
    """x [..., I] by a weight [O, I]."""
    found = x @ w[f"{name}.weight"].T
    return found + w[f"{name}.bias"] if f"{name}.bias" in w else found


def layer_norm(w: Any, name: str, x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    scale = 1.0 / (((centred * centred).mean(-1, keepdims=True) + 1e-5) ** 0.5)
    return centred * scale * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(jax: Any, w: Any, out: str, projected: list[Any], heads: int, causal: bool) -> Any:
    """projected: queries, keys and values [B, T, D]; out: the name of the projection of what they give."""
    b, t, d = projected[0].shape
    q, k, v = (each.reshape(b, t, heads, d // heads) for each in projected)
    return linear(w, out, jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(b, t, d))


def mlp(jax: Any, w: Any, at: str, x: Any, tanh: bool) -> Any:
    """at: the block's name and a dot; tanh: GELU by its approximation."""
    inner = jax.nn.gelu(linear(w, at + "up", layer_norm(w, at + "norm2", x)), approximate=tanh)
    return linear(w, at + "down", inner)


def gpt(jax: Any, peer: Peer, w: Any, ids: Any) -> Any:
    """`benchmarks.models.GPT`: logits [B, T, V]."""
    x = w["tokens.weight"][ids] + w["positions.weight"][: ids.shape[1]]
    for place in range(peer.layers):
        at = f"blocks.{place}."
        projected = jax.numpy.split(linear(w, at + "qkv", layer_norm(w, at + "norm1", x)), 3, axis=-1)
        x = x + attention(jax, w, at + "out", projected, peer.heads, True)
        x = x + mlp(jax, w, at, x, tanh=False)
    return linear(w, "head", layer_norm(w, "norm", x))


def vit(jax: Any, peer: Peer, w: Any, images: Any) -> Any:
    """`benchmarks.large.ViT`: logits [B, classes]."""
    kernel = w["patches.weight"]  # [D, 3, P, P]
    b, c, side, _ = images.shape
    p = kernel.shape[-1]
    n = side // p
    cut = images.reshape(b, c, n, p, n, p).transpose(0, 2, 4, 1, 3, 5).reshape(b, n * n, c * p * p)
    x = cut @ kernel.reshape(kernel.shape[0], -1).T + w["patches.bias"]
    first = jax.numpy.broadcast_to(w["token"], (b, 1, x.shape[-1]))
    x = jax.numpy.concatenate((first, x), 1) + w["positions"]
    for place in range(peer.layers):
        at = f"layers.{place}."
        normed = layer_norm(w, at + "norm1", x)
        projected = [linear(w, f"{at}attention.{name}", normed) for name in ("query", "key", "value")]
        x = x + attention(jax, w, at + "attention.out", projected, peer.heads, False)
        x = x + mlp(jax, w, at, x, tanh=True)
    return linear(w, "head", layer_norm(w, "norm", x)[:, 0])


def peer_of(model: nn.Module) -> Peer:
    if isinstance(model, GPT):
        return Peer(gpt, len(model.blocks), model.blocks[0].heads)
    assert isinstance(model, ViT)
    return Peer(vit, len(model.layers), model.layers[0].attention.heads)


class Jax:
    """The steps of JAX: weights of a PyTorch model, and a batch."""

    def __init__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        self.jax, self.np, self.privacy, self.optax = _libraries()
        peer = peer_of(model)
        self.weights = {name: self.np.array(p.detach().numpy()) for name, p in model.named_parameters()}
        self.x, self.y = self.np.array(x.numpy()), self.np.array(y.numpy())

        def loss(w: Any, x: Any, y: Any) -> Any:
            logits = peer.forward(self.jax, peer, w, x)
            return self.optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        self.loss = loss

    def clipped(self, microbatch: int | None = None) -> Callable[..., Any]:
        """The sum of clipped gradients, a function of weights and batch."""
        return self.privacy.clipping.clipped_grad(  # type: ignore[no-any-return]
            self.loss, l2_clip_norm=R, batch_argnums=(1, 2), microbatch_size=microbatch
        )

    def step(self, gradient: Callable[..., Any], noise: bool) -> Callable[[], object]:
        """One compiled step of AdamW; it returns once the weights are there."""
        jax, optax = self.jax, self.optax
        changes = [self.privacy.noise_addition.gaussian_privatizer(stddev=SIGMA * R, prng_key=1)] if noise else []
        optimizer = optax.chain(*changes, *([optax.scale(1.0 / len(self.x))] if noise else []), optax.adamw(LR))

        @partial(jax.jit, donate_argnums=(0, 1))
        def run(weights: Any, state: Any, x: Any, y: Any) -> Any:
            updates, state = optimizer.update(gradient(weights, x, y), state, weights)
            return optax.apply_updates(weights, updates), state

        held = [jax.tree.map(self.np.copy, self.weights)]
        held.append(optimizer.init(held[0]))

        def once() -> None:
            held[:] = run(*held, self.x, self.y)
            jax.block_until_ready(held[0])

        return once


def error_of(ours: nn.Module, theirs: Jax, work: Workload, x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference between two elements of the clipped sums, over the largest element."""
    optimizer = fastdp.DPSGD(ours, lr=0.0, noise_multiplier=0.0, max_grad_norm=R, loss_reduction="sum")
    work.losses(ours(x), y).sum().backward()
    optimizer.step()
    found = theirs.jax.jit(theirs.clipped())(theirs.weights, theirs.x, theirs.y)
    largest = worst = 0.0
    for name, p in ours.named_parameters():
        other = torch.from_numpy(theirs.jax.device_get(found[name]).copy())
        assert p.grad is not None
        worst, largest = max(worst, float((p.grad - other).abs().max())), max(largest, float(other.abs().max()))
    optimizer.detach()
    return worst / largest


def torch_step(name: str, work: Workload, x: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
    contender = CONTENDERS[name]
    torch.manual_seed(0)
    step = contender.make(contender.prepare(work.build()).train(), work)
    return lambda: step(x, y)


def measured(name: str, work: Workload, rounds: int) -> list[Row]:
    """A row for each contender, of one model."""
    torch.manual_seed(0)
    model = work.build().train()
    x, y = work.batch(work.batch_size)
    theirs = Jax(model, x, y)
    error = error_of(model, theirs, work, x, y)
    if error > CLOSE:
        raise SystemExit(f"{name}: clipped sums differ by {error:.1e} of their largest element")
    runs = {contender: torch_step(contender, work, x, y) for contender in ("non-private", "fastdp", "fastdp graphed")}
    runs["jax non-private"] = theirs.step(theirs.jax.grad(theirs.loss), False)
    runs["jax-privacy"] = theirs.step(theirs.clipped(), True)
    runs["jax-privacy one by one"] = theirs.step(theirs.clipped(1), True)
    times = interleaved(runs, torch.device("cpu"), rounds)
    base = {True: times["jax non-private"], False: times["non-private"]}
    return [
        {"model": name, "contender": contender, "batch_size": work.batch_size, "rounds": rounds,
         "ratio": f"{spent / base['jax' in contender]:.2f}", "of_torch": f"{spent / base[False]:.2f}",
         "step_ms": f"{1e3 * spent:.1f}", "error": f"{error:.1e}" if "privacy" in contender else "-"}
        for contender, spent in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=("gpt", "vit"), default=["gpt", "vit"])
    parser.add_argument("--small", action="store_true", help="tiny models: do the two agree?")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="append rows to this CSV file")
    options = parser.parse_args()
    begin("benchmarks.jax_peer")
    torch.set_num_threads(options.threads)
    os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen={str(options.threads > 1).lower()}"
    jax = _libraries()[0]
    suite = SMALL if options.small else CPU
    rows = list[Row]()
    for name in options.models:
        work = suite[{"gpt": "gpt", "vit": "vit-b16"}[name]]
        rows += measured(name, work, options.rounds)
    publish(rows, COLUMNS, versions() | {"jax": jax.__version__}, options.out)


if __name__ == "__main__":
    main()
