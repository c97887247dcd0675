"""The asynchronous 1F1B against an emulation of the same algorithm in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_sdpipe import AllReduce, ConfigurationError, SDPipeStrategy
from tests.features.running import Regression, samples
from tests.strategy.test_strategy import fit

LEARNING_RATE = 0.1


def emulate(num_stages: int, owners: dict[str, int], batch_size: int, epochs: int) -> dict[str, Tensor]:
    """Mini-batch k of an epoch runs on stage j with the weights that have seen the mini-batches before k − d, for
    d = M − 1 − j, forward and backward alike; its gradient goes to the newest weights."""
    model, trained = Regression(), samples(48)
    sampler = DistributedSampler(trained, num_replicas=1, rank=0)
    versions = {name: [p.detach().clone()] for name, p in model.named_parameters()}
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        order = list(sampler)
        start = len(versions["net.0.weight"]) - 1
        for k in range(len(order) // batch_size):
            for name, p in model.named_parameters():
                late = num_stages - 1 - owners[name]
                p.data = versions[name][start + max(0, k - late)].clone()
            x, y = trained[order[k * batch_size : (k + 1) * batch_size]]
            model.zero_grad()
            torch.nn.functional.mse_loss(model.net(x), y).backward()
            for name, p in model.named_parameters():
                versions[name].append(versions[name][-1] - LEARNING_RATE * p.grad)
    return {name: weights[-1] for name, weights in versions.items()}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("num_stages", "owners"),
    [(1, [0, 0, 0]), (2, [0, 1, 1]), (4, [0, 2, 3])],  # of net.0, net.2 and net.3; net.1 is a Tanh
)
def test_the_weights_are_those_of_the_emulation(tmp_path: Path, num_stages: int, owners: list[int]) -> None:
    strategy = SDPipeStrategy(
        num_stages, schedule="pipedream", sync=AllReduce(), start_method="fork", partition="uniform"
    )
    _, model = fit(tmp_path, strategy, num_stages, 4)
    stage = dict(zip(("net.0", "net.2", "net.3"), owners, strict=True))
    by_name = {name: stage[name.rpartition(".")[0]] for name, _ in model.named_parameters()}
    for name, expected in emulate(num_stages, by_name, batch_size=4, epochs=2).items():
        torch.testing.assert_close(model.get_parameter(name).detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.distributed
def test_two_asynchronous_pipelines_train(tmp_path: Path) -> None:
    strategy = SDPipeStrategy(2, schedule="pipedream", start_method="fork")
    trainer, _ = fit(tmp_path, strategy, 4, 4, max_epochs=6, val_check_interval=3)
    x, y = samples(20)[:]
    untrained = torch.nn.functional.mse_loss(Regression().net(x), y)
    assert trainer.callback_metrics["val_loss"] < untrained / 4


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="schedule='2f2b' is not known; use one of"):
        SDPipeStrategy(2, schedule="2f2b")  # type: ignore[arg-type]
