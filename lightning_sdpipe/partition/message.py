"""Messages from one stage to the next about a micro-batch: values that cross the cut, and effects of all earlier
blocks, which the next stage repeats.

Both ends know the *layout* of a message once one like it has passed; then the values travel alone. A layout has the
:class:`Structure` of each value in the effects: how its parts are nested, and what each part is.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.effects import Effect, Given, Kind, Place, version_of
from lightning_sdpipe.partition.placeholder import Absent, Placeholder


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
    """A Python number, which may differ from message to message; it travels as a float64, which holds it exactly."""

    kind: str  # "bool", "int" or "float"

    def restore(self, value: float) -> float:
        number: float = _NUMBERS[self.kind](value)
        return number


@dataclass(frozen=True)
class Constant:
    """A constant: None, a string, a dtype, a device, a :class:`Given`, or an integer too large for a float64."""

    value: Any


@dataclass(frozen=True)
class Opaque:
    """An object that cannot travel; later stages learn only its type's name."""

    kind: str


@dataclass(frozen=True)
class Travels:
    """A tensor that travels as the message's value with this index."""

    value: int


Part: TypeAlias = TensorMeta | Travels | Number | Constant | Opaque


class Structure(NamedTuple):
    """The nesting of a value, and its parts: of tuples, lists, dicts, named tuples and whatever else torch treats as a
    tree, such as the outputs of Hugging Face's models."""

    spec: pytree.TreeSpec
    parts: tuple[Part, ...]

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Return the value with ``leaves`` in place of its parts."""
        return next(iter(leaves)) if self.spec.is_leaf() else pytree.tree_unflatten(list(leaves), self.spec)


def take_apart(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of ``value``, in order, and its structure. A value whose structure cannot be pickled is one
    leaf."""
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
    except Exception:  # a type, or a dict's key, that cannot be pickled: each kind raises its own error
        return False


def unpickled(data: bytes) -> Any:
    """Unpickle what another worker of the run has sent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about how it unpickles a leaf itself
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
    """The name of one leaf of a block's effects: leaf ``part`` of effect number ``which`` of its kind and place."""

    block: int
    kind: Kind
    place: Place
    which: int
    part: int


class EffectLayout(NamedTuple):
    """An effect without its contents; see :class:`~lightning_sdpipe.partition.effects.Effect`."""

    kind: Kind
    place: Place
    structure: Structure  # its tensors are Travels if the message has them, else TensorMeta


BlockLayout: TypeAlias = tuple[EffectLayout, ...]


def effects_apart(block: int, effects: Sequence[Effect]) -> tuple[BlockLayout, list[tuple[Any, LeafKey, Part]]]:
    """Return the layout of the effects of ``block``, and all their leaves with their keys and parts."""
    apart = [take_apart(effect.value) for effect in effects]
    layout = tuple(EffectLayout(e.kind, e.place, s) for e, (_, s) in zip(effects, apart, strict=True))
    leaves = (leaf for of_effect, _ in apart for leaf in of_effect)
    return layout, [(leaf, *known) for leaf, known in zip(leaves, leaves_of(block, layout), strict=True)]


@dataclass(frozen=True)
class Layout:
    """A message without its values. ``blocks`` has the effects of every block before the cut; None if it did not
    run."""

    values: tuple[TensorMeta, ...]
    blocks: tuple[BlockLayout | None, ...]

    @cached_property
    def last_block(self) -> int:
        """Index of the last block that ran; −1 if none has."""
        return max((number for number, block in enumerate(self.blocks) if block is not None), default=-1)

    @cached_property
    def places(self) -> Mapping[LeafKey, int]:
        """Index of the value at each leaf."""
        return {
            key: part.value
            for number, block in enumerate(self.blocks)
            for key, part in leaves_of(number, block or ())
            if isinstance(part, Travels)
        }

    @cached_property
    def first_numbers(self) -> Sequence[int]:
        """Index of each block's first number among the message's numbers; the last entry is their count."""
        firsts = [0]
        for block in self.blocks:
            parts = (part for effect in block or () for part in effect.structure.parts)
            firsts.append(firsts[-1] + sum(isinstance(part, Number) for part in parts))
        return firsts

    def with_values_at(self, values: Sequence[int | None]) -> tuple[BlockLayout | None, ...]:
        """Return the blocks for a message in which this one's value ``v`` has the index ``values[v]``, or is absent if
        that is None."""
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
        """Return the layout, pickled, for the header of its first message. Only the next stage of the same pipeline
        reads it."""
        return pickle.dumps((self.values, self.blocks))

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        return cls(*unpickled(data))


@dataclass(frozen=True)
class Message:
    """A message: ``tensors`` match ``layout.values``; ``numbers`` are those of all effects, in order."""

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
    """Return the effect with ``change(part)`` in place of each part."""
    structure = effect.structure
    return effect._replace(structure=Structure(structure.spec, tuple(map(change, structure.parts))))


@dataclass(frozen=True)
class Travel:
    """The values of one step that cross each cut, besides the output of the last block before it.

    Args:
        crossing: the values by cut (the index of the first block after it), each given by all leaves that hold it.
        changed: leaves that are written to after the block's call, and so must be copied first.
        late: attributes of modules that the step changes in Python beyond the end of the first stage.
        counted: Python values that the step updates outside of blocks, as a counter.
        metrics: metrics that the step logs beyond the end of the first stage.
    """

    crossing: Mapping[int, Sequence[Sequence[LeafKey]]] = field(default_factory=dict)
    changed: frozenset[LeafKey] = frozenset()
    late: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


NOTHING_MORE = Travel()


class Sending:
    """Collects what a stage sends to the next one about one micro-batch.

    If a block is skipped at random, user code goes on with the value before it. So the output of the block before it
    travels in place of its own.

    Args:
        received: the message that this stage received; None on the first stage.
        span: its blocks.
        travel: what crosses the cuts.
    """

    def __init__(self, received: Message | None, span: range, travel: Travel) -> None:
        self._received = received
        self._span = span
        self._values = travel.crossing.get(span.stop, ())
        self._changed = travel.changed
        self._wanted = {key for leaves in self._values for key in leaves}
        self._with_wanted = {key.block for key in self._wanted}
        self._ran = [number for number, block in enumerate(received.layout.blocks) if block] if received else []
        self._blocks: list[BlockLayout | None] = [None] * len(span)
        self._kept: dict[LeafKey, Tensor] = {}
        self._versions: dict[LeafKey, int] = {}
        self._numbers = list(received.numbers) if received else []
        self._last: dict[LeafKey, Tensor] = {}  # the tensors of the last block that ran

    def add(self, block: int, effects: Sequence[Effect]) -> None:
        """Add the effects of ``block``; blocks are added in the order in which they run."""
        self._keep_for_skipped(block)
        self._ran.append(block)
        self._blocks[block - self._span.start], leaves = effects_apart(block, effects)
        self._last = {}
        for leaf, key, part in leaves:
            if isinstance(part, Number):
                self._numbers.append(float(leaf))
            elif isinstance(part, TensorMeta) and not isinstance(leaf, Placeholder):
                self._last[key] = leaf
        if block in self._with_wanted:
            for key in self._wanted & self._last.keys():
                self._kept[key] = self._last[key].clone() if key in self._changed else self._last[key]
                self._versions[key] = version_of(self._kept[key])
        self._versions |= {key: version_of(tensor) for key, tensor in self._last.items() if key.kind == "output"}

    def message(self) -> Message:
        """Return the message: the added effects, and the received values that travel on."""
        received = self._received
        self._keep_for_skipped(self._span.stop)
        at: dict[LeafKey, int] = {}
        tensors: list[Tensor] = []
        number_of: dict[int, int] = {}  # of a tensor by its identity

        def put(tensor: Tensor, leaves: Sequence[LeafKey]) -> None:
            number = number_of.setdefault(id(tensor), len(tensors))
            if number == len(tensors):
                tensors.append(tensor)
            at.update(dict.fromkeys(leaves, number))

        boundary = self._boundary()
        for key, tensor in boundary.items():
            put(self._unchanged(key, tensor), [key])
        for leaves in self._values:
            known = leaves if self._has_run(leaves) else [self._instead_of(key) for key in leaves]
            found = next((t for key in known if key and (t := self._find(key, boundary)) is not None), None)
            if found is not None:
                put(found, [key for key in known if key])
        for key, tensor in self._last.items():
            if id(tensor) in number_of:
                at.setdefault(key, number_of[id(tensor)])

        earlier: Sequence[BlockLayout | None] = ()
        if received is not None:
            moved: list[int | None] = [number_of.get(id(tensor)) for tensor in received.tensors]
            for key, number in at.items():
                if key in received.layout.places:
                    moved[received.layout.places[key]] = number
            earlier = received.layout.with_values_at(moved)
        blocks = (block and _located(number, block, at) for number, block in zip(self._span, self._blocks, strict=True))
        layout = Layout(tuple(map(TensorMeta.of, tensors)), (*earlier, *blocks))
        return Message(tensors, self._numbers, layout)

    def _boundary(self) -> Mapping[LeafKey, Tensor]:
        """Return the output of the last block that ran."""
        if self._last or self._received is None:
            return {key: tensor for key, tensor in self._last.items() if key.kind == "output"}
        layout = self._received.layout
        return {
            key: self._received.tensors[value]
            for key, value in layout.places.items()
            if key.block == layout.last_block and key.kind == "output"
        }

    def _has_run(self, leaves: Sequence[LeafKey]) -> bool:
        return any(key.block in self._ran for key in leaves)

    def _instead_of(self, key: LeafKey) -> LeafKey | None:
        """Return the leaf that takes the place of a skipped block's output."""
        before = [block for block in self._ran if block < key.block]
        return key._replace(block=before[-1]) if before and key.kind == "output" else None

    def _keep_for_skipped(self, until: int) -> None:
        """Keep the output of the last block that ran if a block skipped since, before block ``until``, would have made
        a wanted output."""
        if not self._last:
            return
        for key in self._wanted:
            instead = self._instead_of(key) if self._ran[-1] < key.block < until else None
            if instead in self._last:
                self._kept[instead] = self._last[instead].clone()

    def _find(self, key: LeafKey, boundary: Mapping[LeafKey, Tensor]) -> Tensor | None:
        if key in boundary:
            return boundary[key]
        if key in self._kept:
            return self._unchanged(key, self._kept[key])
        if self._received is not None and key in self._received.layout.places:
            return self._received.tensors[self._received.layout.places[key]]
        return None

    def _unchanged(self, key: LeafKey, tensor: Tensor) -> Tensor:
        if self._versions.get(key, version_of(tensor)) != version_of(tensor):
            raise ConfigurationError(
                f"A tensor of shape {tuple(tensor.shape)} that block number {key.block} of the chain made, and that a "
                "later stage needs as it was, is written to in place before the stage ends. Write to a copy, or cut "
                "elsewhere with partition=[...]."
            )
        return tensor


def _located(number: int, block: BlockLayout, at: Mapping[LeafKey, int]) -> BlockLayout:
    """Return ``block`` with a :class:`Travels` at each leaf in ``at``."""
    keys = leaves_of(number, block)

    def located(effect: EffectLayout) -> EffectLayout:
        parts: tuple[Part, ...] = tuple(
            Travels(at[key]) if key in at else part
            for part, (key, _) in zip(effect.structure.parts, keys, strict=False)
        )
        return EffectLayout(effect.kind, effect.place, Structure(effect.structure.spec, parts))

    return tuple(located(effect) for effect in block) if any(key.block == number for key in at) else block


def whole_message(effects: Sequence[Effect]) -> Message:
    """Return a message about a single block's call, with all of its tensors."""
    layout, leaves = effects_apart(0, effects)
    at: dict[LeafKey, int] = {}
    tensors: list[Tensor] = []
    number_of: dict[int, int] = {}  # of a tensor by its identity
    numbers: list[float] = []
    for leaf, key, part in leaves:
        if isinstance(part, Number):
            numbers.append(float(leaf))
        elif isinstance(part, TensorMeta):
            at[key] = number_of.setdefault(id(leaf), len(tensors))
            if at[key] == len(tensors):
                tensors.append(leaf)
    return Message(tensors, numbers, Layout(tuple(map(TensorMeta.of, tensors)), (_located(0, layout, at),)))


class Receiving:
    """Gives out what a stage received about one micro-batch.

    Args:
        message: the message from the previous stage.
        chain: names of all blocks.
        device: where this stage computes.
        changed: leaves that are written to later, while the next stage may need them as they are.
    """

    def __init__(
        self, message: Message, chain: Sequence[str], device: torch.device, changed: frozenset[LeafKey]
    ) -> None:
        self.message = message
        self._chain = chain
        self._device = device
        places = message.layout.places if changed else {}
        self._changed = {places[key] for key in changed if key in places}
        self._tensors: dict[int, Tensor] = {}

    def effects(self, block: int) -> list[Effect] | None:
        """Return the effects of the call of ``block``, with a :class:`Placeholder` for each tensor that is absent;
        None if the block has not run."""
        layout = self.message.layout.blocks[block]
        if layout is None:
            return None
        numbers = iter(self.message.numbers[self.message.layout.first_numbers[block] :])
        return [
            Effect(
                effect.kind,
                effect.place,
                effect.structure.rebuild([self._leaf(part, block, numbers) for part in effect.structure.parts]),
            )
            for effect in layout
        ]

    def _leaf(self, part: Part, block: int, numbers: Iterator[float]) -> Any:
        match part:
            case Travels(value):
                if value not in self._tensors:
                    self._tensors[value] = self._own(value)
                return self._tensors[value]
            case TensorMeta():
                return Placeholder(part.empty("meta"), self._device, self._chain[block])
            case Number():
                return part.restore(next(numbers))
            case Opaque(kind):
                return Absent(kind, self._chain[block])
            case Constant(value):
                return value

    def _own(self, value: int) -> Tensor:
        """Return the tensor in a form that user code may write to."""
        tensor = self.message.tensors[value]
        if value in self._changed:
            return tensor.clone()
        return _Identity.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]


class _Identity(torch.autograd.Function):
    """The identity: the result shares its input's memory but is no leaf, so that it may be written to in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()  # autograd does not see a view here, and a view of a leaf may not be written to either

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
