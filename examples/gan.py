"""A GAN that draws digits: the discriminator trains privately, the generator for free. `python examples/gan.py`

What it has learned: a classifier that sees generated images alone is tested on real ones.
"""

import torch
import torch.nn.functional as F
from digits import accuracy, digits
from torch import nn

import fastdp

EPSILON, DELTA, EPOCHS, BATCH, NOISE = 3.0, 1e-4, 40, 128, 8  # BATCH are generated: not len(x), which is private


def fake(generator):
    """Images [BATCH, 64] and their labels, which are the ten digits in turn."""
    labels = torch.arange(BATCH) % 10
    return generator(torch.cat([torch.randn(BATCH, NOISE), F.one_hot(labels, 10)], 1)), labels


def loss(discriminator, x, labels, real: bool):
    """The discriminator has a score for each digit. The mean of each image's own loss."""
    score = discriminator(x).gather(1, labels[:, None])
    return F.softplus(-score if real else score).mean()


def main() -> None:
    data, x_test, y_test = digits(flat=True)
    generator = nn.Sequential(nn.Linear(NOISE + 10, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 10))
    fastdp.verify(discriminator, lambda m, batch: loss(m, *batch, real=True), data[:8])
    loader = fastdp.poisson_loader(data, expected_batch_size=BATCH)
    private = fastdp.DPAdam(discriminator, lr=2e-3, betas=(0.5, 0.99), clipping="automatic",
                            target_epsilon=EPSILON, delta=DELTA, epochs=EPOCHS, loader=loader)  # fmt: skip
    ordinary = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    for x, y in (batch for _ in range(EPOCHS) for batch in loader):
        with private.public():  # no private record is in it: it waits for the step below, which adds it
            loss(discriminator, *(part.detach() for part in fake(generator)), real=False).backward()
        loss(discriminator, x, y, real=True).backward()
        private.step()
        private.zero_grad()
        with private.public():  # the generator's step; what it leaves with the discriminator is dropped
            ordinary.zero_grad()
            loss(discriminator, *fake(generator), real=True).backward()
            ordinary.step()
    classifier = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(classifier.parameters(), lr=1e-2)
    for _ in range(100):  # on generated images, which cost no more
        x, y = (part.detach() for part in fake(generator))
        optimizer.zero_grad()
        F.cross_entropy(classifier(x), y).backward()
        optimizer.step()
    found = accuracy(classifier, x_test, y_test, torch.device("cpu"))
    print(f"accuracy {found:.3f} on real images (chance 0.1), epsilon {private.epsilon(DELTA):.2f} at delta {DELTA}")


if __name__ == "__main__":
    main()
