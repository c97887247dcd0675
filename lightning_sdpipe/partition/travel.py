"""Effects of blocks on their way across a cut: the stage that ran the blocks makes a message of them, and the next
stage repeats them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition import message as m
from lightning_sdpipe.partition.effects import Effect, version_of
from lightning_sdpipe.partition.placeholder import Absent, Placeholder


@dataclass(frozen=True)
class Travel:
    """The values of one step that cross each cut, besides the output of the last block before it.

    Args:
        crossing: the values by cut (the index of the first block after it), each as all leaves where it is found.
        changed: leaves that something writes to after the block's call, so that they are copied before.
        late: attributes of modules that the step changes in Python beyond the end of the first stage.
        counted: Python values that the step changes outside of blocks depending on their value before.
        metrics: metrics that the step logs beyond the end of the first stage.
    """

    crossing: Mapping[int, Sequence[Sequence[m.LeafKey]]] = field(default_factory=dict)
    changed: frozenset[m.LeafKey] = frozenset()
    late: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


NOTHING_MORE = Travel()


class Sending:
    """Data that a stage sends to the next one about one micro-batch.

    Where a block is skipped by chance, the value that it was given is used instead of its output. So the output of the
    block before it travels in place of its own.

    Args:
        received: the message that this stage received; None on the first stage.
        span: its blocks.
        travel: what crosses the cuts.
    """

    def __init__(self, received: m.Message | None, span: range, travel: Travel) -> None:
        self._received = received
        self._span = span
        self._values = travel.crossing.get(span.stop, ())
        self._changed = travel.changed
        self._wanted = {key for leaves in self._values for key in leaves}
        self._with_wanted = {key.block for key in self._wanted}
        self._ran = [number for number, block in enumerate(received.layout.blocks) if block] if received else []
        self._blocks: list[m.BlockLayout | None] = [None] * len(span)
        self._kept: dict[m.LeafKey, Tensor] = {}
        self._versions: dict[m.LeafKey, int] = {}
        self._numbers = list(received.numbers) if received else []
        self._last: dict[m.LeafKey, Tensor] = {}  # the tensors of the last block that ran

    def add(self, block: int, effects: Sequence[Effect]) -> None:
        """Add the effects of ``block``, which has run after all that were added before."""
        self._keep_for_skipped(block)
        self._ran.append(block)
        apart = [m.take_apart(effect.value) for effect in effects]
        layout = tuple(m.EffectLayout(e.kind, e.place, s) for e, (_, s) in zip(effects, apart, strict=True))
        self._blocks[block - self._span.start] = layout
        self._last = {}
        leaves = (leaf for of_effect, _ in apart for leaf in of_effect)
        for leaf, (key, part) in zip(leaves, m.leaves_of(block, layout), strict=True):
            if isinstance(part, m.Number):
                self._numbers.append(float(leaf))
            elif isinstance(part, m.TensorMeta) and not isinstance(leaf, Placeholder):
                self._last[key] = leaf
        if block in self._with_wanted:
            for key in self._wanted & self._last.keys():
                self._kept[key] = self._last[key].clone() if key in self._changed else self._last[key]
                self._versions[key] = version_of(self._kept[key])
        self._versions |= {key: version_of(tensor) for key, tensor in self._last.items() if key.kind == "output"}

    def message(self) -> m.Message:
        """Return the message: what was added, and the received values that go on."""
        received = self._received
        self._keep_for_skipped(self._span.stop)
        at: dict[m.LeafKey, int] = {}
        tensors: list[Tensor] = []
        number_of: dict[int, int] = {}  # of a tensor by its identity

        def put(tensor: Tensor, leaves: Sequence[m.LeafKey]) -> None:
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

        earlier: Sequence[m.BlockLayout | None] = ()
        if received is not None:
            moved: list[int | None] = [number_of.get(id(tensor)) for tensor in received.tensors]
            for key, number in at.items():
                if key in received.layout.places:
                    moved[received.layout.places[key]] = number
            earlier = received.layout.with_values_at(moved)
        blocks = (block and _located(number, block, at) for number, block in zip(self._span, self._blocks, strict=True))
        layout = m.Layout(tuple(map(m.TensorMeta.of, tensors)), (*earlier, *blocks))
        return m.Message(tensors, self._numbers, layout)

    def _boundary(self) -> Mapping[m.LeafKey, Tensor]:
        """Return the output of the last block that ran."""
        if self._last or self._received is None:
            return {key: tensor for key, tensor in self._last.items() if key.kind == "output"}
        layout = self._received.layout
        return {
            key: self._received.tensors[value]
            for key, value in layout.places.items()
            if key.block == layout.last_block and key.kind == "output"
        }

    def _has_run(self, leaves: Sequence[m.LeafKey]) -> bool:
        return any(key.block in self._ran for key in leaves)

    def _instead_of(self, key: m.LeafKey) -> m.LeafKey | None:
        """Return the leaf that is used in the place of a skipped block's output."""
        before = [block for block in self._ran if block < key.block]
        return key._replace(block=before[-1]) if before and key.kind == "output" else None

    def _keep_for_skipped(self, until: int) -> None:
        """Keep the output of the last block that ran, if a wanted output would have come since, before block
        ``until``."""
        if not self._last:
            return
        for key in self._wanted:
            instead = self._instead_of(key) if self._ran[-1] < key.block < until else None
            if instead in self._last:
                self._kept[instead] = self._last[instead].clone()

    def _find(self, key: m.LeafKey, boundary: Mapping[m.LeafKey, Tensor]) -> Tensor | None:
        if key in boundary:
            return boundary[key]
        if key in self._kept:
            return self._unchanged(key, self._kept[key])
        if self._received is not None and key in self._received.layout.places:
            return self._received.tensors[self._received.layout.places[key]]
        return None

    def _unchanged(self, key: m.LeafKey, tensor: Tensor) -> Tensor:
        if self._versions.get(key, version_of(tensor)) != version_of(tensor):
            raise ConfigurationError(
                f"A tensor of shape {tuple(tensor.shape)} that block number {key.block} of the chain made, and that a "
                "later stage needs as it was, is written to in place before the stage ends. Write to a copy, or cut "
                "elsewhere with partition=[...]."
            )
        return tensor


def _located(number: int, block: m.BlockLayout, at: Mapping[m.LeafKey, int]) -> m.BlockLayout:
    """Return ``block`` with the tensors of the message at their places."""
    keys = m.leaves_of(number, block)

    def located(effect: m.EffectLayout) -> m.EffectLayout:
        parts: tuple[m.Part, ...] = tuple(
            m.Travels(at[key]) if key in at else part
            for part, (key, _) in zip(effect.structure.parts, keys, strict=False)
        )
        return m.EffectLayout(effect.kind, effect.place, m.Structure(effect.structure.spec, parts))

    return tuple(located(effect) for effect in block) if any(key.block == number for key in at) else block


class Receiving:
    """Data that a stage received about one micro-batch.

    Args:
        message: the message of the stage before.
        chain: names of all blocks.
        device: where this stage computes.
        changed: leaves that something writes to later, and which may have to be passed on as they are.
    """

    def __init__(
        self, message: m.Message, chain: Sequence[str], device: torch.device, changed: frozenset[m.LeafKey]
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

    def _leaf(self, part: m.Part, block: int, numbers: Iterator[float]) -> Any:
        match part:
            case m.Travels(value):
                if value not in self._tensors:
                    self._tensors[value] = self._own(value)
                return self._tensors[value]
            case m.TensorMeta():
                return Placeholder(part.empty("meta"), self._device, self._chain[block])
            case m.Number():
                return part.restore(next(numbers))
            case m.Opaque(kind):
                return Absent(kind, self._chain[block])
            case m.Constant(value):
                return value

    def _own(self, value: int) -> Tensor:
        """Return the tensor in a form that user code may write to."""
        tensor = self.message.tensors[value]
        if value in self._changed:
            return tensor.clone()
        return _Identity.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]


class _Identity(torch.autograd.Function):
    """The identity: the result has the same values and memory, but is no leaf, which may not be written to in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()  # autograd does not see a view here, and a view of a leaf may not be written to either

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
