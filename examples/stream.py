"""A stream of records that is read once, in its own order. `python examples/stream.py`

DP-SGD's epsilon counts on batches drawn at random, which a stream is not: within one order, each record is in one step
for certain, and that step's noise alone protects it. DP-FTRL adds noise to sums over many steps instead.
"""

import torch
import torch.nn.functional as F
from digits import accuracy, digits
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import fastdp
from fastdp.accounting import epsilon_of
from fastdp.mechanisms import DPFTRL, ftrl_loader, tree_noise_multiplier

EPSILON, DELTA, BATCH, RECORDS = 3.0, 1e-4, 16, 1424


class Stream(IterableDataset):
    """1,424 images and their labels, as they come: from a file, say. Each iteration begins anew (verify is one)."""

    def __iter__(self):
        data, _, _ = digits(flat=True)
        yield from (data[number] for number in range(RECORDS))


def trained(model, optimizer, loader):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    _, *test = digits(flat=True)
    device = torch.device("cpu")

    sigma = fastdp.noise_multiplier_for(target_epsilon=EPSILON, delta=DELTA, sample_rate=1.0, steps=1)
    model = nn.Linear(64, 10)
    # sample_rate=1: a record's step is known. The optimizer's epsilon would be of a record that is in every step
    optimizer = fastdp.DPSGD(model, lr=0.1, momentum=0.9, noise_multiplier=sigma, sample_rate=1.0,
                             expected_batch_size=BATCH)  # fmt: skip
    found = accuracy(trained(model, optimizer, DataLoader(Stream(), batch_size=BATCH)), *test, device)
    print(f"DP-SGD in one order: accuracy {found:.3f}, epsilon {epsilon_of([(sigma, 1.0, 1)], DELTA):.2f}")

    sigma = tree_noise_multiplier(target_epsilon=EPSILON, delta=DELTA, steps_per_epoch=RECORDS // BATCH, epochs=1)
    model = nn.Linear(64, 10)
    loader = ftrl_loader(Stream(), records=RECORDS, batch_size=BATCH)  # records= is len(Stream()), where it has one
    fastdp.verify(model, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), loader)
    optimizer = DPFTRL(model, lr=0.3, momentum=0.9, noise_multiplier=sigma)
    found = accuracy(trained(model, optimizer, loader), *test, device)
    print(f"DP-FTRL: accuracy {found:.3f}, epsilon {optimizer.epsilon(DELTA):.2f}")


if __name__ == "__main__":
    main()
