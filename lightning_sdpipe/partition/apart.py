"""Trials of a user's code in a child process, of which nothing remains but the answer."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from lightning_sdpipe import openmp
from lightning_sdpipe.errors import ConfigurationError

_STDERR = 2


class NoAnswerError(RuntimeError):
    """The child died, or took too long; the message says which."""


def is_possible(device: torch.device) -> bool:
    """Return whether computations on ``device`` can be tried in a child: a fork must have neither an open accelerator
    nor, as on macOS, system libraries that do not survive it."""
    return sys.platform == "linux" and device.type == "cpu" and not _has_opened_an_accelerator()


def apart(work: Callable[[], bytes], seconds: float) -> bytes:
    """Call ``work`` in a forked child and return its result. Memory is copied as it is written to, and the rest is
    shared.

    The child has this thread only, and torch computes there with as many threads as here.

    Args:
        work: the function to call. It prints as usual; changes that it makes do not remain.
        seconds: limit of time.

    Raises:
        NoAnswerError: the child died, or took longer than that.
        Exception: the exception that ``work`` raised.
    """
    receive, send = multiprocessing.Pipe(duplex=False)
    _flush()  # else the child would print it, too
    openmp.end_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, where there are other threads
        child = os.fork()
    if child == 0:
        _answer(work, send, seconds)
    send.close()
    try:
        with receive:
            if not receive.poll(seconds):
                raise NoAnswerError(f"it was not done within {seconds:g} s")
            raised, answer = pickle.loads(receive.recv_bytes())
    except EOFError:
        os.kill(child, signal.SIGKILL)  # unless it has ended
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        raise NoAnswerError(f"the process that tried it ended with status {code}") from None
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    os.waitpid(child, 0)
    if raised:
        raise answer
    return answer  # type: ignore[no-any-return]


def _answer(work: Callable[[], bytes], send: Connection, seconds: float) -> None:
    """Run the child; it leaves without running what is registered for the end of the parent."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it as well, and ends this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The alarm ends the child also if the parent is gone. The parent's thread for that (faulthandler's) is not
        # here.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=_STDERR, chain=True)
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        gc.freeze()  # a process group that was collected here would wait for threads that do not exist
        send.send_bytes(_outcome(work))
        status = 0
    finally:
        _flush()
        os._exit(status)


def _outcome(work: Callable[[], bytes]) -> bytes:
    """Return whether something was raised, and what was returned or raised."""
    try:
        return pickle.dumps((False, work()))
    except BaseException as error:
        if not isinstance(error, ConfigurationError):  # its message is complete
            error.add_note("".join(traceback.format_exception(error)))
        try:
            answer = pickle.dumps((True, error))
            pickle.loads(answer)  # raises where an exception cannot be made from its arguments
        except Exception:
            return pickle.dumps((True, RuntimeError(f"{type(error).__name__}: {error}")))
        return answer


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _has_opened_an_accelerator() -> bool:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return is_initialized is None or bool(is_initialized())
