"""What a fixed order costs: DP-SGD with sampled batches, DP-SGD and DP-FTRL with batches in one order, on MNIST.

Who is in a batch of DP-SGD is random and secret, and the accountants count on it. If records can only be read in one
order, DP-SGD needs the noise of a Gaussian mechanism for each pass. DP-FTRL (fastdp.mechanisms) gives noise to sums
over many steps by a tree, which adds up more slowly than noise of each step does.

    python examples/without_sampling.py --data DIR [--quick] [--epsilons 1 4 16] [--seeds 3]

prints, for each epsilon (at delta 1e-5) and way, the accuracy on the test images. --data: the folder of MNIST's four
IDX files. The learning rate of each line is the best of five on 5,000 images held out of training, in the first run;
that this choice looked at private records is not counted.

Source: Kairouz et al. 2021, Practical and private (deep) learning without sampling or shuffling (arXiv 2103.00039),
where DP-FTRL is compared with amplified and unamplified DP-SGD.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fastdp
from examples.papers.images import Images, mnist
from fastdp.accounting import epsilon_of
from fastdp.mechanisms import DPFTRL, ftrl_loader, tree_noise_multiplier

DELTA, HELD_OUT, CLIPPING_NORM = 1e-5, 5000, 1.0
SAMPLED, ORDERED, TREE = "DP-SGD, sampled", "DP-SGD, one order", "DP-FTRL, one order"
RATES = {SAMPLED: (0.5, 1.0, 2.0, 4.0, 8.0), ORDERED: (0.05, 0.1, 0.2, 0.5, 1.0), TREE: (0.01, 0.03, 0.1, 0.2, 0.5)}
MOMENTUM = 0.9  # of DP-FTRL, as in its paper


class Task(NamedTuple):
    """Images [N, 784] and labels [N]: for training, choosing the learning rate, and the test; how long to train."""

    train: TensorDataset
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    passes: int
    batch: int

    @property
    def steps(self) -> int:
        """Of a pass."""
        return len(self.train) // self.batch


def task_of(images: Images, passes: int, batch: int, records: int | None) -> Task:
    x, held = images.x.flatten(1), slice(0, HELD_OUT)
    count = min(records or len(x), len(x) - HELD_OUT) // batch * batch  # whole batches
    kept = slice(HELD_OUT, HELD_OUT + count)
    train = TensorDataset(x[kept], images.y[kept])
    return Task(train, (x[held], images.y[held]), (images.x_test.flatten(1), images.y_test), passes, batch)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10))


def noise_of(task: Task, way: str, epsilon: float) -> float:
    """The noise multiplier with which the way spends epsilon at DELTA."""
    given: dict[str, Any] = {"target_epsilon": epsilon, "delta": DELTA}
    if way == SAMPLED:
        rate = task.batch / len(task.train)
        return fastdp.noise_multiplier_for(sample_rate=rate, steps=task.passes * task.steps, **given)
    if way == ORDERED:  # a record is in one step of each pass, and noise of the others does not protect it
        return fastdp.noise_multiplier_for(sample_rate=1.0, steps=task.passes, **given)
    return tree_noise_multiplier(steps_per_epoch=task.steps, epochs=task.passes, **given)


def trained(task: Task, way: str, sigma: float, rate: float, seed: int) -> tuple[nn.Module, float]:
    """The model, and the epsilon of the steps that were made."""
    torch.manual_seed(seed)
    model = network()
    given: dict[str, Any] = {"noise_multiplier": sigma, "max_grad_norm": CLIPPING_NORM}
    loader: Any
    if way == TREE:
        loader = ftrl_loader(task.train, batch_size=task.batch)
        optimizer: Any = DPFTRL(model, lr=rate, momentum=MOMENTUM, **given)
    elif way == ORDERED:
        loader = DataLoader(task.train, batch_size=task.batch)
        # the optimizer's own epsilon would be of every record in every step: noise_of accounts for this way
        optimizer = fastdp.DPSGD(model, lr=rate, expected_batch_size=task.batch, sample_rate=1.0, **given)
    else:
        loader = fastdp.poisson_loader(task.train, expected_batch_size=task.batch)
        optimizer = fastdp.DPSGD(model, lr=rate, **given)
    for _ in range(task.passes):
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    spent = epsilon_of([(sigma, 1.0, task.passes)], DELTA) if way == ORDERED else optimizer.epsilon(DELTA)
    optimizer.detach()
    return model, spent


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).double().mean())


def compare(task: Task, epsilon: float, seeds: int) -> dict[str, list[float]]:
    """The accuracies on the test images of each way's runs; prints a line a way."""
    found = {}
    for way, rates in RATES.items():
        begin, sigma = time.perf_counter(), noise_of(task, way, epsilon)
        first = {rate: trained(task, way, sigma, rate, seed=0) for rate in rates}
        best = max(rates, key=lambda rate: accuracy(first[rate][0], task.held_out))
        runs = [first[best], *(trained(task, way, sigma, best, seed) for seed in range(1, seeds))]
        found[way] = [accuracy(model, task.test) for model, _ in runs]
        middle, least, most = statistics.median(found[way]), min(found[way]), max(found[way])
        print(
            f"{way:18s}  {max(spent for _, spent in runs):7.2f}  {sigma:6.2f}  {best:5g}  {middle:8.1%}  "
            f"({least:.1%} to {most:.1%}, n {len(runs)})  {time.perf_counter() - begin:4.0f} s",
            flush=True,
        )
    return found


def main(arguments: Sequence[str] | None = None, images: Images | None = None) -> dict[float, dict[str, list[float]]]:
    """Accuracies by epsilon and way. images: in the place of MNIST's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of MNIST")
    parser.add_argument("--quick", action="store_true", help="two passes over 6,000 images")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 4.0, 16.0])
    parser.add_argument("--seeds", type=int, default=3, help="how many runs of each line")
    options = parser.parse_args(arguments)
    data = mnist(options.data) if images is None else images
    task = task_of(data, 2, 250, 6000) if options.quick else task_of(data, 8, 500, None)
    fastdp.verify(network(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), task.train[:8])
    print(f"{len(task.train):,} images, {task.passes} passes of {task.steps} batches of {task.batch}")
    print(f"{'':18s}  epsilon   sigma   rate  accuracy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastdp.errors.SampleRateWarning)
        warnings.simplefilter("ignore", fastdp.errors.NotVerifiedWarning)  # of each copy of the network
        return {epsilon: compare(task, epsilon, options.seeds) for epsilon in options.epsilons}


if __name__ == "__main__":
    main()
