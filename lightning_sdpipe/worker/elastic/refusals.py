"""What elastic jobs cannot do yet, refused with what to use instead."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.lightning_internals import start_method
from lightning_sdpipe.loop import loop
from lightning_sdpipe.partition import plan
from lightning_sdpipe.policies.decentralized import Decentralized
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.strategy.options import SDPipeOptions
from lightning_sdpipe.sync.methods import ByPolicy

_HOW = "in an elastic job (SDPIPE_PIPELINE is set)"


def check_options(options: SDPipeOptions) -> None:
    """Raises ConfigurationError for options of the strategy that an elastic job cannot carry out."""
    policy = options._method.policy if isinstance(options._method, ByPolicy) else None
    if isinstance(policy, PHDPSGD) and policy.within == "gradients":
        raise ConfigurationError(
            f"sync={options.sync!r} does not work {_HOW}: the pipelines of a group average gradients, and none could "
            "take a step without one that may be gone. Use PHDPSGD(within='models'), which averages their models after "
            "each step instead."
        )
    if policy is None or isinstance(policy, Decentralized) or getattr(policy, "asynchronous", False):
        raise ConfigurationError(
            f"sync={options.sync!r} does not work {_HOW}: its exchanges would wait for all pipelines, or for ones that "
            "may be gone. Use SemiDecentralized(), PartialReduce(), LocalSGD(every=...), ADPSGD() or NoSync(). In "
            "place of AllReduce() that is LocalSGD(every=1), which averages models instead of gradients."
        )
    takes = getattr(options._method, "takes", None)
    for given, name, instead in (
        (getattr(policy, "seating", None) == "near", "seating='near'", "list who is near, as in [[0, 1], [2, 3]]"),
        (options.schedule == "pipedream", "schedule='pipedream'", "use a schedule with a flush, such as '1f1b'"),
        (bool(options.save_distributed_checkpoint), "save_distributed_checkpoint", "leave it out"),
        (plan.is_measured(options.partition), f"partition={options.partition!r}", "use 'parameters', or the numbers"),
        (options.batch_by_speed, "batch_by_speed", "leave it out; batches are dealt by speed in any case"),
        (options.exchange.overlap == "free", "overlap='free'", "use overlap='step'"),
        (options.exchange.hierarchy != "flat", "hierarchy='hosts'", "use hierarchy='flat'"),
        (
            not options.exchange.is_full and takes is not None and takes.common,
            f"{options.exchange.payload} with sync={options.sync!r}",
            "its members need a common model, which newcomers lack; use SemiDecentralized() or PartialReduce(), or "
            "send in full",
        ),
        (start_method(options) != "popen", f"start_method={start_method(options)!r}", "leave it out"),
    ):
        if given:
            raise ConfigurationError(f"{name} does not work {_HOW} yet: {instead}.")


def check_trainer(trainer: Trainer) -> None:
    """Raises ConfigurationError for what a Trainer is asked for and an elastic job cannot do."""
    if trainer.state.fn == TrainerFn.PREDICTING:
        raise ConfigurationError(
            f"predict does not work {_HOW}: nobody collects the predictions of pipelines that come and go. Load the "
            "checkpoint in a job without SDPIPE_PIPELINE."
        )
    if trainer.state.fn == TrainerFn.FITTING and loop.clocks(trainer):
        raise ConfigurationError(
            f"Limits of time (max_time, Timer, ModelCheckpoint(train_time_interval=...), val_check_interval as a time) "
            f"do not work {_HOW} yet: clocks of several machines would decide differently. Count steps or epochs."
        )
