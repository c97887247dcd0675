"""What travels between neighbouring stages of one pipeline: activations down, gradients up.

Both ends see the same micro-batches, so both know the shape of the next message once a micro-batch of that shape has
passed. The first message for new shapes is preceded by a header that describes it; no user code runs an extra time.
Sends start at once and are waited for later; the next receive is posted before the current micro-batch is computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.cut_step import Boundary
from lightning_sdpipe.partition.structure import Structure, TensorMeta, decode_structures, encode_structures


@dataclass
class StageLink:
    """One stage's two cuts.

    Args:
        group: the pipeline's process group.
        ranks: global rank of every stage of the pipeline; a rank may hold several.
        stage: the stage whose neighbours these are.
        device: where received tensors go.
        dynamic_shapes: send a header before every message, for blocks whose output shapes depend on the data.
        sends_in_flight: of one direction, before a further one waits for the oldest: one that the neighbour is taking
            and one that is ready for it. None for no bound, where stages wait for each other in a ring.
    """

    group: dist.ProcessGroup
    ranks: Sequence[int]
    stage: int
    device: torch.device
    dynamic_shapes: bool = False
    sends_in_flight: int | None = 2
    seconds_waiting: float = 0.0  # for the neighbours, so far
    _incoming: dict[Hashable, list[Structure | None]] = field(default_factory=dict)
    _outgoing: dict[Hashable, list[Structure | None]] = field(default_factory=dict)
    _expected: deque[tuple[Hashable, p2p.Transfer]] = field(default_factory=deque)
    _idle: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = field(default_factory=dict)
    _sent_down: deque[p2p.Transfer] = field(default_factory=deque)
    _sent_up: deque[p2p.Transfer] = field(default_factory=deque)

    def send_activations(self, boundary: Boundary, key: Hashable) -> None:
        """Starts sending a micro-batch's boundary to the next stage; ``key`` identifies its shapes on both ends."""
        structures = list(boundary.structures)
        known = self._outgoing.get(key)
        to, tag = self.stage + 1, 2 * (self.stage + 1)
        if known is None or self.dynamic_shapes:
            self._outgoing[key] = structures
            header = encode_structures(structures)
            self._sent_down.append(p2p.send_bytes(header, self.ranks[to], self.group, tag, self._name(to)))
        elif known[-1] != structures[-1]:
            raise ConfigurationError(
                f"The last block of stage {self.stage} returned {structures[-1]} where an earlier micro-batch of the "
                f"same shapes gave {known[-1]}. If its output depends on the data, set "
                "SDPipeStrategy(dynamic_shapes=True)."
            )
        self._sent_down.append(p2p.send(boundary.tensors, self.ranks[to], self.group, tag, self._name(to)))
        if self.sends_in_flight is not None:
            self._settle(self._sent_down, 2 * self.sends_in_flight)

    def expect_activations(self, key: Hashable) -> None:
        """Posts the receive of the next micro-batch, if its shapes are known."""
        structures = self._incoming.get(key)
        if structures is not None and not self.dynamic_shapes:
            self._expected.append((key, self._post(_crossing(structures))))

    def receive_activations(self, key: Hashable) -> Boundary:
        """Waits for the next micro-batch of the previous stage. Tensors that need gradients come as leaves."""
        if self._expected:
            expected_key, transfer = self._expected.popleft()
            assert expected_key == key
        else:
            source, tag = self.stage - 1, 2 * self.stage
            if key not in self._incoming or self.dynamic_shapes:
                header = p2p.receive_bytes(self.ranks[source], self.group, tag, self._name(source))
                self._incoming[key] = decode_structures(header)
            transfer = self._post(_crossing(self._incoming[key]))
        structures = self._incoming[key]
        tensors = self._wait(transfer)
        for tensor, meta in zip(tensors, _crossing(structures), strict=True):
            tensor.requires_grad_(meta.requires_grad)
        return Boundary(tensors, structures)

    def reuse(self, received: Sequence[Tensor]) -> None:
        """Takes back what :meth:`receive_activations` gave, for later messages; its graph must be done with."""
        for tensor in received:
            self._idle.setdefault((tensor.shape, tensor.dtype), []).append(tensor.detach())

    def send_gradients(self, received: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Starts sending the gradients of a received micro-batch to the previous stage.

        What nobody used has no gradient, which several tensors are preceded by flags for. One alone gets zeros.
        """
        to, tag = self.stage - 1, 2 * self.stage - 1
        if len(gradients) > 1:
            message = [torch.tensor([g is not None for g in gradients]), *(g for g in gradients if g is not None)]
        else:
            message = [torch.zeros_like(t) if g is None else g for t, g in zip(received, gradients, strict=True)]
        self._sent_up.append(p2p.send(message, self.ranks[to], self.group, tag, self._name(to)))
        if self.sends_in_flight is not None:
            self._settle(self._sent_up, self.sends_in_flight)

    def receive_gradients(self, sent: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Waits for the gradients of the tensors ``sent`` to the next stage: those that have one, and theirs."""
        source, tag = self.stage + 1, 2 * self.stage + 1
        rank, name = self.ranks[source], self._name(source)
        outputs = list(sent)
        if len(outputs) > 1:
            (flags,) = self._wait(p2p.receive([torch.empty(len(sent), dtype=torch.bool)], rank, self.group, tag, name))
            outputs = [t for t, used in zip(sent, flags.tolist(), strict=True) if used]
        buffers = [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in outputs]
        return outputs, self._wait(p2p.receive(buffers, rank, self.group, tag, name))

    def make_room(self) -> None:
        """Waits until one more gradient can be sent without waiting for the previous stage."""
        if self.sends_in_flight is not None:
            self._settle(self._sent_up, self.sends_in_flight - 1)

    def settle(self) -> None:
        """Waits until the neighbours have taken everything that was sent."""
        self._settle(self._sent_down, 0)
        self._settle(self._sent_up, 0)

    def _settle(self, transfers: deque[p2p.Transfer], leave: int) -> None:
        while len(transfers) > leave:
            self._wait(transfers.popleft())

    def _wait(self, transfer: p2p.Transfer) -> list[Tensor]:
        start = time.perf_counter()
        tensors = transfer.wait()
        self.seconds_waiting += time.perf_counter() - start
        return tensors

    def _post(self, metas: Sequence[TensorMeta]) -> p2p.Transfer:
        buffers = [self._buffer(meta) for meta in metas]
        source = self.stage - 1
        return p2p.receive(buffers, self.ranks[source], self.group, 2 * self.stage, self._name(source))

    def _buffer(self, meta: TensorMeta) -> Tensor:
        idle = self._idle.get((torch.Size(meta.shape), meta.dtype))
        return idle.pop().detach() if idle else meta.empty(self.device)

    def _name(self, stage: int) -> str:
        return f"stage {stage} (rank {self.ranks[stage]})"


def _crossing(structures: Sequence[Structure | None]) -> Sequence[TensorMeta]:
    last = structures[-1]
    assert last is not None, "take_apart gave the boundary a structure"
    return last.tensors
