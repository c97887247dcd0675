"""Lightning's launchers, with a check before they start anything, and an end to what they started."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher


class CheckingLauncher(_SubprocessScriptLauncher):
    """Calls ``check`` in the process that the user started, before any other process exists."""

    def __init__(
        self, environment: ClusterEnvironment, num_processes: int, num_nodes: int, check: Callable[[], None]
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._check = check

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check()
        return super().launch(function, *args, **kwargs)

    def end_children(self, grace: float) -> None:
        """Waits ``grace`` seconds for the started processes to end by themselves, then ends them."""
        deadline = time.monotonic() + grace
        for process in self.procs:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class WholeModelLauncher(_MultiProcessingLauncher):
    """Calls ``check`` first, and brings the whole trained module back to the process that the user started.

    Lightning treats exceptions in the process that the user started only. Here the worker tells the others why it
    fails, and nobody outlives the user's process, however that is told to end.
    """

    def __init__(self, strategy: Any, start_method: Any, check: Callable[[], None], grace: float) -> None:
        super().__init__(strategy, start_method)
        self._check = check
        self._grace = grace

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check()
        try:
            return super().launch(function, *args, **kwargs)
        except KeyboardInterrupt:
            self.kill(signal.SIGTERM)
            raise
        finally:
            deadline = time.monotonic() + self._grace
            for process in self.procs:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)
        except BaseException as error:
            self._strategy.on_exception(error)
            raise

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        state = self._strategy.lightning_module_state_dict()
        if self._strategy.local_rank == 0:
            trainer.lightning_module.load_state_dict(state, assign=True)
        return super()._collect_rank_zero_results(trainer, results)
