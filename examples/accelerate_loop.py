"""A hand-written Accelerate loop, private: scikit-learn's digits to epsilon 3, with a checkpoint and its resumption.

pip install accelerate scikit-learn
python examples/accelerate_loop.py [--quick]
torchrun --nproc-per-node 2 examples/accelerate_loop.py --cpu [--quick]
torchrun --nproc-per-node 2 examples/accelerate_loop.py --fsdp [--quick]

With --fsdp, each GPU holds a part of the model (FSDP2). prepare() makes the parts, once the optimizer was made.
Any number of processes makes the same steps on the same records; on GPUs, `accelerate launch` starts one a device.
"""

from __future__ import annotations

import shutil
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, broadcast_object_list, send_to_device
from digits import accuracy, convolutions, digits, parser

import fastdp

DELTA, BATCH, AT_ONCE = 1e-4, 128, 48


def prepared(epochs: int, epsilon: float, cpu: bool, fsdp: bool):
    """Everything that a run needs; `private` is the optimizer itself, `optimizer` Accelerate's wrapper of it."""
    # gradient_accumulation_steps stays 1; a prepared scheduler must step once a step, not once a process
    parts = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap") if fsdp else None
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=parts, step_scheduler_with_optimizer=False)
    train, x, y = digits()
    torch.manual_seed(0)
    model = convolutions()
    fastdp.verify(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), train[:8])  # raises where samples are coupled
    loader = fastdp.poisson_loader(train, expected_batch_size=BATCH, max_physical_batch_size=AT_ONCE)
    private = fastdp.DPAdamW(
        model, lr=5e-3, target_epsilon=epsilon, delta=DELTA, epochs=epochs, loader=loader, clipping="automatic"
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(private, epochs * loader.steps_per_epoch)
    model, optimizer, schedule = accelerator.prepare(model, private, schedule)
    accelerator.register_for_checkpointing(loader)  # its place in the pass; prepare() has no use for it
    return accelerator, model, optimizer, schedule, loader, private, x, y


def train(accelerator, model, optimizer, schedule, loader, private) -> None:
    model.train()
    for batch in loader:
        x, y = send_to_device(batch, accelerator.device)
        accelerator.backward(F.cross_entropy(model(x), y))  # also of an empty batch: all gather the parts together
        optimizer.step()  # after each physical batch: it updates where the logical one is complete
        if private.stepped:
            schedule.step()
        optimizer.zero_grad()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--cpu", action="store_true")
    made.add_argument("--fsdp", action="store_true", help="lay the model in parts on all processes")
    options = made.parse_args()
    epochs = 3 if options.quick else 30
    settings = (epochs, options.epsilon, options.cpu, options.fsdp)

    accelerator, model, optimizer, schedule, loader, private, x, y = prepared(*settings)
    folder = broadcast_object_list([tempfile.mkdtemp()])[0]  # that of the first process: it saves, and all load
    try:
        for _ in range(epochs // 2):
            train(accelerator, model, optimizer, schedule, loader, private)
        accelerator.save_state(folder)
        accelerator.print(
            f"half way: accuracy {accuracy(model, x, y, accelerator.device):.3f}, epsilon {private.epsilon(DELTA):.2f}"
        )

        accelerator, model, optimizer, schedule, loader, private, x, y = prepared(*settings)  # another process, say
        accelerator.load_state(folder)  # weights, moments, schedule, the loader's place and what was spent
        accelerator.wait_for_everyone()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for _ in range(epochs - epochs // 2):
        train(accelerator, model, optimizer, schedule, loader, private)
    accelerator.print(
        f"accuracy {accuracy(model, x, y, accelerator.device):.3f}, "
        f"epsilon {private.epsilon(DELTA):.2f} at delta {DELTA}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
