"""Every model class of transformers with a training loss, from a configuration shrunk by rules on the names of its
fields; nothing here knows a model by name, but for compositions of two models, which have no default configuration."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .coverage_draws import without_dropout
from .coverage_inputs import inputs_for, padded
from .coverage_losses import losses_for
from .coverage_rules import (
    COUNTS,
    DEPTH,
    DEPTHS,
    EXPERTS,
    FILL,
    GROUPED,
    HEAD_DIM,
    HEADS,
    INNER,
    KEPT,
    KNOWN,
    OFF,
    POSITIONS,
    TOKEN,
    VOCABULARY,
    WIDTH,
)
from .coverage_truth import Built, Case, NotBuilt, Sizes, clean, shake

VOCAB, LARGEST = 128, 40_000_000  # parameters: a model above it is not worth its time
PATIENCE = 40.0  # seconds of looking for a configuration and inputs that go together
NO_LOSS = ("MODEL_MAPPING_NAMES", "MODEL_FOR_BACKBONE_MAPPING_NAMES", "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",
           "MODEL_FOR_IMAGE_MAPPING_NAMES")  # fmt: skip
# ---------------------------------------------------------------------- which classes


def class_names() -> list[str]:
    """Of all auto-model mappings with a task."""
    from transformers.models.auto import modeling_auto

    found: set[str] = set()
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES") and name not in NO_LOSS:
            for value in mapping.values():
                found |= {value} if isinstance(value, str) else set(value)
    return sorted(found)


# ---------------------------------------------------------------------- shrinking


class Profile:
    """How far the fields of a configuration are shrunk; token ids are renamed the same everywhere."""

    def __init__(self, name: str, width: Callable[[int], int] | None, image: int, layers: int = 2) -> None:
        self.name, self.width, self.image, self.layers = name, width, image, layers
        self.filled, self.all_heads = "filled" in name, "equal heads" in name
        self.ids: dict[int, int] = {}

    def token(self, value: int) -> int:
        if value < 8:
            return value
        return self.ids.setdefault(value, 100 + len(self.ids) % 27)


def ratio(divisor: int) -> Callable[[int], int]:
    return lambda value: value if value <= 16 else max(8, value // divisor // 8 * 8)


PROFILES = (
    lambda: Profile("uniform", lambda value: 32, 32),
    lambda: Profile("uniform, 64 pixels", lambda value: 32, 64),
    lambda: Profile("uniform, equal heads", lambda value: 32, 64),
    lambda: Profile("uniform, filled", lambda value: 32, 64),
    lambda: Profile("uniform, filled, equal heads", lambda value: 32, 64),
    lambda: Profile("heads as they are", lambda value: 256, 32),
    lambda: Profile("heads as they are, wider", lambda value: 512, 32),
    lambda: Profile("uniform, all layers", lambda value: 32, 64, 24),
    lambda: Profile("an eighth", ratio(8), 64),
    lambda: Profile("a thirty-second", ratio(32), 64),
    lambda: Profile("shallow", None, 64),
    lambda: Profile("shallow, 4 layers", None, 224, 4),
)


def chosen_layers(fields: dict[str, Any], depth: int, layers: int) -> list[int]:
    """Indices of few layers that show every kind there is in the lists of one entry a layer."""
    lists = [v for v in fields.values() if isinstance(v, list | tuple) and len(v) == depth]
    seen: dict[str, int] = {}
    for i in range(depth):
        seen.setdefault(str([v[i] for v in lists if not isinstance(v[i], int | float) or isinstance(v[i], bool)]), i)
    picked = sorted(seen.values())[:6]
    return (picked + [i for i in range(depth) if i not in picked])[: max(layers, len(picked))]


def shrunk(config: Any, profile: Profile, decoder_only: bool = False) -> Any:
    """A configuration of the same class with few layers, narrow widths, no dropout."""
    names = [f.name for f in dataclasses.fields(config) if f.init] if dataclasses.is_dataclass(config) else []
    fields = {n: config.__dict__[n] for n in names if n in config.__dict__}
    depth_of = {n: v for n, v in fields.items() if DEPTH.search(n) and _is_int(v)}
    main = next((v for n, v in depth_of.items() if "hidden_layers" in n or n in ("n_layer", "num_layers")), 0)
    kept = chosen_layers(fields, main, profile.layers) if main > profile.layers else list(range(main))
    new: dict[str, Any] = {}
    for name, value in fields.items():
        if name in depth_of:
            new[name] = len(kept) if value == main and main else min(value, profile.layers)
        elif main and isinstance(value, list | tuple) and len(value) == main and main > 3:
            new[name] = type(value)(_number(name, value[i], profile) for i in kept)
        else:
            new[name] = shrunk_field(name, value, profile)
    if profile.filled:
        new |= filling(new, len(kept) or profile.layers)
    if "is_decoder" in new and decoder_only:
        new["is_decoder"] = True
    new |= KNOWN.get(type(config).__name__, {})
    plain = vars(type(config)())
    changed = {n: v for n, v in new.items() if n not in ("id2label", "label2id") and not _same(v, plain.get(n))}
    stages = getattr(config, "_out_indices", None) or ()  # of a backbone, which its head counts on
    if len(stages) > 1 and _fits(new, depth_of, stages):
        changed["out_indices"] = list(stages)
    return type(config)(**changed)


def _fits(fields: dict[str, Any], depth_of: dict[str, int], stages: Any) -> bool:
    """Whether the shrunk model still has these stages."""
    staged = any(isinstance(v, list | tuple) and DEPTHS.search(n) for n, v in fields.items())
    return staged or max(stages) <= max((fields[n] for n in depth_of), default=0)


def filling(fields: dict[str, Any], depth: int) -> dict[str, Any]:
    """Values for fields that are None; a word stands for one a layer."""
    new = {n: FILL[n] for n, v in fields.items() if v is None and n in FILL}
    new = {n: [v] * depth if n.endswith("layer_types") else v for n, v in new.items()}
    if isinstance(fields.get("rope_parameters"), dict) and "mrope_section" not in fields["rope_parameters"]:
        new["rope_parameters"] = {**fields["rope_parameters"], "mrope_section": [2, 1, 1]}
    return new


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and not hasattr(a, "to_dict") and a == b


def shrunk_field(name: str, value: Any, profile: Profile) -> Any:
    if hasattr(value, "to_dict"):
        return shrunk(value, profile)
    if isinstance(value, float):
        return None if name == "pos_embed_rescale" else 0.0 if OFF.search(name) else value  # a random scale in training
    if name == "rope_parameters" and isinstance(value, dict):
        return _rope(value, profile)
    if DEPTHS.search(name) and isinstance(value, list | tuple) and all(_is_int(v) for v in value):
        return type(value)(min(v, 1) for v in value)
    if isinstance(value, list | tuple) and value and all(_is_int(v) for v in value):
        if HEADS.search(name):  # of stages of equal width
            return type(value)(min(v, 2) for v in value) if profile.name.startswith("uniform") else value
        name = "stage_channels" if name == "in_channels" and len(value) > 1 else name
        return type(value)(_number(name, v, profile) for v in value)
    return _number(name, value, profile)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: Any, profile: Profile) -> Any:
    if isinstance(value, bool):
        return False if name in ("apply_spec_augment", "use_cache", "output_router_logits") else value
    if not isinstance(value, int):
        return value
    if TOKEN.search(name):
        return profile.token(value)
    if VOCABULARY.search(name):
        return min(value, VOCAB)
    if name.endswith("shared_layers"):
        return 0
    if DEPTH.search(name):
        return min(value, profile.layers)
    if EXPERTS.search(name):
        return min(value, 4)
    if re.search(r"experts_per_tok|moe_topk|moe_k$|top_k$|topk$", name):
        return min(value, 2) if "index" not in name else min(value, 4)
    if re.search(r"^(n|num|topk)_(expert_)?groups?$", name) and profile.width is not None:
        return min(value, 2)
    if "image_size" in name and value > profile.image:
        return profile.image
    if POSITIONS.search(name) and "bucket" not in name:
        return min(value, 256)
    if name.endswith("chunk_size"):
        return min(value, 16) if value < 2**17 else value  # the longest are of sound, in samples
    if COUNTS.search(name):
        return min(value, 8)
    return _width(name, value, profile)


def _width(name: str, value: int, profile: Profile) -> int:
    if profile.width is None or value < 8 and not HEADS.search(name):
        return value
    if name == "num_pos_feats":  # of rows, then of columns
        return profile.width(2 * value) // 2
    uniform, as_they_are = profile.name.startswith("uniform"), profile.name.startswith("heads")
    if HEADS.search(name):
        if not (uniform or as_they_are):
            return value
        return min(value, 2 if GROUPED.search(name) and not profile.all_heads else 4)
    if as_they_are and HEAD_DIM.search(name):
        return value
    if KEPT.search(name) or value < 16:
        return value
    if HEAD_DIM.search(name):
        return 8 if uniform else profile.width(value)
    if (uniform or as_they_are) and INNER.search(name):
        return 48
    return profile.width(value) if WIDTH.search(name) else value


def _rope(value: dict[str, Any], profile: Profile) -> dict[str, Any]:
    """Sections of a head's rotary half, made to fit a head of 8."""
    new = dict(value)
    for key, item in value.items():
        if isinstance(item, dict):
            new[key] = _rope(item, profile)
        elif key == "mrope_section" and profile.name.startswith("uniform"):
            new[key] = [2, 1, 1]
    return new


# ---------------------------------------------------------------------- building


def composed(model_class: type) -> Iterator[Any]:
    """Configurations of compositions, which must be told their parts."""
    import transformers as tf

    bert = dict(is_decoder=True, add_cross_attention=True)
    text = lambda **kw: tf.BertConfig(**kw)
    parts = {
        "VisionEncoderDecoderConfig": lambda: dict(encoder=tf.ViTConfig(), decoder=text(**bert)),
        "EncoderDecoderConfig": lambda: dict(encoder=text(), decoder=text(**bert)),
        "SpeechEncoderDecoderConfig": lambda: dict(encoder=tf.Wav2Vec2Config(), decoder=text(**bert)),
        "VisionTextDualEncoderConfig": lambda: dict(vision_config=tf.ViTConfig(), text_config=text()),
    }
    config_class = model_class.config_class
    if config_class.__name__ in parts:
        for make in PROFILES[:2]:
            profile = make()
            made = {k: shrunk(v, profile).to_dict() for k, v in parts[config_class.__name__]().items()}
            yield profile, config_class(**made, pad_token_id=0, decoder_start_token_id=1)


def configs(model_class: type) -> Iterator[tuple[Profile, Any]]:
    problem: Exception | None = None
    found = False
    for item in composed(model_class):
        found = True
        yield item
    for make in () if found else PROFILES:
        profile = make()
        try:
            config = shrunk(model_class.config_class(), profile, "LMHead" in model_class.__name__)
        except Exception as e:  # noqa: BLE001  (rules that do not fit this configuration: the next ones)
            problem = e
            continue
        yield profile, config
        found = True
    if not found:
        raise NotBuilt(f"config: {type(problem).__name__}: {clean(problem)}")


def model_of(model_class: type, config: Any) -> nn.Module:
    for key, value in (("pad_token_id", 0), ("num_labels", 4)):
        if getattr(config, key, value) is None:
            setattr(config, key, value)
    text = config.get_text_config()
    if getattr(text, "pad_token_id", 0) is None:
        text.pad_token_id = 0
    if config.is_encoder_decoder and not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 0
    config.use_cache = False
    with torch.device("meta"):
        try:
            count = sum(p.numel() for p in model_class(config).parameters())
        except Exception:  # noqa: BLE001  (a model that computes values while it is built)
            count = 0
    if count > LARGEST:
        raise NotBuilt(f"{count / 1e6:.0f} M parameters")
    torch.manual_seed(5)
    return without_dropout(shake(model_class(config).float()))


_CHOSEN: dict[str, tuple[Any, Any, Any]] = {}  # class -> the first configuration, inputs and losses that ran


def build(name: str, sizes: Sizes) -> Built:
    """Model, batch and losses of the first profile under which the model runs."""
    import transformers

    model_class = getattr(transformers, name)
    if name not in _CHOSEN:
        _CHOSEN[name] = _choose(model_class)
    config, make_inputs, losses = _CHOSEN[name]
    model, batch = model_of(model_class, config), make_inputs(sizes)
    return model, padded(model, config, batch, sizes) if sizes.padded else batch, losses


def _choose(model_class: type) -> tuple[Any, Any, Any]:
    problems, started = [], time.monotonic()
    for profile, config in configs(model_class):
        if time.monotonic() - started > PATIENCE:
            break
        try:
            model = model_of(model_class, config)
            for make_inputs in inputs_for(model, config):
                try:
                    return config, make_inputs, losses_for(model, make_inputs)
                except Exception as e:  # noqa: BLE001
                    problems.append(f"{profile.name}: {type(e).__name__}: {clean(e, 160)}")
        except Exception as e:  # noqa: BLE001
            problems.append(f"{profile.name}: {type(e).__name__}: {clean(e, 160)}")
    raise NotBuilt(" | ".join(problems[:1] + problems[-1:]))


def case(name: str) -> Case:
    return Case(name, lambda sizes: build(name, sizes), text=True)


def cases() -> dict[str, Case]:
    return {name: case(name) for name in class_names()}
