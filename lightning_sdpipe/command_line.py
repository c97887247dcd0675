"""What all commands have in common: their parser, lists of numbers, and how they end."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from lightning_sdpipe.errors import ConfigurationError, SchedulerError, WorkerFailedError

_Number = TypeVar("_Number", int, float)
_NUMBERS = re.compile(r"[\d.,/]+")


class Parser(argparse.ArgumentParser):
    """A parser of ``sdpipe COMMAND``, whose help shows all defaults and whose errors are one line. Numbers in a list
    may be separated by commas or spaces."""

    def __init__(self, command: str, description: str, **more: Any) -> None:
        super().__init__(f"sdpipe {command}".strip(), description=description, formatter_class=_Help, **more)

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        lists = {name for each in self._actions if each.type in _LISTS for name in each.option_strings}
        words: list[str] = []
        listing = False
        for word in sys.argv[1:] if args is None else args:
            if listing and _NUMBERS.fullmatch(word) and words[-1] not in lists:
                words[-1] = f"{words[-1].rstrip(',')},{word.lstrip(',')}"
                continue
            listing = word.partition("=")[0] in lists or (listing and words[-1] in lists)
            words.append(word)
        return super().parse_known_args(words, namespace)


class _Help(argparse.HelpFormatter):
    def format_help(self) -> str:
        self._action_max_length += 2  # argparse forgets that commands are indented further than options
        return super().format_help()

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _UNITS.get(action.type, super()._get_default_metavar_for_optional(action))

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = action.option_strings and action.default not in (None, [], argparse.SUPPRESS) and action.nargs != 0
        return text + (" (default: %(default)s)" if shown and "default" not in text else "")


def depths_of(text: str) -> tuple[int, ...]:
    """Parse the number of stages of all pipelines, as in ``2``, or of each, as in ``1,2,2``.

    Raises:
        argparse.ArgumentTypeError: the text is no such list.
    """
    return tuple(_listed(text, int, 1, "a number of at least 1, or one for each pipeline, like 1,2,2"))


def seconds(text: str) -> float:
    """Parse a number of seconds.

    Raises:
        ValueError: the text is not a number.
    """
    return float(text)


def numbers_of(text: str) -> list[float]:
    """Parse numbers, as in ``1,1,2``.

    Raises:
        argparse.ArgumentTypeError: the text has no numbers.
    """
    return _listed(text, float, -math.inf, "numbers, like 1,1,2")


def _listed(text: str, kind: Callable[[str], _Number], least: float, what: str) -> list[_Number]:
    with contextlib.suppress(ValueError):
        numbers = [kind(number) for number in text.split(",")]
        if min(numbers) >= least:
            return numbers
    raise argparse.ArgumentTypeError(f"{text}: give {what}")


def speeds_of(text: str) -> list[float] | list[list[float]]:
    """Parse speeds: ``1,0.5`` for the stages of each pipeline, or a list for each pipeline, as in ``1/0.5,0.5``.

    Raises:
        argparse.ArgumentTypeError: the text has no numbers.
    """
    rows = [numbers_of(row) for row in text.split("/")]
    return rows if len(rows) > 1 else rows[0]


_LISTS = (depths_of, numbers_of, speeds_of)
_UNITS: dict[Any, str] = dict.fromkeys(_LISTS, "LIST") | {int: "N", float: "X", seconds: "SECONDS", Path: "FILE"}
"""The name of an option's value in the help, by the option's type."""


def check_installed(what: str, extra: str, *modules: str) -> None:
    """Check that the ``modules`` that ``what`` needs, from an ``extra`` of the package, are installed.

    Raises:
        ConfigurationError: some are missing.
    """
    if missing := [name for name in modules if find_spec(name) is None]:
        listed = " and ".join(missing)
        raise ConfigurationError(f"{what} needs an extra: {listed} not found; pip install 'lightning-sdpipe[{extra}]'")


def check_writable(file: Path) -> None:
    """Check that ``file`` is in a directory that exists and that this user may write to.

    Raises:
        ConfigurationError: it is not.
    """
    if not os.access(file.parent, os.W_OK):
        where = file.parent.absolute()
        raise ConfigurationError(f"{file} cannot be written: {where} is no directory where this user may write.")


def shape_of(stages: Sequence[int], pipelines: int | None) -> tuple[int, int, tuple[int, ...]]:
    """Return the number of stages of the deepest pipeline, the number of pipelines, and the number of stages of each
    pipeline, empty unless ``stages`` lists several.

    Raises:
        ConfigurationError: the number of pipelines is missing, below 1, or differs from the length of the list.
    """
    if len(stages) == 1:
        if pipelines is None or pipelines < 1:
            raise ConfigurationError(
                f"--stages {stages[0]} are those of each pipeline; give --pipelines too, 1 or more."
            )
        return stages[0], pipelines, ()
    if pipelines not in (None, len(stages)):
        listed = ",".join(map(str, stages))
        raise ConfigurationError(f"--stages {listed} lists {len(stages)} pipelines; leave --pipelines {pipelines} out.")
    return max(stages), len(stages), tuple(stages)


def carried_out(command: Callable[[], int | None], name: str) -> int:
    """Run ``command``, print its error in one line after its ``name``, and return its exit status: 2 if it cannot be
    carried out, 1 if a worker or the system failed, 130 if interrupted, and 141, silently, if its output's reader has
    gone."""
    try:
        try:
            return command() or 0
        finally:
            sys.stdout.flush()
    except (ConfigurationError, SchedulerError, WorkerFailedError) as error:
        said, status = str(error), 1 if isinstance(error, WorkerFailedError) else 2
    except BrokenPipeError:
        said, status = "", 141
    except OSError as error:
        said = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
        status = 1 if error.filename is None else 2
    except KeyboardInterrupt:
        return 130
    with contextlib.suppress(OSError):  # a full disk, for example
        if said:
            print(f"{name}: {said}", file=sys.stderr)
    with contextlib.suppress(OSError):  # flush now: if it fails, /dev/null spares Python a second failure at its end
        sys.stdout.flush()
        return status
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status
