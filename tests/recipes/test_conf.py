"""Every option in conf/ composes and instantiates."""

from __future__ import annotations

import itertools
from pathlib import Path

import hydra
import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import settings
from omegaconf import DictConfig, OmegaConf

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.configuration import check
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.sync import PHDPSGD
from lightning_sdpipe.topology.placement_file import Placement, write_placement
from recipes.command_line import check_jobs

CONF = Path(__file__).parents[2] / "conf"
GROUPS = {
    group.name: sorted(file.stem for file in group.glob("*.yaml"))
    for group in sorted(CONF.iterdir())
    if group.name not in ("hydra", "suite", "debug")  # suites are for recipes.bench; the size chooses in debug
}
INDEPENDENT = [
    ("sync", "data", "heterogeneity"),
    ("exchange", "model", "schedule"),
    ("partition", "trainer", "strategy"),
    ("experiment", "size"),
]
"""Groups whose options are composed at once, since that takes a tenth of a second."""


def options() -> list[list[str]]:
    """Each option of each group, in some list."""
    alone = [(group,) for group in GROUPS if group not in itertools.chain(*INDEPENDENT)]
    return [
        [f"{group}={option}" for group, option in zip(groups, row, strict=True) if option is not None]
        for groups in [*INDEPENDENT, *alone]
        for row in itertools.zip_longest(*(GROUPS[group] for group in groups))
    ]


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", [*overrides, "trainer.default_root_dir=.", "trainer.logger=false"])
    return config


@pytest.mark.parametrize("options", options(), ids=" ".join)
def test_every_option_instantiates(options: list[str], tmp_path: Path) -> None:
    needed = [each for option in options for each in _with(option, tmp_path)]
    config = composed("trainer.devices=8", *options, *needed)
    with torch.device("meta"):  # without memory for large models
        assert isinstance(hydra.utils.instantiate(config.model), L.LightningModule)
    assert isinstance(hydra.utils.instantiate(config.data), L.LightningDataModule)
    strategy = hydra.utils.instantiate(config.strategy)
    assert isinstance(strategy, SDPipeStrategy)
    if options[0].startswith("exchange="):
        assert strategy.exchange == hydra.utils.instantiate(config.exchange)
    trainer = hydra.utils.instantiate(config.trainer, strategy=strategy)
    assert trainer.strategy is strategy


def _with(option: str, directory: Path) -> list[str]:
    """What options need besides: a placement, or members that know the same."""
    if option == "exchange=one_bit":
        return ["sync=all_reduce"]
    if option not in ("placement=file", "partition=placed"):
        return []
    rows = tuple((f"a:{2 * i + 1}", f"a:{2 * i}") for i in range(4))  # of the eight devices above
    path = directory / "placement.json"
    write_placement(path, Placement("a test", {}, True, ((3, 3),) * 4, rows))
    return ["placement=file", f"placement.path={path}"]


CHOSEN = {group: GROUPS[group] for group in ("heterogeneity", "sync", "schedule", "partition", "size")}
STEP = 1 if settings.default.max_examples >= 10_000 else len(GROUPS["experiment"])  # --hypothesis-profile=long


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_an_experiment_composes_with_options_of_every_group(experiment: str, tmp_path: Path) -> None:
    """Several groups at once; each option with some experiment, and in long with each."""
    for number in range(GROUPS["experiment"].index(experiment) % STEP, max(map(len, CHOSEN.values())), STEP):
        chosen = [f"{group}={options[number % len(options)]}" for group, options in CHOSEN.items()]
        refused = {"sync=partial_reduce", "schedule=pipedream"} <= {*chosen}  # with several stages
        chosen.append(f"num_stages={1 if refused else 2}")
        placement = [each for option in chosen for each in _with(option, tmp_path)]
        config = composed(f"experiment={experiment}", *chosen, *placement)
        check(config)
        assert isinstance(hydra.utils.instantiate(config.strategy), SDPipeStrategy), chosen


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_what_an_experiment_sets_holds(experiment: str) -> None:
    said = OmegaConf.to_container(OmegaConf.load(CONF / "experiment" / f"{experiment}.yaml"))
    assert isinstance(said, dict)
    del said["defaults"]
    config = composed(f"experiment={experiment}")
    assert OmegaConf.to_container(OmegaConf.merge(config, said)) == OmegaConf.to_container(config)


def test_groups_of_pipelines_are_lists_on_the_command_line() -> None:
    config = composed("sync=phd_psgd", "sync.groups=[[0,1],[2,3]]", "sync.staleness=4")
    values = hydra.utils.instantiate(config.strategy.sync)
    assert values == PHDPSGD(groups=[[0, 1], [2, 3]], staleness=4, seed=config.seed)
    assert hydra.utils.instantiate(config.strategy).sync == values


def test_the_demonstration_scales_the_papers_delays_only() -> None:
    assert hydra.utils.instantiate(composed("experiment=digits", "heterogeneity=b").strategy).delays.scale == 0.5
    assert hydra.utils.instantiate(composed("experiment=resnet50", "heterogeneity=b").strategy).delays.scale == 1.0


def test_each_pipeline_may_have_its_own_depth() -> None:
    cuts = ["num_stages=[1,2,2]", "sync=all_reduce", "strategy.partition=[[6],[3,3],[4,2]]"]
    check_jobs("train", [*cuts, "trainer.devices=5"])
    options = hydra.utils.instantiate(composed(*cuts).strategy).options
    assert [(cut.num_stages, cut.partition) for cut in options.all_cuts] == [(1, [6]), (2, [3, 3]), (2, [4, 2])]
    with pytest.raises(ConfigurationError, match=r"num_stages=\[1, 2, 2\] are 5 workers, and .* are 4"):
        check_jobs("train", [*cuts, "trainer.devices=4"])


def test_every_value_can_be_overridden() -> None:
    config = composed("sync.window=0.25", "heterogeneity=b", "heterogeneity.scale=2", "num_stages=4", "seed=7")
    strategy = hydra.utils.instantiate(config.strategy)
    assert strategy.sync.window == 0.25
    assert strategy.num_stages == 4
    assert (strategy.delays.scale, strategy.delays.seconds, strategy.delays.seed) == (2, 0.3, 7)
