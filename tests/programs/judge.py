"""What becomes of a program under fastdp, for the batch and for the batch minus each sample."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastdp
from fastdp.errors import FastDPError

from .draw import Batch, Program, Runnable, copied, doubled, piece_of, rows
from .pieces import COUPLED, ESCAPES, RIGHT

SENSITIVITY = 1 + 1e-3
OTHER_STEPS = 2e-3  # of R: how far a sample may move the sums of batches that it is not in
LARGEST = 1e12  # gradients beyond are not numbers to judge by
FAULTS = ("SILENT", "WRONG", "CRASH", "FALSE REFUSAL")


@dataclass
class Verdict:
    """kind: exact; exact, warned; bounded; refused; warned; escaped; skipped; or one of `FAULTS`."""

    kind: str
    why: str = ""
    sens: float = 0.0
    warned: str = ""

    @property
    def fault(self) -> bool:
        return self.kind in FAULTS


class Taken(NamedTuple):
    """A sample that is taken away: of the batch of this step."""

    step: int
    sample: int


class Sums(NamedTuple):
    norms: list[Tensor]  # by step
    sums: list[list[Tensor]]  # by step, by R: flat, float64


# --------------------------------------------------------------------------- runs


def _batches(runnable: Runnable, taken: Taken | None) -> list[Batch]:
    found = []
    for k, batch in enumerate(runnable.batches):
        size = len(batch["x"])
        kept = [i for i in range(size) if taken is None or (k, i) != taken]
        found.append(rows(batch, kept) if len(kept) < size else copied(batch))
    return found


def _backward(loss: Any) -> None:
    """Of a scalar, or of losses and the gradient that is given to their `backward`."""
    if isinstance(loss, tuple):
        loss[0].backward(loss[1])
    else:
        loss.backward()


def _flat(model: nn.Module, tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name, p in model.named_parameters() if p.requires_grad])


def by_engine(runnable: Runnable, batches: list[Batch], bounds: list[float] | None) -> Sums:
    """With `PerSampleGradients`. bounds: the R to clip with; None: only norms."""
    model, state = runnable.model(), types.SimpleNamespace()
    engine = fastdp.PerSampleGradients(model, loss_reduction=runnable.program.reduction)
    found = Sums([], [])
    try:
        for batch in batches:
            _backward(runnable.step(model, batch, state))
            norms = engine.norms()
            found.norms.append(norms.double())
            each = []
            for bound in bounds or ():
                factors = (bound / norms.clamp(min=1e-38)).clamp(max=1)
                each.append(_flat(model, engine.clipped_sum(factors)) / bound)
            found.sums.append(each)
    finally:
        engine.detach()
    return found


def by_optimizer(runnable: Runnable, batches: list[Batch], bound: float) -> Sums:
    """With `DPSGD` without noise, the weights put back after every step: how far one step moves them."""
    model, state = runnable.model(), types.SimpleNamespace()
    clipping = next((p.clipping for p in runnable.program.pieces if p.clipping), "")
    chosen: dict[str, Any] = {"clipping": eval(clipping, {"torch": torch, "R": bound})} if clipping else {}
    optimizer = fastdp.DPSGD(
        model, lr=1.0, noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=1,
        loss_reduction=runnable.program.reduction, **chosen,
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = Sums([], [])
    try:
        for batch in batches:
            with torch.no_grad():  # so that a small step is not lost in the weights' own rounding
                for name, p in model.named_parameters():
                    p.copy_(before[name])
            _backward(runnable.step(model, batch, state))
            optimizer.step()
            optimizer.zero_grad()
            moved = {name: before[name].double() - p.detach().double() for name, p in model.named_parameters()}
            found.sums.append([_flat(model, moved) / bound])
    finally:
        optimizer.detach()
    return found


def plain(runnable: Runnable, batches: list[Batch], double: bool | None = None) -> Tensor:
    """The gradient of the last batch by autograd, float64; the batches before are only looked at."""
    model, state = runnable.model(double), types.SimpleNamespace()
    for batch in batches:
        model.zero_grad()
        _backward(runnable.step(model, batch, state))
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return _flat(model, grads)


# --------------------------------------------------------------------------- verdicts


def _message(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {str(problem)[:300]}".replace("\n", " ")


def _takings(program: Program, most: int) -> list[Taken]:
    last_only = any(piece.last_only for piece in program.pieces)
    found = []
    for step, size in enumerate(program.batches):
        some = most if len(program.batches) == 1 else max(2, most // 2)
        samples = [size - 1] if last_only else sorted({*range(min(size, some - 1)), size - 1})
        found += [Taken(step, i) for i in samples]
    return found


def _ours(caught: list[warnings.WarningMessage]) -> str:
    """The first warning of fastdp's own."""
    for w in caught:
        if "fastdp" in w.category.__module__ or "fastdp" in str(w.message):
            return f"{w.category.__name__}: {str(w.message)[:160]}"
    return ""


def judge(program: Program, most: int = 6) -> Verdict:
    """Run a program as a user would, on the batch and without up to `most` of its samples each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        verdict = _judged(program, most)
    verdict.warned = _ours(caught)
    if verdict.warned and verdict.kind == "exact":
        verdict.kind = "exact, warned"
    if program.label in (COUPLED, ESCAPES) and verdict.kind in ("SILENT", "bounded"):
        if verdict.warned:
            verdict.kind = "warned"
        elif program.label == ESCAPES or (verdict.kind == "SILENT" and _is_caught_but_for_escapes(program, most)):
            verdict.kind = "escaped"
    return verdict


def _is_caught_but_for_escapes(program: Program, most: int) -> bool:
    """Whether the program is at no fault without the pieces that couple samples outside of torch."""
    kept = tuple(name for name in program.names if piece_of(name).label != ESCAPES)
    return kept != program.names and not judge(replace(program, names=kept), most).fault


def _judged(program: Program, most: int) -> Verdict:
    try:
        runnable = Runnable(program)
        takings = _takings(program, most)
        gradients = [plain(runnable, _batches(runnable, taken)) for taken in [None, *takings]]
    except Exception as problem:  # noqa: BLE001
        return Verdict("skipped", f"no program: {_message(problem)}")
    if not all(bool(g.isfinite().all()) and float(g.abs().max()) < LARGEST for g in gradients):
        return Verdict("skipped", "gradients are no numbers")
    truth: list[Tensor] | None = None
    if program.label not in (COUPLED, ESCAPES) and not any(piece.last_only for piece in program.pieces):
        found = _truth(runnable)
        if isinstance(found, Verdict):
            return found
        truth = found
    verdict = _sensitivity(runnable, takings, truth)
    if verdict.kind == "SILENT" and truth is not None and not _is_stable(runnable, takings, truth):
        return Verdict("skipped", "plain torch's gradients of single samples change with the batch's size, in float64")
    return verdict


def _refused(program: Program, run: Callable[[], Sums]) -> Sums | Verdict:
    try:
        return run()
    except FastDPError as problem:
        return Verdict("FALSE REFUSAL" if program.label == RIGHT else "refused", _message(problem))
    except Exception as problem:  # noqa: BLE001
        return Verdict("CRASH", _message(problem))


def _sensitivity(runnable: Runnable, takings: list[Taken], truth: list[Tensor] | None) -> Verdict:
    program = runnable.program
    first = _refused(program, lambda: by_engine(runnable, _batches(runnable, None), None))
    if isinstance(first, Verdict):
        return first
    norms = first.norms[0][first.norms[0].isfinite()]
    norms = norms[norms > 1e-6 * norms.max()] if len(norms) else norms
    if not len(norms) or float(norms.max()) == 0:
        return Verdict("skipped", "no gradient")
    bounds = [0.1 * float(norms.min()), float(norms.median()), 2.5 * float(norms.max())]
    ways: list[tuple[str, Callable[[list[Batch]], Sums]]] = []
    if not any(piece.clipping for piece in program.pieces):
        ways.append(("engine", lambda batches: by_engine(runnable, batches, bounds)))
    if program.optimizer:
        ways.append(("DPSGD", lambda batches: by_optimizer(runnable, batches, bounds[1])))
    slack = _slack(runnable, truth)
    worst, where = _alone(runnable, bounds) if ways[0][0] == "engine" else (0.0, "")
    if worst > SENSITIVITY + (1e-2 if any(piece.loose for piece in program.pieces) else 0.0):
        return Verdict("SILENT", where, worst)
    for way, run in ways:
        whole = _refused(program, lambda run=run: run(_batches(runnable, None)))  # type: ignore[misc]
        if isinstance(whole, Verdict):
            return whole
        if way == "engine" and truth is not None and (wrong := _compared(runnable, whole, bounds, truth)):
            return wrong
        for taken in takings:
            less = _refused(program, lambda run=run, t=taken: run(_batches(runnable, t)))  # type: ignore[misc]
            if isinstance(less, Verdict):
                return less
            moved, number, step = _moved(whole, less, taken, slack)
            if not moved <= worst:
                worst, without = moved, f"without sample {taken.sample} of step {taken.step}"
                where = f"{way}, R {bounds[number]:.3g}, step {step} {without}"
    if not worst <= SENSITIVITY + slack:
        return Verdict("SILENT", where, worst)
    return Verdict("bounded" if program.label in (COUPLED, ESCAPES) else "exact", where, worst)


def _moved(whole: Sums, less: Sums, taken: Taken, slack: float) -> tuple[float, int, int]:
    """How far in units of R the sums move, with which R and in which step."""
    worst = (0.0, 0, 0)
    for step, (a, b) in enumerate(zip(whole.sums, less.sums, strict=True)):
        for number, (whole_sum, less_sum) in enumerate(zip(a, b, strict=True)):
            moved = float((whole_sum - less_sum).norm())
            if step != taken.step:  # any move at all is one too many
                moved = 0.0 if moved <= OTHER_STEPS + slack else max(moved, 1.01 + slack)
            if not moved <= worst[0]:
                worst = (moved, number, step)
    return worst


def _alone(runnable: Runnable, bounds: list[float], most: int = 3) -> tuple[float, str]:
    """The largest clipped sum of a batch of one sample: at most R, whatever is rounded."""
    worst, where = 0.0, ""
    for i in range(min(most, len(runnable.batches[0]["x"]))):
        try:
            sums = by_engine(runnable, [rows(runnable.batches[0], [i])], bounds).sums[0]
        except Exception:  # noqa: BLE001  (no program of one sample)
            return worst, where
        for bound, found in zip(bounds, sums, strict=True):
            if float(found.norm()) > worst:
                worst, where = float(found.norm()), f"engine, R {bound:.3g}, a batch of sample {i} alone"
    return worst, where


def _slack(runnable: Runnable, truth: list[Tensor] | None) -> float:
    """How far rounding may move the sum, in units of R: kernels round otherwise in batches of other sizes."""
    program = runnable.program
    slack = 2e-2 * max(program.batches) if any(piece.loose for piece in program.pieces) else 0.0
    if program.double:
        return slack
    off = sum(float(_single_errors(runnable, each, step).clamp(max=1).sum()) for step, each in enumerate(truth or ()))
    return max(slack, 1e-3) + 4 * off


# --------------------------------------------------------------------------- truth


def _single_errors(runnable: Runnable, each: Tensor, step: int) -> Tensor:
    """Relative errors of plain torch's gradients of single samples, in the program's own precision."""
    before = _batches(runnable, None)[:step]
    single = [plain(runnable, [*before, rows(runnable.batches[step], [i])]) for i in range(len(each))]
    right = each.norm(dim=1)
    return (torch.stack(single) - each).norm(dim=1) / right.clamp(min=1e-7 * float(right.max()) + 1e-30)


def _truth(runnable: Runnable) -> list[Tensor] | Verdict:
    """By step, the gradients of single samples [B, P], float64."""
    found = []
    whole = [doubled(batch) for batch in _batches(runnable, None)]
    try:
        for k, batch in enumerate(whole):
            size = len(batch["x"])
            each = torch.stack([plain(runnable, [*whole[:k], rows(batch, [i])], True) for i in range(size)])
            total = plain(runnable, whole[: k + 1], True)
            expected = each.mean(0) if runnable.program.reduction == "mean" else each.sum(0)
            if float((expected - total).norm()) > _tolerance(runnable, 1e-5) * float(each.norm(dim=1).max()):
                return Verdict("skipped", "MISLABELLED: the gradient is not the sum of single samples'")
            found.append(each)
    except Exception as problem:  # noqa: BLE001
        return Verdict("skipped", f"no program of one sample: {_message(problem)}")
    return found


def _is_stable(runnable: Runnable, takings: list[Taken], truth: list[Tensor]) -> bool:
    """Whether plain torch's gradients without a sample are those of the others, in float64, up to a small part of the
    smallest: a softmax of logits of 1e18 is decided by how a product of another size was rounded."""
    for taken in [taken for taken in takings if taken.step == 0]:
        each = truth[0][[i for i in range(len(truth[0])) if i != taken.sample]]
        if not len(each):
            continue
        expected = each.mean(0) if runnable.program.reduction == "mean" else each.sum(0)
        found = plain(runnable, [doubled(_batches(runnable, taken)[0])], True)
        if float((found - expected).norm()) > 1e-2 * float(each.norm(dim=1).min()):
            return False
    return True


def _tolerance(runnable: Runnable, tight: float) -> float:
    return 5e-2 if any(piece.loose for piece in runnable.program.pieces) else tight


def _compared(runnable: Runnable, whole: Sums, bounds: list[float], truth: list[Tensor]) -> Verdict | None:
    """Norms and clipped sums against the truth; float32 may be as far off as plain float32 is."""
    program = runnable.program
    for step, (norms, sums, each) in enumerate(zip(whole.norms, whole.sums, truth, strict=True)):
        right = each.norm(dim=1)
        allowed = torch.full_like(right, _tolerance(runnable, 1e-5))
        if not program.double:
            allowed = 1e-3 + 20 * _single_errors(runnable, each, step) + allowed
        if float(allowed.max()) > 0.2:
            continue  # float32 itself says nothing
        off = (norms - right).abs() / right.clamp(min=1e-7 * float(right.max()) + 1e-30)
        if not bool((off <= allowed).all()):
            i = int((off / allowed).argmax())
            return Verdict(
                "WRONG", f"norm of sample {i} in step {step} is {norms[i]:.6g}, not {right[i]:.6g}", float(off[i])
            )
        for bound, found in zip(bounds, sums, strict=True):
            expected = torch.einsum("b,bp->p", (bound / right.clamp(min=1e-38)).clamp(max=1), each) / bound
            wrong = float((found - expected).norm())
            if not wrong <= float(allowed.max()) * len(right):
                return Verdict("WRONG", f"clipped sum in step {step}, R {bound:.3g}, is off by {wrong:.3g} R", wrong)
    return None
