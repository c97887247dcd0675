"""Learning rates that follow a metric, where all workers must follow the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_sdpipe.errors import ConfigurationError


def refuse_own_values(trainer: Trainer, why: str | None) -> Callable[[], None]:
    """Has a plateau schedule by step refused that monitors what a training step has logged. Returns what undoes it.

    Such a value is that of a pipeline's own batch, and exists on its last stage only. Those of validation, and of
    whole epochs, are the same on all workers.

    Args:
        trainer: about to fit.
        why: all workers must step alike; None if each pipeline may have a learning rate of its own.

    Raises:
        ConfigurationError: in the first step whose value is asked for.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    if why is None:
        return lambda: None

    def monitored(name: str) -> Any:
        value = type(loop)._get_monitor_value(loop, name)
        by_step = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "step"]
        found = [config for config in by_step if config.monitor == name]
        if found and (name in _logged_now(trainer) or (value is None and found[0].strict)):
            schedule = type(found[0].scheduler).__name__
            raise ConfigurationError(
                f"{schedule} steps with interval='step' and monitors {name!r}, which is not the same on all workers: "
                f"it is of a pipeline's own batch, and {why}. Give interval='epoch', or monitor what validation logs, "
                "with frequency=val_check_interval."
            )
        return value

    loop._get_monitor_value = monitored

    def undo() -> None:
        vars(loop).pop("_get_monitor_value", None)

    return undo


def _logged_now(trainer: Any) -> set[str]:
    """By the training step of this batch."""
    results = trainer.fit_loop.epoch_loop._results
    logged = [result for _, result in results.valid_items() if result.meta.on_step]
    return {name for result in logged for name in (result.meta.name, results._forked_name(result, True)[1])}
