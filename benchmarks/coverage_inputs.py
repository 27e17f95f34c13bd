"""Inputs for a model of transformers, from its forward's signature, and a loss for each sample from what comes out."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .coverage_truth import NotBuilt, Sizes

Make = Callable[[Sizes], dict[str, Any]]
FIRST, LAST = 10, 90  # token ids of plain text, below those of special tokens
OPTIONAL = (
    ("pixel_values",), ("flattened_patches",), ("input_values",), ("input_features",), ("visual_feats", "visual_pos"),
    ("pixel_values", "pixel_attention_mask", "spatial_shapes"),
    ("input_ids", "pixel_values", "pixel_attention_mask", "spatial_shapes"), ("input_ids", "mm_token_type_ids"),
)  # fmt: skip
CHANNELS = ("num_channels", "in_channels", "in_chans", "num_input_channels")


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


def below(vocabulary: int) -> Callable[[int, int], Tensor]:
    """Token ids of a vocabulary that may be smaller than usual."""
    return lambda n, t: (
        tokens(n, t) if vocabulary >= LAST else torch.randint(min(4, vocabulary - 1), vocabulary, (n, t))
    )


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


def pair(config: Any) -> Callable[[int, int], Tensor]:
    """Of images."""
    image = pixels(config, 64)
    return lambda n, t: torch.stack([image(n, t), image(n, t)], 1)


def half_masked(config: Any) -> Callable[[int, int], Tensor]:
    """The first half of an image's or a video's patches, which every sample must have as many of."""
    side, patch = (first_int(look_up(config, (n,), d), d) for n, d in (("image_size", 32), ("patch_size", 16)))
    tube = first_int(look_up(config, ("tubelet_size",), 0), 0)
    times = first_int(look_up(config, ("num_frames",), 4), 4) // tube if tube else 1
    count = times * (side // patch) ** 2
    return lambda n, t: (torch.arange(count) < count // 2).expand(n, count)


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
    words = below(first_int(look_up(config, ("vocab_size",), LAST), LAST))
    seen, place = (first_int(look_up(config, (n,), 4), 4) for n in ("visual_feat_dim", "visual_pos_dim"))
    return {
        "input_ids": words,
        "decoder_input_ids": lambda n, t: words(n, max(t - 2, 3)),
        "visual_feats": lambda n, t: torch.randn(n, 5, seen),
        "task_inputs": lambda n, t: words(n, 77),
        "visual_pos": lambda n, t: torch.rand(n, 5, place),
        "pixel_attention_mask": lambda n, t: torch.ones(n, 4, dtype=torch.long),
        "spatial_shapes": lambda n, t: torch.tensor([[2, 2]] * n),
        "attention_mask": lambda n, t: torch.ones(n, t, dtype=torch.long),
        "mm_token_type_ids": lambda n, t: torch.zeros(n, t, dtype=torch.long),
        "pixel_values": pixels(config),
        "pixel_values_videos": video(config),
        "input_values": lambda n, t: torch.randn(n, 2000),
        "input_features": spectrogram(config, True),
        "bbox": boxes,
        "qformer_input_ids": tokens,
        "flattened_patches": lambda n, t: flattened(config, n),
        "bool_masked_pos": half_masked(config),
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
    mains = main if isinstance(main, list | tuple) else [main]
    wanted = list(dict.fromkeys([n for n in ("input_ids", *mains) if n in parameters] + required))
    wanted += [n for n in ("decoder_input_ids", "bbox") if n in parameters and n not in wanted]
    unknown = [n for n in required if n not in table]
    if unknown:
        raise NotBuilt(f"no rule for the required input {', '.join(unknown)}")
    wanted = [n for n in wanted if n in table] or ["input_ids"]
    yield from combinations(model, config, wanted, table)
    if "decoder_input_ids" in wanted and "decoder_input_ids" not in required:  # made by the model of the others
        yield from combinations(model, config, [n for n in wanted if n != "decoder_input_ids"], table)
    for names in OPTIONAL:
        if set(names) <= set(parameters) and not set(names) <= set(wanted):
            yield from combinations(model, config, [*wanted, *[n for n in names if n not in wanted]], table)
            yield from combinations(model, config, [*required, *[n for n in names if n not in required]], table)


def combinations(model: nn.Module, config: Any, wanted: list[str], table: Makers) -> Iterator[Make]:
    """Of the formats in which each of the inputs may come."""
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" in wanted and "pixel_values" in parameters:
        yield from with_images(model, config)
    choices: dict[str, list[Callable[[int, int], Tensor]]] = {n: [table[n]] for n in wanted}
    sides = [pixels(config, side) for side in (64, 128, 224)]
    words, books = table["input_ids"], first_int(look_up(config, ("num_codebooks", "num_channels"), 4), 4)
    patches = 3 * first_int(look_up(config, ("patch_size",), 16), 16) ** 2
    alternatives = {
        "pixel_values": [*sides, video(config), pair(config), lambda n, t: torch.randn(n, 4, patches)],
        "past_values": [lambda n, t: torch.randn(n, 32)],
        "decoder_input_ids": [lambda n, t: words(n * books, 4), lambda n, t: words(n * books, 4).view(n, 4, books)],
        "input_values": [
            spectrogram(config, True),
            lambda n, t: torch.randn(n, 1, 2000),
            lambda n, t: torch.randn(n, 8000),
            spectrogram(config, True, first_int(look_up(config, ("max_length",), 128), 128)),
        ],
        "input_features": [spectrogram(config, False), spectrogram(config, True, 64), spectrogram(config, False, 64)],
        "input_ids": [
            lambda n, t: words(n, 2 * t).view(n, 2, t),
            lambda n, t: words(n, 64),
            with_token(config, ("sep_token_id",), lambda t: [2, t - 1, t], 4),
            with_token(config, ("sep_token_id",), lambda t: [2, t - 1, t], 4, choices=2),
            with_token(config, ("eos_token_id",), lambda t: [t - 3], 0),
            with_token(config, ("question_token_id",), lambda t: [2], 0),
            lambda n, t: words(n * books, t),
            lambda n, t: words(n, t * books).view(n, t, books),
        ],
    }
    for name in choices:
        choices[name] += alternatives.get(name, [])
    for combination in itertools.product(*choices.values()):
        yield _maker(dict(zip(choices, combination, strict=True)))
    if "pixel_values" in parameters and "pixel_values" not in wanted:
        for make in (pixels(config), *sides):
            yield _maker({**{n: table[n] for n in wanted}, "pixel_values": make})


def with_token(
    config: Any, names: tuple[str, ...], places: Callable[[int], list[int]], more: int, choices: int = 0
) -> Callable[[int, int], Tensor]:
    """Text with a special token at these places of every sample, before the last two, which may be padding."""
    token = first_int(look_up(config, names, 2), 2)

    def make(n: int, t: int) -> Tensor:
        ids = tokens(n * (choices or 1), t + more)
        ids[:, places(t)] = token
        return ids.view(n, choices, -1) if choices else ids

    return make


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


def padded(model: nn.Module, config: Any, batch: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Sample b without its last b % 3 tokens, padded on the right; raises NotBuilt where there is no text or mask."""
    ids = batch.get("input_ids")
    known = "attention_mask" in inspect.signature(model.forward).parameters
    if ids is None or not known or ids.dim() != 2 or ids.size(0) != sizes.batch or ids.size(1) < 4:
        raise NotBuilt("no text with an attention mask")
    lengths = ids.size(1) - torch.arange(sizes.batch) % 3
    mask = (torch.arange(ids.size(1)) < lengths[:, None]).long()
    pad = look_up(config, ("pad_token_id",), 0)
    pad = pad if isinstance(pad, int) and 0 <= pad < LAST else 0
    return {**batch, "input_ids": torch.where(mask > 0, ids, pad), "attention_mask": mask}
