"""Options are a value: what depends on hosts makes a new one, which the run has and the strategy does not."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_sdpipe import PHDPSGD, ConfigurationError, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.worker.fixed_run import FixedRun
from lightning_sdpipe.worker.options import Options


def test_defaults_are_those_of_the_strategy() -> None:
    assert SDPipeStrategy().options == Options(method=SDPipeStrategy().options.method)


def test_nothing_of_it_is_assigned() -> None:
    options: Any = SDPipeStrategy(2).options
    with pytest.raises(FrozenInstanceError):
        options.num_stages = 3


def test_arguments_are_resolved() -> None:
    options = SDPipeStrategy(3, schedule="zero_bubble", stages_per_worker=2).options
    assert (options.num_micro_batches, options.total_stages, options.division) == (3, 6, (3, 3))
    assert SDPipeStrategy(3, schedule="pipedream").options.num_micro_batches == 1


@pytest.mark.parametrize(
    ("sync", "name"), [(PHDPSGD(staleness=3), "groups"), (SemiDecentralized(max_group=2, seating="near"), "seating")]
)
def test_a_run_on_hosts_has_new_options(sync: Any, name: str) -> None:
    options = SDPipeStrategy(1, sync=sync).options
    workers: Any = SimpleNamespace(num_nodes=2, num_processes=2)
    run = FixedRun(options, workers, lambda: None)
    run.check()
    assert getattr(run.options.method.policy, name) == ((0, 1), (2, 3))
    assert options.method.policy == options.sync == sync


def test_a_run_whose_workers_do_not_fit_is_refused() -> None:
    workers: Any = SimpleNamespace(num_nodes=1, num_processes=3)
    with pytest.raises(ConfigurationError, match="3"):
        FixedRun(SDPipeStrategy(2).options, workers, lambda: None).check()
