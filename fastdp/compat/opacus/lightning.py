"""A Lightning data module whose training loader samples by Poisson."""

from __future__ import annotations

from typing import Any

from opacus import lightning as theirs

from .data_loader import DPDataLoader

__all__ = ["DPLightningDataModule"]


class DPLightningDataModule(theirs.DPLightningDataModule):  # type: ignore[misc]
    """Another data module with its training loader replaced by a DPDataLoader of the same data and batch size.

    Args: datamodule; generator: of the sampling (Opacus takes it and does not use it).
    """

    def train_dataloader(self) -> Any:
        loader = self.datamodule.train_dataloader()
        return DPDataLoader.from_data_loader(loader, distributed=False, generator=self.generator)
