"""The command ``sdpipe status``: shows the state of a run, from its scheduler or from a log."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_sdpipe.command_line import Parser, check_installed, seconds
from lightning_sdpipe.errors import ConfigurationError, SchedulerError
from lightning_sdpipe.scheduler.client.wire import ask_status
from lightning_sdpipe.scheduler.credentials import WorkerKeys, worker_keys
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.scheduler.run_file import RunFile, running
from lightning_sdpipe.seeing.detectors import findings
from lightning_sdpipe.seeing.following import KEPT, NEWEST, Follower
from lightning_sdpipe.seeing.page import HEALTHY, exit_status, text, to_plain
from lightning_sdpipe.seeing.recording import Recording, of_log

_ELSEWHERE = 1.0
"""Seconds within which a scheduler on another host must answer to be listed."""
_OF_A_CORE, _WATCHED = 0.05, 256
"""Largest share of a core that ``--watch`` may take, which may slow refreshes down; and number of each worker's newest
updates that it examines, of which up to twice as many are kept."""

Look = Callable[[], tuple[Recording, Status | None]]


def main(arguments: Sequence[str]) -> int:
    """Show the run; with ``--once`` the exit status tells its state."""
    options = _parser().parse_args(arguments)
    look = _look(options)
    if options.watch is not None:
        _watch(look, options.watch)
        return HEALTHY
    recording, status = look()
    found = findings(recording)
    plain = to_plain(recording, status, found)
    print(json.dumps(plain, allow_nan=False) if options.json else text(plain, status))
    return exit_status(found) if options.once else HEALTHY


def add_key_file(parser: Parser) -> None:
    """Add the option that :func:`scheduler_of` takes."""
    parser.add_argument(
        "--key-file", type=Path, help="the run's worker.key (default: found for your own runs on this machine)"
    )


def add_scheduler(parser: Parser) -> None:
    """Add the arguments that :func:`scheduler_of` takes."""
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help="address of the scheduler, like tcp://127.0.0.1:5555 (default: your only run on this machine)",
    )
    add_key_file(parser)


def _parser() -> Parser:
    parser = Parser("status", "Shows what the workers of a run do, and which of them is slow.")
    parser.add_argument(
        "run",
        nargs="?",
        metavar="ADDRESS|LOG",
        help="address of the scheduler, like tcp://127.0.0.1:5555, or its log (default: your only run on this machine)",
    )
    add_key_file(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--once",
        action="store_true",
        help="report by exit status: 0 healthy, 10 warning, 11 critical, 12 too little is known, 2 the command failed",
    )
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument(
        "--watch",
        type=seconds,
        nargs="?",
        const=1.0,
        help="refresh every second, or every SECONDS; needs the extra `watch`",
    )
    parser.add_argument("--timeout", type=seconds, default=5.0, help="wait for an answer")
    return parser


def _look(options: argparse.Namespace) -> Look:
    if options.run is not None and Path(options.run).is_file():
        return lambda: (of_log(Path(options.run)), None)
    if options.run is not None and "://" not in options.run:
        raise ConfigurationError(
            f"there is no file {options.run}; give the log of a run, or a scheduler, as in tcp://10.0.0.1:5555"
        )
    address, keys, _ = scheduler_of(options.run, options.key_file)
    follower = Follower(address, keys, KEPT if options.watch is None else _WATCHED, NEWEST)
    return lambda: follower.poll(options.timeout)


def _watch(look: Look, seconds: float) -> None:
    check_installed("--watch", "watch", "rich")
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        while True:
            begun = time.process_time()
            recording, status = look()
            live.update(Text(text(to_plain(recording, status), status)), refresh=True)
            time.sleep(max(seconds, (time.process_time() - begun) / _OF_A_CORE))


def scheduler_of(address: str | None, key_file: Path | None) -> tuple[str, WorkerKeys | None, RunFile | None]:
    """Return the scheduler's address, the keys that open it, and its run if this host knows it.

    Raises:
        ConfigurationError: ``address`` is not an address; or it is None, and there is not exactly one scheduler.
    """
    if address is not None and "://" not in address:
        raise ConfigurationError(f"{address} is not the address of a scheduler, like tcp://10.0.0.1:5555")
    runs = [run for run in running(_answers) if address in (None, run.address)]
    if address is None and len(runs) != 1:
        listed = "".join(f"\n  {run}" for run in runs)
        raise ConfigurationError(
            f"several schedulers run; give the address of one:{listed}"
            if runs
            else "no scheduler of this account runs on this host; give the address of one, as in tcp://10.0.0.1:5555"
        )
    if runs and key_file is None and runs[0].keys is not None:
        return runs[0].address, runs[0].keys, runs[0]
    address = address or runs[0].address
    return address, worker_keys(address, key_file), runs[0] if runs else None


def _answers(run: RunFile) -> bool:
    """Return whether the scheduler of another host answers from here."""
    try:
        ask_status(run.address, credentials=run.keys, timeout=_ELSEWHERE)
    except (ConfigurationError, SchedulerError):
        return False
    return True
