import pytest
import torch
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.pipeline.gradients import loss_with_gradients, put_back, set_aside


def test_backward_adds_the_gradients_of_the_schedule_scaled() -> None:
    a, b, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
    parameters = [a, b, unused]
    a.grad = torch.tensor([1.0, 2.0])
    before = set_aside(parameters)
    assert a.grad is None
    a.grad, b.grad = torch.tensor([10.0, 10.0]), torch.tensor([4.0, 6.0])  # what a schedule would leave
    gradients = set_aside(parameters)
    put_back(parameters, before)
    loss = loss_with_gradients(torch.tensor(3.0), parameters, gradients)
    assert torch.equal(a.grad, torch.tensor([1.0, 2.0]))
    assert b.grad is None
    (loss / 2).backward()
    assert loss.item() == 3.0
    assert torch.equal(a.grad, torch.tensor([6.0, 7.0]))
    assert torch.equal(b.grad, torch.tensor([2.0, 3.0]))
    assert unused.grad is None


def test_a_second_backward_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    loss = loss_with_gradients(torch.tensor(3.0), [parameter], [torch.ones(2)])
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigurationError, match="backward ran twice"):
        loss.backward()
    assert torch.equal(parameter.grad, torch.ones(2))
