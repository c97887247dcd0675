"""The experiments: their settings, their sizes, and one of them trained by two pipelines of two stages."""

from __future__ import annotations

import math
from pathlib import Path

import hydra
import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch import Tensor

from recipes.callbacks import TrainingCurve
from recipes.classification import ResNet, relative_rate
from recipes.language import LanguageModel
from tests.recipes.images.test_images import write_fashion, write_imagenet

CONF = Path(__file__).parents[2] / "conf"
OFFLINE = {"resnet50": "digits", "bert_base": "pydoc", "gpt_small": "pydoc", "lora": "pydoc"}


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", [*overrides])


def parameters(model: torch.nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


@pytest.mark.parametrize(
    ("experiment", "millions"), [("resnet50", 25.557), ("bert_base", 109.515), ("gpt_small", 109.283)]
)
def test_models_have_their_published_sizes(experiment: str, millions: float) -> None:
    with torch.device("meta"):
        model = hydra.utils.instantiate(composed(f"experiment={experiment}").model)
    assert parameters(model) == pytest.approx(millions, abs=1e-3)


def test_the_papers_settings() -> None:
    resnet, bert = composed("experiment=resnet50"), composed("experiment=bert_base")
    assert {name: resnet.model[name] for name in ("lr", "momentum", "weight_decay", "warmup_epochs")} == {
        **{"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4, "warmup_epochs": 1}
    }
    assert resnet.data.batch_size == bert.data.batch_size == 256
    assert (bert.model.lr, bert.model.weight_decay, bert.model.warmup_steps) == (1e-5, 1e-2, 2000)
    assert (bert.data.length, bert.strategy.variance_correction) == (128, True)
    (resnets_end,), (berts_end,) = resnet.trainer.callbacks, bert.trainer.callbacks
    assert (resnets_end.monitor, resnets_end.mode, resnets_end.stopping_threshold) == ("val_accuracy", "max", 0.74)
    assert (berts_end.monitor, berts_end.stopping_threshold) == ("val_loss", 3.0)


def test_the_learning_rate_warms_up_over_one_epoch_and_falls_every_thirty() -> None:
    rates = [relative_rate(epochs, 1, 30, 0.2) for epochs in (0.5, 1, 29.9, 30, 59.9, 60)]
    assert rates == pytest.approx([0.5, 1, 1, 0.2, 0.2, 0.04])


def test_the_network_for_clothes_is_small() -> None:
    assert parameters(hydra.utils.instantiate(composed("experiment=fashion_mnist").model)) == pytest.approx(
        0.0295, abs=1e-4
    )


@pytest.mark.parametrize("experiment", OFFLINE)
def test_debug_sizes_are_small(experiment: str) -> None:
    chosen = (f"experiment={experiment}", f"data={OFFLINE[experiment]}")
    small = composed(*chosen, "size=debug")
    assert small.trainer.max_epochs * small.trainer.limit_train_batches <= 40
    assert parameters(hydra.utils.instantiate(small.model)) < 2
    assert isinstance(hydra.utils.instantiate(small.model), ResNet | LanguageModel)
    assert composed(*chosen).trainer.limit_val_batches is None


def run(
    directory: Path, *overrides: str, callback: L.Callback | None = None, ckpt_path: Path | None = None
) -> dict[str, Tensor]:
    """Two steps in each of two epochs, by two pipelines of two stages."""
    config = composed(
        *("size=debug", "num_stages=2", "trainer.devices=4", "strategy.start_method=fork", "trainer.logger=false"),
        *(f"trainer.default_root_dir={directory}", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1"),
        *("trainer.log_every_n_steps=1", "+trainer.enable_progress_bar=false", *overrides),
    )
    strategy = hydra.utils.instantiate(config.strategy)
    trainer: L.Trainer = hydra.utils.instantiate(config.trainer, strategy=strategy)
    trainer.callbacks.append(callback or TrainingCurve(directory / "training_curve.png"))  # type: ignore[attr-defined]
    L.seed_everything(config.seed)
    model, data = hydra.utils.instantiate(config.model), hydra.utils.instantiate(config.data)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return dict(trainer.callback_metrics)


@pytest.mark.distributed
def test_resnet_trains_on_pictures_that_its_last_stages_do_not_decode(tmp_path: Path) -> None:
    write_imagenet(tmp_path, each=16)
    data = ("data=imagenet", f"data.folder={tmp_path}", "data.size=32", "data.batch_size=8", "data.num_workers=1")
    metrics = run(tmp_path, "experiment=resnet50", "trainer.devices=2", *data)
    assert 0 < metrics["train_loss"] < 10  # a stand-in that was computed with would make it nan
    assert (tmp_path / "training_curve.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.distributed
def test_the_network_for_clothes_learns_in_two_stages(tmp_path: Path) -> None:
    write_fashion(tmp_path, each=8)
    data = (f"data.folder={tmp_path}", "data.batch_size=8", "data.num_workers=0", "strategy.data=dealt")
    longer = ("trainer.limit_train_batches=6", "trainer.max_epochs=6")
    metrics = run(tmp_path, "experiment=fashion_mnist", *data, *longer)
    assert metrics["train_loss"] < 0.8 * math.log(10), "a guess has log(10)"


@pytest.mark.distributed
def test_bert_reads_wikipedias_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = [f"Article number {n} tells of the number {n * n}. " * 40 for n in range(64)]
    (tmp_path / "wiki").mkdir()
    for number in range(4):
        datasets.Dataset.from_dict({"text": texts[number::4]}).to_parquet(tmp_path / f"wiki/{number}.parquet")
    data = ("data=wikipedia", f"data.folder={tmp_path / 'wiki'}", "data.length=32", "data.num_workers=1")
    metrics = run(
        tmp_path,
        "experiment=bert_base",
        *data,
        *("num_stages=1", "trainer.devices=2"),
        "data.batch_size=4",
        "data.validation_articles=8",
        "trainer.val_check_interval=2",
    )
    assert 0 < metrics["train_loss"] < 12
    assert 0 < metrics["val_loss"] < 12


class _Adapters(L.Callback):
    """Leaves in a file what rank 0 holds of the trained parameters at the beginning, and how much it has sent."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._begun: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        held = {name: each for name, each in pl_module.named_parameters() if each.requires_grad and not each.is_meta}
        self._begun = {name: each.detach().clone() for name, each in held.items()}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            torch.save((self._begun, trainer.strategy.statistics.bytes_sent), self._file)  # type: ignore[attr-defined]


@pytest.mark.distributed
def test_lora_sends_and_saves_adapters_alone_and_resumes_on_another_mesh(tmp_path: Path) -> None:
    chosen = ("experiment=lora", "sync=local_sgd", "sync.every=1", "data.length=16", "data.batch_size=2")
    run(tmp_path / "2x2", *chosen, callback=_Adapters(tmp_path / "2x2.pt"))
    held, sent = torch.load(tmp_path / "2x2.pt")
    assert sent == 4 * sum(each.nbytes for each in held.values())  # of four updates, in groups of two
    (file,) = (tmp_path / "2x2/checkpoints").glob("*.ckpt")
    saved = torch.load(file, weights_only=False)["state_dict"]
    assert len(saved) > len(held)
    assert all("lora_" in name for name in saved)
    more = ("num_stages=1", "trainer.devices=2", "trainer.max_epochs=3")
    run(tmp_path / "1x2", *chosen, *more, callback=_Adapters(tmp_path / "1x2.pt"), ckpt_path=file)
    held, sent = torch.load(tmp_path / "1x2.pt")
    assert held.keys() == saved.keys()
    assert all(held[name].equal(saved[name]) for name in saved)
    assert sent == 2 * sum(each.nbytes for each in held.values())
