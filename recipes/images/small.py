"""Data sets of small pictures, which fit into memory, and their file formats."""

from __future__ import annotations

import gzip
import math
import zlib
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from recipes.loaders import Loaders, MissingDataError

Pictures = tuple[Tensor, Tensor]
_PADDING = 4  # pixels
_CIFAR_RECORD = 1 + 3 * 32 * 32  # a label, and the pixels: all red ones, all green ones, all blue ones
_UNSIGNED_BYTES = 0x08  # of the IDX format


class _Small(Loaders):
    """The common part of both data modules.

    Args:
        folder: folder that holds the files.
        batch_size: batch size of one pipeline.
        num_workers: processes that prepare pictures for each rank.
        augment: whether training pictures are shifted and mirrored.
    """

    called: str
    remedy: str
    """What to do where a file is missing."""

    def __init__(self, folder: str, batch_size: int = 256, num_workers: int = 1, augment: bool = True) -> None:
        super().__init__(batch_size, num_workers)
        self.folder = Path(folder)
        self.augment = augment

    @abstractmethod
    def read(self, train: bool) -> Pictures:
        """Return pictures, uint8 of shape ``(n, channels, height, width)``, and labels.

        Raises:
            MissingDataError: the files are not in the folder.
        """

    def prepare_data(self) -> None:
        self.read(train=False)  # if files are missing, only one rank says so

    def setup(self, stage: str) -> None:
        self.train, self.val = (PictureDataset(*self.read(train), train and self.augment) for train in (True, False))

    def _file(self, *names: str) -> Path:
        """Return the first of these files that is there."""
        for name in names:
            if (file := self.folder / name).is_file():
                return file
        raise MissingDataError(self.called, f"{' or '.join(names)} in {self.folder.absolute()}", self.remedy)


class FashionMNIST(_Small):
    """60,000 grey pictures of clothes to train on and 10,000 to validate, 28 × 28 pixels, in ten classes."""

    called = "Fashion-MNIST"
    remedy = (
        "On Debian: apt install dataset-fashion-mnist. Else put the four files from "
        "https://github.com/zalandoresearch/fashion-mnist into a folder and say data.folder=FOLDER."
    )

    def read(self, train: bool) -> Pictures:
        part = "train" if train else "t10k"
        named = (f"{part}-{what}-ubyte" for what in ("images-idx3", "labels-idx1"))
        images, labels = (self._file(name, f"{name}.gz") for name in named)
        pictures, classes = read_idx(images), read_idx(labels)
        if pictures.shape[1:] != (28, 28) or classes.shape != pictures.shape[:1]:
            shapes = f"{[*pictures.shape]}, and {labels} {[*classes.shape]}"
            raise ValueError(f"{images} has the shape {shapes}; needed are [n, 28, 28] and [n]")
        return pictures.unsqueeze(1), classes.long()


class CIFAR10(_Small):
    """50,000 colour pictures to train on and 10,000 to validate, 32 × 32 pixels, in ten classes; binary version."""

    called = "CIFAR-10"
    remedy = "Unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz and say data.folder=FOLDER."

    def read(self, train: bool) -> Pictures:
        names = [f"data_batch_{number}.bin" for number in range(1, 6)] if train else ["test_batch.bin"]
        parts = [read_cifar10(self._file(name)) for name in names]
        return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


class PictureDataset(Dataset[tuple[Tensor, Tensor]]):
    """Pictures in float32 from −1 to 1, varied if ``augment``, with their labels."""

    def __init__(self, images: Tensor, labels: Tensor, augment: bool) -> None:
        self.images = images
        self.labels = labels
        self._augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return several pictures at once, which is faster; loaders call this."""
        images: Iterable[Tensor] = self.images[indices].float() / 127.5 - 1
        if self._augment:
            images = [shift_and_flip(image, _PADDING) for image in images]
        return [*zip(images, self.labels[indices], strict=True)]


def shift_and_flip(image: Tensor, padding: int) -> Tensor:
    """Return ``image``, of shape ``(channels, height, width)``, shifted by up to ``padding`` pixels over a margin of
    zeros, and mirrored left to right with probability ½. Random numbers come from torch's global generator."""
    _, height, width = image.shape
    top, left = torch.randint(2 * padding + 1, (2,)).tolist()
    moved = F.pad(image, (padding,) * 4)[:, top : top + height, left : left + width]
    return moved.flip(-1) if torch.rand(()) < 0.5 else moved


def read_cifar10(file: Path) -> tuple[Tensor, Tensor]:
    """Read CIFAR-10's binary version: pictures, uint8 of shape ``(n, 3, 32, 32)``, and labels, int64 of shape ``(n,)``.

    Raises:
        ValueError: the file does not consist of such records.
    """
    data = file.read_bytes()
    if not data or len(data) % _CIFAR_RECORD:
        raise ValueError(
            f"{file} has {len(data)} bytes, which is no multiple of the {_CIFAR_RECORD} of a CIFAR-10 record"
        )
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, _CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def read_idx(file: Path) -> Tensor:
    """Read the array in an IDX file of unsigned bytes, the format of MNIST and Fashion-MNIST, gzipped or not.

    Layout: two zero bytes, the type of the numbers, the number of dimensions, each dimension as a big-endian 32-bit
    number, and then the numbers.

    Returns:
        A uint8 tensor of the shape that the file gives.

    Raises:
        ValueError: the file has another format or another length than it says, or cannot be unpacked.
    """
    data = file.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{file} cannot be unpacked ({error}); get it again") from error
    if len(data) < 4 or data[:3] != bytes([0, 0, _UNSIGNED_BYTES]):
        raise ValueError(f"{file} is not an IDX file of unsigned bytes: it starts with {data[:4]!r}")
    start = 4 + 4 * data[3]
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    if len(data) - start != math.prod(shape):
        raise ValueError(f"{file} holds {len(data) - start} numbers, but says that its shape is {shape}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).view(shape)
