"""Buffers that a forward assigns anew, and weights that a hook gives other memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sdpipe import AllReduce, SDPipeStrategy
from lightning_sdpipe.checkpoints.whole_module import make_room
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.held_buffers import HeldBuffers
from lightning_sdpipe.sync.synchronizer import refuse_unlike
from tests.features.running import Regression, on_four_ranks, quiet_trainer, samples


class Observer(nn.Module):
    """Keeps statistics as observers do: one buffer gets its shape in the first forward, one is None until then, one is
    registered there, and one is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("low", torch.empty(0))
        self.register_buffer("high", None)
        self.register_buffer("squares", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        if self.training:
            if self.high is None:
                self.low, self.high = seen.amin(0), seen.amax(0)
                self.register_buffer("count", torch.zeros(1, dtype=torch.long))
            self.mean = 0.5 * self.mean + 0.5 * seen.mean(0)
            self.low, self.high = torch.minimum(self.low, seen.amin(0)), torch.maximum(self.high, seen.amax(0))
            self.squares = (seen.t() @ seen).t()
            self.count = self.count + len(seen)
        return x - self.mean


class Observed(Regression):
    """Has an observer in a block, and a center that the end of the step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.net[0], Observer(), *self.net[1:])
        self.register_buffer("center", None)
        self.validated: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        before = torch.zeros(1) if self.center is None else self.center
        self.center = 0.9 * before + 0.1 * out.detach().mean(0)
        return nn.functional.mse_loss(out - self.center, batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("validated", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.clamp(-0.3, 0.3)


def _train(directory: Path) -> dict[str, Any]:
    module = Observed()
    keeps = ModelCheckpoint(directory, "file", save_weights_only=True)
    trainer = quiet_trainer(
        strategy=SDPipeStrategy(num_stages=2, sync=AllReduce(), num_micro_batches=1),
        devices=4,
        callbacks=[keeps],
    )
    trainer.fit(module, DataLoader(samples(), 4), DataLoader(samples(8), 4))
    buffers = {name: buffer for name, buffer in module.named_buffers() if not buffer.is_meta}
    return {"buffers": buffers, "weights": dict(module.named_parameters()), **trainer.callback_metrics}


@pytest.mark.distributed
def test_buffers_are_those_that_the_forwards_have_assigned_last(tmp_path: Path) -> None:
    first, *others = on_four_ranks(_train, tmp_path)
    shapes = {name: tuple(buffer.shape) for name, buffer in first["buffers"].items()}
    inside = {"mean": (8,), "low": (8,), "high": (8,), "squares": (8, 8), "count": (1,)}
    assert shapes == {"center": (1,), **{f"net.1.{name}": shape for name, shape in inside.items()}}
    for other in others:
        for name, buffer in first["buffers"].items():
            assert torch.equal(other["buffers"][name], buffer), name
        assert other["validated"] == first["validated"]
    assert first["buffers"]["net.1.count"] == 32, "the largest of the pipelines, each of which has seen 16 twice"
    assert max(weight.abs().max() for weight in first["weights"].values()) <= 0.3
    state = torch.load(tmp_path / "file.ckpt", weights_only=True)["state_dict"]
    for name, buffer in first["buffers"].items():
        assert torch.equal(state[name], buffer), name


def test_buffers_can_be_averaged_in_place_wherever_they_come_from() -> None:
    module = nn.Module()
    for name in ("view", "wide", "pairs", "graph", "from_evaluation", "elsewhere", "sparse", "rows"):
        module.register_buffer(name, torch.zeros(2))
    held = HeldBuffers(module, lambda name: name != "elsewhere")
    assert len(held) == 7
    weight = torch.ones(2, requires_grad=True)
    module.view = torch.arange(6.0).view(2, 3).t()
    module.wide = torch.ones(1).expand(3)
    module.pairs = torch.ones(2, dtype=torch.complex64)
    module.graph = weight * 2
    with torch.inference_mode():
        module.from_evaluation = torch.ones(2)
    module.sparse, module.rows = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    for buffer in held:
        assert buffer.is_contiguous()
        buffer.view(-1).zero_()
    for name, buffer in module.named_buffers():
        assert name == "elsewhere" or not buffer.to_dense().any()
    assert "'view' is (3, 2), torch.float32" in str(held)


def test_replicas_whose_buffers_have_other_shapes_are_refused() -> None:
    module = nn.Module()
    module.register_buffer("seen", torch.zeros(3))
    held = HeldBuffers(module, lambda _: True)
    refuse_unlike(held, lambda _: None)

    def with_another(tensors: Any) -> None:
        (least_and_most,) = tensors
        torch.maximum(least_and_most, torch.tensor([-5, 5]), out=least_and_most)

    with pytest.raises(ConfigurationError, match=r"'seen' is \(3,\), torch.float32.*does not depend on the batch"):
        refuse_unlike(held, with_another)


def test_a_state_finds_room_in_the_module_that_it_is_brought_back_to() -> None:
    trained, module = Observer(), Observer()
    trained(torch.randn(4, 8))
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict(trained.state_dict(), strict=False)
    make_room(module, trained.state_dict())
    module.load_state_dict(trained.state_dict(), strict=False)
    assert torch.equal(module.low, trained.low)
    assert torch.equal(module.high, trained.high)
