"""``sdpipe``: the operator's commands. Starts without torch.

``sdpipe run`` trains on one machine with several pipelines, any of which may die. ``sdpipe keygen DIRECTORY`` makes the
keys of a run, ``sdpipe scheduler`` serves one, ``sdpipe status`` shows its state, ``sdpipe trace`` writes down its
spans, ``sdpipe serve`` shows it in a browser, ``sdpipe report LOG`` reports on a finished run, and ``sdpipe replay
FILE`` checks its log. ``sdpipe simulate`` tries a policy in virtual time. ``sdpipe partition`` shows how a model would
be cut, and ``sdpipe check`` whether it then computes the same. ``sdpipe measure FILE`` measures links and devices, and
``sdpipe place FILE`` decides which device runs which stage. ``sdpipe demo`` compares methods on handwritten digits, and
``sdpipe env`` prints the versions for a report of a problem.
"""

from __future__ import annotations

import argparse
import codecs
import logging
import os
import platform
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from pathlib import Path

from lightning_sdpipe import __version__
from lightning_sdpipe.errors import ConfigurationError, carried_out
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.policy import check_integer
from lightning_sdpipe.scheduler import credentials
from lightning_sdpipe.scheduler.log.event_log import LIMIT, differences, read_log
from lightning_sdpipe.scheduler.server.process import SchedulerSettings, serve
from lightning_sdpipe.scheduler.server.server import Endpoint, Files, Limits
from lightning_sdpipe.tested import verdict
from lightning_sdpipe.topology.mesh import depths_of, shape_of

_OWN_OPTIONS = {
    "run": ("supervision.command", "train with pipelines that are started again when they die"),
    "partition": ("partition.command", "show the chain of a model and where it would be cut"),
    "check": ("check", "compare what a cut model computes with the whole one"),
    "simulate": ("simulate.command", "run a policy under stragglers, in virtual time"),
    "measure": ("placement.measure", "measure the links between a job's workers, and their speed"),
    "place": ("placement.command", "decide which device runs which stage of which pipeline"),
    "demo": ("demo", "train on handwritten digits, with SDPipe and with all-reduce"),
    "status": ("seeing.command", "show what workers do, and which of them is slow"),
    "trace": ("seeing.trace", "write what workers do, span by span, for a viewer of traces"),
    "report": ("seeing.report", "write one file about a run that is over"),
    "serve": ("seeing.serve", "show a run in a browser, and to Prometheus"),
}
"""Commands that parse their own options: the module of each, whose ``main`` takes the arguments and returns the exit
status or raises, and its help."""
_IN_ASCII = {"×": "x", "→": "->", "−": "-", "–": "-", "…": "...", "µ": "u", "ρ": "rho", "≤": "<=", "≥": ">=", "━": "="}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 2 when it cannot be carried out."""
    _say_it_in_ascii()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "" not in sys.path:  # a console script does not look for modules in the working directory
        sys.path.append("")
    if given and given[0] in _OWN_OPTIONS:
        module = f"lightning_sdpipe.{_OWN_OPTIONS[given[0]][0]}"
        return carried_out(lambda: import_module(module).main(given[1:]), f"sdpipe {given[0]}")
    options = _parser().parse_args(given)
    return carried_out(lambda: options.run(options), "sdpipe")


def _say_it_in_ascii() -> None:
    """Let terminals print other characters in place of those that they do not have."""

    def others(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        missing = error.object[error.start : error.end]
        return "".join(_IN_ASCII.get(character, "?") for character in missing), error.end

    codecs.register_error("sdpipe", others)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="sdpipe")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sdpipe",
        description="Tools for training on devices that are not alike: try it, cut and place a model, run, look.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for name, (_, does) in _OWN_OPTIONS.items():
        commands.add_parser(name, help=does, add_help=False)

    env = commands.add_parser("env", help="print the versions and devices of this machine, for a report of a problem")
    env.set_defaults(run=_env)

    keygen = commands.add_parser("keygen", help="make the keys of a run, readable by you only")
    keygen.add_argument("directory", type=Path, help="where scheduler.key and worker.key are written")
    keygen.set_defaults(run=_keygen)

    scheduler = commands.add_parser("scheduler", help="serve a run until interrupted")
    add = scheduler.add_argument
    add("--bind", default="tcp://127.0.0.1:5555", help="address (default: %(default)s)")
    add("--key-file", type=Path, help="scheduler.key; on loopback this account's own by default")
    add(
        "--num-stages",
        type=depths_of,
        required=True,
        metavar="M",
        help="the stages of a pipeline; or of each, as in 1,2,2, for pipelines that are cut unlike",
    )
    add("--num-pipelines", type=int, help="N, the pipelines, unless --num-stages lists them")
    add(
        "--policy",
        default="semi_decentralized",
        help=f"{', '.join(registry.BUILT_IN)}, or one of your own, as in my_package.policies:RoundRobin "
        "(default: %(default)s)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a value of the policy, as in --set window=0.05 --set connectivity=5; may be repeated",
    )
    add("--policy-file", type=Path, help="the policy as `sdpipe run` hands it over, instead")
    add("--worker-timeout", type=float, default=30.0, help="seconds of silence until a worker counts as left")
    add(
        "--min-pipelines",
        type=int,
        default=1,
        help="of an elastic run: with fewer, the others wait instead of training (default: %(default)s)",
    )
    add("--start-pipelines", type=int, help="of an elastic run: how many begin together (default: --min-pipelines)")
    add(
        "--gather",
        type=float,
        default=60.0,
        help="seconds after which an elastic run begins with fewer than that, if there are --min-pipelines",
    )
    add(
        "--resume",
        action="store_true",
        help="if all pipelines of an elastic run are lost at once, those that come go on from its newest checkpoint; "
        "else the run is over then",
    )
    add(
        "--hold-limit",
        type=float,
        default=1800.0,
        help="seconds of waiting for --min-pipelines that end an elastic run (default: %(default)s)",
    )
    add(
        "--lifeline-port",
        type=int,
        default=0,
        help="to which the processes of a run connect, besides the scheduler's own (default: any)",
    )
    add("--log", type=Path, help="file that gets every event and decision, as lines of JSON")
    add(
        "--log-limit",
        type=int,
        default=LIMIT >> 20,
        metavar="MIB",
        help="of that file and FILE.1, which has what came before; what is older is dropped (default: %(default)s)",
    )
    add(
        "--journal",
        type=Path,
        help="file with the batches that are dealt, and beside it one with the path of the newest checkpoint, for a "
        "scheduler that is started again",
    )
    add("--verbose", action="store_true", help="log every group and its reason")
    scheduler.set_defaults(run=_scheduler)

    replay = commands.add_parser(
        "replay", help="play a scheduler's log back to its policy, and compare what it decides"
    )
    replay.add_argument("file", type=Path, help="as sdpipe scheduler --log wrote it")
    replay.set_defaults(run=_replay)

    return parser


def _env(options: argparse.Namespace) -> int:
    python = platform.python_version()
    print(f"{'python':18}{python}, {verdict('python', python)}; {platform.platform()}, {os.cpu_count()} processors")
    print(f"{'lightning-sdpipe':18}{__version__}")
    for package in ("torch", "lightning", "numpy", "pyzmq", "msgspec", "networkx"):
        try:
            found = version(package)
            print(f"{package:18}{', '.join(filter(None, (found, verdict(package, found))))}")
        except PackageNotFoundError:
            print(f"{package:18}not installed")
    devices = import_module("lightning_sdpipe.heterogeneity.speed").devices()
    print("\n".join(f"{device:18}{name}" for device, name in devices) or "no accelerator that torch can use")
    return 0


def _keygen(options: argparse.Namespace) -> int:
    scheduler, worker = credentials.write_keys(options.directory)
    print(f"{scheduler}: for `sdpipe scheduler --key-file`, on its machine only")
    print(f"{worker}: for every worker and for `sdpipe status --key-file`")
    return 0


def _scheduler(options: argparse.Namespace) -> int:
    check_integer("--log-limit", options.log_limit, 1, "MiB")
    key_file = options.key_file
    if key_file is None and credentials.is_loopback(options.bind):
        key_file, worker_file = credentials.own_keys()
        print(
            f"only your account may connect: workers take {worker_file} unless SDPIPE_KEY_FILE names another",
            file=sys.stderr,
        )
    num_stages, num_pipelines, depths = shape_of(options.num_stages, options.num_pipelines)
    settings = SchedulerSettings(
        num_stages,
        num_pipelines,
        None if options.policy_file else registry.to_plain(registry.from_text(options.policy, options.set)),
        options.policy_file,
        Endpoint(
            options.bind, None if key_file is None else credentials.read_scheduler_keys(key_file), options.lifeline_port
        ),
        Limits(options.worker_timeout),
        Files(options.log, options.log_limit << 20, options.journal),
        ElasticConfig.of_fixed(num_pipelines, depths=depths)
        if depths
        else ElasticConfig(
            options.min_pipelines, options.start_pipelines, options.gather, options.hold_limit, resume=options.resume
        ),
        level=logging.DEBUG if options.verbose else logging.INFO,
        worker_keys=None if key_file is None else credentials.worker_keys_beside(key_file),
    )
    serve(settings, [signal.SIGINT, signal.SIGTERM], [], lambda line: print(line, flush=True))
    return 0


def _replay(options: argparse.Namespace) -> int:
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
        first = next(differences(record.policy(), record.dealer(), entries, record.membership()), None)
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


if __name__ == "__main__":
    sys.exit(main())
