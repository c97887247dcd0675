"""Messages between neighbouring stages of one pipeline: activations go down, gradients go up.

Both ends see the same micro-batches, so both know the shapes of the next message once a micro-batch of those shapes has
passed. The first message with new shapes follows a header that describes it, so no user code runs an extra time. A note
travels with the tensors: it says which of the known layouts the message has (a block may be skipped now and then), and
holds the Python numbers that the blocks have made. A message of unexpected shapes follows a filler of the expected
shapes. Sends start at once and are waited for later; the next receive is posted before the current micro-batch is
computed.

The first message of a mini-batch has its digest (:mod:`~lightning_sdpipe.pipeline.digest`) in the header or the note,
at the same place, since stages that were given different batches may expect different ones. After layers were frozen or
unfrozen, a message of the same length comes first. A stage without that change takes it for the first message of its
mini-batch, so either stage notices that the other has not made the same change.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import meter, p2p
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.message import Layout, Message
from lightning_sdpipe.pipeline.digest import LENGTH, BatchDigest

_FREEZING = -1  # in place of the number that begins the first message of a mini-batch


@dataclass
class StageLink:
    """One stage's ends of the cuts to its neighbours.

    Args:
        group: the pipeline's process group.
        ranks: global rank of every stage of the pipeline; a rank may hold several.
        stage: this stage.
        device: where received tensors go.
        dynamic_shapes: send a header before every message, which is faster if output shapes of blocks often depend on
            the data.
        lanes: the group of each direction of a cut, by tag, if the backend of ``group`` has no tags.
        sends_in_flight: most sends in one direction; a further one waits for the oldest. Two are one that the neighbour
            is taking and one ready for it. None for no bound, where stages wait for each other in a ring.
    """

    group: dist.ProcessGroup
    ranks: Sequence[int]
    stage: int
    device: torch.device
    dynamic_shapes: bool = False
    sends_in_flight: int | None = 2
    lanes: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)
    _incoming: dict[Hashable, list[Layout]] = field(default_factory=dict)
    _outgoing: dict[Hashable, list[Layout]] = field(default_factory=dict)
    _expected: deque[tuple[Hashable, p2p.Transfer]] = field(default_factory=deque)
    _sent_down: deque[p2p.Transfer] = field(default_factory=deque)
    _sent_up: deque[p2p.Transfer] = field(default_factory=deque)
    _untold: BatchDigest | None = None  # the digest, until the first message of the mini-batch is sent
    _unheard: BatchDigest | None = None  # the digest, until the first message is received
    _counts: Counter[int] = field(default_factory=Counter)
    """Number of messages sent or received here in each lane, by tag."""

    def begin(self, digest: BatchDigest) -> None:
        """Begin a mini-batch, whose messages follow."""
        self._untold = self._unheard = digest

    def tell_freezing(self) -> None:
        """Tell the next stage that layers were frozen or unfrozen here, and hear the same from the previous stage.

        Raises:
            ConfigurationError: no layers were frozen or unfrozen on the previous stage.
        """
        if self.stage + 1 < len(self.ranks):
            self._send_down([torch.tensor([_FREEZING, *[0] * LENGTH], dtype=torch.float64)])
        if self.stage > 0 and self._first_from_previous(1 + LENGTH)[0] != _FREEZING:
            raise self._frozen_on_one(self.stage, self.stage - 1)

    def send_activations(self, message: Message, key: Hashable) -> None:
        """Start sending a micro-batch's message to the next stage; ``key`` identifies its shapes on both ends."""
        self._mark(meter.SENT, 2 * self.stage + 2)
        layout = message.layout
        layouts = self._outgoing.get(key)
        if layouts is None or self.dynamic_shapes:
            layouts = self._outgoing[key] = [layout]
            self._send_layout(layout)
        number = next((number for number, known in enumerate(layouts) if known == layout), len(layouts))
        expected = number == 0 or _as_expected(layout, layouts[0])
        if expected:
            self._send_down([*self._note(number, message.numbers), *message.tensors])
        else:  # fill the buffers that the next stage has posted; the message follows
            nothing = [meta.empty(self.device) for meta in layouts[0].values]
            self._send_down([*self._note(number, [0.0] * layouts[0].first_numbers[-1]), *nothing])
        if number == len(layouts):
            layouts.append(layout)
            self._send_layout(layout)
        if not expected:
            self._send_down([*self._note(number, message.numbers), *message.tensors])
        if self.sends_in_flight is not None:
            self._settle(self._sent_down, 2 * self.sends_in_flight)

    def expect_activations(self, key: Hashable) -> None:
        """Post the receive of the next micro-batch, if its shapes are known."""
        layouts = self._incoming.get(key)
        if layouts is not None and not self.dynamic_shapes:
            self._expected.append((key, self._post(layouts[0])))

    def receive_activations(self, key: Hashable) -> Message:
        """Wait for the next micro-batch from the previous stage. Tensors that need gradients are leaves."""
        if self._expected:
            expected_key, transfer = self._expected.popleft()
            assert expected_key == key
            number, numbers, tensors = _parted(self._wait(transfer, meter.WAIT_UP))
        else:
            if key not in self._incoming or self.dynamic_shapes:
                self._incoming[key] = [self._receive_layout()]
            number, numbers, tensors = self._receive(self._incoming[key][0])
        layouts = self._incoming[key]
        if number == len(layouts):
            layouts.append(self._receive_layout())
        layout = layouts[number]
        if number > 0 and not _as_expected(layout, layouts[0]):
            _, numbers, tensors = self._receive(layout)
        self._mark(meter.RECEIVED, 2 * self.stage)
        for tensor, meta in zip(tensors, layout.values, strict=True):
            tensor.requires_grad_(meta.requires_grad)
        return Message(tensors, numbers, layout)

    def send_gradients(self, received: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Start sending the gradients of a received micro-batch to the previous stage.

        Flags before them say which tensors have one: an unused tensor has none. A single unused tensor gets zeros, so
        that the previous stage can receive flag and gradient at once.
        """
        to, tag = self.stage - 1, 2 * self.stage - 1
        message: list[Tensor] = []
        if gradients:
            found = [g for g in gradients if g is not None]
            if len(gradients) == 1 and not found:
                found = [torch.zeros_like(received[0])]
            message = [torch.tensor([g is not None for g in gradients]), *found]
            self._mark(meter.SENT, tag)
        self._sent_up.append(p2p.send(message, self.ranks[to], self._lane(tag), tag, self.name(to)))
        if self.sends_in_flight is not None:
            self._settle(self._sent_up, self.sends_in_flight)

    def receive_gradients(self, sent: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Wait for gradients from the next stage; return the tensors in ``sent`` that have one, and the gradients."""
        if not sent:
            return [], []
        source, tag = self.stage + 1, 2 * self.stage + 1
        rank, lane, name = self.ranks[source], self._lane(tag), self.name(source)

        def receive(*into: Tensor) -> list[Tensor]:
            return self._wait(p2p.receive(into, rank, lane, tag, name), meter.WAIT_DOWN)

        flags = torch.empty(len(sent), dtype=torch.bool)
        if len(sent) == 1:
            _, gradient = receive(flags, self._like(sent[0]))
            outputs, gradients = ([*sent], [gradient]) if flags else ([], [])
        else:
            receive(flags)
            outputs = [t for t, used in zip(sent, flags.tolist(), strict=True) if used]
            gradients = receive(*map(self._like, outputs))
        self._mark(meter.RECEIVED, tag)
        return outputs, gradients

    def _like(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)

    def make_room(self) -> None:
        """Wait until one more gradient can be sent without waiting for the previous stage."""
        if self.sends_in_flight is not None:
            self._settle(self._sent_up, self.sends_in_flight - 1)

    def settle(self) -> None:
        """Wait until the neighbours have taken everything that was sent."""
        for transfers in (self._sent_down, self._sent_up):
            if transfers:
                self._settle(transfers, 0)

    def _settle(self, transfers: deque[p2p.Transfer], leave: int) -> None:
        while len(transfers) > leave:
            self._wait(transfers.popleft(), meter.SEND)

    def _mark(self, what: int, tag: int) -> None:
        """Mark a message with its number in the lane, which both ends count."""
        self._counts[tag] += 1
        meter.current().mark(what, self._counts[tag] * meter.LANES + tag)

    def _wait(self, transfer: p2p.Transfer, phase: int) -> list[Tensor]:
        with p2p.labelled("wait"):
            return transfer.wait(phase)

    def _post(self, layout: Layout, begun: int = 1) -> p2p.Transfer:
        """Post the receive of a message whose note has ``begun`` numbers before those of the blocks."""
        note = torch.empty(begun + layout.first_numbers[-1], dtype=torch.float64)
        buffers = [note, *(meta.empty(self.device) for meta in layout.values)]
        return self._receive_down(buffers)

    def _receive(self, layout: Layout) -> tuple[int, list[float], list[Tensor]]:
        """Receive a message; return its layout's number, the blocks' numbers, and its tensors."""
        if self._unheard is None:
            return _parted(self._wait(self._post(layout), meter.WAIT_UP))
        number = self._receive_first()
        note, *tensors = self._wait(self._post(layout, 0), meter.WAIT_UP)
        return number, note.tolist(), tensors

    def _receive_layout(self) -> Layout:
        payload = torch.empty(self._receive_first(), dtype=torch.uint8)
        return Layout.decode(self._wait(self._receive_down([payload]), meter.WAIT_UP)[0].numpy().tobytes())

    def _receive_first(self) -> int:
        """Return the number that begins a header or a note; compare the digest after it, if one is expected.

        Raises:
            ConfigurationError: the previous stage was given another batch, or trains other layers.
        """
        digest, self._unheard = self._unheard, None
        number, *theirs = self._first_from_previous(1 if digest is None else 1 + LENGTH)
        if number == _FREEZING:
            raise self._frozen_on_one(self.stage - 1, self.stage)
        if digest is not None:
            digest.compare(theirs, self.stage - 1)
        return number

    def _first_from_previous(self, length: int) -> list[int]:
        first = torch.empty(length, dtype=torch.float64)
        (first,) = self._wait(self._receive_down([first]), meter.WAIT_UP)
        return list(map(int, first.tolist()))

    def _frozen_on_one(self, there: int, not_there: int) -> ConfigurationError:
        return ConfigurationError(
            f"requires_grad was set on some ranks only: it has changed on {self.name(there)}, and not on "
            f"{self.name(not_there)}, before the same mini-batch. Every rank has every parameter, most of them on the "
            "meta device: freeze and unfreeze layers on all ranks at the same batch, in a hook that does not depend on "
            "the rank, the stage or the rank's own data."
        )

    def _first(self, number: int) -> Tensor:
        digest, self._untold = self._untold, None
        return torch.tensor([number] if digest is None else [number, *digest.numbers], dtype=torch.float64)

    def _note(self, number: int, numbers: Sequence[float]) -> list[Tensor]:
        if self._untold is None:
            return [torch.tensor([number, *numbers], dtype=torch.float64)]
        return [self._first(number), torch.tensor(numbers, dtype=torch.float64)]

    def _send_layout(self, layout: Layout) -> None:
        payload = layout.encode()
        self._send_down([self._first(len(payload)), torch.frombuffer(bytearray(payload), dtype=torch.uint8)])

    def _send_down(self, tensors: Sequence[Tensor]) -> None:
        to, tag = self.stage + 1, 2 * (self.stage + 1)
        self._sent_down.append(p2p.send(tensors, self.ranks[to], self._lane(tag), tag, self.name(to)))

    def _receive_down(self, into: Sequence[Tensor]) -> p2p.Transfer:
        source, tag = self.stage - 1, 2 * self.stage
        return p2p.receive(into, self.ranks[source], self._lane(tag), tag, self.name(source))

    def _lane(self, tag: int) -> dist.ProcessGroup:
        return self.lanes.get(tag, self.group)

    def name(self, stage: int) -> str:
        return f"stage {stage} (rank {self.ranks[stage]})"


def _parted(tensors: list[Tensor]) -> tuple[int, list[float], list[Tensor]]:
    note, *values = tensors
    number, *numbers = note.tolist()
    return int(number), numbers, values


def _as_expected(layout: Layout, first: Layout) -> bool:
    """Return whether messages of both layouts have the same size; else a filler must precede the message."""
    return layout.values == first.values and layout.first_numbers[-1] == first.first_numbers[-1]
