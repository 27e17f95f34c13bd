"""Private training of a model whose layers are split over processes (parallelize_module): digits to epsilon 3.

pip install scikit-learn
torchrun --nproc-per-node 2 examples/tensor_parallel.py [--quick]
torchrun --nproc-per-node 4 examples/tensor_parallel.py [--quick] [--shard]

Two processes share the layers and every batch. With four there are two copies, each with samples of its own; --shard
keeps them as one copy in parts (fully_shard). All make the same steps on the same records.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import Block, accuracy, blocks, digits, join, parser
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fastdp

DELTA, BATCH, AT_ONCE, SPLIT = 1e-4, 128, 32, 2  # SPLIT: how many processes share the layers


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shard", action="store_true", help="cut the copies into parts")
    options = made.parse_args()

    device = join()
    mesh = init_device_mesh(device.type, (dist.get_world_size() // SPLIT, SPLIT), mesh_dim_names=("dp", "tp"))
    train, x, y = digits(flat=True)
    torch.manual_seed(0)
    model = blocks().to(device)
    fastdp.verify(model, lambda m, b: F.cross_entropy(m(b[0].to(device)), b[1].to(device)), train[:8])
    for block in model:
        if isinstance(block, Block):
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if options.shard:
                fully_shard(block, mesh=mesh["dp"])
    if options.shard:
        fully_shard(model, mesh=mesh["dp"])

    # samples are dealt over the copies: the processes that share layers get the same ones
    loader = fastdp.poisson_loader(train, expected_batch_size=BATCH, max_physical_batch_size=AT_ONCE, mesh=mesh["dp"])
    epochs = 3 if options.quick else 30
    optimizer = fastdp.DPAdamW(
        model, lr=5e-3, target_epsilon=options.epsilon, delta=DELTA, epochs=epochs, loader=loader, clipping="automatic",
        mesh=mesh["dp"],
    )  # fmt: skip
    for _ in range(epochs):
        for images, labels in loader:
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    right = accuracy(model, x, y, device)
    epsilon = optimizer.epsilon(DELTA)
    if dist.get_rank() == 0:
        print(f"accuracy {right:.3f}, epsilon {epsilon:.2f} at delta {DELTA}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
