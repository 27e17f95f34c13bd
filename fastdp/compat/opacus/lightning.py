"""A Lightning data module whose training loader samples by Poisson."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from .data_loader import DPDataLoader


def _data_module() -> Any:
    """Lightning's class, of that of its two packages which the script has imported, if any."""
    packages = ("lightning.pytorch", "pytorch_lightning")
    for package in sorted(packages, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(package).LightningDataModule
        except ImportError:
            continue
    raise ImportError("DPLightningDataModule needs Lightning: pip install lightning")


LightningDataModule: Any = _data_module()

__all__ = ["DPLightningDataModule"]


class DPLightningDataModule(LightningDataModule):  # type: ignore[misc]
    """Another data module with its training loader replaced by a DPDataLoader of the same data and batch size.

    Args: datamodule; generator: of the sampling (Opacus takes it and does not use it).
    """

    def __init__(self, datamodule: Any, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.datamodule, self.generator = datamodule, generator

    def train_dataloader(self) -> Any:
        loader = self.datamodule.train_dataloader()
        return DPDataLoader.from_data_loader(loader, distributed=False, generator=self.generator)

    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        self.datamodule.setup(stage)

    def teardown(self, stage: str | None = None) -> None:
        self.datamodule.teardown(stage)

    def val_dataloader(self) -> Any:
        return self.datamodule.val_dataloader()

    def test_dataloader(self) -> Any:
        return self.datamodule.test_dataloader()

    def predict_dataloader(self) -> Any:
        return self.datamodule.predict_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self.datamodule.transfer_batch_to_device(batch, device, dataloader_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.datamodule.on_before_batch_transfer(batch, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.datamodule.on_after_batch_transfer(batch, dataloader_idx)
