"""Data-parallel private training with DistributedDataParallel: scikit-learn's digits to epsilon 3.

pip install scikit-learn
torchrun --nproc-per-node 2 examples/ddp.py [--quick]

Any number of processes makes the same steps on the same records. On GPUs torchrun starts one process a device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import accuracy, convolutions, digits, join, parser
from torch.nn.parallel import DistributedDataParallel

import fastdp

DELTA, BATCH, AT_ONCE = 1e-4, 128, 32  # the batch of all processes together; what one of them holds at once


def main() -> None:
    options = parser(__doc__).parse_args()

    device = join()
    train, x, y = digits()
    torch.manual_seed(0)
    model = convolutions().to(device)
    fastdp.verify(model, lambda m, b: F.cross_entropy(m(b[0].to(device)), b[1].to(device)), train[:8])
    wrapped = DistributedDataParallel(model)

    loader = fastdp.poisson_loader(train, expected_batch_size=BATCH, max_physical_batch_size=AT_ONCE)
    epochs = 3 if options.quick else 30
    optimizer = fastdp.DPAdamW(
        wrapped,
        lr=5e-3,
        target_epsilon=options.epsilon,
        delta=DELTA,
        epochs=epochs,
        loader=loader,
        clipping="automatic",
    )
    for _ in range(epochs):
        for images, labels in loader:  # this rank's part; a rank that has none left gets empty batches
            F.cross_entropy(wrapped(images.to(device)), labels.to(device)).backward()
            optimizer.step()  # after each physical batch: at the end of the logical one, all ranks add up and update
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        right = accuracy(model, x, y, device)
        print(f"accuracy {right:.3f}, epsilon {optimizer.epsilon(DELTA):.2f} at delta {DELTA}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
