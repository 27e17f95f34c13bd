"""What the figures of the loss paper show of a model: norms of its weights and pre-activations, errors by class,
sharpness. Nothing here is private.
"""

from __future__ import annotations

import copy
import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.papers import common

Loss = Callable[[Tensor, Tensor], Tensor]
EPOCHS = (
    "task", "case", "seed", "epoch", "epochs", "accuracy", "loss", "epsilon_rdp", "epsilon_prv", "cosine", "norm_p10",
    "norm_median", "norm_p90", "clipped", "weights", "pre_activations", "logits", "commit",
)  # fmt: skip
DETAILS = ("task", "case", "seed", "what", "epoch", "i", "j", "value", "commit")


def weight_norms(model: nn.Module) -> list[float]:
    """The norm of each layer's weight, first to last."""
    return [float(p.detach().norm()) for name, p in model.named_parameters() if name.endswith("weight")]


def pre_activation_norms(model: nn.Sequential, x: Tensor) -> list[float]:
    """The mean over samples of the norm of each layer's pre-activation, and last of the logits."""
    found, seen = [], x
    with torch.no_grad():
        for layer in copy.deepcopy(model).eval():  # a copy has no hooks
            if isinstance(layer, nn.Tanh):
                found.append(float(seen.flatten(1).norm(dim=1).mean()))
            seen = layer(seen)
    return [*found, float(seen.norm(dim=1).mean())]


def confusion(logits: Tensor, labels: Tensor) -> Tensor:
    """Counts [10, 10] by label and predicted class."""
    return torch.bincount(labels * 10 + logits.argmax(1), minlength=100).view(10, 10)


def sharpness(model: nn.Module, loss: Callable[[nn.Module], Loss], x: Tensor, y: Tensor, rounds: int = 20) -> float:
    """The largest singular value of the Hessian of the mean loss on (x, y), by power iteration.

    loss: makes the loss of a model (a DPLoss holds on to the model it was made for).
    """
    plain = copy.deepcopy(model).eval()
    of = loss(plain)
    parameters = list(plain.parameters())
    gradients = torch.autograd.grad(of(plain(x), y), parameters, create_graph=True)
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(p.shape, generator=generator).to(p.device) for p in parameters]
    found = 0.0
    for _ in range(rounds):
        length = torch.sqrt(sum(d.square().sum() for d in direction))  # type: ignore[arg-type]
        direction = [d / length for d in direction]
        product = torch.autograd.grad(gradients, parameters, grad_outputs=direction, retain_graph=True)
        direction = [p.detach() for p in product]
        found = float(torch.sqrt(sum(d.square().sum() for d in direction)))  # type: ignore[arg-type]
    return found


def append(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows of one run to a CSV file, six digits of a number, lists with spaces between. Raises ValueError."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if not path.exists():
        writer.writeheader()
    for row in rows:
        writer.writerow({name: _plain(value) for name, value in {**row, "commit": common.COMMIT}.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        file.write(text.getvalue())


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(f"{each:.5g}" for each in value)
    return f"{value:.6g}" if isinstance(value, float) else value


def read(path: Path, **wanted: Any) -> list[dict[str, str]]:
    """Rows of such a file with the wanted values; of a (task, case, seed, what, epoch, i, j) that is there twice, the
    later one."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if all(row[k] == str(v) for k, v in wanted.items())]
    names = ("task", "case", "seed", "what", "epoch", "i", "j")
    return list({tuple(row.get(name) for name in names): row for row in rows}.values())
