"""Noticing that a block leaves a tensor where no stand-in can leave one, in a model that nobody can rehearse.

A model that is larger than one worker never runs whole in one process before training, so nothing tells what a later
stage will use. But the stage that runs a block can see what Python still refers to when the call has returned.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.partition.effects import Effect


class Made(TorchDispatchMode):
    """Remembers the tensors that operations make within its context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._references: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outcome = func(*args, **(kwargs or {}))
        self._references += (weakref.ref(leaf) for leaf in tree_leaves(outcome) if isinstance(leaf, Tensor))
        return outcome

    def kept_elsewhere(self, effects: Iterable[Effect]) -> list[str]:
        """What refers to a tensor that was made, still lives, and is in none of ``effects``: descriptions of it."""
        handed_on = {id(leaf) for effect in effects for leaf in tree_leaves(effect.value)}
        alive = (reference() for reference in self._references)
        left = [tensor for tensor in alive if tensor is not None and id(tensor) not in handed_on]
        return sorted(set(_holders(left, {id(left)})))


_CONTAINERS = (list, dict, tuple, set, types.CellType)
_DEPTH = 4  # of containers in containers


def _holders(values: list[Any], passed: set[int], depth: int = _DEPTH) -> Iterator[str]:
    """What user code would reach any of ``values`` by. torch keeps things too, for the backward and for checkpoints."""
    holders = gc.get_referrers(*values) if values else []
    passed.add(id(holders))
    containers = []
    for holder in holders:
        if id(holder) in passed or isinstance(holder, (types.FrameType, types.GeneratorType)):
            continue
        passed.add(id(holder))
        if isinstance(holder, dict) and "__builtins__" in holder:
            yield f"a variable of the module {holder['__name__']}"
        elif isinstance(holder, type):
            yield f"the class {holder.__qualname__}"
        elif isinstance(holder, _CONTAINERS):
            containers.append(holder)
        elif not _is_of_torch(holder):
            yield f"{type(holder).__qualname__} {getattr(holder, '__qualname__', '')}".rstrip()
    passed.add(id(containers))
    if depth:
        yield from _holders(containers, passed, depth - 1)


def _is_of_torch(holder: Any) -> bool:
    module = holder.__module__ if isinstance(holder, types.FunctionType) else type(holder).__module__
    return str(module).startswith("torch.") or isinstance(holder, torch.autograd.function.FunctionCtx)
