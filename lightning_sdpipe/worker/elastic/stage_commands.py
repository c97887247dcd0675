"""How the stages of a pipeline agree before each turn: stage 0 says what ``turn_order`` gives, and the others, whose
work begins with what it sends, wait for its word."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_sdpipe.membership.turn_order import Command, CommandKind
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.topology.groups import ProcessGroups

_BYTES = 128


class CommandChannel:
    """One worker's, said or heard; every stage of the pipeline must call the methods in the same order."""

    def __init__(self, groups: ProcessGroups) -> None:
        mesh = groups.mesh
        stage, pipeline = mesh.locate(groups.rank)
        self.speaks = stage == 0
        self._alone = mesh.num_stages == 1
        self._first = mesh.rank(0, pipeline)
        self._group = groups.pipeline

    def send(self, word: Command) -> None:
        """Stage 0 tells the others. It does not wait for them to act."""
        if not self._alone:
            text = word.text.encode("ascii")
            self._pass_on(torch.tensor([word.kind, len(text), *text.ljust(_BYTES, b"\0")], dtype=torch.uint8))

    def receive(self) -> Command:
        """Waits for what stage 0 says."""
        heard = self._pass_on(torch.empty(_BYTES + 2, dtype=torch.uint8)).tolist()
        return Command(CommandKind(heard[0]), bytes(heard[2 : 2 + heard[1]]).decode("ascii"))

    def done(self) -> None:
        """Waits until all stages have done what was said."""
        if not self._alone:
            with waiting_for(self._group, "acting together"):
                dist.barrier(self._group)

    def _pass_on(self, data: torch.Tensor) -> torch.Tensor:
        with waiting_for(self._group, "the word of stage 0"):
            dist.broadcast(data, self._first, group=self._group)
        return data
