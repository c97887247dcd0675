"""The callback alone, on a module of which other stages hold a part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe import SDPipeWeightAveraging
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.buckets import flatten
from lightning_sdpipe.loop.weight_averaging import averaging_of


class Half(L.LightningModule):
    """Its second layer is on another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 1, device="meta")
        self.spectrum = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.tied = self.first.weight
        self.register_buffer("late", None)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(5))
        flatten([*self.first.parameters(), self.spectrum])

    def module_state(self) -> dict[str, Any]:
        """As one stage gives it; one entry is a view that no tensor of the module has."""
        return {**self.state_dict(), "turned": self.first.weight.detach().T}

    def load_module(self, state: Any, strict: bool) -> None:
        self.load_state_dict({name: value for name, value in state.items() if name != "turned"}, strict=strict)

    def holds(self, name: str) -> bool:
        return not self.get_buffer(name).is_meta

    def held(self) -> list[Tensor]:
        return [tensor for tensor in (*self.parameters(), *self.buffers()) if not tensor.is_meta]

    def step(self, by: int) -> None:
        for tensor in self.held():
            tensor.data.add_(by)


def begun(module: Half, **given: Any) -> tuple[SDPipeWeightAveraging, Any, list[Tensor]]:
    averaging, alike = SDPipeWeightAveraging(**given), list[Tensor]()
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(strategy=strategy, global_step=0, current_epoch=0)
    averaging.connect(module, alike)
    averaging.on_fit_start(trainer, module)
    averaging.on_train_start(trainer, module)
    return averaging, trainer, alike


def batch_ends(averaging: SDPipeWeightAveraging, trainer: Any, module: Half, steps: int) -> None:
    trainer.global_step += steps
    averaging.on_train_batch_end(trainer, module, None, None, 0)


def validated_with(averaging: SDPipeWeightAveraging, trainer: Any, module: Half) -> list[Tensor]:
    averaging.on_validation_epoch_start(trainer, module)
    found = [tensor.detach().clone() for tensor in module.held()]
    averaging.on_validation_epoch_end(trainer, module)
    return found


def test_one_copy_of_the_stage_in_few_tensors() -> None:
    module = Half()
    _, _, alike = begun(module)
    assert sum(tensor.nbytes for tensor in alike) == sum(tensor.nbytes for tensor in module.held()) + 8
    assert len(alike) == 4  # real, complex and whole numbers, and how many were averaged
    assert not any(tensor.is_complex() for tensor in alike)


def test_swapping_twice_changes_nothing() -> None:
    module = Half()
    averaging, trainer, _ = begun(module)
    module.late = torch.zeros(3)
    module.step(1)
    before = [tensor.detach().clone() for tensor in module.held()]
    average = validated_with(averaging, trainer, module)
    late = [tensor is module.late for tensor in module.held()]  # which is not averaged
    torch.testing.assert_close([tensor + (not own) for tensor, own in zip(average, late, strict=True)], before)
    torch.testing.assert_close([tensor.detach() for tensor in module.held()], before, rtol=0, atol=0)
    averaging.on_train_end(trainer, module)
    torch.testing.assert_close([tensor.detach() for tensor in module.held()], average, rtol=0, atol=0)


@pytest.mark.parametrize("given", [{"decay": 0.5}, {}, {"device": "cpu", "use_buffers": False}])
def test_a_count_that_rises_by_several_is_several_updates(given: dict[str, Any]) -> None:
    averages = []
    for jumps in ((1, 1, 1, 1), (1, 3, 0)):
        torch.manual_seed(0)
        module = Half()
        averaging, trainer, alike = begun(module, **given)
        for number, steps in enumerate(jumps):
            if number < 2:
                module.step(1)
            batch_ends(averaging, trainer, module, steps)
        assert alike[-1] == 4
        averages.append(validated_with(averaging, trainer, module))
    torch.testing.assert_close(*averages, rtol=0, atol=0)


def test_the_ends_of_epochs() -> None:
    module = Half()
    averaging, trainer, alike = begun(module, update_every_n_steps=0, update_starting_at_epoch=1)
    for epoch in range(4):
        trainer.current_epoch = epoch
        batch_ends(averaging, trainer, module, 1)
        module.step(1)
        averaging.on_train_epoch_end(trainer, module)
    assert alike[-1] == 3
    torch.testing.assert_close(validated_with(averaging, trainer, module)[0], module.held()[0].detach() - 1)


def test_a_checkpoint_keeps_both_and_lasts() -> None:
    module = Half()
    averaging, trainer, _ = begun(module, decay=0.5)
    batch_ends(averaging, trainer, module, 1)
    module.step(1)
    checkpoint: dict[str, Any] = {"state_dict": module.module_state()}
    averaging.on_save_checkpoint(trainer, module, checkpoint)
    average, current = checkpoint["state_dict"], checkpoint["current_model_state"]
    for name in ("first.weight", "spectrum", "mean", "seen", "turned", "tied"):
        torch.testing.assert_close(average[name] + 1, current[name])
    assert average["second.weight"].is_meta

    other = Half()
    resumed, its_trainer, alike = begun(other, decay=0.5)
    other.load_module(average, True)
    resumed.on_load_checkpoint(its_trainer, other, checkpoint)
    assert alike[-1] == 1
    torch.testing.assert_close(other.held(), module.held(), rtol=0, atol=0)
    mine, its = (validated_with(a, t, m) for a, t, m in ((averaging, trainer, module), (resumed, its_trainer, other)))
    torch.testing.assert_close(mine, its, rtol=0, atol=0)


def test_a_checkpoint_of_a_run_without_it() -> None:
    module = Half()
    averaging, trainer, alike = begun(module)
    module.step(2)  # as loading has
    with pytest.warns(UserWarning, match="the average begins with its weights"):
        averaging.on_load_checkpoint(trainer, module, {"state_dict": {}})
    assert alike[-1] == 0
    torch.testing.assert_close(validated_with(averaging, trainer, module), [t.detach() for t in module.held()])


def test_what_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="give one of them"):
        SDPipeWeightAveraging(decay=0.9, avg_fn=lambda average, current, number: current)
    with pytest.raises(ConfigurationError, match=r"decay=1\.5 is not between 0 and 1"):
        SDPipeWeightAveraging(decay=1.5)
    with pytest.raises(ConfigurationError, match="update_every_n_steps=-1 is negative"):
        SDPipeWeightAveraging(update_every_n_steps=-1)
    with pytest.raises(ConfigurationError, match="has 2 SDPipeWeightAveraging callbacks"):
        averaging_of([SDPipeWeightAveraging(), L.Callback(), SDPipeWeightAveraging()])
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match=r"With SingleDeviceStrategy use .*EMAWeightAveraging"):
        SDPipeWeightAveraging().on_fit_start(trainer, Half())
