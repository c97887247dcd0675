"""Which mini-batches make up an update without a flush, and when it is due."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sdpipe.pipeline.accumulation_windows import Lane, Window


@pytest.mark.parametrize("depth", range(5))
@pytest.mark.parametrize("accumulate", [1, 2, 3, 5])
def test_windows_are_applied_so_many_steps_late(depth: int, accumulate: int) -> None:
    lane, applied = Lane(depth), []
    for turn in range(30):
        if (turn + 1) % accumulate:
            continue
        expected = lane.would_be_due(turn)
        lane.waiting.append(Window(0, closed_at=turn))
        assert lane.due(turn) == expected
        if expected:
            applied.append((lane.waiting.popleft().closed_at, turn))
    late = -(-depth // accumulate)
    assert [(at - closed) // accumulate for closed, at in applied] == [late] * (30 // accumulate - late)
    assert len(lane.waiting) == late


def test_the_first_gradient_is_kept_and_others_are_added_to_it() -> None:
    (p,) = parameters = [nn.Parameter(torch.zeros(2))]
    window, first = Window(0), torch.tensor([4.0, 8.0])
    window.add(parameters, [first], 1.0, [])
    assert window.gradients[p] is first
    window.add(parameters, [torch.tensor([4.0, 2.0])], 2.0, [])
    window.add(parameters, [None], 1.0, [])
    assert window.gradients[p].tolist() == [6.0, 9.0]
    assert window.loss_scale == 2.0


def test_gradients_do_not_share_memory() -> None:
    """Of a sum of two parameters, autograd returns one tensor twice; and the one that is sent to the stage before."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    one, sent, expanded = torch.ones(2), torch.ones(2), torch.ones(1).expand(2)
    window = Window(0)
    window.add(parameters, [one, one, sent, expanded], 1.0, [sent, None])
    window.add(parameters, [torch.ones(2)] * 4, 1.0, [])
    assert [grad.tolist() for grad in window.gradients.values()] == [[2.0, 2.0]] * 4
    assert sent.tolist() == [1.0, 1.0]
