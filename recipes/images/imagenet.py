"""ImageNet-1K, from a folder of pictures or in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_sdpipe.pipeline.data import stand_in
from recipes.loaders import Loaders, MissingDataError

_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # of ImageNet's colours, the usual values
_DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
_SUFFIXES = frozenset({".jpeg", ".jpg", ".png"})


class Folder:
    """A folder for each class, numbered in the order of their names; pictures are decoded on access.

    Raises:
        MissingDataError: there is no picture.
    """

    def __init__(self, folder: Path) -> None:
        classes = sorted(path for path in folder.glob("*") if path.is_dir())
        self._files = [
            (file, label)
            for label, path in enumerate(classes)
            for file in sorted(path.iterdir())
            if file.suffix.lower() in _SUFFIXES
        ]
        if not self._files:
            raise missing(f"CLASS/*.JPEG in {folder.absolute()}")

    def __len__(self) -> int:
        return len(self._files)

    def label(self, index: int) -> int:
        return self._files[index][1]

    def image(self, index: int) -> Any:
        from PIL import Image

        return Image.open(self._files[index][0])


class HuggingFace:
    """A split of a data set with the columns ``image`` and ``label``, written by ``DatasetDict.save_to_disk``.

    Raises:
        MissingDataError: the data set is not there.
    """

    def __init__(self, folder: Path) -> None:
        import datasets

        try:
            self._rows: Any = datasets.load_from_disk(str(folder))
        except FileNotFoundError as error:
            raise missing(f"a saved data set in {folder.absolute()}") from error
        self._labels = self._rows["label"]

    def __len__(self) -> int:
        return len(self._rows)

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def image(self, index: int) -> Any:
        return self._rows[index]["image"]


Pictures: TypeAlias = Folder | HuggingFace


def missing(looked_for: str) -> MissingDataError:
    return MissingDataError(
        "ImageNet-1K",
        looked_for,
        "Download it from https://image-net.org into FOLDER/train/CLASS/*.JPEG and FOLDER/val/CLASS/*.JPEG, or as "
        "'ILSVRC/imagenet-1k' with Hugging Face datasets, .save_to_disk('FOLDER') with its splits train and val; "
        "then say data.folder=FOLDER. Without it, use data=fashion_mnist, data=cifar10 or data=digits.",
    )


def open_pictures(folder: Path) -> Pictures:
    """Open whichever of the two ``folder`` has."""
    return HuggingFace(folder) if (folder / "state.json").is_file() else Folder(folder)


def random_crop(image: Any, size: int) -> Any:
    """Return a random part of a picture, 8 to 100 % of its area at 3:4 to 4:3, scaled to ``size`` and mirrored with
    probability ½ (Szegedy et al. 2015, §6). Random numbers come from torch's global generator."""
    from PIL import Image

    width, height = image.size
    area = width * height * float(torch.empty(()).uniform_(0.08, 1.0))
    ratio = float(torch.empty(()).uniform_(np.log(3 / 4), np.log(4 / 3)).exp())
    wide, high = min(width, (area * ratio) ** 0.5), min(height, (area / ratio) ** 0.5)
    left, top = float(torch.rand(())) * (width - wide), float(torch.rand(())) * (height - high)
    part = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + wide, top + high))
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(()) < 0.5 else part


def centre_crop(image: Any, size: int) -> Any:
    """Return the centre square with 7/8 of a picture's shorter side, scaled to ``size``."""
    from PIL import Image

    width, height = image.size
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))


@dataclass(frozen=True)
class Decoded(Dataset[tuple[Tensor, Tensor]]):
    """Pictures as normalised float32 tensors of shape ``(3, size, size)``, and labels.

    Args:
        pictures: the pictures.
        size: side in pixels.
        crop: crops a decoded picture to that size.
    """

    pictures: Pictures
    size: int
    crop: Callable[[Any, int], Any]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        label = torch.tensor(self.pictures.label(index))
        with self.pictures.image(index) as image:
            image.draft("RGB", (2 * self.size, 2 * self.size))  # JPEG decodes to a smaller size several times faster
            part = self.crop(image.convert("RGB"), self.size)
        pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1)
        return (pixels / 255 - _MEAN) / _DEVIATION, label


@dataclass(frozen=True)
class Labels(Dataset[Tensor]):
    """Only the labels; :meth:`collate` makes batches like those of :class:`Decoded`, without reading a picture."""

    pictures: Pictures
    size: int

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.pictures.label(index))

    def collate(self, labels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return stand_in((len(labels), 3, self.size, self.size)), torch.stack(list(labels))


class ImageNet(Loaders):
    """ImageNet-1K in ``folder/train`` and ``folder/val``.

    Args:
        folder: folder that holds both.
        batch_size: batch size of one pipeline.
        size: side in pixels.
        num_workers: processes that decode pictures for each rank of a first stage; other ranks read only labels.
    """

    def __init__(self, folder: str, batch_size: int = 256, size: int = 224, num_workers: int = 8) -> None:
        super().__init__(batch_size, num_workers)
        self.folder = Path(folder)
        self.size = size

    def prepare_data(self) -> None:
        for part in ("train", "val"):
            open_pictures(self.folder / part)  # if missing, only one rank says so

    def setup(self, stage: str) -> None:
        self.train, self.val = (open_pictures(self.folder / part) for part in ("train", "val"))

    def loader(self, data: Any, train: bool, **options: Any) -> DataLoader[Any]:
        if not getattr(self.trainer and self.trainer.strategy, "reads_inputs", True):
            labels = Labels(data, self.size)
            return DataLoader(labels, self.batch_size, shuffle=train, drop_last=train, collate_fn=labels.collate)
        pictures = Decoded(data, self.size, random_crop if train else centre_crop)
        return super().loader(pictures, train, prefetch_factor=4 if self.num_workers else None, **options)
