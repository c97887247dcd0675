from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.ghost import Absent, Ghost, SkippedCutError, refuse_ghosts


@pytest.fixture
def ghost() -> Ghost:
    return Ghost(torch.empty(4, 5, device="meta"), torch.device("cpu"), "net.0")


def test_its_metadata_is_that_of_the_value(ghost: Ghost) -> None:
    assert (ghost.shape, ghost.dtype, ghost.device) == ((4, 5), torch.float32, torch.device("cpu"))


def test_operations_give_ghosts_of_the_right_shape(ghost: Ghost) -> None:
    outcomes = [
        (nn.functional.relu(ghost, inplace=True), (4, 5)),
        (ghost + torch.ones(1, 5), (4, 5)),
        (nn.Linear(5, 3)(ghost), (4, 3)),
        (torch.cat([torch.zeros(2, 5), ghost]), (6, 5)),
        (ghost[:, 0], (4,)),
    ]
    for outcome, shape in outcomes:
        assert isinstance(outcome, Ghost)
        assert outcome.shape == shape


def test_what_is_made_from_its_metadata_is_real(ghost: Ghost) -> None:
    for made in (
        torch.zeros_like(ghost),
        ghost.new_ones(4, 5) - 1,
        torch.zeros(ghost.shape, dtype=ghost.dtype),
    ):
        assert not isinstance(made, Ghost)
        assert torch.equal(made, torch.zeros(4, 5))


def test_using_its_value_names_the_block_it_comes_from(ghost: Ghost) -> None:
    with pytest.raises(SkippedCutError, match=r"'net\.0'.*read as a Python number"):
        float(ghost.sum())
    with pytest.raises(SkippedCutError, match=r"'net\.0'.*is used by block 'net\.3'"):
        refuse_ghosts(([1, {"x": ghost}],), "block 'net.3'")
    with pytest.raises(SkippedCutError, match="written into a tensor"):
        torch.ones(4, 5).add_(ghost)


@pytest.mark.parametrize("draw", [nn.Dropout(0.5), torch.bernoulli, lambda t: t.uniform_(), torch.rand_like])
def test_random_operations_on_a_ghost_draw_as_many_numbers_as_on_the_value(ghost: Ghost, draw: Any) -> None:
    torch.manual_seed(1)
    assert draw(ghost).shape == (4, 5)
    after = torch.rand(1)
    torch.manual_seed(1)
    draw(torch.ones(4, 5))
    assert torch.equal(torch.rand(1), after)


def test_shapes_that_depend_on_values_are_refused(ghost: Ghost) -> None:
    for read in (ghost.nonzero, ghost.tolist, ghost.numpy, lambda: torch.arange(4)[ghost[:, 0] > 0]):
        with pytest.raises(SkippedCutError, match=r"block 'net\.0'"):
            read()


def test_an_object_that_is_absent_may_be_passed_on_only() -> None:
    absent = Absent("Cache", "net.0")
    assert [absent, 1][0] is absent
    for use in (lambda: absent.size, lambda: absent[0], lambda: bool(absent), lambda: list(absent), absent):
        with pytest.raises(ConfigurationError, match=r"'net\.0'.* made a Cache"):
            use()
