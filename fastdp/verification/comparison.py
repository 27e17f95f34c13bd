"""Compares samples' gradients in a batch, and in other batches, with one-sample gradients; words differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import FastDPError, SampleMixingError
from .coupled_module import BEFORE, where_coupled
from .execution import Found, Miscounted, Rows, Runs
from .records import Records
from .report import VerifyReport, largest


class Looked(NamedTuple):
    """A report, and the one-sample gradients [B, ...] by name."""

    report: VerifyReport
    truth: Rows


def look(runs: Runs, base: Records, probes: list[Records], tolerance: float) -> Looked:
    """Compare norms and clipped sum with one-sample backwards, in this batch and in others."""
    found: Found | None = None
    try:
        if runs.draws is None:  # first, as a refusal says more than what a sample alone may fail by
            found = runs.engine(base)
        else:
            runs.look_ahead(base)
        truth = _alone(runs, base)
        found = runs.engine(base) if found is None else found
    except Miscounted as count:
        return Looked(_miscounted(count, base, tolerance), {})
    report = _compared(runs, base, truth, found, tolerance)
    report.looked_at.append(f"batches of {_listed([1, base.samples])} samples")
    if not report.worst() <= tolerance:
        report.problem = _problem(runs, base, report)
    else:
        _other_batches(runs, base, truth, probes, report)
    if runs.reordered:
        report.looked_at.append("gradients as a set, as the program puts the samples into another order")
    return Looked(report, truth)


def _alone(runs: Runs, base: Records) -> Rows:
    """Each sample's gradient by itself."""
    alone = [runs.alone(base.of([sample])) for sample in range(base.samples)]
    return {name: torch.stack([rows[name] for rows in alone]) for name in runs.named}


def _compared(runs: Runs, base: Records, truth: Rows, found: Found, tolerance: float) -> VerifyReport:
    """The errors of what the engine found for the batch of all samples."""
    norms, places = norms_of(truth), places_of(truth, found.rows, range(base.samples))
    runs.reordered = places != list(range(base.samples))
    found = Found(found.norms[places], found.factors[places], found.sums, {n: g[places] for n, g in found.rows.items()})
    sizes = norms.clamp(min=_floor(norms))
    errors = [((each - norms).abs() / sizes).max() for each in (found.norms, norms_of(found.rows))]
    ends = {i: runs.engine(base.of([i] * base.samples)).rows for i in (0, base.samples - 1)}
    coupling = largest(float(apart(found.rows, rows)[i] / sizes[i]) for i, rows in ends.items())
    report = VerifyReport(len(norms), largest(map(float, errors)), _sum_error(found, truth), coupling, tolerance)
    for name, rows in truth.items():
        off = (found.rows[name] - rows).reshape(len(rows), -1).norm(dim=1).max()
        report.parameters[name] = float(off / sizes.mean())
    report.untested = [name for name, rows in truth.items() if not rows.any()]
    return report


def _other_batches(runs: Runs, base: Records, truth: Rows, probes: list[Records], report: VerifyReport) -> None:
    """The samples in other batches, each against its own gradient."""
    sizes = {1, base.samples}
    for records in probes:
        try:
            off = _off(runs, base, truth, records)
        except SampleMixingError:
            raise
        except Miscounted as count:
            report.problem = _miscounted(count, records, report.tolerance).problem
            return
        except (FastDPError, RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            first = str(error).strip().splitlines()
            report.not_looked_at.append(
                f"batches of {records.samples} samples, which the program does not take: {type(error).__name__}: "
                f"{first[0][:160] if first else ''}"
            )
            continue
        report.coupling = largest([report.coupling, off])
        sizes.add(records.samples)
        if not off <= report.tolerance:
            where = where_coupled(runs, records)
            report.problem = (
                f"a sample's gradient depends on the batch that it is in: in batches of {records.samples} samples it "
                f"is {off:.1e} off its own, though not in those of {base.samples} here. {where[:1].upper()}{where[1:]}"
                f"{'.' if where else ''} Clipping does not bound it: let nothing be computed from the size of the "
                "batch, from the places of the samples in it or from all of them together."
            )
            return
    report.looked_at[-1] = f"batches of {_listed(sizes)} samples"


def _off(runs: Runs, base: Records, truth: Rows, records: Records) -> float:
    """How far these samples are off their own gradients in a batch of them and others, in whatever order."""
    place = {name: number for number, name in enumerate(base.names)}
    own = [k for k, name in enumerate(records.names) if name in place]
    numbers = [place[records.names[k]] for k in own]
    found, wanted = runs.engine(records), {name: rows[numbers] for name, rows in truth.items()}
    floor, norms, all_norms = _floor(norms_of(truth)), norms_of(wanted), norms_of(found.rows)
    places = places_of(wanted, found.rows, own)
    off = apart(wanted, {name: g[places] for name, g in found.rows.items()}) / norms.clamp(min=floor)
    routes = (found.norms - all_norms).abs() / all_norms.clamp(min=floor)
    return largest([float(off.max()), float(routes.max()), _sum_error(found, found.rows)])


def _listed(sizes: Iterable[int]) -> str:
    found = [str(size) for size in sorted(set(sizes))]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"


def _by_place(runs: Runs, base: Records) -> float:
    """Largest change of norms, relatively, where the samples stand in reversed order."""
    own = runs.engine(base).norms
    turned = runs.engine(base.of(range(base.samples - 1, -1, -1))).norms.flip(0)
    return largest([float(((turned - own).abs() / own.clamp(min=1e-30)).max())])


def between_equal_runs(runs: Runs, base: Records) -> float:
    """How far two equal runs are apart, relative to the largest gradient."""
    one, other = runs.engine(base).rows, runs.engine(base).rows
    return largest([float(apart(one, other).max() / norms_of(one).max().clamp(min=1e-30))])


def carried(runs: Runs, base: Records) -> float:
    """How far a sample's gradient is apart after two others: what the model carries from one batch to the next."""
    last = base.of([base.samples - 1])
    found = []
    for sample in (0, 1):
        runs.alone(base.of([sample]))
        found.append(runs.alone(last, fresh=False))
    runs.put_back()
    one, other = ({name: g[None] for name, g in rows.items()} for rows in found)
    return largest([float(apart(one, other) / norms_of(one).clamp(min=1e-30))])


# --------------------------------------------------------------------------- in words


def _problem(runs: Runs, base: Records, report: VerifyReport) -> str:
    parameters, reduction = report.parameters, runs.reduction
    worst = max(parameters, key=lambda name: parameters[name])
    where, draws = where_coupled(runs, base), runs.draws
    if where or not report.coupling <= report.tolerance:
        if draws is not None and draws.orders:
            remedy = f"A random order of the samples is drawn, {_some(draws.orders)}: mix no samples."
        elif where and where != BEFORE:
            remedy = "Replace what works across the batch (BatchNorm by GroupNorm, for example)."
        else:
            remedy = (
                f"Let the loss be the {reduction} of the samples' own losses (for token models: of each sample's own "
                "mean; with weights of classes: the weighted losses' plain mean), and check loss_reduction."
            )
        problem = (
            f"a sample's gradient depends on other samples, {where or 'in the loss'}: clipping does not bound it. "
            f"{remedy}"
        )
    elif (moved := _by_place(runs, base)) > report.tolerance:
        report.coupling = largest([report.coupling, moved])
        problem = (
            "a sample's gradient depends on its place in the batch, or on the order of the samples: if one is removed, "
            "others move to other places, and clipping does not bound it. Let nothing be computed from the places of "
            "the samples."
        )
        if draws is not None and draws.constants:
            problem += f" What is drawn after one seed in every call is such a constant: {_some(draws.constants)}."
    elif parameters[worst] <= report.tolerance:
        problem = (
            f"wrong norms (off by {report.norm_error:.1e}) or clipped sums (by {report.sum_error:.1e}) of per-sample "
            "gradients that are right: one of the routes is at fault, which `explain()` of the optimizer tells. Please "
            "report the model: this is a bug of fastdp."
        )
    else:
        problem = (
            f"wrong per-sample gradients, most at parameter '{worst}' ({parameters[worst]:.1e}). If the loss is not "
            f"the {reduction} over the samples, set loss_reduction; else please report the model: this is a bug "
            "of fastdp."
        )
    lines = runs.reads[0].lines()
    return problem + (f" Numbers over the batch are read by Python in {'; '.join(lines[:5])}." if lines else "")


def _some(places: Iterable[str]) -> str:
    return "; ".join([*places][:3])


def _miscounted(count: Miscounted, records: Records, tolerance: float) -> VerifyReport:
    problem = (
        f"the engine sees {count.found} samples in a batch of {count.wanted}: each of them would be clipped and "
        "counted by itself. "
    )
    if count.found > count.wanted and count.found % count.wanted == 0:
        rows = count.found // count.wanted
        problem += (
            f"If the loss makes {rows} rows of each sample, one record could contribute {rows} times the clipping "
            f"norm: put its rows one after the other (x.repeat_interleave({rows}, 0)) and give rows_per_sample={rows}, "
            "here and to the optimizer; or say whose the rows are by fastdp.mark_rows."
        )
    else:
        problem += "Say which rows are whose, by fastdp.mark_rows, rows_per_sample= or batch_size=."
    return VerifyReport.failed(records.samples, tolerance, problem)


# --------------------------------------------------------------------------- numbers


def _sum_error(found: Found, rows: Rows) -> float:
    """The clipped sum's error relative to its norm, or to one sample's share: where samples cancel, it is rounding."""
    want = {name: torch.einsum("b,b...->...", found.factors, g) for name, g in rows.items()}
    least = float((found.factors * norms_of(rows)).max())
    wrong = sum(float((found.sums[n] - want[n]).square().sum()) for n in want)
    size = sum(float(t.square().sum()) for t in want.values())
    return float((wrong / max(size, least**2, 1e-60)) ** 0.5)


def _floor(norms: Tensor) -> float:
    """What errors are relative to at least."""
    return float(norms.max()) * 1e-6 + 1e-30


def places_of(wanted: Rows, rows: Rows, own: Sequence[int]) -> list[int]:
    """For each wanted gradient the place of the one most like it among these, each taken once.

    own: where they stand if the program leaves samples in their places, which is kept unless another is far nearer.
    """
    flat = [(g.reshape(len(g), -1), rows[n].reshape(len(rows[n]), -1)) for n, g in wanted.items()]
    squares = [torch.cdist(*pair, compute_mode="donot_use_mm_for_euclid_dist").square() for pair in flat]
    found = list[int]()
    for place, off in zip(own, torch.stack(squares).sum(0).nan_to_num(float("inf")).tolist(), strict=True):
        free = [k for k in range(len(off)) if k not in found]
        best = min(free, key=off.__getitem__)
        found.append(place if place in free and off[place] <= 1e4 * off[best] else best)
    return found


def apart(one: Rows, other: Rows) -> Tensor:
    """How far gradients are apart, [B]."""
    return torch.stack([(other[n] - g).reshape(len(g), -1).square().sum(1) for n, g in one.items()]).sum(0).sqrt()


def norms_of(rows: Rows) -> Tensor:
    """Each sample's norm [B]."""
    return torch.stack([g.reshape(len(g), -1).square().sum(1) for g in rows.values()]).sum(0).sqrt()
