"""A rare class: weights in the loss, where a sampler would draw it more often. `python examples/imbalance.py`

One image in ten is a nine. Its recall is the share of the nines among the test images that are found.
"""

import torch
import torch.nn.functional as F
from digits import digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import fastdp

EPSILON, DELTA, EPOCHS, RARE = 3.0, 1e-4, 20, 9
# Written down beforehand: counting the private labels would have to be paid for. The largest is 1: a weight acts before
# clipping, so a larger one lifts no gradient above max_grad_norm.
WEIGHT = torch.tensor([0.1, 1.0])


def trained(data: TensorDataset, weight: torch.Tensor) -> tuple[nn.Module, float]:
    """The model and epsilon."""

    def loss(model, x, y):
        return (F.cross_entropy(model(x), y, reduction="none") * weight[y]).mean()  # not weight=: that couples samples

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    fastdp.verify(model, lambda m, batch: loss(m, *batch), data)
    loader = fastdp.poisson_loader(data, expected_batch_size=128)
    # "local" clips the long gradients alone; "automatic" makes all equally long, and so undoes the weights
    optimizer = fastdp.DPAdamW(model, lr=5e-3, clipping="local", max_grad_norm=1.0, target_epsilon=EPSILON,
                               delta=DELTA, epochs=EPOCHS, loader=loader)  # fmt: skip
    for x, y in (batch for _ in range(EPOCHS) for batch in loader):
        loss(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer.epsilon(DELTA)


def main() -> None:
    data, x_test, labels = digits(flat=True)
    x, y = data.tensors
    data, nine = TensorDataset(x, (y == RARE).long()), labels == RARE
    for name, weight in (("without weights", torch.ones(2)), ("with weights", WEIGHT)):
        model, spent = trained(data, weight)
        found = model(x_test).argmax(1) == 1
        print(f"{name}: recall {found[nine].float().mean():.3f}, accuracy {(found == nine).float().mean():.3f}, "
              f"epsilon {spent:.2f} at delta {DELTA}")  # fmt: skip
    often = WeightedRandomSampler(WEIGHT[data.tensors[1]], len(data))  # another sample rate for each record
    try:
        fastdp.poisson_loader(DataLoader(data, batch_size=128, sampler=often))
    except fastdp.errors.StepError as refusal:
        print("refused:", refusal)


if __name__ == "__main__":
    main()
