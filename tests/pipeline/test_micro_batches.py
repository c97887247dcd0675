from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.pipeline.micro_batches import refuse_time_first, split


@given(st.integers(1, 40), st.integers(1, 8))
def test_a_split_keeps_every_sample_once(size: int, count: int) -> None:
    batch = {"x": torch.arange(size), "scale": torch.tensor(3.0)}
    parts = split(batch, count)
    assert len(parts) == min(size, count)
    assert torch.equal(torch.cat([part.batch["x"] for part in parts]), batch["x"])
    assert all(part.batch["scale"] == batch["scale"] for part in parts)
    assert [part.weight for part in parts] == [len(part.batch["x"]) / size for part in parts]
    assert sum(part.weight for part in parts) == pytest.approx(1)
    assert len({part.signature for part in parts}) == len({part.weight for part in parts})


def test_a_small_batch_has_as_many_parts_as_the_schedule_can_order() -> None:
    assert [len(part.batch) for part in split(torch.arange(5), 6, multiple=2)] == [2, 1, 1, 1]
    with pytest.raises(ConfigurationError, match=r"batch of 1 samples cannot be split into num_micro_batches=2"):
        split(torch.arange(1), 6, multiple=2)


def test_each_part_may_be_changed_in_place_before_the_backward_of_another() -> None:
    x, scale, rows = torch.ones(4, 2), torch.tensor(2.0), torch.ones(1, 2)
    weight = torch.ones(2, requires_grad=True)
    losses = []
    for part in split({"x": x, "scale": scale, "rows": rows, "images": [torch.ones(3) for _ in range(4)]}, 2):
        for tensor in (part.batch["x"], part.batch["scale"], part.batch["rows"]):
            tensor.mul_(2)
        losses.append((part.batch["x"] * weight * part.batch["scale"] * part.batch["rows"]).sum())
    assert losses == [64, 64]
    for loss in losses:
        loss.backward()
    assert torch.equal(x, torch.full((4, 2), 2.0)), "hooks see what the step has made of the batch"
    assert (scale, rows.tolist()) == (2, [[1, 1]])


class TimeFirst(nn.Module):
    def split_batch(self, batch: tuple[Tensor, Tensor], n: int) -> list[Any]:
        x, y = batch
        return list(zip(x.chunk(n, dim=1), y.chunk(n), strict=True))

    def weigh_batch(self, batch: tuple[Tensor, Tensor]) -> float:
        return float(batch[1].sum())


def test_a_modules_own_split_and_weights() -> None:
    x, y = torch.ones(5, 4, 3), torch.tensor([1.0, 2.0, 3.0, 4.0])
    first, second = split((x, y), 2, TimeFirst())
    assert first.batch[0].shape == second.batch[0].shape == (5, 2, 3)
    assert (first.weight, second.weight) == (0.3, 0.7)
    with pytest.raises(ConfigurationError, match=r"batch\[0\]: \(5, 4, 3\), .* Define split_batch\(batch, n\)"):
        split((x, y), 2)


def test_weights_of_ones_own_for_a_split_that_is_not() -> None:
    class Weighing(nn.Module):
        def weigh_batch(self, batch: Tensor) -> int:
            return int(batch[0])

    assert [part.weight for part in split(torch.tensor([1, 0, 3, 0]), 2, Weighing())] == [0.25, 0.75]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda batch, n: [batch], r"returned 1 batches; it must return 2"),
        (lambda batch: batch, r"split_batch does not take \(batch, n\)"),
        (lambda batch, n: [object()] * n, r"batch: object.*Define weigh_batch\(batch\)"),
    ],
)
def test_methods_that_do_something_else_are_refused(method: Any, message: str) -> None:
    module = nn.Module()
    module.split_batch = method
    with pytest.raises(ConfigurationError, match=message):
        split(torch.ones(4), 2, module)


def test_one_micro_batch_is_the_mini_batch_whatever_it_is() -> None:
    batch = object()
    (part,) = split(batch, 1)
    assert part.batch is batch
    assert part.weight == 1.0


def test_a_first_dimension_that_is_not_that_of_the_samples_is_refused() -> None:
    time_first = torch.zeros(7, 4, 3), torch.zeros(7, 4)
    with pytest.raises(ConfigurationError, match="The loader was asked for 4 samples"):
        refuse_time_first(time_first, 4)
    refuse_time_first(time_first, 4, TimeFirst())
    refuse_time_first(time_first, None)  # of another kind of loader
    refuse_time_first(time_first, 7)
    refuse_time_first((torch.zeros(3, 4), torch.zeros(3)), 4)  # some samples were left out
    refuse_time_first((torch.zeros(4, 4), torch.zeros(4, 4)), 4)  # cannot be seen
