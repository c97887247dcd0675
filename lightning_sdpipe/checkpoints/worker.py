"""A worker's part in checkpoints, which are gathered into one file or written part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from lightning_sdpipe.checkpoints import whole
from lightning_sdpipe.checkpoints.distributed import DistributedWriter, read_part
from lightning_sdpipe.checkpoints.files import Publisher
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.topology.groups import ProcessGroups


class Checkpoints:
    """Saves and loads this worker's part of ``module`` and of its optimizer.

    Args:
        module: the module of which this worker holds a stage.
        ownership: the owners of its tensors.
        groups: the process groups of this worker.
        distributed: the value of ``SDPipeStrategy(save_distributed_checkpoint=...)``. Both kinds can be loaded in any
            case.
    """

    def __init__(
        self, module: LightningModule, ownership: Ownership, groups: ProcessGroups, distributed: bool | Literal["async"]
    ) -> None:
        self.distributed = distributed
        self.only_held = False
        """Whether states are requested of this stage alone, as they are in memory."""
        self._module = module
        self._ownership = ownership
        self._groups = groups
        self._stage, _ = groups.mesh.locate(groups.rank)
        self._optimizers: list[whole.OptimizerParts] = []
        self._writer: DistributedWriter | None = None

    def holds(self, name: str) -> bool:
        """Return whether this worker holds the parameter or buffer ``name``."""
        return self._stage in self._ownership.owners(name)

    def take_part_of(self, optimizers: Sequence[Optimizer]) -> None:
        """Drop the parameters of other stages from optimizers of the whole module, and remember their places."""
        self._optimizers = [
            whole.OptimizerParts(each, self._module, self._ownership, self._stage) for each in optimizers
        ]

    def whole_groups(self, number: int) -> list[dict[str, Any]]:
        """Return the groups of optimizer ``number`` with the parameters of all stages."""
        return self._optimizers[number].groups()

    @contextmanager
    def whole_groups_shown(self) -> Iterator[None]:
        """Show the parameters of all stages in the optimizers' own groups within the context."""
        with ExitStack() as shown:
            for parts in self._optimizers:
                shown.enter_context(parts.shown())
            yield

    def module_state(self) -> dict[str, Any]:
        """Return the whole ``state_dict`` on rank 0; for distributed checkpoints, this stage's part on every rank."""
        if self.only_held:
            return whole.held_module_state(self._module, self._ownership, self._stage)
        if self.distributed:
            return whole.part_of_module_state(self._module, self._ownership, self._stage)
        return whole.gather_module_state(self._module, self._ownership, self._groups)

    @contextmanager
    def of_this_stage(self) -> Iterator[None]:
        """Request the state of this stage alone within the context: no other rank is asked, nor waited for."""
        self.only_held = True
        try:
            yield
        finally:
            self.only_held = False

    def check(self) -> None:
        """Raise ConfigurationError if the module's state cannot be saved."""
        mesh, rank = self._groups.mesh, self._groups.rank
        to_zero = mesh.alike or mesh.locate(rank)[1] == mesh.locate(0)[1]
        sends = to_zero and not self.distributed and not mesh.is_last(rank)
        whole.check_module_state(self._module, self._ownership, self._stage, sends)

    def load_module(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load this stage's part of a whole ``state_dict``; raise ConfigurationError if it does not fit."""
        whole.load_module_state(self._module, state, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state in the same way as :meth:`module_state`."""
        parts = self._parts(optimizer)
        if self.only_held:
            return parts.held()
        if self.distributed:
            return parts.part()
        return parts.gather(self._groups)

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        self._parts(optimizer).load(state)

    def save(
        self, checkpoint: dict[str, Any], path: Path, files: CheckpointIO, publisher: Publisher | None = None
    ) -> None:
        """Write a distributed checkpoint; see :class:`~lightning_sdpipe.checkpoints.distributed.DistributedWriter`."""
        if self._writer is None:
            self._writer = DistributedWriter(self._groups, self.distributed == "async")
        self._writer.save(checkpoint, path, files, publisher)

    def load(self, path: Path, files: CheckpointIO) -> dict[str, Any]:
        """Read the part of a distributed checkpoint that this worker needs."""
        places = [parts.places for parts in self._optimizers]
        return read_part(path, self._ownership, places, self._groups, files)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        if self._writer is not None:
            self._writer.wait()

    def _parts(self, optimizer: Optimizer) -> whole.OptimizerParts:
        return next(parts for parts in self._optimizers if parts.optimizer is optimizer)
