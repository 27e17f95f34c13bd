"""Ray Train's TorchTrainer with two workers on the CPU: scikit-learn's digits to epsilon 3.

pip install 'ray[train]' scikit-learn
python examples/ray_ddp.py [--quick]

Ray begins the process group before it calls `train_worker`, so a worker's loop is that of `examples/ddp.py`. The loader
is fastdp's own: leave Ray Data's shards and `ray.train.torch.prepare_data_loader` out.
"""

from __future__ import annotations

import tempfile
from typing import Any

import ray.train
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import accuracy, convolutions, digits, parser
from ray.train.torch import TorchTrainer, prepare_model

import fastdp

DELTA, BATCH, AT_ONCE = 1e-4, 128, 32  # the batch of all workers together; what one of them holds at once


def train_worker(config: dict[str, Any]) -> None:
    train, x, y = digits()
    torch.manual_seed(0)
    model = prepare_model(convolutions())  # in DistributedDataParallel
    loader = fastdp.poisson_loader(train, expected_batch_size=BATCH, max_physical_batch_size=AT_ONCE)
    optimizer = fastdp.DPAdamW(
        model, lr=5e-3, target_epsilon=config["epsilon"], delta=DELTA, epochs=config["epochs"], loader=loader,
        clipping="automatic",
    )  # fmt: skip
    for _ in range(config["epochs"]):
        for images, labels in loader:  # this worker's part
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    right = accuracy(model.module, x, y, torch.device("cpu"))
    metrics = {"accuracy": right, "epsilon": optimizer.epsilon(DELTA)}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"{folder}/model.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)  # of metrics without a checkpoint, the result keeps none


def main() -> None:
    options = parser(__doc__).parse_args()
    trainer = TorchTrainer(
        train_worker, train_loop_config={"epochs": 3 if options.quick else 30, "epsilon": options.epsilon},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
    )  # fmt: skip
    found = trainer.fit().metrics
    print(f"accuracy {found['accuracy']:.3f}, epsilon {found['epsilon']:.2f} at delta {DELTA}")


if __name__ == "__main__":
    main()
