"""Random numbers that depend neither on where the model is cut nor on which pipeline trains a batch.

While a step runs, user code outside the blocks draws from one stream for each (seed, epoch, position of the batch,
micro-batch), which all stages of a pipeline share, and every block draws from its own stream. A call of a block or of
its stand-in begins and ends by seeding the generators from the seed that they had, so draws within a block do not
affect later ones, and a stage that does not run the block stays in step. Recomputation sees the same numbers, since
activation checkpointing restores that seed.

The generators are torch's on the CPU and on the worker's device, Python's and NumPy's.

Batches are loaded with other streams: a :class:`Stream` continues where it ended, and :func:`seed_generators` seeds a
data set's draws for each batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_sdpipe.errors import ConfigurationError

_MASK = (1 << 64) - 1
_python: Any = random.seed.__self__  # type: ignore[attr-defined]  # the generator of the module's functions
_seed_python: Any = random.Random.__base__.seed  # type: ignore[union-attr]

_START = 0x9E3779B97F4A7C15
WITHIN, AFTER = 1, 2
"""Last numbers of the keys of a block's own stream and of the stream that follows it."""


def mix(*numbers: int, state: int = _START) -> int:
    """Return a seed, from 0 to 2⁶² − 1, that is unrelated to the seeds of other numbers. ``state`` is the result of
    :func:`mixed` for any numbers before these."""
    return mixed(*numbers, state=state) >> 2


def mixed(*numbers: int, state: int = _START) -> int:
    """Return the state of :func:`mix` after these numbers: it applies the finaliser of SplitMix64 (Steele et al. 2014)
    for each."""
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def generator_of(device: torch.device) -> torch.Generator:
    """Return the random generator of an accelerator.

    Raises:
        ConfigurationError: torch does not expose it.
    """
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    if hasattr(module, "init"):
        module.init()  # fills default_generators
    generators = getattr(module, "default_generators", ())
    index = module.current_device() if device.index is None else device.index
    if index >= len(generators):
        raise ConfigurationError(
            f"torch.{device.type}.default_generators has nothing for {device}, and without it what is drawn would "
            "depend on where the model is cut. Use an accelerator whose generators torch tells: CUDA, XPU or MPS."
        )
    generator: torch.Generator = generators[index]
    return generator


class RandomStreams:
    """The random generators of one worker, which computes on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._torch = [torch.default_generator]
        self.current: Callable[[], int] = torch.default_generator.initial_seed
        """Returns the seed of the current stream."""
        if device.type != "cpu":
            self._torch.append(generator_of(device))

    def begin(self, *key: int, state: int = _START) -> None:
        """Begin the stream of ``key``, from which user code draws from now on; ``state`` is the result of :func:`mixed`
        for any numbers before these.

        A block's stream has the key (the seed before it, the block, :data:`WITHIN`), and the stream after it the key
        (the same seed, the block, :data:`AFTER`), whether the block has run here or on another stage.
        """
        for number in key:  # mixed() and _seed() inlined for speed: a step begins some 16 streams
            state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
            state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
            state ^= state >> 31
        seed = state >> 2
        for generator in self._torch:
            generator.manual_seed(seed)
        _seed_python(_python, seed)
        _python.gauss_next = None
        np.random.seed(seed & 0xFFFFFFFF)

    def drawn_from(self) -> bool:
        """Return whether anything has been drawn since the stream began. Begin another stream afterwards, since this
        call moves the generators."""
        found = self._fingerprint()
        _seed(self._torch, self.current())
        return found != self._fingerprint()

    def _fingerprint(self) -> tuple[Any, ...]:
        states = [generator.get_state().numpy().tobytes() for generator in self._torch]
        return *states, random.getstate(), np.random.randint(2**31)


@contextmanager
def beginning_again() -> Iterator[None]:
    """After the block, begin the current stream again from its start. Its position is not kept, since saving NumPy's
    state takes 0.1 ms."""
    seed = torch.default_generator.initial_seed()
    try:
        yield
    finally:
        seed_generators(seed)


class Stream:
    """A stream of the CPU's generators that begins from ``seed`` and continues where it was left."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, ...] | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from this stream within the context. Afterwards the generators stay where they are, since their next
        user seeds them."""
        if self._states is None:
            seed_generators(self._seed)
        else:
            set_states(self._states)
        try:
            yield
        finally:
            self._states = states()


def states() -> tuple[Any, ...]:
    """Return the states of the CPU's generators, in some 0.1 ms."""
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def set_states(found: tuple[Any, ...]) -> None:
    """Restore the states of the generators."""
    torch.default_generator.set_state(found[0])
    random.setstate(found[1])
    np.random.set_state(found[2])


def seed_generators(seed: int) -> None:
    """Seed the generators of this process that a data set may draw from: torch's, Python's and NumPy's."""
    opened = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if opened:  # never in a process that loads batches
        torch.cuda.manual_seed(seed)
    _seed([torch.default_generator], seed)


def _seed(generators: Sequence[torch.Generator], seed: int) -> None:
    """Seed torch's ``generators``, Python's and NumPy's."""
    for generator in generators:
        generator.manual_seed(seed)
    _seed_python(_python, seed)  # as random.seed does after asking for the type of its argument
    _python.gauss_next = None
    np.random.seed(seed & 0xFFFFFFFF)
