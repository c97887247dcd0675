"""The base of all data modules, and the error for a data set that was not found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, IterableDataset


class MissingDataError(FileNotFoundError):
    """A data set was not found; the message says where it was looked for and how to get it."""

    def __init__(self, name: str, looked_for: str | Path, remedy: str) -> None:
        super().__init__(f"{name} was not found: looked for {looked_for}. {remedy}")


class Loaders(L.LightningDataModule):
    """A data module whose ``setup`` sets the data sets ``train`` and ``val``.

    Args:
        batch_size: samples in a batch of one pipeline.
        num_workers: number of processes of each rank that prepare batches.
    """

    train: Any
    val: Any

    def __init__(self, batch_size: int, num_workers: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.train, train=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.val, train=False)

    def loader(self, data: Any, train: bool, **options: Any) -> DataLoader[Any]:
        """Return a loader of ``data``.

        Args:
            data: a data set or a stream.
            train: whether to drop a last batch that is not full, and to shuffle unless ``data`` is a stream.
            options: other arguments of ``DataLoader``.
        """
        return DataLoader(
            data,
            self.batch_size,
            shuffle=train and not isinstance(data, IterableDataset),
            drop_last=train,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            **options,
        )
