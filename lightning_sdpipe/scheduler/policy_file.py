"""File with the policy of a run: the run's first worker writes it, for a scheduler that is started then.

The user's command on one machine starts the scheduler, but the policy is in the user's script, as ``sync=``. The file
stays for a scheduler that is started again. It also names where the worker finds its modules, since the policy may be
the user's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from lightning_sdpipe.errors import ConfigurationError, os_errors_as
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.policy import PolicyConfig


def offer(path: Path, policy: PolicyConfig) -> None:
    """Write the whole file, unless it exists: then write nothing, as the disk may be full by now.

    Raises:
        ConfigurationError: the file exists and names another policy, or it cannot be written.
    """
    plain = json.loads(registry.to_json(policy))  # as read back: lists where the policy has tuples
    folders = [os.path.abspath(folder) for folder in sys.path]  # "" is the working directory
    if not path.exists():
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with os_errors_as(f"the policy file {path} cannot be written", "without it no scheduler is started"):
                draft.write_text(json.dumps({"policy": plain, "path": folders}) + "\n")
                with contextlib.suppress(FileExistsError):
                    os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    there = json.loads(path.read_text())["policy"]
    if there != plain:
        raise ConfigurationError(
            f"this script's sync= asks for {json.dumps(plain)}, and the run's scheduler was started for "
            f"{json.dumps(there)}, since another process of the run asked for that: all pipelines run one script "
            "with equal values"
        )


def read(path: Path) -> PolicyConfig:
    """Return the policy that :func:`offer` wrote, and make its modules importable.

    Raises:
        ConfigurationError: there is no such file, or it is another one, or there is no such policy here.
    """
    try:
        found = json.loads(path.read_text())
        plain, folders = found["policy"], [str(folder) for folder in found["path"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"--policy-file {path} is no policy file of a worker of the run ({error})") from error
    sys.path += [folder for folder in folders if folder not in sys.path]
    return registry.from_plain(plain)
