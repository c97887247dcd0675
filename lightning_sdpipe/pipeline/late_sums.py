"""Sums the gradients of parameters that several stages hold, without a flush.

All owners apply the sum for the same mini-batches in the same update, when the first owner has it, whose backward comes
last. A partial sum travels up from the last owner, and every owner adds its own gradient. No owner waits longer for
that sum than for the gradient of the activations, which came the same way. The first owner sends the total to the
others in the turn in which they use it, before it runs the next forward, whose output they need next anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe import p2p
from lightning_sdpipe.pipeline.accumulation_windows import Window

_UP, _DOWN, _NORM = 1, 2, 3  # tags; the group has no other members than the owners

_Flat = tuple[list[nn.Parameter], Tensor]  # parameters of one type, and a tensor as joined() makes it


@dataclass
class _Sum:
    flats: Sequence[_Flat]
    arriving: p2p.Transfer | None  # the total, from the first owner
    sent: Sequence[p2p.Transfer]


class LateSum:
    """One owner's end of the sums for parameters with the same owners.

    Everything is staged on the CPU: NCCL's messages have no tags, so both directions would wait for each other.

    Args:
        group: the owners.
        ranks: their global ranks, in the order of stages.
        stages: their stages.
        place: this owner's position in these sequences.
        parameters: this stage's copies, in the same order on all owners.
        trained: this stage's trained parameters. The sequence may change when nothing is under way.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        stages: Sequence[int],
        place: int,
        parameters: Sequence[nn.Parameter],
        trained: Sequence[nn.Parameter],
    ) -> None:
        self.first_stage = stages[0]
        self.is_first = place == 0
        self.parameters = parameters
        self._all_trained = trained
        self._group = group
        self._ranks = ranks
        self._stages = stages
        self._place = place
        self._sums: deque[_Sum] = deque()
        self._leaving: list[p2p.Transfer] = []  # sends of sums that have been taken
        self._square: p2p.Transfer | None = None
        self._owes_square = False
        self._squares_sent: list[p2p.Transfer] = []

    @property
    def trained(self) -> list[nn.Parameter]:
        """Trained parameters of this owner."""
        trained = {id(p) for p in self._all_trained}  # as agreed; requires_grad may have changed since
        return [p for p in self.parameters if id(p) in trained]

    def add(self, window: Window) -> None:
        """Take this stage's gradients out of a complete window, add them to the sum, and pass it on.

        Raises:
            WorkerFailedError: another owner is gone.
        """
        self._wait(self._leaving)
        flats: list[_Flat] = []
        for parameters in by_type(self.trained):
            flats.append((parameters, joined(parameters, [window.gradients.pop(p, None) for p in parameters], "cpu")))
        tensors = [tensor for _, tensor in flats]
        if self._place + 1 < len(self._ranks):
            later = [torch.empty_like(tensor) for tensor in tensors]
            for tensor, part in zip(tensors, self._receive(later, self._place + 1, _UP).wait(), strict=True):
                tensor.add_(part)
        if self.is_first:
            sent = [self._send(tensors, place, _DOWN) for place in range(1, len(self._ranks))]
            copies = [(parameters, tensor.clone()) for parameters, tensor in flats]  # updates change gradients in place
            self._sums.append(_Sum(copies, None, sent))
        else:
            sent = [self._send(tensors, self._place - 1, _UP)]
            totals = [(parameters, torch.empty_like(tensor)) for parameters, tensor in flats]
            arriving = self._receive([tensor for _, tensor in totals], 0, _DOWN)
            self._sums.append(_Sum(totals, arriving, sent))

    def take(self) -> dict[nn.Parameter, Tensor]:
        """Wait for the sums of the oldest window and return them, without parameters that no owner used."""
        oldest = self._sums.popleft()
        if oldest.arriving is not None:
            oldest.arriving.wait()
        self._leaving += oldest.sent
        found: dict[nn.Parameter, Tensor] = {}
        for parameters, flat in oldest.flats:
            owners, totals = parted(flat, parameters)
            found |= {p: t.to(p.device) for p, t, some in zip(parameters, totals, owners.tolist(), strict=True) if some}
        return found

    def begin_clipping(self) -> None:
        """Begin clipping by norm in an update with these sums."""
        if self.is_first:
            self._owes_square = bool(self.trained)
        elif self.trained:
            self._square = self._receive([torch.empty(1, dtype=torch.float64)], 0, _NORM)

    def tell_square(self, square: float) -> None:
        """On the first owner, tell the others the squared norm by which it clips, unless it has told them."""
        if self._owes_square:
            self._wait(self._squares_sent)
            value = torch.tensor([square], dtype=torch.float64)
            self._squares_sent = [self._send([value], place, _NORM) for place in range(1, len(self._ranks))]
        self._owes_square = False

    def hear_square(self) -> float:
        """Return the squared norm that the first owner tells; 0 if none is expected."""
        transfer, self._square = self._square, None
        return 0.0 if transfer is None else float(transfer.wait()[0])

    def settle(self) -> None:
        """End an update, even if the user's code has not clipped: afterwards nothing is owed or expected."""
        self.tell_square(0.0)
        self.hear_square()

    def finish(self) -> None:
        """Wait until the other owners have received everything."""
        self.settle()
        self._wait(self._leaving)
        self._wait(self._squares_sent)

    def _wait(self, transfers: list[p2p.Transfer]) -> None:
        while transfers:
            transfers.pop().wait()

    def _send(self, tensors: Sequence[Tensor], place: int, tag: int) -> p2p.Transfer:
        return p2p.send(tensors, self._ranks[place], self._group, tag, self._name(place))

    def _receive(self, into: Sequence[Tensor], place: int, tag: int) -> p2p.Transfer:
        return p2p.receive(into, self._ranks[place], self._group, tag, self._name(place))

    def _name(self, place: int) -> str:
        return f"stage {self._stages[place]} (rank {self._ranks[place]}), which holds the same weights"


def by_type(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters, grouped by type."""
    return [[p for p in parameters if p.dtype == dtype] for dtype in {p.dtype: None for p in parameters}]


def joined(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], device: torch.device | str
) -> Tensor:
    """Return a flat tensor for parameters of one type: a 1 for each gradient that exists and a 0 for each that does
    not, then the gradients."""
    exist = torch.tensor([grad is not None for grad in gradients], dtype=parameters[0].dtype, device=device)
    parts = (
        torch.zeros(p.numel(), dtype=p.dtype, device=device) if grad is None else grad.to_dense().flatten().to(device)
        for p, grad in zip(parameters, gradients, strict=True)
    )
    return torch.cat([exist, *parts])


def parted(flat: Tensor, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """Split a sum of results of :func:`joined` into the number of gradients of each parameter, and their sums."""
    exist, *sums = torch.split_with_sizes(flat, [len(parameters), *(p.numel() for p in parameters)])
    return exist, [total.view(p.shape) for p, total in zip(parameters, sums, strict=True)]
