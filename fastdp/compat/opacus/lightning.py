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
_FORWARDED = (
    "prepare_data", "setup", "teardown", "val_dataloader", "test_dataloader", "predict_dataloader",
    "transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer",
)  # fmt: skip

__all__ = ["DPLightningDataModule"]


class DPLightningDataModule(LightningDataModule):  # type: ignore[misc]
    """Another data module with its training loader replaced by a DPDataLoader of the same data and batch size.

    Args: datamodule; generator: of the sampling (Opacus takes it and does not use it).
    """

    def __init__(self, datamodule: Any, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.datamodule, self.generator = datamodule, generator
        for name in _FORWARDED:
            if getattr(type(self), name) is getattr(LightningDataModule, name):  # not of a derived class
                setattr(self, name, getattr(datamodule, name))

    def train_dataloader(self) -> Any:
        loader = self.datamodule.train_dataloader()
        return DPDataLoader.from_data_loader(loader, distributed=False, generator=self.generator)
