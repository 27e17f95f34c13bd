"""A LightningModule trained privately: scikit-learn's digits to epsilon 3, automatic or manual optimization.

pip install lightning scikit-learn
python examples/lightning_module.py [--quick] [--manual] [--devices 2 [--strategy ddp_spawn]]
python examples/lightning_module.py --devices 2 --fsdp [--quick]

With --fsdp, each device holds a part of the model (FSDP2), which configure_model() lays.
Any number of devices makes the same steps on the same records.
"""

from __future__ import annotations

import logging
import tempfile

import lightning as L
import torch
import torch.nn.functional as F
from digits import convolutions, digits, parser
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import fastdp
from fastdp.lightning import DPCallback, stream

DELTA, BATCH, AT_ONCE = 1e-4, 128, 48


class Digits(L.LightningModule):
    def __init__(self, noise_multiplier: float, steps: int, manual: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = convolutions()
        self.noise_multiplier, self.steps = noise_multiplier, steps
        self.automatic_optimization = not manual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def configure_model(self):
        """Of ModelParallelStrategy alone, which has a mesh. It may be called again, by a second fit()."""
        if self.device_mesh is not None and not isinstance(self.net, FSDPModule):
            for layer in self.net:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)  # self(x), so that all between input and output is seen
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            self.manual_backward(loss)
            optimizer.step()
            if optimizer.stepped:
                self.lr_schedulers().step()
            optimizer.zero_grad()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        self.private = fastdp.DPAdamW(
            self, lr=5e-3, noise_multiplier=self.noise_multiplier, max_grad_norm=1.0, clipping="automatic"
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.private, self.steps)
        return {"optimizer": self.private, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_scheduler_step(self, scheduler, metric):
        if self.private.stepped:  # once a logical batch, not once a physical one
            scheduler.step()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--manual", action="store_true", help="manual optimization")
    made.add_argument("--devices", type=int, default=1)
    made.add_argument("--strategy", default="ddp", choices=["ddp", "ddp_spawn", "ddp_fork"])
    made.add_argument("--fsdp", action="store_true", help="lay the model in parts on all devices")
    made.add_argument("--accelerator", default="auto")
    made.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    options = made.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    epochs = 3 if options.quick else 30
    train, *test = digits()
    loader = fastdp.poisson_loader(train, expected_batch_size=BATCH, max_physical_batch_size=AT_ONCE)
    steps = epochs * loader.steps_per_epoch
    sigma = fastdp.noise_multiplier_for(
        target_epsilon=options.epsilon, delta=DELTA, sample_rate=loader.sample_rate, steps=steps
    )  # fmt: skip
    module = Digits(sigma, steps, options.manual)
    strategy = options.strategy if options.devices > 1 else "auto"
    if options.fsdp:  # its own default is tensor parallelism
        strategy = ModelParallelStrategy(data_parallel_size=options.devices, tensor_parallel_size=1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=epochs, accelerator=options.accelerator, devices=options.devices,
            strategy=strategy, precision=options.precision, logger=False,
            default_root_dir=folder, enable_model_summary=False, enable_progress_bar=False,
            callbacks=[DPCallback(delta=DELTA, target_epsilon=options.epsilon)],
        )  # fmt: skip
        trainer.fit(module, stream(loader), DataLoader(TensorDataset(*test), batch_size=120))
    seen = trainer.callback_metrics
    if trainer.is_global_zero:
        print(f"accuracy {seen['accuracy']:.3f}, epsilon {seen['epsilon']:.2f} at delta {DELTA}, ", end="")
        print(f"{int(seen['noised_steps'])} noised steps in {trainer.global_step} physical batches of a process")


if __name__ == "__main__":
    main()
