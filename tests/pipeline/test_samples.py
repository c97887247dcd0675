from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.pipeline import micro_batches
from lightning_sdpipe.pipeline.micro_batches import find_samples, shapes

X = torch.arange(4.0)


def boxes(count: int) -> dict[str, Tensor]:
    return {"boxes": torch.ones(count, 4), "labels": torch.ones(count, dtype=torch.int64)}


class Named(NamedTuple):
    x: Tensor
    names: list[str]


@dataclass(frozen=True)
class Record:
    x: Tensor
    kind: str


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, X[1:3]),
        ([X, 2 * X], [X[1:3], 2 * X[1:3]]),
        ({"x": X, "name": ["a", "b", "c", "d"], "task": "t"}, {"x": X[1:3], "name": ["b", "c"], "task": "t"}),
        ((X, torch.ones(1, 7), torch.tensor(3.0)), (X[1:3], torch.ones(1, 7), torch.tensor(3.0))),
        ([["a", "b", "c", "d"], X.tolist()], [["b", "c"], [1.0, 2.0]]),
        (["a", "b", "c", "d"], ["b", "c"]),
        ({"a": {"x": X}, "b": {"x": X, "c": None}}, {"a": {"x": X[1:3]}, "b": {"x": X[1:3], "c": None}}),
        ([[X, 2 * X], [3 * X, 4 * X, 5 * X]], [[X[1:3], 2 * X[1:3]], [3 * X[1:3], 4 * X[1:3], 5 * X[1:3]]]),
        ([[X, 2 * X], [3 * X, 4 * X]], [[X[1:3], 2 * X[1:3]], [3 * X[1:3], 4 * X[1:3]]]),
        ((np.arange(4), X), (np.array([1, 2]), X[1:3])),
        ({"words": [[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 0, 0]]}, {"words": [[4, 5, 6], [7, 8, 9]]}),
        (Named(X, ["a", "b", "c", "d"]), Named(X[1:3], ["b", "c"])),
        ([Record(X, "k"), X], [Record(X[1:3], "k"), X[1:3]]),
    ],
)
def test_everything_of_the_samples_is_taken_and_the_rest_is_left(batch: Any, expected: Any) -> None:
    samples = find_samples(batch, "")
    assert samples.count == 4
    assert plain(samples[1:3]) == plain(expected)
    assert type(samples[1:3]) is type(batch)


@pytest.mark.parametrize("batch", [X, (X, 2 * X), [X, 2 * X], {"x": X, "y": torch.ones(4, 3, dtype=torch.int64)}])
def test_a_batch_of_tensors_is_read_as_any_other(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_samples(batch, "")
    assert found.is_plain
    monkeypatch.setattr(micro_batches, "_plain_parts", lambda batch: ())
    general = find_samples(batch, "")
    assert not general.is_plain
    assert (found.count, plain(found[1:3])) == (general.count, plain(general[1:3]))


def plain(value: Any) -> Any:
    """Without tensors, which do not compare."""
    if isinstance(value, Record):
        return Record, plain(value.x), value.kind
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, Tensor | np.ndarray) else value


IMAGES = [torch.full((3, 5, 5 + i), float(i)) for i in range(4)]


@pytest.mark.parametrize("counts", [[2, 0, 1, 5], [3, 3, 3, 3]])
def test_images_of_several_sizes_with_their_boxes(counts: list[int]) -> None:
    """Also where all tensors happen to agree on three channels, or boxes."""
    batch = (IMAGES, [boxes(count) for count in counts])
    samples = find_samples(batch, "")
    assert samples.count == 4
    images, targets = samples[1:3]
    assert [float(image.mean()) for image in images] == [1.0, 2.0]
    assert [len(target["boxes"]) for target in targets] == counts[1:3]


def test_a_list_of_samples_that_nobody_has_collated() -> None:
    batch = [{"image": image, **boxes(count)} for image, count in zip(IMAGES, (2, 0, 1, 5), strict=True)]
    assert [float(sample["image"].mean()) for sample in find_samples(batch, "")[2:4]] == [2.0, 3.0]


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences(enforce_sorted: bool) -> None:
    sequences = [torch.full((length,), float(length)) for length in ([5, 4, 2, 1] if enforce_sorted else [2, 5, 1, 4])]
    samples = find_samples({"x": pack_sequence(sequences, enforce_sorted), "y": X}, "")
    assert samples.count == 4
    part = unpack_sequence(samples[1:3]["x"])
    torch.testing.assert_close(part, sequences[1:3])


class Graph:
    """Of a library that is not known here."""


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ((torch.ones(20, 8, 5), torch.ones(8)), r"batch\[0\]: \(20, 8, 5\), batch\[1\]: \(8,\)"),
        ({"x": X, "weights": torch.ones(10)}, r"batch\['x'\]: \(4,\), batch\['weights'\]: \(10,\)"),
        ({"x": X, "captions": ["a"] * 20}, r"batch\['captions'\]: list of 20 str"),
        ((X, Graph()), r"batch\[1\]: Graph"),
        ([X, [X, Graph()]], r"batch\[1\]: list of 2 Graph and Tensor"),
        ([[torch.ones(16), torch.ones(16)], [torch.ones(64), torch.ones(64)]], r"batch\[0\]: list of 2 Tensor"),
        ([{"x": torch.ones(16)}, {"x": torch.ones(64)}], r"batch\[0\]\['x'\]: \(16,\), batch\[1\]\['x'\]: \(64,\)"),
        (torch.eye(4).to_sparse(), "batch: Tensor"),
        ({"task": "t"}, "nothing but constants"),
    ],
)
def test_parts_that_do_not_tell_the_number_of_samples_are_named(batch: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        find_samples(batch, "Do this.")


def test_shapes_tell_batches_apart_that_give_messages_of_other_shapes() -> None:
    def packed(*lengths: int) -> Any:
        return pack_sequence([torch.ones(length) for length in lengths])

    batches = [X, X.long(), X.view(2, 2), (X, X), {"a": X, "b": ["c"]}, {"a": X, "b": ["c", "d"]}, packed(3, 1)]
    batches += [packed(2, 2), IMAGES, IMAGES[:2], (IMAGES, [boxes(1)]), (IMAGES, [boxes(2)]), None]
    assert len({shapes(batch) for batch in batches}) == len(batches)
    assert shapes({"a": X}) == shapes({"a": X + 1})
