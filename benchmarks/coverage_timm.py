"""One small model of every module of timm, on small images; again with BatchNorm in eval mode where it has any."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import nn

from .coverage_losses import row_losses
from .coverage_truth import Built, Case, NotBuilt, Sizes, clean, shake, without_dropout

SMALL = re.compile(
    r"test|atto|femto|pico|nano|zepto|tiny|xxs|_xs|_x?small|_s\b|_s0|_t0|_b0|_m0|18|_0\d\d|mini|micro|lite|10|_ti_"
)
CANDIDATES, LARGEST = 6, 25_000_000
ONE_EACH = (1, 1, 1, 1)
SHAPES = (dict(img_size=64, depth=2), dict(img_size=64, depths=ONE_EACH), dict(img_size=64), dict(depths=ONE_EACH),
          dict(layers=ONE_EACH), {})  # fmt: skip
SIDES = (64, 96, 224, 256)
EVAL = " (BatchNorm in eval mode)"


def made(name: str, options: dict[str, Any]) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=4, **options)


def parameters(name: str, options: dict[str, Any]) -> int | None:
    """None where the model cannot be made like that."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in made(name, options).parameters())
    except Exception:  # noqa: BLE001  (options that this model does not take)
        return None


@functools.lru_cache
def smallest(module: str) -> tuple[str, tuple[tuple[str, Any], ...], int]:
    """Model, options and image side of the module's smallest model that runs."""
    import timm

    names = sorted(timm.list_models(module=module), key=lambda n: (not SMALL.search(n), len(n)))[:CANDIDATES]
    counted = [(n, options, parameters(n, options)) for n in names for options in SHAPES]
    fitting = sorted((c for c in counted if c[2] is not None and c[2] <= LARGEST), key=lambda c: c[2] or 0)
    problem: object = f"no model below {LARGEST / 1e6:.0f} M parameters among {names}"
    for name, options, _ in fitting[:4]:
        model = made(name, options).eval()
        for side in SIDES:
            try:
                with torch.no_grad():
                    model(torch.zeros(1, model.default_cfg["input_size"][0], side, side))
                return name, tuple(options.items()), side
            except Exception as e:  # noqa: BLE001  (an image of another size)
                problem = f"{name}: {type(e).__name__}: {clean(e, 120)}"
    raise NotBuilt(str(problem))


def build(module: str, sizes: Sizes, frozen: bool) -> Built:
    name, options, side = smallest(module)
    torch.manual_seed(5)
    model = without_dropout(shake(made(name, dict(options))))
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if frozen and not norms:
        raise NotBuilt("has no BatchNorm")
    for norm in norms if frozen else []:
        norm.train = lambda mode=True, norm=norm: norm  # type: ignore[method-assign]
        norm.training = False
    batch = {"x": torch.randn(sizes.batch, model.default_cfg["input_size"][0], side, side)}
    losses = lambda m, b: row_losses(m(b["x"]), b["seed"])
    return model, {**batch, "seed": torch.arange(3, 3 + sizes.batch)}, losses


def cases() -> dict[str, Case]:
    import timm

    found = [
        Case(module + (EVAL if frozen else ""), lambda sizes, m=module, f=frozen: build(m, sizes, f))
        for module in timm.list_modules()
        for frozen in (False, True)
    ]
    return {case.name: case for case in found}
