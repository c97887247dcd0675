"""Wrong names and types are refused with the nearest valid name, before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest

from lightning_sdpipe import ConfigurationError, SDPipeStrategy
from lightning_sdpipe.configuration import parameters
from recipes.command_line import check_jobs


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("strategy.num_stage=2", "strategy.num_stage does not exist; did you mean num_stages?"),
        ("num_stage=2", "num_stage does not exist; did you mean num_stages?"),
        ("sync=semi_decentralised", "sync=semi_decentralised does not exist; did you mean semi_decentralized?"),
        ("snyc=all_reduce", "snyc does not exist; did you mean sync?"),
        ("scedule=gpipe", "scedule does not exist; did you mean schedule?"),
        ("schedule=1f1bb", "schedule=1f1bb does not exist; did you mean 1f1b?"),
        ("sync.conectivity=3", "sync.conectivity does not exist; did you mean connectivity?"),
        ("+sync.conectivity=3", "sync.conectivity is not an option of SemiDecentralized; did you mean connectivity?"),
        ("+strategy.find_unused_parameters=true", "find_unused_parameters is not an option of SDPipeStrategy"),
        ("+strategy.ddp_comm_hook=true", "ddp_comm_hook is not an option of SDPipeStrategy: sync= says"),
        ("+strategy.num_micro_batchs=3", "is not an option of SDPipeStrategy; did you mean num_micro_batches?"),
        ("partition=balanced strategy.partition.bandwith=3", "strategy.partition.bandwith does not exist; did you"),
        ("trainer.max_epoch=3", "trainer.max_epoch does not exist; did you mean max_epochs?"),
        ("+trainer.limit_train_batch=3", "is not an option of Trainer; did you mean limit_train_batches?"),
        ("trainer.max_steps=3", "write +trainer.max_steps=…"),
        ("model.chanels=3", "model.chanels does not exist; did you mean channels?"),
        ("num_stages=two", "num_stages='two' is not allowed: give int or a list of int, such as 2, or [1, 2, 2]"),
        ("model.lr=quick", "model.lr='quick' must be float."),
        ("sync.connectivity=many", "sync.connectivity='many' must be int | None."),
        ("heterogeneity.draws=iterations", "is not one of iteration, pass; did you mean iteration?"),
        ("strategy.start_method=frok", "is not one of popen, spawn, fork, forkserver; did you mean fork?"),
        ("strategy.variance_correction=maybe", "strategy.variance_correction='maybe' must be bool."),
        ("+strategy.save_distributed_checkpoint=asynch", "strategy.save_distributed_checkpoint='asynch' must be"),
        ("sync.window=-1", "window=-1 is not allowed"),
        ("num_stages=1,2,3", "4 workers cannot form pipelines of num_stages=3"),
        ("seed=1,2 trainer.devices=2,3", "3 workers cannot form pipelines of num_stages=2"),
    ],
)
def test_a_wrong_command_line_gets_one_message(overrides: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_jobs("train", overrides.split())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "experiment=digits sync=semi_decentralized,all_reduce num_stages=1,2",
        "strategy.partition=[3,3] trainer.devices=2,4",
        "strategy.num_stages=[1,1,2] sync=all_reduce",
        "sync.window=0.5 strategy.blocks=['net.*'] ~trainer.logger +trainer.max_steps=3",
        "model.lr=interval(0.01,0.1) hydra.run.dir=somewhere",
    ],
)
def test_what_is_right_passes(overrides: str) -> None:
    check_jobs("train", overrides.split())


def test_the_options_of_the_strategy_are_those_of_its_signature() -> None:
    known = parameters(SDPipeStrategy)
    own = {name for name in inspect.signature(SDPipeStrategy).parameters if name != "unknown"}
    assert own <= set(known)
    assert {"start_method", "process_group_backend"} <= set(known)
    assert known["num_stages"] == int | Sequence[int]
