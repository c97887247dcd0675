"""One job of this process, and the functions that undo it at its end: a sweep runs many jobs in one process.

A job ends with the process, when the next one begins, or when :func:`end` is called.

In a Hydra job, a process that ran the command line again would run the whole sweep again, with its own times and
directories. So the others get this job's configuration, with its interpolations resolved, in a file: Hydra's
``--experimental-rerun`` calls the application's task function with it, and writes and composes nothing.
"""

from __future__ import annotations

import atexit
import copy
import gc
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_sdpipe.topology.groups import keep_until_the_end, open_groups

_QUIET = "ignore:Experimental rerun CLI option:UserWarning"
_undo = ExitStack()
_of_the_parent: list[ExitStack] = []
_key: object = None


@dataclass(frozen=True)
class Rerun:
    """Command and environment of a process that runs the task function of this job."""

    command: list[str]
    environment: dict[str, str]
    file: Path
    """File with the configuration; to be removed when all processes have read it."""


def key() -> object:
    """Return an identifier of this process's Hydra job; None outside of Hydra."""
    hydra = _hydra()
    return None if hydra is None else (hydra.runtime.output_dir, hydra.job.get("num"))  # jobs may share a directory


def in_sweep() -> bool:
    """Return whether this process may have further jobs to run."""
    hydra = _hydra()
    return hydra is not None and getattr(hydra.mode, "name", None) == "MULTIRUN"


def rerun() -> Rerun | None:
    """Write the configuration into the job's output directory, and return how others run it; None outside of Hydra."""
    hydra = _hydra()
    if hydra is None:
        return None
    handle, name = tempfile.mkstemp(prefix=".job-", suffix=".pickle", dir=hydra.runtime.output_dir)
    with os.fdopen(handle, "wb") as file:
        pickle.dump(_for_others(hydra), file)
    program, environment = _program(Path(hydra.runtime.cwd))
    return Rerun([sys.executable, "-W", _QUIET, *program, f"--experimental-rerun={name}"], environment, Path(name))


def _hydra() -> Any:
    """Return Hydra's part of the configuration of the job that runs; None if ``hydra.main`` has not started one."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    hydra = module.HydraConfig.get()
    return hydra if hydra.runtime.get("output_dir") is not None else None


def _program(start: Path) -> tuple[list[str], dict[str, str]]:
    """Return the arguments that run this program, and the environment in which its modules are found if the job has
    left ``start``, its first directory."""
    main = sys.modules["__main__"]
    if main.__spec__ is None:
        return [str(start / sys.argv[0])], {}
    paths = [start, *(start / path for path in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    return ["-m", main.__spec__.name], {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def _for_others(hydra: Any) -> Any:
    """Return the whole configuration, Hydra's part included, for a process that leaves Hydra's files to this one."""
    from omegaconf import flag_override

    config = copy.deepcopy(hydra._get_root())
    with flag_override(config, ["readonly", "struct"], False), flag_override(config.hydra, "readonly", False):
        _resolve(config)
        _drop_log_files(config.hydra.job_logging)
    return config


def _resolve(node: Any) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationResolutionError

    for name in list(node) if OmegaConf.is_dict(node) else range(len(node)):
        if OmegaConf.is_missing(node, name):
            continue
        if OmegaConf.is_interpolation(node, name):
            with suppress(InterpolationResolutionError):  # it may not be needed; where it is, the error is raised
                node[name] = node[name]
        if not OmegaConf.is_interpolation(node, name) and OmegaConf.is_config(node[name]):
            _resolve(node[name])


def _drop_log_files(logging: Any) -> None:
    if logging is None:
        return
    files = {name for name, handler in (logging.get("handlers") or {}).items() if "filename" in handler}
    for logger in (logging.get("root"), *(logging.get("loggers") or {}).values()):
        if logger and logger.get("handlers"):
            logger.handlers = [name for name in logger.handlers if name not in files]
    for name in files:
        del logging.handlers[name]


def begin() -> None:
    """Begin a job, before anything of it is set up; end the previous job if this is another one."""
    global _key
    now = key()
    if now != _key:
        end()
        _key = now


def at_end(function: Callable[..., Any], *arguments: Any) -> None:
    """Call ``function(*arguments)`` at the end of the job; functions are called in reverse order."""
    _undo.callback(function, *arguments)


@atexit.register
def end() -> None:
    """Undo what the job has left in this process; do nothing if nothing is left."""
    _undo.close()


def _leave_to_the_parent() -> None:
    """Keep the child of a fork from undoing what its parent registered, and from freeing its parent's process groups:
    it would wait for threads that it does not have."""
    global _undo
    _of_the_parent.append(_undo)
    _undo = ExitStack()
    gc.freeze()  # groups that are garbage already
    keep_until_the_end(open_groups())


os.register_at_fork(after_in_child=_leave_to_the_parent)
