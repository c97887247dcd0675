"""Refusals of what elastic runs cannot do, each with what to use instead.

:mod:`lightning_sdpipe.sync.capabilities` has those that depend on the method or the exchange.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.decentralized import Decentralized
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.sync.capabilities import Combination
from lightning_sdpipe.sync.methods import check
from lightning_sdpipe.worker.options import Options

_HOW = "in an elastic run (SDPIPE_PIPELINE is set)"


def check_options(options: Options) -> None:
    """Raise ConfigurationError for options of the strategy that elastic runs do not support."""
    if options.start_method != "popen":
        raise ConfigurationError(f"start_method={options.start_method!r} does not work {_HOW}: leave it out.")


def check_served(options: Options, served: Sequence[int], address: str) -> None:
    """Raise ConfigurationError if the scheduler at ``address`` serves pipelines of another depth. ``served`` has its
    numbers of stages and of pipelines and, for ordinary runs of unlike pipelines, the stages of each."""
    job = options.job
    assert job is not None
    stages = {*served[2:]} or {served[0]}
    if stages != {job.world_size}:
        serves = ", ".join(map(str, sorted(stages)))
        raise ConfigurationError(
            f"The scheduler at {address} serves pipelines of {serves} stages, and pipeline {job.pipeline} was started "
            f"with {job.world_size} processes, one for each stage. Start as many."
        )


def check_scheduler(options: Options, needed: PolicyConfig, held: PolicyConfig) -> None:
    """Raise ConfigurationError if the scheduler decides by another policy than a method needs, or only one of the two
    lets pipelines average while they compute."""
    others = (needed.keeps_equal or isinstance(needed, OuterRounds | Decentralized)) and type(held) is not type(needed)
    if others or needed.must_hold != held.must_hold:
        name = _named(needed)
        raise ConfigurationError(
            f"sync={options.sync!r} needs a scheduler that decides by {name}, and this one decides by {_named(held)}. "
            f"Start it with --policy {name}, or leave --policy out."
        )


def check_trainer(trainer: Trainer, options: Options) -> None:
    """Raise ConfigurationError if ``trainer`` is asked for something that an elastic run cannot do."""
    if trainer.state.fn == TrainerFn.FITTING:
        each = trainer.accumulate_grad_batches
        check(options.method, Combination(options.sync, options.exchange, elastic=True, accumulate_grad_batches=each))
    if trainer.state.fn == TrainerFn.PREDICTING:
        raise ConfigurationError(
            f"predict does not work {_HOW}: no process collects the predictions of pipelines that come and go. Load "
            "the checkpoint in a job without SDPIPE_PIPELINE."
        )


def _named(policy: PolicyConfig) -> str:
    """Return the name of ``policy``, as it is given to a scheduler."""
    values = [f" --set {name}={json.dumps(value)}" for name, value in policy.must_hold.items()]
    return registry.name_of(policy) + "".join(values)
