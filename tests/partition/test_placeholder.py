from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.placeholder import Absent, Placeholder, SkippedCutError, refuse_placeholders


@pytest.fixture
def placeholder() -> Placeholder:
    return Placeholder(torch.empty(4, 5, device="meta"), torch.device("cpu"), "net.0")


def test_its_metadata_is_that_of_the_value(placeholder: Placeholder) -> None:
    assert (placeholder.shape, placeholder.dtype, placeholder.device) == ((4, 5), torch.float32, torch.device("cpu"))


def test_operations_give_placeholders_of_the_right_shape(placeholder: Placeholder) -> None:
    outcomes = [
        (nn.functional.relu(placeholder, inplace=True), (4, 5)),
        (placeholder + torch.ones(1, 5), (4, 5)),
        (nn.Linear(5, 3)(placeholder), (4, 3)),
        (torch.cat([torch.zeros(2, 5), placeholder]), (6, 5)),
        (placeholder[:, 0], (4,)),
    ]
    for outcome, shape in outcomes:
        assert isinstance(outcome, Placeholder)
        assert outcome.shape == shape


def test_what_is_made_from_its_metadata_is_real(placeholder: Placeholder) -> None:
    for made in (
        torch.zeros_like(placeholder),
        placeholder.new_ones(4, 5) - 1,
        torch.zeros(placeholder.shape, dtype=placeholder.dtype),
    ):
        assert not isinstance(made, Placeholder)
        assert torch.equal(made, torch.zeros(4, 5))


def test_using_its_value_names_the_block_it_comes_from(placeholder: Placeholder) -> None:
    with pytest.raises(SkippedCutError, match=r"'net\.0'.*read as a Python number"):
        float(placeholder.sum())
    for read in (torch.tensor, torch.as_tensor, torch.asarray):
        with pytest.raises(SkippedCutError, match=r"'net\.0'.*read as a Python number"):
            read([torch.zeros(()), placeholder.sum()])
    with pytest.raises(SkippedCutError, match=r"'net\.0'.*is used by block 'net\.3'"):
        refuse_placeholders(([1, {"x": placeholder}],), "block 'net.3'")
    with pytest.raises(SkippedCutError, match="written into a tensor"):
        torch.ones(4, 5).add_(placeholder)


@pytest.mark.parametrize("draw", [nn.Dropout(0.5), torch.bernoulli, lambda t: t.uniform_(), torch.rand_like])
def test_random_operations_on_a_placeholder_draw_as_many_numbers_as_on_the_value(
    placeholder: Placeholder, draw: Any
) -> None:
    torch.manual_seed(1)
    assert draw(placeholder).shape == (4, 5)
    after = torch.rand(1)
    torch.manual_seed(1)
    draw(torch.ones(4, 5))
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize(
    "draw", [torch.poisson, lambda t: torch.distributions.Gamma(t, 1.0, validate_args=False).rsample()]
)
def test_operations_that_draw_by_the_value_are_refused(placeholder: Placeholder, draw: Any) -> None:
    with pytest.raises(SkippedCutError, match="decides how many random numbers"):
        draw(placeholder)


def test_shapes_that_depend_on_values_are_refused(placeholder: Placeholder) -> None:
    for read in (
        placeholder.nonzero,
        placeholder.tolist,
        placeholder.numpy,
        lambda: torch.arange(4)[placeholder[:, 0] > 0],
    ):
        with pytest.raises(SkippedCutError, match=r"block 'net\.0'"):
            read()


def test_an_object_that_is_absent_may_be_passed_on_only() -> None:
    absent = Absent("Cache", "net.0")
    assert [absent, 1][0] is absent
    for use in (lambda: absent.size, lambda: absent[0], lambda: bool(absent), lambda: list(absent), absent):
        with pytest.raises(ConfigurationError, match=r"'net\.0'.* made a Cache"):
            use()
