"""Inputs for a model of transformers, from its forward's signature, and a loss for each sample from what comes out."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .coverage_truth import Losses, NotBuilt, Sizes, default_dtype, from_batch_norm, take

Make = Callable[[Sizes], dict[str, Any]]
FIRST, LAST = 10, 90  # token ids of plain text, below those of special tokens
CHANNELS = ("num_channels", "in_channels", "in_chans", "num_input_channels")
NOT_A_LOSS = ("loss", "past_key_values", "attentions", "hidden_states", "cross_attentions")


def look_up(config: Any, names: tuple[str, ...], default: Any = None) -> Any:
    """The first of these fields that the configuration or a part of it has."""
    for part in (config, *[v for v in vars(config).values() if hasattr(v, "to_dict")]):
        for name in names:
            value = vars(part).get(name)
            if value is not None:
                return value
    return default


def first_int(value: Any, default: int) -> int:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, int) else default


# ---------------------------------------------------------------------- one generator an input


def tokens(n: int, t: int) -> Tensor:
    return torch.randint(FIRST, LAST, (n, t))


def pixels(config: Any, side: int | None = None) -> Callable[[int, int], Tensor]:
    size = look_up(config, ("image_size", "img_size", "input_size"), 32)
    high = side or first_int(size, 32)
    wide = side or (size[1] if isinstance(size, list | tuple) and len(size) > 1 else high)
    channels = first_int(look_up(config, CHANNELS, 3), 3)
    return lambda n, t: torch.randn(n, channels, high, wide)


def video(config: Any) -> Callable[[int, int], Tensor]:
    frames = first_int(look_up(config, ("num_frames", "frames_per_clip", "tubelet_size"), 4), 4)
    image = pixels(config)
    return lambda n, t: torch.stack([image(n, t) for _ in range(frames)], 1)


def spectrogram(config: Any, time_first: bool, steps: int | None = None) -> Callable[[int, int], Tensor]:
    names = ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim", "input_dim",
             "n_mels", "num_mel_channels")  # fmt: skip
    bins = first_int(look_up(config, names, 80), 80)
    length = steps or 2 * first_int(look_up(config, ("max_source_positions", "max_length"), 24), 24)
    return lambda n, t: torch.randn(n, length, bins) if time_first else torch.randn(n, bins, length)


def boxes(n: int, t: int) -> Tensor:
    corner = torch.randint(0, 90, (n, t, 2))
    return torch.cat([corner, corner + torch.randint(1, 30, (n, t, 2))], 2)


def flattened(config: Any, n: int) -> Tensor:
    """Patches with their row and column before their pixels."""
    patch = first_int(look_up(config, ("patch_size",), 16), 16)
    places = torch.tensor([[r, c] for r in (1, 2, 3) for c in (1, 2)]).float().expand(n, 6, 2)
    return torch.cat([places, torch.randn(n, 6, 3 * patch * patch)], 2)


Makers = dict[str, Callable[[int, int], Tensor]]


def makers(config: Any) -> Makers:
    """By the name of the argument; n samples, t tokens."""
    vocab = first_int(look_up(config, ("context_length", "prediction_length"), 16), 16)
    series = first_int(look_up(config, ("num_input_channels", "input_size"), 1), 1)
    width = first_int(look_up(config, ("hidden_size", "d_model"), 32), 32)
    return {
        "input_ids": tokens,
        "decoder_input_ids": lambda n, t: tokens(n, max(t - 2, 3)),
        "attention_mask": lambda n, t: torch.ones(n, t, dtype=torch.long),
        "pixel_values": pixels(config),
        "pixel_values_videos": video(config),
        "input_values": lambda n, t: torch.randn(n, 2000),
        "input_features": spectrogram(config, True),
        "bbox": boxes,
        "qformer_input_ids": tokens,
        "task_inputs": lambda n, t: tokens(n, 77),
        "flattened_patches": lambda n, t: flattened(config, n),
        "past_values": lambda n, t: torch.randn(n, vocab, series),
        "inputs_embeds": lambda n, t: torch.randn(n, t, width),
    }


def inputs_for(model: nn.Module, config: Any) -> Iterator[Make]:
    """Ways to make a batch for the model, the likeliest first."""
    parameters = inspect.signature(model.forward).parameters
    table = makers(config)
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in kinds]
    main = getattr(model, "main_input_name", "input_ids")
    wanted = list(dict.fromkeys([n for n in ("input_ids", main) if n in parameters] + required))
    wanted += [n for n in ("decoder_input_ids", "bbox") if n in parameters and n not in wanted]
    unknown = [n for n in required if n not in table]
    if unknown:
        raise NotBuilt(f"no rule for the required input {', '.join(unknown)}")
    wanted = [n for n in wanted if n in table] or ["input_ids"]
    if "input_ids" in wanted and "pixel_values" in parameters:
        yield from with_images(model, config)
    choices: dict[str, list[Callable[[int, int], Tensor]]] = {n: [table[n]] for n in wanted}
    sides = [pixels(config, side) for side in (64, 128, 224)]
    alternatives = {
        "pixel_values": [*sides, video(config)],
        "input_values": [
            spectrogram(config, True),
            lambda n, t: torch.randn(n, 1, 2000),
            spectrogram(config, True, first_int(look_up(config, ("max_length",), 128), 128)),
        ],
        "input_features": [spectrogram(config, False), spectrogram(config, True, 64), spectrogram(config, False, 64)],
        "input_ids": [lambda n, t: tokens(n, 2 * t).view(n, 2, t), lambda n, t: tokens(n, 64), separated, ended],
    }
    for name in choices:
        choices[name] += alternatives.get(name, [])
    for combination in itertools.product(*choices.values()):
        yield _maker(dict(zip(choices, combination, strict=True)))
    if "pixel_values" in parameters and "pixel_values" not in wanted:
        for make in (pixels(config), *sides):
            yield _maker({**{n: table[n] for n in wanted}, "pixel_values": make})


def separated(n: int, t: int) -> Tensor:
    """Three separators, of id 2, in every sample."""
    ids = tokens(n, t + 4)
    ids[:, [2, t, t + 3]] = 2
    return ids


def ended(n: int, t: int) -> Tensor:
    ids = tokens(n, t)
    ids[:, -1] = 1
    return ids


def with_images(model: nn.Module, config: Any) -> Iterator[Make]:
    """Text with as many image tokens as the model makes of an image."""
    token = look_up(config, ("image_token_id", "image_token_index", "image_token"))
    features = getattr(model, "get_image_features", None) or getattr(model.base_model, "get_image_features", None)
    if not isinstance(token, int) or features is None:
        return
    known = inspect.signature(features).parameters
    parameters = inspect.signature(model.forward).parameters
    for images in image_formats(config):
        if not set(images(1)) <= set(known) and "pixel_values" in known:
            continue
        try:
            with torch.no_grad():
                count = rows_of(features(**images(2))) / 2
        except Exception:  # noqa: BLE001  (not this model's format)
            continue
        if 0 < count == int(count) <= 512:
            yield _with_images(
                images, int(count), token, "mm_token_type_ids" in parameters, "token_type_ids" in parameters
            )


def _with_images(images: Callable[[int], dict[str, Tensor]], count: int, token: int, kinds: bool, types: bool) -> Make:
    def make(sizes: Sizes) -> dict[str, Any]:
        torch.manual_seed(17)
        ids = tokens(sizes.batch, sizes.tokens + count)
        ids[:, 2 : 2 + count] = token
        batch = {"input_ids": ids, **images(sizes.batch)}
        if kinds:
            batch["mm_token_type_ids"] = (ids == token).long()
        if types:
            batch["token_type_ids"] = (ids == token).long()
        return {**batch, "seed": torch.arange(3, 3 + sizes.batch)}

    return make


def rows_of(features: Any) -> int:
    """Rows of all images' features together."""
    found = getattr(features, "pooler_output", None)
    found = features if found is None else found
    parts = found if isinstance(found, list | tuple) else [found]
    parts = [p for p in parts if isinstance(p, Tensor) and p.dim() > 1]
    return sum(p.numel() // p.size(-1) for p in parts)


def image_formats(config: Any) -> Iterator[Callable[[int], dict[str, Tensor]]]:
    """n images, one for each sample."""
    image = pixels(config)
    side = image(1, 1).size(-1)
    patch = first_int(look_up(config, ("patch_size",), 14), 14)
    time = first_int(look_up(config, ("temporal_patch_size",), 1), 1)
    merge = first_int(look_up(config, ("spatial_merge_size", "merge_size"), 2), 2)
    row = 3 * time * patch * patch
    sizes = lambda n: torch.tensor([[side, side]] * n)
    grid = lambda n, *shape: torch.tensor([shape] * n)
    packed = lambda n: torch.randn(n * 4 * merge * merge, row)
    yield lambda n: {"pixel_values": image(n, 1)}
    yield lambda n: {"pixel_values": packed(n), "image_grid_thw": grid(n, 1, 2 * merge, 2 * merge)}
    yield lambda n: {"pixel_values": image(n, 1), "image_sizes": sizes(n)}
    yield lambda n: {"pixel_values": image(n, 1)[:, None]}
    yield lambda n: {"pixel_values": torch.stack([image(n, 1)] * 3, 1), "image_sizes": sizes(n)}
    yield lambda n: {"pixel_values": packed(n), "image_grid_hw": grid(n, 2 * merge, 2 * merge)}
    yield lambda n: {
        "pixel_values": packed(n).view(-1, 3, patch, patch),
        "image_grid_hws": grid(n, 2 * merge, 2 * merge),
    }


def _maker(rules: Makers) -> Make:
    def make(sizes: Sizes) -> dict[str, Any]:
        generator_state = torch.get_rng_state()
        torch.manual_seed(17)
        batch = {name: rule(sizes.batch, sizes.tokens) for name, rule in rules.items()}
        torch.set_rng_state(generator_state)
        return {**batch, "seed": torch.arange(3, 3 + sizes.batch)}

    return make


# ---------------------------------------------------------------------- losses from outputs


def outputs(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that come out and need a gradient, by name; lists by name and place."""
    out = model(**{k: v for k, v in batch.items() if k != "seed"})
    items = out.items() if hasattr(out, "items") else enumerate(out if isinstance(out, list | tuple) else [out])
    found: dict[str, Tensor] = {}
    for name, value in items:
        if name in NOT_A_LOSS:
            continue
        many = value if isinstance(value, list | tuple) else [value]
        for i, tensor in enumerate(many):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.requires_grad:
                found[f"{name}.{i}"] = tensor
    return found


def losses_for(model: nn.Module, make: Make) -> Losses:
    """Losses of what has one row (or k rows) for each sample, as two batch sizes tell; raises where nothing has."""
    _one_alone(model, make)
    shapes = []
    for sizes in (Sizes(3, 8), Sizes(2, 8)):
        found = outputs(model, make(sizes))
        shapes.append({n: t.size(0) / sizes.batch for n, t in found.items() if t.dim() and t.numel()})
    rows = [n for n, per in shapes[0].items() if shapes[1].get(n) == per and per == int(per)]
    if not rows:
        raise NotBuilt(f"no output with a row for each sample among {sorted(found)}")
    rows = [n for n in rows if shapes[0][n] == 1 or _by_sample(model, make, n)]
    if not rows:
        raise NotBuilt("the rows of its outputs are not ordered by sample")
    heads = [n for n in rows if "logits" in n or n.startswith("pred_")] or rows

    def losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        found, seeds = outputs(model, batch), batch["seed"]
        return torch.stack([row_losses(found[n], seeds) for n in heads if n in found]).sum(0)

    return losses


def _one_alone(model: nn.Module, make: Make) -> None:
    """Raises where one sample alone does not run, unless by BatchNorm, which is a property of the model."""
    try:
        outputs(model, make(Sizes(1, 8)))
    except ValueError as problem:
        if not from_batch_norm(problem):
            raise


def _by_sample(model: nn.Module, make: Make, name: str) -> bool:
    """Whether the k rows of a sample are consecutive: another order would make a loss that couples samples."""
    batch = make(Sizes(2, 8))
    together = outputs(model, batch)[name]
    alone = [outputs(model, take(batch, [i], 2))[name] for i in (0, 1)]
    return bool(torch.allclose(together, torch.cat(alone), rtol=1e-3, atol=1e-3))


def row_losses(out: Tensor, seeds: Tensor) -> Tensor:
    """[B]: cross entropy of [B, V] and [B, T, V], mean over the sample's own tokens; mean of squares of the rest."""
    out = out.reshape(len(seeds), -1, *out.shape[1:]) if out.size(0) != len(seeds) else out
    if out.dim() in (2, 3) and 1 < out.size(-1) <= 256:
        flat = out.reshape(len(seeds), -1, out.size(-1))
        place = torch.arange(flat.size(1)) * 7
        labels = (seeds[:, None] * 5 + place[None]) % flat.size(-1)
        return F.cross_entropy(flat.transpose(1, 2).clamp(-1e4, 1e4), labels, reduction="none").mean(1)
    flat = out.reshape(len(seeds), -1).clamp(-1e4, 1e4)
    with default_dtype(torch.float32):
        weights = torch.linspace(0.5, 1.5, flat.size(1)).to(flat.dtype)
    return ((flat + 0.05 * seeds[:, None].to(flat.dtype)) * weights).square().mean(1)
