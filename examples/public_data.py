"""30 public images beside 1,407 private ones: what they give at one epsilon. `python examples/public_data.py`

Three ways: on the public images alone, on the private ones alone, and first on the public ones, then on both in mixed
steps. Public are images that anybody may see, such as those of volunteers.
"""

import torch
import torch.nn.functional as F
from digits import accuracy, digits
from torch import nn
from torch.utils.data import Subset

import fastdp

EPSILON, DELTA, EPOCHS, PUBLIC = 0.5, 1e-4, 20, 30


def pretrain(model, x, y) -> None:
    """Without privacy, and so before the private optimizer is made, or within its public()."""
    ordinary = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(100):
        ordinary.zero_grad()
        F.cross_entropy(model(x), y).backward()
        ordinary.step()


def train_privately(model, data, public_x=None, public_y=None) -> float:
    """Returns epsilon. Public images, if there are any, join every step."""
    fastdp.verify(model, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), data)
    loader = fastdp.poisson_loader(data, expected_batch_size=256)
    optimizer = fastdp.DPAdamW(model, lr=5e-3, clipping="automatic", target_epsilon=EPSILON, delta=DELTA,
                               epochs=EPOCHS, loader=loader)  # fmt: skip
    for x, y in (batch for _ in range(EPOCHS) for batch in loader):
        if public_x is not None:
            with optimizer.public():  # waits for the step, which adds it to the noisy private gradient
                (0.5 * F.cross_entropy(model(public_x), public_y)).backward()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.epsilon(DELTA)


def main() -> None:
    data, x_test, y_test = digits(flat=True)
    public, private = data[:PUBLIC], Subset(data, range(PUBLIC, len(data)))
    for name in ("public", "private", "both"):
        model, spent = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), 0.0
        if name != "private":
            pretrain(model, *public)
        if name != "public":
            spent = train_privately(model, private, *(public if name == "both" else ()))
        found = accuracy(model, x_test, y_test, torch.device("cpu"))
        print(f"{name:8s} accuracy {found:.3f}, epsilon {spent:.2f} at delta {DELTA}")


if __name__ == "__main__":
    main()
