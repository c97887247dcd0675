"""Exceptions that reach users, checks of single values, and suggestions for wrong names."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, Literal, get_args, get_origin, get_type_hints


class ConfigurationError(ValueError):
    """The configuration cannot work. The message says what was given, what is allowed, and what to do."""


class SchedulerError(RuntimeError):
    """The scheduler cannot be reached, or did not answer in time."""


class RefusedError(SchedulerError):
    """The scheduler was reached and refuses the request, so starting again does not help."""


class NonFiniteError(RuntimeError):
    """A loss, gradients or parameters are nan or infinite; ``what`` names them, the pipeline and the step."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"Not finite: {what}. Lower the learning rate or clip gradients; Trainer(detect_anomaly=True) finds the "
            "operation. SDPipeStrategy(on_nonfinite='continue') continues anyway."
        )


class NotWrittenError(OSError):
    """A checkpoint was not written; the message names the file, what it needs and what is free."""


class WorkerFailedError(RuntimeError):
    """Another worker of the run failed first; the message names it and its reason."""


class MustEndError(WorkerFailedError):
    """This process, or another stage of its pipeline, was declared lost: it must end, and be restarted."""

    def __init__(self, pipeline: int, reason: str) -> None:
        super().__init__(f"this process of pipeline {pipeline} must end: {reason}")


def refusal(name: str, value: object, allowed: str) -> ConfigurationError:
    """Return the error for a value that is not allowed."""
    return ConfigurationError(f"{name}={value!r} is not allowed; give {allowed}")


def check_choices(values: object) -> None:
    """Check that each field of ``values`` whose annotation has a ``Literal`` holds one of its choices.

    Raises:
        ConfigurationError: a field holds another value.
    """
    for name, hint in get_type_hints(type(values)).items():
        parts = [hint, *get_args(hint)]  # of a union
        choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
        choices += [None] if choices and type(None) in parts else []
        if choices and getattr(values, name) not in choices:
            raise refusal(name, getattr(values, name), f"one of {', '.join(map(repr, choices))}")


def check_integer(name: str, value: object, least: int, unit: str, *, optional: bool = False) -> None:
    """Check that ``value`` is an integer of at least ``least``, or None if ``optional``.

    Raises:
        ConfigurationError: it is not.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refusal(name, value, f"an integer from {least} ({unit})")


def check_number(
    name: str,
    value: object,
    allowed: str,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = math.nan,
    below: float = math.nan,
) -> None:
    """Check that ``value`` is a number from ``least`` to ``most``, greater than ``above`` and less than ``below``.

    Raises:
        ConfigurationError: it is not, or is nan; the message says what is ``allowed``.
    """
    number: Any = math.nan if isinstance(value, bool) or not isinstance(value, Real) else value
    if not least <= number <= most or number <= above or number >= below:
        raise refusal(name, value, allowed)


@contextmanager
def os_errors_as(cannot: str, advice: str = "", kind: type[Exception] = ConfigurationError) -> Iterator[None]:
    """Raise ``kind`` in place of an OSError within the block; its message says what ``cannot`` be done, and why.

    Raises:
        ConfigurationError: or another ``kind``: the system refused.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{cannot} ({error.strerror}); {advice}" if advice else f"{cannot}: {error.strerror}") from error


ONLY_LIGHTNING = (
    "SDPipeStrategy works only with the Trainer of `import lightning as L`: that of pytorch_lightning does not accept "
    "its strategies, and Fabric has no training_step that could be cut."
)

LOST_CONNECTION = "gloo/transport"
"""Part of the message of gloo's exceptions about a lost connection, which names a source file."""


def place_of(error: BaseException) -> str:
    """Return the frame in which ``error`` was raised, as in ``train.py:41 in training_step``; empty if it has no
    traceback."""
    frames = error.__traceback__
    if frames is None:
        return ""
    while frames.tb_next is not None:
        frames = frames.tb_next
    code = frames.tb_frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{frames.tb_lineno} in {code.co_name}"


LEFT = {
    "staleness": "leave it out, or use PHDPSGD(staleness=8), which bounds the age of models",
    "seating": "leave it out, since large groups are split by turns",
    **dict.fromkeys(
        ("parameter_server", "het_pipe", "ParameterServer", "HetPipe"),
        "a checkout has it as a method from outside, recipes.baselines.ParameterServer and HetPipe; or use "
        "SemiDecentralized(window=inf), which computes what a synchronous server does",
    ),
    **dict.fromkeys(
        ("quorum", "grace"),
        "leave it out, since with dealt data no pipeline waits for a slow one: a round is due when all together have "
        "made as many updates",
    ),
    "group": "use SemiDecentralized() or PartialReduce(), whose groups wait for no slow pipeline",
    **dict.fromkeys(("top_k", "TopK"), 'use "one_bit", which sends a bit per value with error feedback'),
    "sharded": 'leave it out, since meetings of PHDPSGD move whole models (data="sharded" is another option)',
}
"""Names that the package once had, and what to do without them."""


def counted(number: int, noun: str) -> str:
    """Return ``number`` and ``noun``, in the plural unless ``number`` is 1."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def shape(stages: int, pipelines: int) -> str:
    """Return a mesh in words, as in ``2 stages × 3 pipelines``."""
    return f"{counted(stages, 'stage')} × {counted(pipelines, 'pipeline')}"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about a wrong ``name``: what replaces it if it has left the package, else the nearest
    of ``names``, else all of them."""
    if name in LEFT:
        return f"; it has left the package: {LEFT[name]}."
    names = list(dict.fromkeys(names))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(names) or 'none'}."
