"""``sdpipe run``: trains with several pipelines on this machine, any of which may die."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_sdpipe.command_line import Parser, seconds
from lightning_sdpipe.errors import ConfigurationError, check_integer, os_errors_as, shape
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler.client.wire import ask_status
from lightning_sdpipe.scheduler.credentials import read_scheduler_keys, read_worker_keys, write_keys
from lightning_sdpipe.scheduler.server.process import SchedulerProcess, SchedulerSettings
from lightning_sdpipe.scheduler.server.server import Endpoint, Files
from lightning_sdpipe.supervision.output import Terminal
from lightning_sdpipe.supervision.rules import NO_MEMBERS, Seen, Settings
from lightning_sdpipe.supervision.supervisor import Supervisor

_ANSWER = 2.0  # seconds in which the scheduler answers for its status


def main(arguments: Sequence[str]) -> int:
    """Run the script's pipelines; return the exit status of the run."""
    options = _parser().parse_args(arguments)
    settings, policy = _check(options)
    terminal = Terminal()  # before anything is opened that could take the place of a closed output
    logs = _make_directory(options.logs)
    environment = _environment(settings, options.bind)
    scheduler_file, worker_file = write_keys(logs)
    environment["SDPIPE_KEY_FILE"], keys = str(worker_file), read_worker_keys(worker_file)
    policy_file = logs / "policy.json" if policy is None else None
    if policy_file is not None:
        environment["SDPIPE_POLICY_FILE"] = str(policy_file)
    of_scheduler = SchedulerSettings(
        options.stages,
        options.pipelines,
        None if policy is None else registry.to_plain(policy),
        policy_file,
        Endpoint(options.bind, read_scheduler_keys(scheduler_file)),
        options.worker_timeout,
        Files(logs / "scheduler.jsonl", newest=logs / "newest.checkpoint"),
        ElasticConfig(
            options.min_pipelines, options.pipelines, options.gather, options.hold_limit, resume=options.resume
        ),
        worker_keys=keys,
        script=options.script,
    )
    scheduler = SchedulerProcess(of_scheduler, logs / "scheduler.log", environment, keeps_port=True)
    mesh = shape(settings.num_stages, settings.num_pipelines)
    terminal.say(f"{mesh}; scheduler at {scheduler.address}; logs in {logs}")

    def look(asked: float) -> Seen:
        if not scheduler.started:
            return Seen(asked)
        status = ask_status(scheduler.address, credentials=keys, timeout=_ANSWER)
        return Seen(asked, status.members or NO_MEMBERS, status.failure)

    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.arguments]
    try:
        return Supervisor(settings, command, environment, scheduler, look, logs, terminal).run()
    finally:
        terminal.close()


def _parser() -> Parser:
    parser = Parser(
        "run",
        "Trains on this machine with N pipelines of M processes each. A pipeline that dies is started again.",
        usage="sdpipe run --pipelines N [--stages M] [options] [-m] SCRIPT [ARGUMENT …]",
    )
    add = parser.add_argument
    add("--pipelines", type=int, required=True, metavar="N", help="number of pipelines")
    add("--stages", type=int, default=1, metavar="M", help="processes of each pipeline, one for each stage")
    add("--restarts", type=int, default=10, metavar="K", help="a pipeline is given up after this many restarts")
    add("--min-pipelines", type=int, default=1, metavar="P", help="with fewer pipelines, the others wait")
    add("--gather", type=seconds, default=60.0, help="begin after that without missing pipelines")
    add("--hold-limit", type=seconds, default=1800.0, help="longest wait for --min-pipelines")
    add("--resume", action="store_true", help="if all pipelines are lost at once, continue from the newest checkpoint")
    add("--worker-timeout", type=seconds, default=30.0, help="a process that is silent for longer is lost")
    add("--policy", help="the scheduler's policy (default: that of the script's sync=)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a value of the policy")
    bind = "address to listen at; on another one than loopback, other machines may send pipelines"
    add("--bind", default="tcp://127.0.0.1:*", metavar="ADDRESS", help=bind)
    add("--logs", type=Path, metavar="DIRECTORY", help="a new one, for logs and keys (default: in sdpipe-runs/)")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as with python -m")
    add("script", metavar="SCRIPT", help="your script, which calls fit of a Trainer with SDPipeStrategy")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of the script").required = False
    return parser


def _check(options: argparse.Namespace) -> tuple[Settings, PolicyConfig | None]:
    """Return the settings, and the policy if one is named, or raise ConfigurationError before anything is started."""
    if not sys.platform.startswith("linux"):
        raise ConfigurationError("it needs Linux; elsewhere start a scheduler and torchrun by hand: docs/faults.md")
    check_integer("--stages", options.stages, 1, "processes of each pipeline")
    check_integer("--restarts", options.restarts, 0, "times that a pipeline is started again")
    check_integer("--min-pipelines", options.min_pipelines, 1, "pipelines")
    check_integer("--pipelines", options.pipelines, options.min_pipelines, "pipelines, at least --min-pipelines")
    if options.set and options.policy is None:
        raise ConfigurationError("--set gives values of --policy, which is missing; or give them to the script's sync=")
    policy = None if options.policy is None else registry.from_text(options.policy, options.set)
    if policy is not None:
        registry.build(policy, options.stages, options.pipelines)
    if not options.module and not Path(options.script).is_file():
        raise ConfigurationError(f"there is no script {options.script}; give its path, or -m and a module's name")
    if "SDPIPE_PIPELINE" in os.environ:
        raise ConfigurationError("SDPIPE_PIPELINE is set: this is already a pipeline; give the script to python itself")
    return Settings(options.pipelines, options.stages, options.restarts, options.min_pipelines), policy


def _make_directory(asked: Path | None) -> Path:
    directory = asked or Path("sdpipe-runs", time.strftime("%Y-%m-%d_%H-%M-%S") + f"_{os.getpid()}")
    with os_errors_as(f"--logs {directory} cannot be made", "give a new one"):
        directory.mkdir(parents=True)
    return directory.resolve()


def _environment(settings: Settings, bind: str) -> dict[str, str]:
    """Return the environment of all ranks. All pipelines share the processors, which a rank does not know. Where no
    other machine can send pipelines, tensors travel over loopback."""
    threads = max(1, len(os.sched_getaffinity(0)) // (settings.num_pipelines * settings.num_stages))
    network = {"GLOO_SOCKET_IFNAME": "lo"} if bind.startswith("tcp://127.") else {}
    return {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"} | network | os.environ
