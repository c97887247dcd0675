"""``sdpipe`` and its commands; each is imported when it is called, so that ``sdpipe`` starts without torch."""

from __future__ import annotations

import argparse
import codecs
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from lightning_sdpipe import __version__
from lightning_sdpipe.command_line import Parser, carried_out

COMMANDS = {
    "demo": ("demo:main", "train on handwritten digits, and compare SDPipe with all-reduce"),
    "simulate": ("simulate.command:main", "estimate the gain on your devices, in virtual time"),
    "partition": ("partition.command:main", "show the blocks of a model, and where it would be cut"),
    "check": ("check:main", "compare the loss and gradients of a cut model with those of the whole one"),
    "measure": ("placement.measure:main", "measure the links between the workers of a job, and their speed"),
    "place": ("placement.command:main", "decide which device runs which stage of which pipeline"),
    "run": ("supervision.command:main", "train with pipelines that are restarted when they die"),
    "status": ("seeing.command:main", "show what each worker does, and which one is slow"),
    "serve": ("seeing.serve:main", "show a run in a browser, and export its metrics to Prometheus"),
    "trace": ("seeing.trace:main", "write a timeline of what each worker did, for a trace viewer"),
    "report": ("seeing.report:main", "write a report about a run that is over"),
    "scheduler": ("scheduler.command:scheduler", "serve a run, until interrupted"),
    "keygen": ("scheduler.command:keygen", "make the keys of a run, which only you can read"),
    "replay": ("scheduler.command:replay", "replay a scheduler's log, and check that its policy decides the same"),
    "env": ("environment:main", "print versions and devices, for a bug report"),
}
"""Each command's function, which takes the arguments and returns the exit status or raises, and its help."""
_CLEANS_UP = ("demo", "measure", "run", "scheduler", "status")
"""Commands that end other processes or restore the terminal at Ctrl-C; the others end at once."""
_IN_ASCII = {"×": "x", "→": "->", "−": "-", "–": "-", "…": "...", "µ": "u", "ρ": "rho", "≤": "<=", "≥": ">=", "━": "="}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status."""
    _say_it_in_ascii()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "" not in sys.path:  # a console script does not look for modules in the working directory
        sys.path.append("")
    if not given or given[0] not in COMMANDS:
        return carried_out(lambda: _refuse(given), "sdpipe")
    name = given[0]

    def command() -> int | None:
        module, _, function = COMMANDS[name][0].partition(":")
        interrupt = signal.getsignal(signal.SIGINT)
        at_once = arguments is None and interrupt is signal.default_int_handler
        if at_once:  # Python's handler would wait for imports and C libraries to return
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        called = getattr(import_module(f"lightning_sdpipe.{module}"), function)
        if at_once and name in _CLEANS_UP:
            signal.signal(signal.SIGINT, interrupt)
        status: int | None = called(given[1:])
        return status

    return carried_out(command, f"sdpipe {name}")


def _say_it_in_ascii() -> None:
    """Print ASCII in place of characters that the terminal's encoding lacks."""

    def others(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        missing = error.object[error.start : error.end]
        return "".join(_IN_ASCII.get(character, "?") for character in missing), error.end

    codecs.register_error("sdpipe", others)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="sdpipe")


def _refuse(given: Sequence[str]) -> None:
    """Print the help or the version, or say that ``given`` names no command."""
    parser = Parser("", "Train on unequal devices: try it, cut and place a model, start runs, and watch them.")
    parser.add_argument("--version", action="version", version=f"sdpipe {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for name, (_, does) in COMMANDS.items():
        commands.add_parser(name, help=does, add_help=False)
    parser.parse_args(given or ["--help"])


if __name__ == "__main__":
    sys.exit(main())
