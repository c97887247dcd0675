"""Messages of one stage to the next about a micro-batch: values that cross the cut, and effects of all earlier blocks.

Both ends know the *layout* of a message once one like it has passed: then the values travel alone. A layout has the
:class:`Structure` of each value that user code handed on: how its parts are nested, and what each part is.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_sdpipe.partition.effects import Given, Kind, Place


class TensorMeta(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device | str) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Number:
    """A Python number, which may differ from message to message: it travels as a float64, which holds it exactly."""

    kind: str  # "bool", "int" or "float"

    def restore(self, value: float) -> float:
        number: float = _NUMBERS[self.kind](value)
        return number


@dataclass(frozen=True)
class Constant:
    """A constant: None, a string, a dtype, a device or a given object; or an integer that no float64 holds."""

    value: Any


@dataclass(frozen=True)
class Opaque:
    """An object that cannot travel; later stages get only the name of its type."""

    kind: str


@dataclass(frozen=True)
class Travels:
    """A tensor that is the message's value of this number."""

    value: int


Part: TypeAlias = TensorMeta | Travels | Number | Constant | Opaque


class Structure(NamedTuple):
    """A value without its parts: tuples, lists, dicts, named tuples and all else that is a tree for torch, such as the
    outputs of Hugging Face's models."""

    spec: pytree.TreeSpec
    parts: tuple[Part, ...]

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Return the value with ``leaves`` in the places of its parts."""
        return next(iter(leaves)) if self.spec.is_leaf() else pytree.tree_unflatten(list(leaves), self.spec)


def take_apart(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of ``value``, in order, and its structure. An object that cannot be described to another
    process is a leaf."""
    if isinstance(value, Tensor):
        return [value], Structure(_LEAF, (_part(value),))
    leaves, spec = pytree.tree_flatten(value)
    if not (spec.is_leaf() or _describable(spec)):
        leaves, spec = [value], _LEAF
    return leaves, Structure(spec, tuple(map(_part, leaves)))


_LEAF = pytree.tree_structure(None)
_NUMBERS: Mapping[str, Any] = {"bool": bool, "int": int, "float": float}


@lru_cache(maxsize=4096)
def _describable(spec: pytree.TreeSpec) -> bool:
    try:
        return bool(unpickled(pickle.dumps(spec)) == spec)
    except Exception:  # a type, or a dict's key, that other processes cannot find: each says so in its own way
        return False


def unpickled(data: bytes) -> Any:
    """Unpickle what another worker of the run has sent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of how it unpickles a leaf
        return pickle.loads(data)


def _part(leaf: Any) -> Part:
    kind = type(leaf)
    if isinstance(leaf, Tensor):
        dense = leaf.layout is torch.strided and not leaf.is_nested
        return TensorMeta.of(leaf) if dense else Opaque("sparse or nested tensor")
    if kind is bool or kind is float or (kind is int and abs(leaf) <= 2**53):
        return Number(kind.__name__)
    if leaf is None or kind in (int, str, torch.dtype, torch.device, Given):
        return Constant(leaf)
    return Opaque(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."))


class LeafKey(NamedTuple):
    """Names one part of an effect of a block: the ``part``-th leaf of the ``which``-th effect of its kind and place."""

    block: int
    kind: Kind
    place: Place
    which: int
    part: int


class EffectLayout(NamedTuple):
    """An effect without its contents; see :class:`~lightning_sdpipe.partition.effects.Effect`."""

    kind: Kind
    place: Place
    structure: Structure  # in which tensors of the message are Travels, and others a TensorMeta


BlockLayout: TypeAlias = tuple[EffectLayout, ...]


@dataclass(frozen=True)
class Layout:
    """A message without its values. ``blocks`` has the effects of every block before the cut, None for one that did not
    run."""

    values: tuple[TensorMeta, ...]
    blocks: tuple[BlockLayout | None, ...]

    @cached_property
    def last_block(self) -> int:
        """Number of the last block that ran; −1 if none has."""
        return max((number for number, block in enumerate(self.blocks) if block is not None), default=-1)

    @cached_property
    def places(self) -> Mapping[LeafKey, int]:
        """Number of the value at each leaf."""
        return {
            key: part.value
            for number, block in enumerate(self.blocks)
            for key, part in leaves_of(number, block or ())
            if isinstance(part, Travels)
        }

    @cached_property
    def first_numbers(self) -> Sequence[int]:
        """Position of each block's first number among those of the message; the last entry is their count."""
        firsts = [0]
        for block in self.blocks:
            parts = (part for effect in block or () for part in effect.structure.parts)
            firsts.append(firsts[-1] + sum(isinstance(part, Number) for part in parts))
        return firsts

    def with_values_at(self, values: Sequence[int | None]) -> tuple[BlockLayout | None, ...]:
        """Return the blocks as they are in a message in which value ``v`` of this one is ``values[v]``, or absent if
        None."""
        known = self._moved.get(tuple(values))
        if known is None:

            def moved(part: Part) -> Part:
                if not isinstance(part, Travels):
                    return part
                to = values[part.value]
                return self.values[part.value] if to is None else Travels(to)

            known = tuple(block and tuple(with_parts(effect, moved) for effect in block) for block in self.blocks)
            self._moved[tuple(values)] = known
        return known

    @cached_property
    def _moved(self) -> dict[tuple[int | None, ...], tuple[BlockLayout | None, ...]]:
        return {}

    def encode(self) -> bytes:
        """Return the layout for the header that precedes its first message, pickled: it goes to the next stage of the
        same pipeline alone."""
        return pickle.dumps((self.values, self.blocks))

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        return cls(*unpickled(data))


@dataclass(frozen=True)
class Message:
    """A message: ``tensors`` belong to ``layout.values``; ``numbers`` are those of all effects, in order."""

    tensors: Sequence[Tensor]
    numbers: Sequence[float]
    layout: Layout


def leaves_of(block: int, effects: Sequence[EffectLayout]) -> Iterator[tuple[LeafKey, Part]]:
    """Yield every part of a block's effects with its name, in order."""
    seen: dict[tuple[Kind, Place], int] = {}
    for effect in effects:
        which = seen[effect.kind, effect.place] = seen.get((effect.kind, effect.place), -1) + 1
        for number, part in enumerate(effect.structure.parts):
            yield LeafKey(block, effect.kind, effect.place, which, number), part


def with_parts(effect: EffectLayout, change: Callable[[Part], Part]) -> EffectLayout:
    """Return the effect with ``change(part)`` in the place of each part."""
    structure = effect.structure
    return effect._replace(structure=Structure(structure.spec, tuple(map(change, structure.parts))))
