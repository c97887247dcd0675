"""Pictures read from the formats that data sets come in, and varied for training."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.images.imagenet import ImageNet
from recipes.images.small import CIFAR10, FashionMNIST, read_cifar10, read_idx, shift_and_flip
from recipes.loaders import MissingDataError

Image = pytest.importorskip("PIL.Image")


def idx(array: Tensor) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return head + array.numpy().tobytes()


PACKED = gzip.compress(idx(torch.zeros(5, dtype=torch.uint8)), mtime=0)  # workers name tests alike


@pytest.mark.parametrize("packed", [False, True])
def test_an_idx_file_is_read(tmp_path: Path, packed: bool) -> None:
    array = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    file = tmp_path / "some-idx3-ubyte"
    file.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    assert torch.equal(read_idx(file), array)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x00\x00\x0d\x01", "not an IDX"),
        (idx(torch.zeros(5, dtype=torch.uint8))[:-1], "4 numb"),
        *((packed, "file cannot be unpacked") for packed in (PACKED[:-9], PACKED[:12], PACKED[:12] + b"?" * 30)),
    ],
)
def test_other_files_are_not_taken_for_idx(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / "file")


def test_a_cifar_file_is_read(tmp_path: Path) -> None:
    images = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    labels = torch.tensor([7, 0, 9])
    file = tmp_path / "data_batch_1.bin"
    file.write_bytes(b"".join(bytes([n]) + i.numpy().tobytes() for n, i in zip(labels.tolist(), images, strict=True)))
    read_images, read_labels = read_cifar10(file)
    assert torch.equal(read_images, images)
    assert torch.equal(read_labels, labels)
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match="3073"):
        read_cifar10(file)


def write_fashion(folder: Path, each: int = 1) -> None:
    """The class is the place of a bright stripe."""
    for part, count in {"train": 12 * each, "t10k": 4 * each}.items():
        labels = torch.arange(count, dtype=torch.uint8) % 10
        images = torch.randint(50, (count, 28, 28), dtype=torch.uint8)
        for image, label in zip(images, labels.tolist(), strict=True):
            image[2 * label : 2 * label + 4] += 200
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))


def test_fashion_mnist_makes_batches_and_varies_what_is_trained_on(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    data = FashionMNIST(str(tmp_path), batch_size=4, num_workers=0)
    data.prepare_data()
    data.setup("fit")
    images, labels = next(iter(data.train_dataloader()))
    assert (images.shape, images.dtype, labels.dtype) == ((4, 1, 28, 28), torch.float32, torch.int64)
    assert -1 <= images.min() < images.max() <= 1
    assert torch.equal(data.val[0][0], data.val[0][0])
    torch.manual_seed(0)
    versions = torch.stack([data.train[0][0] for _ in range(10)])
    assert len(versions.unique(dim=0)) > 5
    plain = FashionMNIST(str(tmp_path), augment=False)
    plain.setup("fit")
    assert torch.equal(plain.train[0][0], plain.train[0][0])
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(idx(torch.zeros(3, dtype=torch.uint8)))
    with pytest.raises(ValueError, match=r"has the shape \[4, 28, 28\], and .*t10k-labels-idx1-ubyte.gz \[3\]"):
        data.prepare_data()


def test_a_picture_is_moved_within_its_margin() -> None:
    torch.manual_seed(0)
    image = torch.zeros(1, 9, 9)
    image[0, 4, 4] = 1
    places = {tuple(shift_and_flip(image, 2)[0].nonzero()[0].tolist()) for _ in range(500)}
    assert places == {(row, column) for row in range(2, 7) for column in range(2, 7)}
    assert torch.equal(shift_and_flip(torch.ones(3, 5, 7), 0), torch.ones(3, 5, 7))


def write_imagenet(folder: Path, each: int = 2) -> None:
    colours = {"n01": (250, 0, 0), "n02": (0, 250, 0)}
    for part in ("train", "val"):
        for name, colour in colours.items():
            (folder / part / name).mkdir(parents=True)
            for number in range(each):
                Image.new("RGB", (60 + number, 40), colour).save(folder / part / name / f"{number}.JPEG")


def save_imagenet(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    colours = [(250, 0, 0), (250, 0, 0), (0, 250, 0), (0, 250, 0)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    for part in ("train", "val"):
        rows = {"image": [Image.new("RGB", (60, 40), colour) for colour in colours], "label": [0, 0, 1, 1]}
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder / part))


@pytest.mark.parametrize("write", [write_imagenet, save_imagenet])
def test_imagenet_is_decoded_where_it_is_needed(tmp_path: Path, write: Any) -> None:
    write(tmp_path)

    def batches(reads_inputs: bool) -> list[list[Tensor]]:
        data = ImageNet(str(tmp_path), batch_size=3, size=16, num_workers=0)
        data.trainer = SimpleNamespace(strategy=SimpleNamespace(reads_inputs=reads_inputs))  # type: ignore[assignment]
        data.prepare_data()
        data.setup("fit")
        return [*data.val_dataloader(), next(iter(data.train_dataloader()))]

    for batch in (first := batches(True)):
        images, labels = batch
        assert images.shape == (len(labels), 3, 16, 16)
        assert torch.equal(images[:, 1].mean((1, 2)) > 0, labels == 1)  # the second class is green
    for batch, read in zip(last := batches(False), first, strict=True):
        images, labels = batch
        assert images.shape == read[0].shape
        assert images.isnan().all()
        assert images.untyped_storage().nbytes() == 4
    assert torch.equal(last[0][1], first[0][1])


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (FashionMNIST, "apt install dataset-fashion-mnist"),
        (CIFAR10, "cifar-10-binary.tar.gz"),
        (ImageNet, "https://image-net.org"),
    ],
)
def test_what_is_missing_is_named_with_how_to_get_it(tmp_path: Path, make: Any, advice: str) -> None:
    with pytest.raises(MissingDataError, match=rf"{tmp_path}/nowhere(.|\n)*{advice}(.|\n)*data.folder=FOLDER"):
        make(str(tmp_path / "nowhere")).prepare_data()
