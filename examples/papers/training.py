"""The training loop of the experiments, for private and other optimizers, and what is measured of a network."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fastdp
from examples.papers.common import Checkpoint
from fastdp.calibration import calibration
from fastdp.sampling import current
from fastdp.utils.progress_bar import Bar


class Rows(Dataset[tuple[Tensor, ...]]):
    """Tensors of the same length as a data set that gives a batch at once; for `loader`."""

    def __init__(self, *tensors: Tensor) -> None:
        if len({len(t) for t in tensors}) != 1:
            raise ValueError(f"tensors of different lengths: {', '.join(str(len(t)) for t in tensors)}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(t[index] for t in self.tensors)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        chosen = torch.tensor(indices, dtype=torch.long)
        return tuple(t[chosen] for t in self.tensors)


def _as_it_is(batch: Any) -> Any:
    """What Rows gave; one record of it in a list is a batch of one (to take no rows of)."""
    return tuple(t.unsqueeze(0) for t in batch[0]) if isinstance(batch, list) else batch


def loader(
    x: Tensor, y: Tensor, batch: float, seed: int | None = None, **options: Any
) -> fastdp.sampling.PoissonLoader:
    """A Poisson loader of (x, y), fetched a batch at a time. seed: only where nothing is private."""
    return fastdp.poisson_loader(Rows(x, y), expected_batch_size=batch, seed=seed, collate_fn=_as_it_is, **options)


class Run(NamedTuple):
    """What training was, with what came before the checkpoint: logical steps and passes done, seconds; the share of
    gradients longer than R (of samples, by groups where clipping is; None without privacy); mean loss of each pass."""

    steps: int
    epochs: float
    seconds: float
    clipped: float | None
    losses: list[float]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, loss: Any = F.cross_entropy, *,
          steps: int, forward: Callable[[nn.Module, Any], Tensor] | None = None,
          before: Callable[[int], object] | None = None, note: Callable[[Run], object] | None = None,
          kept: Checkpoint | None = None, keep: int | None = None, more: dict[str, Any] | None = None,
          text: str = "", lines: bool = True) -> Run:  # fmt: skip
    """One loop for private and other optimizers, in place, on from a checkpoint of it if there is one.

    Args:
        batches: a Poisson loader; passes over it until `steps` logical batches are done.
        loss: loss(logits, labels) -> mean of the batch.
        forward: forward(model, batch) -> mean loss, in the place of loss(model(*inputs), labels) on (*inputs, labels).
        before: called with the number of logical steps done before each of them (schedules).
        note: called with the Run until then after each pass, before its state is kept.
        kept: where the state is kept after each pass, or after every `keep` logical steps.
        more: plain values that belong to the run's state; filled from the checkpoint.
        lines: print a line a pass where no one watches a progress bar.

    Raises ValueError for steps < 1, FloatingPointError where the weights are no longer finite at the end of a pass.
    """
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, not {steps}")
    private, more = hasattr(optimizer, "noise_multiplier"), {} if more is None else more
    state = kept.state if kept is not None else {}
    done, (over, all_norms) = int(state.get("steps", 0)), state.get("counts", (0, 0))
    losses, start = list(state.get("losses", [])), time.perf_counter() - state.get("seconds", 0.0)
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        more.update(state["more"])

    def save() -> None:
        if kept is not None:
            kept.keep(model=model.state_dict(), optimizer=optimizer.state_dict(), steps=done, losses=losses, more=more,
                      counts=(over, all_norms), seconds=time.perf_counter() - start)  # fmt: skip

    def now() -> Run:
        return Run(done, done / batches.steps_per_epoch, time.perf_counter() - start,
                   over / max(all_norms, 1) if private else None, list(losses))  # fmt: skip

    bar, begun = Bar(steps), done - 1
    model.train()
    while done < steps:
        total, count = 0.0, 0
        for batch in batches:
            if begun < done:  # the first physical batch of a logical one
                begun = done
                if before is not None:
                    before(done)
            size, place = len(batch[-1]) if not isinstance(batch, Mapping) else 1, current(id(batches))
            if private or size:
                value = forward(model, batch) if forward is not None else loss(model(*batch[:-1]), batch[-1])
                value.backward()
                if private:
                    longer, of = _beyond(optimizer)
                    over, all_norms = over + longer, all_norms + of
                optimizer.step()
                optimizer.zero_grad()
                if size:
                    total, count = total + float(value.detach()) * size, count + size
            if place is not None and not place.final:
                continue
            done += 1
            bar.at(done, text)
            if done == steps:
                break
            if keep and done % keep == 0:
                save()
        losses.append(total / max(count, 1))
        if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
            raise FloatingPointError(f"{text or 'training'}: weights are not finite after {done} steps: a smaller lr")
        if lines and not sys.stderr.isatty():
            spent = time.perf_counter() - start
            print(f"  {text}: step {done} of {steps}, training loss {losses[-1]:.4f}, {spent:.0f} s", flush=True)
        if note is not None:
            note(now())
        if not keep or done == steps:
            save()  # before its rows: where this ends between the two, they are written of the same run
    return now()


def _beyond(optimizer: Any) -> tuple[int, int]:
    """How many per-sample norms of the last backward are larger than their R, and of how many."""
    norms = optimizer.norms
    if isinstance(norms, Tensor):
        return int((norms > optimizer.max_grad_norm).sum()), norms.numel()
    groups = {group.name: group.max_grad_norm for group in optimizer._privacy.clipping.groups}
    return sum(int((n > groups[name]).sum()) for name, n in norms.items()), sum(n.numel() for n in norms.values())


# ---------------------------------------------------------------------- what came of it


def logits_of(model: nn.Module, x: Tensor, batch: int = 500) -> Tensor:
    """model(x) in evaluation mode, without gradients; the model is left in the mode it had."""
    training = model.training
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part) for part in x.split(batch)])
    model.train(training)
    return found


def test_metrics(logits: Tensor, labels: Tensor, bins: int = 15) -> dict[str, float]:
    """accuracy, ece, mce (shares from 0 to 1) and nll (nats) of logits [N, C]."""
    found = calibration(logits, labels, bins)
    return {"accuracy": found.accuracy, "nll": found.nll, "ece": found.ece, "mce": found.mce}


test_metrics.__test__ = False  # type: ignore[attr-defined]  # pytest: a function of the scripts
