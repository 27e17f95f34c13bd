"""A script with Opacus's names, data-parallel: scikit-learn's digits to epsilon 3.

pip install scikit-learn
torchrun --nproc-per-node 2 examples/opacus_ddp.py [--quick] [--ghost | --fsdp]

But for where the names come from, this is a script for Opacus. The batch size of the loader is that of all processes
together; the engine gives each process its share, and any number of processes makes the same steps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from digits import accuracy, convolutions, digits, join, parser
from torch import nn
from torch.utils.data import DataLoader

from fastdp.compat.opacus import PrivacyEngine
from fastdp.compat.opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from fastdp.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from fastdp.compat.opacus.utils.fsdp_utils import FSDP2Wrapper

DELTA, BATCH, AT_ONCE = 1e-4, 128, 32  # the batch of all processes together; what one of them holds at once


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--ghost", action="store_true", help="grad_sample_mode='ghost'")
    made.add_argument("--fsdp", action="store_true", help="grad_sample_mode='ghost_fsdp', the model in parts")
    options = made.parse_args()
    epochs = 3 if options.quick else 30
    device = join()
    train, x, y = digits()
    model = FSDP2Wrapper(convolutions().to(device)) if options.fsdp else DPDDP(convolutions().to(device))
    mode = "ghost_fsdp" if options.fsdp else "ghost" if options.ghost else "hooks"
    engine = PrivacyEngine(secure_mode=True)
    model, optimizer, *criterion, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3), max_grad_norm=1.0,
        data_loader=DataLoader(train, batch_size=BATCH), target_epsilon=options.epsilon, target_delta=DELTA,
        epochs=epochs, grad_sample_mode=mode,
    )  # fmt: skip
    loss = criterion[0] if criterion else nn.CrossEntropyLoss()
    for _ in range(epochs):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=AT_ONCE, optimizer=optimizer) as batches:
            for images, labels in batches:
                optimizer.zero_grad()
                loss(model(images.to(device)), labels.to(device)).backward()
                optimizer.step()
    right = accuracy(model, x, y, device)
    if dist.get_rank() == 0:
        print(f"accuracy {right:.3f}, epsilon {engine.get_epsilon(DELTA):.2f} at delta {DELTA}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
