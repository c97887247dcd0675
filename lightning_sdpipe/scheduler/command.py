"""``sdpipe keygen``, ``sdpipe scheduler`` and ``sdpipe replay``: the keys of a run, its service, and its log."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_sdpipe.command_line import Parser, depths_of, seconds, shape_of
from lightning_sdpipe.errors import ConfigurationError, check_integer
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.policies import registry
from lightning_sdpipe.scheduler import credentials
from lightning_sdpipe.scheduler.log.event_log import LIMIT, read_log
from lightning_sdpipe.scheduler.server.process import SchedulerSettings, serve
from lightning_sdpipe.scheduler.server.server import Endpoint, Files


def keygen(arguments: Sequence[str]) -> None:
    """Make the keys of a run."""
    parser = Parser("keygen", "Makes the keys of a run, readable by you only.")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("keys"), metavar="DIRECTORY", help="directory for both keys"
    )
    scheduler, worker = credentials.write_keys(parser.parse_args(arguments).output)
    print(f"{scheduler}: for `sdpipe scheduler --key-file`, on its machine only")
    print(f"{worker}: for every worker and for `sdpipe status --key-file`")


def scheduler(arguments: Sequence[str]) -> None:
    """Serve a run."""
    options = _parser().parse_args(arguments)
    check_integer("--log-limit", options.log_limit, 1, "MiB")
    key_file = options.key_file
    if key_file is None and credentials.is_loopback(options.bind):
        key_file, worker_file = credentials.own_keys()
        print(
            f"only your account may connect: workers take {worker_file} unless SDPIPE_KEY_FILE names another",
            file=sys.stderr,
        )
    num_stages, num_pipelines, depths = shape_of(options.stages, options.pipelines)
    settings = SchedulerSettings(
        num_stages,
        num_pipelines,
        None if options.policy_file else registry.to_plain(registry.from_text(options.policy, options.set)),
        options.policy_file,
        Endpoint(
            options.bind, None if key_file is None else credentials.read_scheduler_keys(key_file), options.lifeline_port
        ),
        options.worker_timeout,
        Files(options.log, options.log_limit << 20, options.newest),
        ElasticConfig.of_fixed(num_pipelines, depths=depths)
        if depths
        else ElasticConfig(
            options.min_pipelines, options.start_pipelines, options.gather, options.hold_limit, resume=options.resume
        ),
        level=logging.DEBUG if options.verbose else logging.INFO,
        worker_keys=None if key_file is None else credentials.worker_keys_beside(key_file),
    )
    serve(settings, [signal.SIGINT, signal.SIGTERM], [], lambda line: print(line, flush=True))


def _parser() -> Parser:
    parser = Parser("scheduler", "Serves a run until interrupted.")
    add = parser.add_argument
    add("--bind", default="tcp://127.0.0.1:5555", metavar="ADDRESS", help="address to listen at")
    add("--key-file", type=Path, help="scheduler.key of `sdpipe keygen` (default on loopback: your account's)")
    add("--stages", type=depths_of, required=True, metavar="M", help="stages of a pipeline, or of each, like 1,2,2")
    add("--pipelines", type=int, metavar="N", help="number of pipelines, unless --stages lists them")
    add(
        "--policy",
        default="semi_decentralized",
        help=f"{', '.join(registry.BUILT_IN)}, or one of your own, like my_package.policies:RoundRobin "
        "(default: %(default)s)",
    )
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a value of the policy, like window=0.05")
    add("--policy-file", type=Path, help="the policy in a file, as `sdpipe run` writes it")
    add("--worker-timeout", type=seconds, default=30.0, help="a process that is silent for longer is lost")
    add("--min-pipelines", type=int, default=1, metavar="P", help="elastic runs: with fewer, the others wait")
    add("--start-pipelines", type=int, metavar="P", help="elastic runs: begin with so many (default: --min-pipelines)")
    add("--gather", type=seconds, default=60.0, help="elastic runs: begin after that with --min-pipelines")
    add(
        "--resume",
        action="store_true",
        help="elastic runs: if all pipelines are lost at once, new ones continue from the newest checkpoint (without "
        "this option the run ends)",
    )
    add("--hold-limit", type=seconds, default=1800.0, help="elastic runs: longest wait for --min-pipelines")
    add("--lifeline-port", type=int, default=0, metavar="PORT", help="port of lifelines (default: any free one)")
    add("--log", type=Path, help="write every event and decision, as lines of JSON")
    add("--log-limit", type=int, default=LIMIT >> 20, metavar="MIB", help="largest size of the log and FILE.1 together")
    add(
        "--newest",
        type=Path,
        help="elastic runs: a file that keeps the path of the newest checkpoint, for --resume after a restart",
    )
    add("--verbose", action="store_true", help="print every group and its reason")
    return parser


def replay(arguments: Sequence[str]) -> int:
    """Play a log back; the exit status is 1 where the policy decides otherwise."""
    parser = Parser("replay", "Plays a scheduler's log back to its policy, and compares what it decides.")
    parser.add_argument(
        "file", type=Path, help="the scheduler's log, which log_dir= or `sdpipe scheduler --log` writes"
    )
    options = parser.parse_args(arguments)
    differs, played = False, False
    for record in read_log(options.file):
        beginning, entries = record.beginning, record.entries
        decided = sum(len(entry.decisions) + len(entry.leases) + len(entry.members) for entry in entries)
        print(
            f"scheduler of {beginning.time}: {beginning.policy['type']} for {beginning.num_stages} × "
            f"{beginning.num_pipelines}, {record.events} events, {decided} decisions"
        )
        if beginning.after:
            print(f"its first {beginning.after} events are in no file any more, without which it cannot be played back")
            continue
        played = True
        first = next(record.differences(), None)
        if first is None:
            print("the policy decides the same again")
            continue
        differs = True
        print(f"event {first.number} at {first.entry.at:.6f}: {first.entry.event}")
        print(f"  recorded  {first.entry.decisions or first.entry.leases or first.entry.members}")
        print(f"  now       {first.decisions}")
    if not played:
        raise ConfigurationError(f"nothing of {options.file} can be played back; give --log-limit more next time")
    return int(differs)
