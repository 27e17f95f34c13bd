"""Check a model, a loss and a batch: does fastdp's result equal that of one sample at a time?

And does a sample's gradient depend on the other samples, which no clipping can make private?
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .arguments import may_be_packed, nested_tensors
from .engine import PerSampleGradients
from .errors import BatchReadWarning, VerificationError
from .marks import mark_of, mark_rows, samples_said
from .people import numbers_of
from .reads import Reads
from .rounding import doubled, judged_in_double, may_be_doubled

Loss = Callable[[nn.Module, Any], Tensor]
_DROPOUT = (nn.modules.dropout._DropoutNd,)


@dataclass
class VerifyReport:
    """What `verify` found. Errors are relative; `parameters` gives each one's largest over the samples."""

    samples: int
    norm_error: float
    sum_error: float
    coupling: float
    tolerance: float
    parameters: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    untested: list[str] = field(default_factory=list)  # parameters whose gradient is zero in every sample
    rounding: float | None = None  # of plain torch's float32, where float32 failed and float64 was asked

    @property
    def ok(self) -> bool:
        return not self.problem

    def __str__(self) -> str:
        verdict = "exact" if self.ok else self.problem
        lines = [
            f"fastdp.verify: {verdict}",
            f"  samples {self.samples}, tolerance {self.tolerance:.0e}",
            f"  norms: relative error {self.norm_error:.1e}; clipped sum: {self.sum_error:.1e}",
            f"  dependence of one sample's gradient on the others: {self.coupling:.1e}",
        ]
        if self.rounding is not None:
            lines.append(
                f"  float32 cannot say more: plain one-sample gradients are {self.rounding:.1e} off float64's; in "
                "float64 all of this is within the tolerance"
            )
        worst = sorted(self.parameters.items(), key=lambda item: -item[1])[:3]
        lines += [f"  {name}: {error:.1e}" for name, error in worst]
        if self.untested:
            lines.append(
                f"  not tested: {len(self.untested)} of {len(self.parameters)} parameters have no gradient on these "
                f"samples ({self.untested[0]}, ...): they lie behind zeros, as LoRA's first factors do at the start, "
                "or have no part in the loss"
            )
        return "\n".join(lines)


def verify(
    model: nn.Module,
    loss_fn: Loss,
    batch: Any,
    *,
    params: Iterable[Tensor] | None = None,
    loss_reduction: str = "mean",
    tolerance: float | None = None,
    samples: int = 8,
    group_by: Any = None,
    raise_on_failure: bool = True,
    **options: Any,
) -> VerifyReport:
    """Compare norms and clipped sum with one-sample backwards, and perturb the other samples.

    Args:
        model: as it will be trained; without a fastdp optimizer attached. It comes back unchanged.
        loss_fn: loss_fn(model, batch) -> the loss that will be trained, a scalar or one loss a sample [B].
        batch: tensors, samples first, in any nest of tuples, lists and dicts.
        params: parameters to check (default: all that require grad).
        loss_reduction: "mean" or "sum", as of the optimizer.
        tolerance: largest relative error (default 1e-4; 5e-2 for 16-bit models). Where a float32 model fails the
            default, it is computed in float64 as well (parameters and buffers are swapped meanwhile): it passes if
            float64 does, and float32 is at most 4 times as far off as plain torch's own float32 is.
        samples: at most this many samples of the batch are used.
        group_by: a key for each record of the batch, where all records of one key are one sample (a person).
        options: batch_first, batch_size of PerSampleGradients.

    Dropout is off while it runs. Returns a report; raises VerificationError naming the module or the loss
    where one can be named (or returns the report with `problem`, if not raise_on_failure), and the engine's
    own errors where it refuses the model.
    """
    size = _size(batch)
    numbers = list(range(size)) if group_by is None else numbers_of(group_by)[0]
    if len(numbers) != size:
        raise ValueError(f"group_by gives {len(numbers)} keys for a batch of {size} records")
    kept = [record for record, number in enumerate(numbers) if number < samples]
    batch = Records(_rows(batch, kept, size), [numbers[record] for record in kept], group_by is not None)
    if batch.samples < 2:
        raise ValueError("verify needs a batch of at least two samples")
    judged = tolerance is None and may_be_doubled(model)
    if tolerance is None:
        half = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
        tolerance = 5e-2 if half else 1e-4
    states = [(m, m.training) for m in model.modules() if isinstance(m, _DROPOUT)]
    grads = {p: p.grad for p in model.parameters()}
    chosen = None if params is None else list(params)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    try:
        for module, _ in states:
            module.eval()
        report, truth = _verify(model, loss_fn, batch, chosen, loss_reduction, tolerance, options)
        if report.problem and judged:
            again = batch._replace(batch=doubled(batch.batch))
            repeat = lambda: _verify(model, loss_fn, again, chosen, loss_reduction, tolerance, options)
            report.problem, report.rounding = judged_in_double(report, truth, model, repeat)
    finally:
        for module, training in states:
            module.train(training)
        for p, grad in grads.items():
            p.grad = grad
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
    if report.problem and raise_on_failure:
        raise VerificationError(str(report))
    return report


class Records(NamedTuple):
    """A batch, and the number of the sample that each of its records belongs to."""

    batch: Any
    numbers: list[int]
    grouped: bool

    @property
    def samples(self) -> int:
        return max(self.numbers, default=-1) + 1

    def of(self, samples: Iterable[int]) -> Records:
        """The batch made of these samples."""
        own = [[record for record, number in enumerate(self.numbers) if number == sample] for sample in samples]
        numbers = [number for number, records in enumerate(own) for _ in records]
        return Records(_rows(self.batch, [r for records in own for r in records], len(self.numbers)), numbers,
                       self.grouped)  # fmt: skip


def _verify(model: nn.Module, loss_fn: Loss, batch: Records, chosen: list[Tensor] | None, loss_reduction: str,
            tolerance: float, options: dict[str, Any]) -> tuple[VerifyReport, dict[str, Tensor]]:  # fmt: skip
    """The report, and the one-sample gradients [B, ...] by name."""
    size = batch.samples
    reads: list[Reads] = []
    found = _by_engine(model, loss_fn, batch, chosen, loss_reduction, options, reads)
    ours = found.rows
    names = list(ours)
    named = {name: p for name, p in model.named_parameters() if name in ours}
    alone = {name: [] for name in names}  # type: dict[str, list[Tensor]]
    for i in range(size):
        one = _plain(model, loss_fn, batch.of([i]), named, loss_reduction)
        for name in names:
            alone[name].append(one[name])
    truth = {name: torch.stack(rows) for name, rows in alone.items()}
    norms = _norms(truth)
    floor = float(norms.max()) * 1e-6 + 1e-30
    errors = [((each - norms).abs() / norms.clamp(min=floor)).max() for each in (found.norms, _norms(ours))]
    norm_error = float(torch.stack(errors).max())  # of the routes of training, and of the gradients themselves
    # at least one sample's share: where samples cancel, the sum itself is rounding
    least, want = float((found.factors * norms).max()), _weighted(truth, found.factors)
    sum_error = _relative(found.sums, want, least)
    whole = norms.mean().clamp(min=floor)
    parameters = {name: float((ours[name] - truth[name]).reshape(size, -1).norm(dim=1).max() / whole) for name in names}
    coupling = _coupling(model, loss_fn, batch, chosen, loss_reduction, options, ours, norms, floor)
    report = VerifyReport(size, norm_error, sum_error, coupling, tolerance, parameters)
    report.untested = [name for name, rows in truth.items() if not rows.any()]
    worst = max(parameters, key=lambda name: parameters[name])
    if not max(coupling, norm_error, sum_error) <= tolerance:
        where = _where_coupled(model, loss_fn, batch.batch, len(batch.numbers))
        if where or coupling > tolerance:
            report.problem = (
                f"a sample's gradient depends on other samples, {where or 'in the loss'}: clipping does not bound it. "
                + (
                    "Replace what works across the batch (BatchNorm by GroupNorm, for example)."
                    if where
                    else f"Let the loss be the {loss_reduction} of the samples' own losses (for token models: of each "
                    "sample's own mean), and check loss_reduction."
                )
            )
        else:
            report.problem = (
                f"wrong per-sample gradients, most at parameter '{worst}' ({parameters[worst]:.1e}). If the loss is "
                f"not the {loss_reduction} over the samples, set loss_reduction; if the model is random, make it "
                "deterministic; else please report the model: this is a bug of fastdp."
            )
        if reads[0].lines():
            report.problem += f" Numbers over the batch are read by Python in {'; '.join(reads[0].lines()[:5])}."
    else:
        reads[0].harmless()
    return report, truth


# --------------------------------------------------------------------------- gradients


class Found(NamedTuple):
    """By the engine, in float64: norms [B] and the sum clipped with factors [B], by the routes that training takes,
    and the per-sample gradients themselves, by name."""

    norms: Tensor
    factors: Tensor
    sums: dict[str, Tensor]
    rows: dict[str, Tensor]


def _by_engine(model: nn.Module, loss_fn: Loss, batch: Records, params: list[Tensor] | None, reduction: str,
               options: dict[str, Any], reads: list[Reads] | None = None) -> Found:  # fmt: skip
    engine = PerSampleGradients(model, params, loss_reduction=reduction, **options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BatchReadWarning)  # what is read is about to be judged
            engine.group_by(batch.numbers if batch.grouped else None)
            loss = _reduced(loss_fn(model, batch.batch), reduction)
        loss.backward()  # type: ignore[no-untyped-call]
        if reads is not None:
            reads.append(engine._forward.reads)
        rows = {name: g.double() for name, g in engine.materialize().items()}
        norms = engine.norms()
        factors = (norms.median() / norms.clamp(min=1e-30)).clamp(max=1.0)
        sums = {name: total.double() for name, total in engine.clipped_sum(factors).items()}
        return Found(norms.double(), factors.double(), sums, rows)
    finally:
        engine.detach()


def _plain(model: nn.Module, loss_fn: Loss, batch: Records, named: dict[str, nn.Parameter],
           reduction: str) -> dict[str, Tensor]:  # fmt: skip
    """The gradient of a batch of one sample: the sum over its records."""
    loss = _reduced(loss_fn(model, batch.batch), reduction)
    if reduction == "mean":
        loss = loss * len(batch.numbers)
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p).double() if g is None else g.double()
        for (name, p), g in zip(named.items(), found, strict=True)
    }


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if loss.dim() == 0:
        return loss
    if loss.dim() != 1:
        raise VerificationError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}: it must be a scalar, or one loss a sample [B]"
        )
    return loss.mean() if reduction == "mean" else loss.sum()


def _norms(rows: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.reshape(len(g), -1).square().sum(1) for g in rows.values()]).sum(0).sqrt()


def _weighted(rows: dict[str, Tensor], factors: Tensor) -> dict[str, Tensor]:
    return {name: torch.einsum("b,b...->...", factors, g) for name, g in rows.items()}


def _relative(found: dict[str, Tensor], truth: dict[str, Tensor], least: float) -> float:
    """The error's norm over that of the truth, or over `least` where the truth is smaller."""
    wrong = sum(float((found[n] - truth[n]).square().sum()) for n in truth)
    size = sum(float(t.square().sum()) for t in truth.values())
    return (wrong / max(size, least**2, 1e-60)) ** 0.5


# --------------------------------------------------------------------------- dependence


def _coupling(model: nn.Module, loss_fn: Loss, batch: Records, params: list[Tensor] | None, reduction: str,
              options: dict[str, Any], ours: dict[str, Tensor], norms: Tensor, floor: float) -> float:  # fmt: skip
    """Largest change of a sample's gradient when all others are replaced by copies of it."""
    worst, size = 0.0, batch.samples
    for i in {0, size - 1}:
        other = _by_engine(model, loss_fn, batch.of([i] * size), params, reduction, options).rows
        moved = sum(float((other[name][i] - g[i]).square().sum()) for name, g in ours.items()) ** 0.5
        worst = max(worst, moved / max(float(norms[i]), floor))
    return worst


def _where_coupled(model: nn.Module, loss_fn: Loss, batch: Any, size: int) -> str:
    """The first module whose output for a sample changes with the others, or ''."""
    first: list[tuple[str, list[Tensor]]] = []
    record: list[tuple[str, list[Tensor]]] = first
    handles = []
    for path, module in model.named_modules():

        def hook(_: nn.Module, __: Any, out: Any, path: str = path) -> None:
            record.append((path, [t.detach().clone() for t in nested_tensors(out) if t.is_floating_point()]))

        handles.append(module.register_forward_hook(hook))
    try:
        with torch.no_grad():
            loss_fn(model, batch)
            second: list[tuple[str, list[Tensor]]] = []
            record = second
            loss_fn(model, _rows(batch, [0] * size, size))
    except RuntimeError:  # a loss that needs gradients: what is coupled is known, only not where
        return ""
    finally:
        for handle in handles:
            handle.remove()
    for (path, before), (_, after) in zip(first, second, strict=False):
        for a, b in zip(before, after, strict=False):
            if a.dim() and a.shape == b.shape and a.size(0) == size:
                scale = float(a[0].abs().max()) + 1e-12
                if not float((a[0] - b[0]).abs().max()) <= 1e-4 * scale:
                    return f"first in module '{path or type(model).__name__}'"
    return ""


# --------------------------------------------------------------------------- batches


def _size(batch: Any) -> int:
    tensors = [t for t in nested_tensors(batch) if t.dim()]
    if not tensors:
        raise ValueError("the batch holds no tensor with a batch dimension")
    said = samples_said(tensors)
    return next((t for t in tensors if mark_of(t) is None), tensors[0]).size(0) if said is None else said


def _rows(batch: Any, rows: Iterable[int], size: int) -> Any:
    """The batch made of these samples."""
    index = torch.as_tensor(list(rows))

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _rows_of(value, index, size)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[take(item) for item in value])
        if isinstance(value, tuple | list):
            return type(value)(take(item) for item in value)
        if hasattr(value, "items"):
            return {key: take(item) for key, item in value.items()}
        return value

    return take(batch)


def _rows_of(tensor: Tensor, index: Tensor, size: int) -> Tensor:
    """These samples' rows of a tensor: those marked as theirs, or their k consecutive ones; tables as they are."""
    mark = mark_of(tensor)
    if mark is not None and mark.owner is not None:
        places = [(mark.owner == number).nonzero().flatten() for number in index.tolist()]
        owner = torch.arange(len(index)).repeat_interleave(torch.tensor([len(rows) for rows in places]))
        return mark_rows(tensor[torch.cat(places).to(tensor.device)], owner, len(index))
    if mark is not None or not tensor.dim():
        return tensor
    if tensor.size(0) == size:
        return tensor[index.to(tensor.device)]
    if may_be_packed(tensor, size, 0):
        return tensor.unflatten(0, (size, -1))[index.to(tensor.device)].flatten(0, 1)
    return tensor
