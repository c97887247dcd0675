"""The whole model outside of training steps: what hooks and steps of evaluation get from all stages of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_sdpipe import AllReduce, ConfigurationError, SDPipeStrategy
from lightning_sdpipe.errors import WorkerFailedError
from tests.features.running import as_torchrun, on_four_ranks, quiet_trainer, weights
from tests.features.table import refused, supported
from tests.workers import free_port, run_workers

pytestmark = pytest.mark.distributed
WORDS, WIDTH, END = 12, 8, 1
SAID: dict[str, list[Any]] = {}


def say(where: str, what: Any) -> None:
    SAID.setdefault(where, []).append(what)


@dataclass
class Cache:
    """Changed by blocks in every way: entries of a dict, a number, and a tensor that is written to."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    calls: int = 0
    length: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.long))


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        rows = torch.cat([cache.rows[self.name], x], 1) if self.name in cache.rows else x
        cache.rows[self.name] = rows
        cache.calls += 1
        if self.name == "first":
            cache.length.add_(x.shape[1])
        means = rows.cumsum(1) / torch.arange(1, rows.shape[1] + 1)[:, None]
        return x + torch.tanh(self.linear(means[:, -x.shape[1] :]))


class Twice(Metric):
    """Runs the model twice for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")

    def update(self, model: Callable[..., Tensor], batch: Tensor) -> None:
        self.total: Tensor = self.total + (model(batch, Cache()) - model(batch.flip(0), Cache())).abs().sum()

    def compute(self) -> Tensor:
        return self.total.clone()


class Speaking(L.LightningModule):
    def __init__(self, where: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.where = where
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(map(Layer, ("first", "second", "third")))
        self.head = nn.Linear(WIDTH, WORDS)
        self.twice = Twice()
        self.collected: list[float] = []

    def forward(self, tokens: Tensor, cache: Cache) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, cache)
        odds: Tensor = self.head(x)
        return odds

    @torch.no_grad()
    def generate(self, tokens: Tensor, sample: bool = True, most: int = 12) -> list[list[int]]:
        """Ends when the values say so; the cache's length is what the user's code reads."""
        cache, new = Cache(), tokens
        while int(cache.length) < most and not bool((new == END).all()):
            odds = self(new, cache)[:, -1].softmax(-1)
            new = torch.multinomial(odds, 1) if sample else odds.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, new], 1)
        assert cache.calls == 3 * (tokens.shape[1] - 2)
        said: list[list[int]] = tokens.tolist()
        return said

    def speak(self, where: str) -> None:
        if where in self.where:
            prompt = torch.randint(2, WORDS, (2, 2))
            say(where, (self.generate(prompt), self.generate(prompt, sample=False)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        odds = self(torch.where(torch.rand(batch.shape) < 0.1, 0, batch), Cache())
        return nn.functional.cross_entropy(odds[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.training_step(batch, batch_idx)
        self.collected.append(float(loss))
        self.log("val_loss", loss)
        if "validation_step" in self.where:
            self.speak("validation_step")
            self.twice.update(self, batch)
            self.log("twice", self.twice)

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[list[int]]:
        return self.generate(batch[:, :2])

    def on_train_batch_end(self, *_: Any) -> None:
        self.speak("on_train_batch_end")
        if self.where and self.trainer.world_size > 1:
            with pytest.raises(ConfigurationError, match=r"outside of training_step where gradients.*torch.no_grad"):
                self(texts(), Cache())

    def on_validation_epoch_end(self) -> None:
        mean = sum(self.collected) / len(self.collected)  # which last stages alone have, unless others are called
        self.collected.clear()
        self.log("mean", mean)
        self.speak("on_validation_epoch_end")

    def on_fit_end(self) -> None:
        self.speak("on_fit_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Embedding(Callback):
    """Embeds a set at the end of an epoch, and samples."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if "callback" in module.where:
            with torch.no_grad():
                rows = [module.layers[0](module.words(tokens), Cache()).mean(1) for tokens in torch.split(texts(), 4)]
            say("embeddings", torch.cat(rows))
            module.speak("callback")

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.speak("callback")


def loader() -> DataLoader[Any]:
    data: Any = texts()
    return DataLoader(data, 8)


def texts() -> Tensor:
    return torch.randint(2, WORDS, (16, 5), generator=torch.Generator().manual_seed(5))


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.time = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Linear(1, WIDTH)

    def forward(self, x: Tensor, time: Tensor, skips: list[Tensor]) -> Tensor:
        skips.append(nn.functional.silu(self.conv(x) + self.time(time[:, None])[:, :, None, None]))
        return nn.functional.avg_pool2d(skips[-1], 2)


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        both = torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skips.pop()], 1)
        return nn.functional.silu(self.conv(both))


class Denoising(L.LightningModule):
    """A U-Net that predicts noise, and draws images in ten steps."""

    STEPS = 10

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Conv2d(1, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 1, 3, padding=1)
        self.downs, self.ups = nn.ModuleList([Down(), Down()]), nn.ModuleList([Up(), Up()])
        self.register_buffer("kept", torch.linspace(0.99, 0.8, self.STEPS).cumprod(0))
        self.kept: Tensor

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        skips: list[Tensor] = []
        x = self.first(x)
        for down in self.downs:
            x = down(x, time, skips)
        for up in self.ups:
            x = up(x, skips)
        noise: Tensor = self.last(x)
        return noise

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time, noise = torch.randint(0, self.STEPS, (len(batch),)), torch.randn_like(batch)
        kept = self.kept[time][:, None, None, None]
        return nn.functional.mse_loss(self(kept.sqrt() * batch + (1 - kept).sqrt() * noise, time / self.STEPS), noise)

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        x = torch.randn(2, 1, 8, 8)
        for step in reversed(range(self.STEPS)):
            kept, before = self.kept[step], self.kept[step - 1] if step else torch.ones(())
            noise = self(x, torch.full((2,), step / self.STEPS))
            clean = ((x - (1 - kept).sqrt() * noise) / kept.sqrt()).clamp(-2, 2)
            x = before.sqrt() * clean + (1 - before).sqrt() * torch.randn_like(x)
        say("images", x)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


PLACES = ("on_train_batch_end", "on_validation_epoch_end", "on_fit_end", "callback")


def fitted(where: tuple[str, ...], stages: int, directory: Path, **options: Any) -> tuple[Speaking, L.Trainer]:
    strategy = SDPipeStrategy(stages, AllReduce(), blocks=["words", "layers.*", "head"], **options)
    model = Speaking(where)
    callbacks: list[Callback] = [Embedding()]
    trainer = quiet_trainer(
        default_root_dir=directory,
        strategy=strategy,
        devices=stages,
        callbacks=callbacks,
        num_sanity_val_steps=1,
        max_epochs=1,
    )
    trainer.fit(model, loader(), loader())
    return model, trainer


def _spoken(directory: Path, stages: int) -> dict[str, Any]:
    SAID.clear()
    found: dict[str, Any] = {}
    for name, where in {"silent": (), "all": (*PLACES, "validation_step")}.items():
        model, trainer = fitted(where, stages, directory, num_micro_batches=2)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        predicted = trainer.predict(model, loader()) if name == "all" else None
        found[name] = weights(model), metrics, SAID.copy(), predicted
        SAID.clear()
    blocks = ["first", "downs.*", "ups.*", "last"]
    strategy = SDPipeStrategy(stages, AllReduce(), blocks=blocks, num_micro_batches=2)
    denoising, data = Denoising(), torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    trainer = quiet_trainer(default_root_dir=directory, strategy=strategy, devices=stages, max_epochs=1)
    trainer.fit(denoising, DataLoader(data, 8))  # type: ignore[arg-type]
    found["images"] = {}, {}, SAID.copy(), None
    SAID.clear()
    return found


@supported("Hooks", "the whole model in hooks and evaluation steps: `generate`, samples, embeddings", "every rank "
           "calls it, without gradients; each block runs on the stage that holds it")  # fmt: skip
@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_whole_model_speaks_as_in_one_process(stages: int, tmp_path: Path) -> None:
    (whole,) = on_four_ranks(_spoken, tmp_path, 1, count=1)
    for rank in on_four_ranks(_spoken, tmp_path, stages, count=stages):
        for name, (kept, metrics, said, predicted) in rank.items():
            expected_weights, expected_metrics, expected, expected_predictions = whole[name]
            assert metrics == pytest.approx(expected_metrics, rel=1e-5)
            assert said.keys() == expected.keys()
            for place, what in said.items():
                torch.testing.assert_close(what, expected[place], msg=f"{place} of {name}")
            for parameter, value in kept.items():
                assert torch.equal(value, rank["silent"][0][parameter]), "sampling leaves no trace in training"
                torch.testing.assert_close(value, expected_weights[parameter])
            assert predicted is None or predicted == expected_predictions
    assert {len(said) for *_, said, _ in whole.values()} == {0, 1, 6}


def _between_late_updates(directory: Path) -> dict[str, Any]:
    found = {}
    for name, where in {"silent": (), "hooks": PLACES}.items():
        SAID.clear()
        model, _ = fitted(where, 3, directory, schedule="pipedream")
        found[name] = weights(model), SAID.copy()
    return found


def test_hooks_speak_while_neighbours_have_not_taken_what_was_sent(tmp_path: Path) -> None:
    ranks = on_four_ranks(_between_late_updates, tmp_path, count=3)
    for rank in ranks:
        torch.testing.assert_close(rank["hooks"][1], ranks[0]["hooks"][1])
        torch.testing.assert_close(rank["hooks"][0], rank["silent"][0], rtol=0, atol=0)
    assert len(ranks[0]["hooks"][1]) == 5


class OnlyOne(Callback):
    def on_train_batch_end(on, trainer: Any, module: Any, *_: Any) -> None:  # whatever its name
        if trainer.is_global_zero:
            module.generate(texts()[:2])


def _misuse(directory: Path) -> None:
    strategy = SDPipeStrategy(2, AllReduce(), blocks=["words", "layers.*", "head"])
    trainer = quiet_trainer(default_root_dir=directory, strategy=strategy, devices=2, callbacks=[OnlyOne()])
    with suppress(WorkerFailedError):  # of the one that waits, unless both are ended
        trainer.fit(Speaking(), loader())


@refused(
    "Hooks",
    "the model called by some ranks only: under `rank_zero_only` or `trainer.is_global_zero`",
    "and these do not call it",
    "within 30 s; names the hook, the block and the ranks",
)
def test_a_call_that_some_ranks_make_ends_with_the_hook_and_the_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_workers(2, as_torchrun, free_port(), 2, _misuse, (tmp_path,), lost=[0, 1])  # gloo cannot wake them
    message = (
        r"block 'words' in OnlyOne.on_train_batch_end is called on ranks \[0\], which wait for ranks \[1\], and these "
        r"do not call it: rank 1 waits in receiving from stage 1 \(rank 0\)\. Outside of training steps.*is_global_zero"
    )
    assert re.search(message, capfd.readouterr().err)
