"""What one stage tells the next of a micro-batch: values that cross the cut, and the effects of all blocks before it.

Both ends know the *layout* of a message once one like it has passed: then the values travel alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor

from lightning_sdpipe.partition.effects import Kind, Place
from lightning_sdpipe.partition.structure import (
    Number,
    Part,
    Structure,
    TensorMeta,
    Travels,
    decode_part,
    encode_part,
)


@dataclass(frozen=True)
class LeafKey:
    """Names one part of an effect of a block: the ``part``-th leaf of the ``which``-th effect of its kind and place."""

    block: int
    kind: Kind
    place: Place
    which: int
    part: int


@dataclass(frozen=True)
class EffectLayout:
    """An effect without what is in it; see :class:`~lightning_sdpipe.partition.effects.Effect`."""

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
        """The last block that ran, −1 if none has."""
        return max((number for number, block in enumerate(self.blocks) if block is not None), default=-1)

    @cached_property
    def places(self) -> Mapping[LeafKey, int]:
        """Which value is at which leaf."""
        return {
            key: part.value
            for number, block in enumerate(self.blocks)
            for key, part in leaves_of(number, block or ())
            if isinstance(part, Travels)
        }

    @cached_property
    def first_numbers(self) -> Sequence[int]:
        """Where the numbers of each block begin among those of the message, and at the end how many there are."""
        firsts = [0]
        for block in self.blocks:
            parts = (part for effect in block or () for part in effect.structure.parts)
            firsts.append(firsts[-1] + sum(isinstance(part, Number) for part in parts))
        return firsts

    def with_values_at(self, values: Sequence[int | None]) -> tuple[BlockLayout | None, ...]:
        """The blocks as a message has them in which value ``v`` of this one is ``values[v]``, or is not."""
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
        """As JSON, for the header that precedes the first message of this layout."""
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
    """``tensors`` belong to ``layout.values``; ``numbers`` are those of all effects, in order."""

    tensors: Sequence[Tensor]
    numbers: Sequence[float]
    layout: Layout


def leaves_of(block: int, effects: Sequence[EffectLayout]) -> Iterator[tuple[LeafKey, Part]]:
    """Every part of a block's effects with its name, in order."""
    seen: dict[tuple[Kind, Place], int] = {}
    for effect in effects:
        which = seen[effect.kind, effect.place] = seen.get((effect.kind, effect.place), -1) + 1
        for number, part in enumerate(effect.structure.parts):
            yield LeafKey(block, effect.kind, effect.place, which, number), part


def with_parts(effect: EffectLayout, change: Callable[[Part], Part]) -> EffectLayout:
    """The effect with ``change(part)`` in the place of each part."""
    structure = effect.structure
    return replace(effect, structure=Structure(structure.spec, tuple(map(change, structure.parts))))


def _encode_effect(effect: EffectLayout) -> list[Any]:
    return [effect.kind, effect.place, effect.structure.encode()]


def _decode_effect(data: Sequence[Any]) -> EffectLayout:
    kind, place, structure = data
    return EffectLayout(kind, tuple(place), Structure.decode(structure))
