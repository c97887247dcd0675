"""Checks and changes the command line of ``recipes.train`` before Hydra gets it."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_sdpipe.configuration import check, explain
from lightning_sdpipe.errors import ConfigurationError

CONF = Path(__file__).resolve().parents[1] / "conf"
_MOST = 256  # most combinations of a sweep that are checked before it starts


def prepare() -> None:
    """End the program with one message, before anything starts, if a job of the command line cannot work.

    torchrun and SLURM start every rank with the same command line. All ranks then use the same output directory, and
    only rank 0 writes Hydra's files.
    """
    arguments = get_args_parser().parse_args()
    if arguments.experimental_rerun is not None:  # started by a job, with the job's configuration
        return
    OmegaConf.register_new_resolver("start_time", lambda pattern: start_time().strftime(pattern), replace=True)
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
    if arguments.multirun and _number_started() > 1:
        sys.exit("A sweep starts the processes of its jobs itself; run it without torchrun or srun.")
    if not any((arguments.cfg, arguments.info, arguments.help, arguments.hydra_help, arguments.config_dir)):
        try:
            check_jobs(arguments.config_name or "train", arguments.overrides)
        except ConfigurationError as error:
            sys.exit(str(error))
    if rank > 0:
        sys.argv += ["hydra.output_subdir=null", "hydra/job_logging=stdout"]


def check_jobs(config_name: str, overrides: Sequence[str]) -> None:
    """Raise ConfigurationError if a job of ``overrides``, as on a command line, cannot work."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        groups = GlobalHydra.instance().config_loader().list_groups("")
        try:
            for job in itertools.islice(_jobs(OverridesParser.create().parse_overrides(list(overrides))), _MOST):
                _check_job(compose(config_name, job))
        except InstantiationException as error:
            raise (error.__cause__ if isinstance(error.__cause__, ConfigurationError) else error) from None
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigurationError(explain(error, groups)) from error


@cache
def start_time() -> datetime:
    """Return when the run was started, the same on all ranks.

    Raises:
        ConfigurationError: nothing tells the ranks.
    """
    if _number_started() == 1:
        return datetime.now()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*address, is_master=False, timeout=timedelta(minutes=5))
        key = f"sdpipe/start_time/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        if os.environ["RANK"] == "0":
            store.set(key, datetime.now().isoformat())
        return datetime.fromisoformat(store.get(key).decode())
    if "SLURM_JOB_START_TIME" in os.environ:
        step = int(os.environ.get("SLURM_STEP_ID", 0))  # a job may run several steps
        return datetime.fromtimestamp(int(os.environ["SLURM_JOB_START_TIME"])).replace(microsecond=step)
    raise ConfigurationError("The ranks of this run cannot agree on an output directory; give hydra.run.dir=….")


def _number_started() -> int:
    """Return the number of processes that torchrun or srun has started with this command line; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1) if "SLURM_PROCID" in os.environ else 1))


def _jobs(overrides: Sequence[Override]) -> Iterator[list[str]]:
    return map(list, itertools.product(*map(_choices, overrides)))


def _choices(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    name = override.get_key_element()
    if override.is_discrete_sweep():
        return [f"{name}={value}" for value in override.sweep_string_iterator()]
    interval: Any = override.value()  # for sweepers that sample intervals
    return [f"{name}={interval.start}"]


def _check_job(config: DictConfig) -> None:
    check(config, typed=("lightning_sdpipe", "recipes"))
    strategy = instantiate(config.strategy)  # checks what its signature cannot
    devices = config.trainer.devices
    if isinstance(devices, int) and devices > 0:
        strategy.options.mesh(devices * config.trainer.num_nodes)
