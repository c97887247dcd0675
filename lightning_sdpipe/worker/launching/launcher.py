"""Lightning's launchers, with a check before they start anything, and an end to the processes that they started."""

from __future__ import annotations

import ctypes
import gc
import inspect
import logging
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from torch.multiprocessing.spawn import ProcessExitedException

import __main__
from lightning_sdpipe import openmp
from lightning_sdpipe.checkpoints.whole_module import is_whole, make_room
from lightning_sdpipe.errors import LOST_CONNECTION, ConfigurationError, WorkerFailedError
from lightning_sdpipe.lightning_internals import (
    ChildProcessObserver,
    Launcher,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    command_of_this_script,
    set_num_threads,
    strategy_of,
)
from lightning_sdpipe.worker.launching import job
from lightning_sdpipe.worker.launching.environment import check_tasks, choose_port, refuse_strangers

_log = logging.getLogger(__name__)

_GRACE = 10.0  # seconds that other processes get to end by themselves after a failure
_WOKEN = 2.0  # seconds that this process gets to end by itself once they have ended
_JOINED = "SDPIPE_JOINED"  # in a started process: the pipe through which it reports that it has come to its Trainer
_PR_SET_PDEATHSIG = 1
_SET_FOR_WORKERS = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
_FORK = (
    'SDPipeStrategy(start_method="fork"): the other processes are then copies of this one, on this machine. With '
    "CUDA, nothing may have used a GPU before."
)
_NO_GUARD = (
    "The processes that this script starts read it again from the top, and came to its `fit`: put what follows its "
    'definitions under `if __name__ == "__main__":`, or leave start_method= out (the default needs no such line).'
)
_PROCESSES_GONE = (
    "and processes that would train now have ended with it. Run the script again. A script that goes on after a "
    'failure needs new processes for each run, as SDPipeStrategy(start_method="fork") starts them.'
)
_children: list[subprocess.Popen[bytes]] = []  # of this process's job: all its Trainers run on the same ones


Check = Callable[[Trainer, Mapping[str, Any]], None]
"""Raises if a Trainer cannot run with the arguments that its method was given."""


def launcher_for(strategy: Any, start_method: str, check: Check, timeout: float) -> Launcher:
    """Return a launcher that starts the processes of ``strategy``; see the classes below.

    Raises:
        ConfigurationError: other processes cannot run code that is typed into this one, the Trainers of a script start
            their processes in several ways, or other machines cannot be found.
    """
    interactive = hasattr(sys, "ps1") and start_method != "fork"
    if interactive or (_JOINED in os.environ and start_method != "popen"):
        raise ConfigurationError(
            "In a notebook or an interactive session, there is no script that other processes could run "
            f"(start_method={start_method!r}). Pass {_FORK}"
            if interactive
            else "This process runs the script again for a later Trainer, whose start_method is 'popen', and has come "
            f"to one with start_method={start_method!r}. Give all Trainers of a script the same start_method."
        )
    refuse_strangers(strategy.cluster_environment, strategy.num_nodes)
    job.begin()
    if start_method != "popen":
        return WholeModelLauncher(strategy, start_method, check, _GRACE)
    return CheckingLauncher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes, check, timeout)


def end_after_failure(launcher: Launcher | None) -> None:
    """Make the started processes end with the job, after the error has been printed."""
    if isinstance(launcher, CheckingLauncher):
        job.at_end(_end_children, _GRACE)


def give_up(launcher: Launcher | None, code: int) -> None:
    """End a wait for a tensor that will never come. End its sender, if this process started it; otherwise, or if that
    is not enough and this process need not run on, exit with ``code``."""
    if isinstance(launcher, CheckingLauncher) and _children:
        sweep = job.in_sweep()
        _end_children(0 if sweep else _GRACE)
        if sweep:
            return
        time.sleep(_WOKEN)
    os._exit(code)


class CheckingLauncher(SubprocessScriptLauncher):
    """A launcher that calls ``check`` in the process that the user started, before any other process exists.

    The others run the user's script; in a Hydra application, its task function on the configuration of this very job.
    They run what this process runs, so they are started once, and end with the job.

    Args:
        environment: knows the launcher of the processes, and where they meet.
        num_processes: processes on this machine.
        num_nodes: number of machines.
        check: raises if the run cannot work.
        timeout: seconds that started processes get to come to their Trainer, and to end after the job.
    """

    def __init__(
        self, environment: ClusterEnvironment, num_processes: int, num_nodes: int, check: Check, timeout: float
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._check = check
        self._timeout = timeout
        self.procs = _children

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self._check(trainer, inspect.signature(function).bind(*args, **kwargs).arguments)
        _Observer.trainer, _Observer.failed = trainer, False
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        check_tasks(self.cluster_environment, self.num_processes, self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._start_children()
        elif _JOINED in os.environ:
            with os.fdopen(int(os.environ.pop(_JOINED)), "wb") as pipe:
                pipe.write(b"!")
        set_num_threads(num_processes=self.num_processes)
        earlier = _Observer.failure
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _Observer.failed = True
            if earlier and LOST_CONNECTION in str(error):
                raise WorkerFailedError(
                    f"An earlier run of this script failed ({earlier}), {_PROCESSES_GONE}"
                ) from error
            _Observer.failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            _Observer.trainer = None

    def _start_children(self) -> None:
        rerun = job.rerun()
        if self.num_processes > 1 and rerun is None and __main__.__spec__ is None and not os.path.isfile(sys.argv[0]):
            if os.path.isfile(script := getattr(__main__, "__file__", "")):
                raise ConfigurationError(
                    f"This program was started as {sys.argv[0]!r}, which does not lead to it from {os.getcwd()}: it "
                    "has changed its working directory (os.chdir), and other processes start there. Start it as "
                    f"{script!r}, and change to an absolute path; or change the directory after fit. Or pass {_FORK}"
                )
            raise ConfigurationError(
                "This program has no file that other processes could run, as with `python < script.py` or `python -c`: "
                f"put it into one. Or pass {_FORK}"
            )
        job.at_end(_restore_environment, {name: os.environ.get(name) for name in _SET_FOR_WORKERS})
        job.at_end(_leave_process_groups)
        job.at_end(_await_end, self._timeout)  # no method: a job outlives its launchers and their models
        choose_port()
        environment = self.cluster_environment
        os.environ |= {
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(environment.node_rank()),
            "LOCAL_RANK": str(environment.local_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }
        command, more = (command_of_this_script(), {}) if rerun is None else (rerun.command, rerun.environment)
        pipes = {}
        for local_rank in range(1, self.num_processes):
            reading, writing = os.pipe()
            variables = os.environ | more | {"LOCAL_RANK": str(local_rank), _JOINED: str(writing)}
            self.procs.append(subprocess.Popen(command, env=variables, pass_fds=[writing]))
            os.close(writing)
            pipes[reading] = local_rank
        try:
            self._await_start(pipes)
        finally:
            for reading in pipes:
                os.close(reading)
            if rerun is not None:
                rerun.file.unlink()
        if not job.in_sweep():  # it would end the sweep
            _Observer(self.procs).start()

    def _await_start(self, pipes: Mapping[int, int]) -> None:
        """Wait until all started processes have come to their Trainer, so that none waits for one that has ended before
        there is a connection to notice it by."""
        waiting, deadline = dict(pipes), time.monotonic() + self._timeout
        poll = select.poll()
        for reading in pipes:
            poll.register(reading, select.POLLIN | select.POLLHUP)
        while waiting:
            answered = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not answered:
                raise WorkerFailedError(
                    f"The processes with LOCAL_RANK {sorted(waiting.values())} did not come to their Trainer within "
                    f"{self._timeout:g} s."
                )
            for reading, _ in answered:
                local_rank = waiting.pop(reading)
                poll.unregister(reading)
                if not os.read(reading, 1):
                    code = self.procs[local_rank - 1].wait()
                    raise WorkerFailedError(
                        f"The process with LOCAL_RANK {local_rank} ended (exit code {code}) before it came to its "
                        "Trainer. It runs the same script; its own message is above."
                    )


def _await_end(timeout: float) -> None:
    _end_children(timeout)
    for local_rank, process in enumerate(_children, 1):
        if process.returncode and not (_Observer.failed and process.returncode == 1):  # that has said why, above
            _log.warning(f"The process with LOCAL_RANK {local_rank} ended with exit code {process.returncode}.")
    _children.clear()
    _Observer.failure = ""


def _end_children(grace: float) -> None:
    """Wait ``grace`` seconds for the started processes to end by themselves, then end them."""
    deadline = time.monotonic() + grace
    for process in _children:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Observer(ChildProcessObserver):
    """Ends all processes at once when a started one has failed, unless the user's process knows and is about to end,
    and the others with it, with its own message and exit code."""

    trainer: Trainer | None = None  # the one that runs now
    failed = False
    failure = ""  # of the last run of this job that has failed

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        super().__init__(os.getpid(), processes)

    def _run(self) -> bool:
        if self.failed or (self.trainer is not None and self.trainer.received_sigterm):
            return False  # a sweep of fits in one script may go on
        return super()._run()


class WholeModelLauncher(MultiProcessingLauncher):
    """A launcher that calls ``check`` first, and brings the trained module back to the process that the user started,
    if the strategy has made it whole at the end.

    Lightning handles exceptions only in the process that the user started. Here the worker tells the others why it
    fails, and no process outlives the user's, however that is told to end.
    """

    def __init__(self, strategy: Any, start_method: Any, check: Check, grace: float) -> None:
        super().__init__(strategy, start_method)
        self._check = check
        self._grace = grace

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise SystemExit(_NO_GUARD)  # the message alone: the traceback would be one of multiprocessing's insides
        self._check(trainer, inspect.signature(function).bind(*args, **kwargs).arguments)
        if dist.is_initialized() and dist.get_world_size() == 1:  # a copy would wait in this process's own group
            job.end()
        before = {name: os.environ.get(name) for name in _SET_FOR_WORKERS}
        choose_port()
        openmp.end_threads()
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except KeyboardInterrupt:  # perhaps only this process was interrupted
            self.kill(signal.SIGTERM)
            raise
        except ProcessExitedException as error:
            error.add_note("That process has said why, above, if it had the time.")
            raise
        finally:
            deadline = time.monotonic() + self._grace
            for process in self.procs:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()
            _restore_environment(before)

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        _die_with_parent()
        try:
            super()._wrapping_function(*args, **kwargs)
        except BaseException as error:
            strategy_of(self).on_exception(error)
            raise

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        module = trainer.lightning_module
        if not is_whole(module):  # a part of the module is nothing to bring home
            module.__dict__["state_dict"] = dict
        return super()._collect_rank_zero_results(trainer, results)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        register: Any = trainer.lightning_module.register_load_state_dict_pre_hook
        with register(lambda module, state, *_: make_room(module, state)):
            super()._recover_results_in_main_process(worker_output, trainer)

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        return {**super().get_extra_results(trainer), "costs": strategy_of(self).costs()}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        strategy_of(self).brought_home = extra["costs"]


def _die_with_parent() -> None:
    """Make Linux kill this process when its parent has ended. Torch asks for SIGINT, which a program in the background
    of a shell ignores."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # the parent ended before the request
        os.kill(os.getpid(), signal.SIGKILL)


def _restore_environment(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _leave_process_groups() -> None:
    gc.collect()  # a Trainer and its strategy refer to each other; while they live, so do their groups
    if dist.is_initialized():
        dist.destroy_process_group()
