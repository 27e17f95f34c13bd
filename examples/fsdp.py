"""Private training of a model in parts on all processes (fully_shard, FSDP2): scikit-learn's digits to epsilon 3.

pip install scikit-learn
torchrun --nproc-per-node 2 examples/fsdp.py [--quick]

Any number of processes makes the same steps on the same records, and takes up the checkpoint of any other number.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from digits import Block, accuracy, blocks, digits, join, parser
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import fastdp

DELTA, BATCH, AT_ONCE = 1e-4, 128, 32  # the batch of all processes together; what one of them holds at once


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--save", help="a folder for a checkpoint at the end")
    options = made.parse_args()

    device = join()
    train, x, y = digits(flat=True)
    torch.manual_seed(0)
    model = blocks().to(device)
    fastdp.verify(model, lambda m, b: F.cross_entropy(m(b[0].to(device)), b[1].to(device)), train[:8])
    for block in model:
        if isinstance(block, Block):
            fully_shard(block)
    fully_shard(model)

    loader = fastdp.poisson_loader(train, expected_batch_size=BATCH, max_physical_batch_size=AT_ONCE)
    epochs = 3 if options.quick else 30
    optimizer = fastdp.DPAdamW(
        model, lr=5e-3, target_epsilon=options.epsilon, delta=DELTA, epochs=epochs, loader=loader, clipping="automatic"
    )
    for _ in range(epochs):
        for images, labels in loader:  # this rank's part; an empty batch runs, too: all gather the parameters together
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    right = accuracy(model, x, y, device)
    if options.save:
        weights, state = get_state_dict(model, optimizer)  # with the accountant's history, without the secret key
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=options.save)
    epsilon = optimizer.epsilon(DELTA)
    if dist.get_rank() == 0:
        print(f"accuracy {right:.3f}, epsilon {epsilon:.2f} at delta {DELTA}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
