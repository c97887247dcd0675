"""States of parameters that a synchronizer keeps, stored in a checkpoint as entries of the optimizer's state.

So they are gathered, cut and loaded like its own, on any number of stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

PREFIX = "sdpipe_"


@contextmanager
def added_to(optimizer: Optimizer, states: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> Iterator[None]:
    """Add ``states`` to the optimizer only while a checkpoint is made: it may take a non-empty state for one that it
    has initialised."""
    known = {parameter for parameter in states if parameter in optimizer.state}
    for parameter, state in states.items():
        optimizer.state[parameter].update({PREFIX + name: value for name, value in state.items()})
    try:
        yield
    finally:
        for parameter, state in states.items():
            for name in state:
                del optimizer.state[parameter][PREFIX + name]
            if parameter not in known:
                del optimizer.state[parameter]


def taken_from(optimizer: Optimizer) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Remove the added states from a loaded optimizer, and return them by parameter."""
    found: dict[nn.Parameter, dict[str, Tensor]] = {}
    for parameter in [parameter for parameter in optimizer.state if isinstance(parameter, nn.Parameter)]:
        state = optimizer.state[parameter]
        for name in [name for name in state if isinstance(name, str) and name.startswith(PREFIX)]:
            found.setdefault(parameter, {})[name.removeprefix(PREFIX)] = state.pop(name)
        if not state:
            del optimizer.state[parameter]
    return found
