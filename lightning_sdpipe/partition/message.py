"""Messages of one stage to the next about a micro-batch: values that cross the cut, and effects of all earlier blocks.

Both ends know the *layout* of a message once one like it has passed: then the values travel alone. A layout has the
:class:`Structure` of each value that user code handed on: how its parts are nested, and what each part is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_sdpipe.partition.effects import Kind, Place


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
    """A constant: None, a string, a dtype or a device; or an integer that no float64 holds."""

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

    def encode(self) -> dict[str, Any]:
        """Return the structure as values for JSON."""
        return {"spec": pytree.treespec_dumps(self.spec), "parts": list(map(encode_part, self.parts))}

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> Structure:
        for kind in _named_tuples_in(json.loads(data["spec"])[1]):
            _make_known(_loaded(kind))
        return cls(pytree.treespec_loads(data["spec"]), tuple(map(decode_part, data["parts"])))


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
    for node in _nodes(spec):
        _make_known(node.context)
    try:
        return pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    except (NotImplementedError, TypeError):  # a type that torch cannot name, or a dict's key that JSON has not
        return False


def _part(leaf: Any) -> Part:
    kind = type(leaf)
    if isinstance(leaf, Tensor):
        dense = leaf.layout is torch.strided and not leaf.is_nested
        return TensorMeta.of(leaf) if dense else Opaque("sparse or nested tensor")
    if kind is bool or kind is float or (kind is int and abs(leaf) <= 2**53):
        return Number(kind.__name__)
    if leaf is None or kind in (int, str, torch.dtype, torch.device):
        return Constant(leaf)
    return Opaque(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."))


def encode_part(part: Part) -> list[Any]:
    """Return the part as values for JSON."""
    match part:
        case TensorMeta(shape, dtype, requires_grad):
            return ["tensor", shape, str(dtype).removeprefix("torch."), requires_grad]
        case Travels(value):
            return ["travels", value]
        case Number(kind):
            return ["number", kind]
        case Opaque(kind):
            return ["opaque", kind]
        case Constant(torch.dtype() as dtype):
            return ["dtype", str(dtype).removeprefix("torch.")]
        case Constant(torch.device() as device):
            return ["device", str(device)]
        case Constant(value):
            return ["constant", value]


def decode_part(data: Sequence[Any]) -> Part:
    """Reverse :func:`encode_part`."""
    match data:
        case ["tensor", shape, dtype, requires_grad]:
            return TensorMeta(tuple(shape), getattr(torch, dtype), requires_grad)
        case ["travels", value]:
            return Travels(value)
        case ["number", kind]:
            return Number(kind)
        case ["opaque", kind]:
            return Opaque(kind)
        case ["dtype", dtype]:
            return Constant(getattr(torch, dtype))
        case ["device", device]:
            return Constant(torch.device(device))
        case [_, value]:
            return Constant(value)
    raise ValueError(f"{data!r} describes no part of a value")


def _nodes(spec: pytree.TreeSpec) -> Iterable[pytree.TreeSpec]:
    if not spec.is_leaf():
        yield spec
        for child in spec.children():
            yield from _nodes(child)


def _named_tuples_in(encoded: Mapping[str, Any]) -> Iterable[str]:
    if encoded["type"] == "collections.namedtuple":
        yield encoded["context"]
    for child in encoded["children_spec"]:
        yield from _named_tuples_in(child)


def _make_known(kind: Any) -> None:
    """Register a named tuple: these are trees for torch, but it must know each kind before it can describe it."""
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
            pytree._register_namedtuple(kind, serialized_type_name=name)


def _loaded(name: str) -> Any:
    """Return the object that other processes call ``name``, if a module that is loaded here has it."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:length]))
        if module is not None:
            return reduce(lambda place, part: getattr(place, part, None), parts[length:], cast(Any, module))
    return None


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
        """Return the layout as JSON, for the header that precedes its first message."""
        blocks = [None if block is None else list(map(_encode_effect, block)) for block in self.blocks]
        return json.dumps({"values": list(map(encode_part, self.values)), "blocks": blocks}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        plain = json.loads(data)
        values: Any = map(decode_part, plain["values"])  # tensors all of them
        blocks = (None if block is None else tuple(map(_decode_effect, block)) for block in plain["blocks"])
        return cls(tuple(values), tuple(blocks))


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


def _encode_effect(effect: EffectLayout) -> list[Any]:
    return [effect.kind, effect.place, effect.structure.encode()]


def _decode_effect(data: Sequence[Any]) -> EffectLayout:
    kind, place, structure = data
    return EffectLayout(kind, tuple(place), Structure.decode(structure))
