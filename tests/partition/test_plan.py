from itertools import pairwise

import pytest
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.plan import Balanced, Plan, plan
from lightning_sdpipe.partition.profile import BlockProfile
from tests.partition.families import ResNet


def chain(*widths: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in pairwise(widths)])


def test_modules_of_one_block_stay_together() -> None:
    made = plan(ResNet(), 2, [1, 4])
    assert made.spans == (range(1), range(1, 5))
    assert made.chain[:4] == ("conv1", "bn1", "layer1.0", "layer1.1")
    assert made.module_spans == (range(3), range(3, 7))


def test_parameters_are_balanced() -> None:
    model = chain(10, 10, 1, 1, 1, 1)
    assert plan(model, 2).spans == (range(3), range(3, 5))
    assert plan(model, 2, "parameters").spans == (range(1), range(1, 5))


def measured(blocks: object) -> list[BlockProfile]:
    return [BlockProfile(1, 2, size, size) for size in (10**9, 10**9, 0, 0, 0, 10**9)]


@pytest.mark.parametrize(
    ("partition", "first"),
    [
        ("balanced", 3),
        (Balanced(), 3),
        (Balanced([2.0, 1.0]), 4),
        (Balanced([0.5, 1.0]), 2),
        (Balanced([0.5, 1.0], bandwidth=1e8), 3),  # the cut after two blocks takes too long
    ],
)
def test_times_speeds_and_transfers_are_balanced(partition: Balanced, first: int) -> None:
    made = plan(chain(*[1] * 7), 2, partition, measure=measured)
    assert made.spans == (range(first), range(first, 6))


def test_an_output_that_cannot_travel_is_not_cut_after() -> None:
    def some_stay(blocks: object) -> list[BlockProfile]:
        return [BlockProfile(1, 2, None if i == 1 else 0, 0) for i in range(4)]

    assert plan(chain(*[1] * 5), 2, "balanced", measure=some_stay).spans == (range(1), range(1, 4))


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("equal", "partition='equal' is not known"),
        ([1, 1, 1], "does not cut 4 blocks"),
        (Balanced([1.0]), "names 1 devices for num_stages=2"),
        ("balanced", "needs a batch"),
    ],
)
def test_what_does_not_fit_is_refused(partition: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(chain(*[1] * 5), 2, partition)  # type: ignore[arg-type]


def test_a_bandwidth_must_be_positive() -> None:
    with pytest.raises(ConfigurationError, match="bandwidth=0"):
        Balanced(bandwidth=0)


def test_module_spans_cover_the_chain() -> None:
    made = Plan((("a", "b"), ("c",), ("d", "e", "f")), (range(2), range(2, 3)))
    assert made.module_spans == (range(3), range(3, 6))
