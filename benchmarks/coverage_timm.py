"""One small model of every architecture of timm: of each pair of a module of timm and a model class that it makes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .coverage_draws import without_dropout
from .coverage_losses import row_losses
from .coverage_truth import Built, Case, NotBuilt, Sizes, clean, shake

CANDIDATES, LARGEST = 6, 50_000_000  # models tried of an architecture, parameters
PATIENCE, FAST = 15.0, 0.5  # processor seconds of looking for options and an image that go together; of a forward
SMALL = re.compile(
    r"test|atto|femto|pico|nano|zepto|tiny|xxs|_xs|_x?small|_s\b|_s0|_t0|_b0|_m0|18|_0\d\d|mini|micro|lite|10|_ti_"
)
DEPTH = re.compile(r"(^|_)(depths?|layers|num_blocks|num_modules|d)$")
WIDTHS = re.compile(r"(^|_)(embed_dims?|dims|hidden_dims|channels|widths|num_channels)$")
SIDES = (64, 96, 128, 224, 256)

# ---------------------------------------------------------------------- which models

Found = tuple[str, tuple[tuple[str, Any], ...], int]  # model, options, image side


class Asked(Exception):
    """Instead of a model: its class, and what it would be made with."""


@contextlib.contextmanager
def building(build: Callable[..., Any]) -> Iterator[None]:
    """Within it timm's entry points build with `build(timm's own function, class, variant, pretrained, **options)`."""
    name = "build_model_with_cfg"
    modules = [m for n, m in sys.modules.items() if n.startswith("timm.models.") and hasattr(m, name)]
    kept = [getattr(m, name) for m in modules]
    try:
        for module, own in zip(modules, kept, strict=True):
            setattr(module, name, functools.partial(build, own))
        yield
    finally:
        for module, own in zip(modules, kept, strict=True):
            setattr(module, name, own)


def made_with(name: str) -> tuple[type, dict[str, Any]]:
    """Class and options of a model (of its trunk, if that is made first), without building it."""
    import timm

    def ask(_: Any, model_class: type, variant: str, pretrained: bool, *__: Any, **options: Any) -> Any:
        raise Asked(model_class, options)

    try:
        with building(ask):
            timm.create_model(name, pretrained=False)
    except Asked as found:
        return found.args
    raise NotBuilt(f"{name} is made in a way of its own")


@functools.lru_cache
def architectures() -> dict[str, list[str]]:
    """'module.Class' -> the names of its models, likely small ones first."""
    import timm

    found: dict[str, list[str]] = {}
    for module in timm.list_modules():
        for name in timm.list_models(module=module):
            try:
                kind = made_with(name)[0].__name__
            except Exception:  # noqa: BLE001  (needs another package: among the rest of its module)
                kind = "other"
            found.setdefault(f"{module}.{kind}", []).append(name)
    return {k: sorted(names, key=lambda n: (not SMALL.search(n), len(n), n)) for k, names in found.items()}


# ---------------------------------------------------------------------- made small


def made(name: str, changes: dict[str, Any]) -> nn.Module:
    """With other options than its own, given to the class that made_with tells."""
    import timm

    target, own_changes = made_with(name)[0], copy.deepcopy(changes)  # timm takes options apart

    def change(own: Any, model_class: type, variant: str, pretrained: bool, *rest: Any, **options: Any) -> Any:
        return own(model_class, variant, pretrained, *rest, **options | (own_changes if model_class is target else {}))

    with building(change):
        return timm.create_model(name, pretrained=False)


def shrunk(name: str, value: Any, narrow: bool) -> Any:
    """Fewer layers everywhere in an option; narrower layers where widths are given for each stage."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: shrunk(f.name, getattr(value, f.name), narrow) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, dict):
        return {n: shrunk(n, v, narrow) for n, v in value.items()}
    if DEPTH.search(name):
        return _ones(value)
    if narrow and WIDTHS.search(name) and isinstance(value, list | tuple) and all(isinstance(v, int) for v in value):
        return type(value)(v // 4 if v % 16 == 0 and v >= 64 else v for v in value)
    if narrow and name == "mlp_ratio" and isinstance(value, float) and value <= 1:
        return value / 4
    if narrow and name == "num_features" and isinstance(value, int) and value >= 1024:
        return value // 16
    if isinstance(value, list | tuple) and value and all(isinstance(v, dict) for v in value):  # blocks
        kinds = [v.get("block_type") for v in value]  # one of a kind, and the last
        kept = [i for i, kind in enumerate(kinds) if kind not in kinds[:i] or i == len(kinds) - 1]
        return type(value)(shrunk(name, value[i], narrow) for i in kept)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(shrunk(name, v, narrow) if not isinstance(v, str | int | float) else v for v in value)
    return value


def _ones(value: Any) -> Any:
    """The same shape of numbers, each 1 (a plain depth: at most 2)."""
    if isinstance(value, list | tuple):
        return type(value)(1 if isinstance(v, int) else _ones(v) for v in value)
    return min(value, 2) if isinstance(value, int) else value


def shapes(name: str) -> list[dict[str, Any]]:
    """Options to make it smaller with, the smallest first; the last changes nothing but the classes."""
    model_class, options = made_with(name)
    known = inspect.signature(model_class.__init__).parameters
    fields = {n: p.default for n, p in known.items() if p.default is not p.empty and p.default is not None} | options
    fields = {n: v for n, v in fields.items() if n in known or n in ("cfg", "model_cfg", "block_args")}
    width, heads = fields.get("embed_dim"), fields.get("num_heads")
    small: list[dict[str, Any]] = []
    for narrow in (True, False):
        changed = {n: shrunk(n, v, narrow) for n, v in fields.items()}
        if narrow and isinstance(width, int) and isinstance(heads, int):
            changed["embed_dim"] = 16 * heads
        small.append({n: v for n, v in changed.items() if not _equal(v, fields[n])})
    side: dict[str, Any] = dict(img_size=SIDES[0]) if "img_size" in known else {}
    classes: dict[str, Any] = dict(num_classes=4) if "num_classes" in known else {}
    tried = [{**classes, **s, **c} for c in small for s in (side, {})] + [{**classes, **side}, classes]
    return [options for i, options in enumerate(tried) if options not in tried[:i]]


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def parameters(name: str, options: dict[str, Any]) -> int:
    """Raises where the model cannot be made like that."""
    with torch.device("meta"):
        return sum(p.numel() for p in made(name, options).parameters())


def channels(model: nn.Module) -> int:
    return model.pretrained_cfg["input_size"][0]


@functools.lru_cache
def smallest(architecture: str) -> Found:
    """Model, options and image side of the smallest model of the architecture that runs."""
    started, names = time.process_time(), architectures()[architecture][:CANDIDATES]
    counted: list[tuple[int, str, list[dict[str, Any]]]] = []  # parameters, model, ways to make it
    problem: object = "no model"
    for name in names:
        try:
            ways = shapes(name)
        except Exception as e:  # noqa: BLE001  (as in architectures())
            problem = f"{name}: {type(e).__name__}: {clean(e, 120)}"
            continue
        for i, options in enumerate(ways):
            try:
                count = parameters(name, options)
            except Exception as e:  # noqa: BLE001  (options that it does not take)
                problem = f"{name}: {type(e).__name__}: {clean(e, 120)}"
                continue
            if count <= LARGEST:
                counted.append((count, name, ways[i:]))
                break
            problem = f"{name}: {count / 1e6:.0f} M parameters"
    slow: list[tuple[float, Found]] = []
    for _, name, ways in sorted(counted, key=lambda c: c[0]):
        for options, side in ((w, s) for w in ways for s in ([w["img_size"]] if "img_size" in w else SIDES)):
            if time.process_time() - started > PATIENCE:
                break
            try:
                took = _run(made(name, options), side)
            except Exception as e:  # noqa: BLE001  (an image of another size)
                problem = f"{name}: {type(e).__name__}: {clean(e, 120)}"
                continue
            slow.append((took, (name, tuple(options.items()), side)))
            if took < FAST:
                return slow[-1][1]
            break  # other ways to make it are slower
    if slow:
        return min(slow, key=lambda found: found[0])[1]
    raise NotBuilt(str(problem))


@torch.no_grad()
def _run(model: nn.Module, side: int) -> float:
    """Seconds of a forward."""
    if sum(p.numel() for p in model.parameters()) > LARGEST:
        raise NotBuilt(f"over {LARGEST / 1e6:.0f} M parameters")
    started = time.process_time()
    losses(model.train(), {"x": torch.zeros(2, channels(model), side, side), "seed": torch.arange(2)})
    return time.process_time() - started


# ---------------------------------------------------------------------- cases


def first(out: Any) -> Tensor:
    """Of several outputs (a distilled head's, an encoder's features and mask) all that are numbers, side by side."""
    items = list(out.values()) if isinstance(out, dict) else list(out) if isinstance(out, list | tuple) else [out]
    found = [t for t in items if isinstance(t, Tensor) and t.is_floating_point()]
    return found[0] if len(found) == 1 else torch.cat([t.flatten(1) for t in found], 1)


def losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return row_losses(first(model(batch["x"])), batch["seed"])


def build(architecture: str, sizes: Sizes) -> Built:
    name, options, side = smallest(architecture)
    torch.manual_seed(5)
    model = without_dropout(shake(made(name, dict(options))))
    batch = {"x": torch.randn(sizes.batch, channels(model), side, side)}
    return model, {**batch, "seed": torch.arange(3, 3 + sizes.batch)}, losses


def cases() -> dict[str, Case]:
    return {name: Case(name, lambda sizes, n=name: build(n, sizes), tokens=False) for name in architectures()}
