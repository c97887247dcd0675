"""Lightning's hooks for checkpoints: their contents, and which rank writes and reads them.

States of parameters that are not the optimizer's are added as entries of the optimizer's state. So they are gathered,
cut and loaded as its own are, on any number of stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.checkpoints.distributed import directory_of, is_distributed, read_part, replacing
from lightning_sdpipe.checkpoints.files import whole_files, with_whole_files
from lightning_sdpipe.checkpoints.whole import load_module_state
from lightning_sdpipe.checkpoints.whole_module import is_whole
from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.errors import ConfigurationError, NotWrittenError
from lightning_sdpipe.lightning_internals import WrappingCheckpointIO
from lightning_sdpipe.loop.batch_source import Split
from lightning_sdpipe.loop.freezing import restore_groups
from lightning_sdpipe.p2p import broadcast_value, waiting_for
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.strategy.collectives import Collectives

PREFIX = "sdpipe_"


@contextmanager
def added_to(optimizer: Optimizer, states: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> Iterator[None]:
    """Add ``states`` to the optimizer while a checkpoint is made; it may take a non-empty state for one that it has
    begun."""
    known = {parameter for parameter in states if parameter in optimizer.state}
    for parameter, state in states.items():
        optimizer.state[parameter].update({PREFIX + name: value for name, value in state.items()})
    try:
        yield
    finally:
        for parameter, state in states.items():
            for name in state:
                del optimizer.state[parameter][PREFIX + name]
            if parameter not in known:
                del optimizer.state[parameter]


def taken_from(optimizer: Optimizer) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Remove and return the added states from those that were loaded."""
    found: dict[nn.Parameter, dict[str, Tensor]] = {}
    for parameter in [parameter for parameter in optimizer.state if isinstance(parameter, nn.Parameter)]:
        state = optimizer.state[parameter]
        for name in [name for name in state if isinstance(name, str) and name.startswith(PREFIX)]:
            found.setdefault(parameter, {})[name.removeprefix(PREFIX)] = state.pop(name)
        if not state:
            del optimizer.state[parameter]
    return found


log = logging.getLogger(__name__)


class CheckpointHooks(Collectives):
    """Hooks that gather a checkpoint into one file, or have each rank write its part of a directory."""

    _checkpoints: Checkpoints
    _begun: frozenset[str] = frozenset()
    """Checkpoints that are there or will be, as they may be written in the background."""
    _is_set_up = False
    """True from the end of the setup of a run."""
    _restores_late: bool | None = None
    """Value of :attr:`restore_checkpoint_after_setup` in this run, once it is known."""
    _weights_only: bool | None = None
    """What the Trainer's method was given, which Lightning does not pass on where it restores late."""
    _resumed: Mapping[str, Any] = {}
    """Random states, and numbers of updates, of the checkpoint that was loaded."""
    _split: Split | None = None
    _loaded_split: Split | None = None
    _lacks_checkpoint = False
    """True if the last checkpoint was not written."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        io = with_whole_files(lightning_internals.given_checkpoint_io(self))
        lightning_internals.set_checkpoint_io(self, io)
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        lightning_internals.set_checkpoint_io(self, io)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """False where Lightning's own order holds: each worker has the whole module, with its weights, before it is set
        up. A cut module gets its stage's part; what is on ``meta`` has no weights before; and a newcomer of an elastic
        run gets another pipeline's state."""
        if self._restores_late is None:
            options = self.options
            cut = options.total_stages > 1 or bool(options.cuts)
            self._restores_late = cut or options.job is not None or not is_whole(self.module)
        return self._restores_late

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._assembled is None:  # other processes have run; this one has the whole module
            return self.module.state_dict()
        over = self._run.membership is None or self._ends_alone  # nothing is under way
        if not (self._checkpoints.only_held or over):
            self._guard.check("save_checkpoint")
            self.training.pause()
        return self._checkpoints.module_state()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._resumed = saved = checkpoint.get("random_states", {})
        self._data_seed = saved.get("data_seed", self._data_seed)
        self._loaded_split = saved.get("split")
        if self._is_set_up:
            self._begin_where_it_ended()
        load_module_state(self.module, checkpoint["state_dict"], strict)

    def _begin_where_it_ended(self) -> None:
        """Let training begin with the update at which the run of a loaded checkpoint was."""
        self.training.begin_at(self._resumed.get("updates", 0))
        self._take_over_rounds(self._resumed.get("rounds"))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        states = {} if self._training is None else self._training.sync.parameter_states()
        with added_to(own, states):
            gathered = self._checkpoints.optimizer_state(own)
            if "state" in gathered:  # a copy, since the added states are removed again
                gathered["state"] = {place: dict(state) for place, state in gathered["state"].items()}
            return gathered

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not checkpoint["optimizer_states"]:
            raise ConfigurationError(
                "The checkpoint has the state of no optimizer, so training cannot go on from it. It may be of a "
                "process that did not train, as the first one with start_method='fork': save in a callback such as "
                "ModelCheckpoint. Load its state_dict into the module to begin training with its weights."
            )
        states: dict[nn.Parameter, dict[str, Tensor]] = {}
        restore_groups(self._trainer, self.optimizers)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._checkpoints.load_optimizer(optimizer, state)
            states |= taken_from(optimizer)
        self.training.sync.load_parameter_states(states)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        in_parts = self._assembled is not None and self._checkpoints.distributed and not self._ends_alone
        if in_parts or isinstance(self.checkpoint_io, WrappingCheckpointIO):
            self._begun |= {str(filepath)}
        if (files := whole_files(self.checkpoint_io)) is not None:
            files.publisher = None if in_parts else self._run.publisher
        if in_parts:
            if broadcast_value(self._run.leads, 0, self.groups.world):  # its stages may hear of it at other times
                self._checkpoints.save(checkpoint, directory_of(filepath), self.checkpoint_io, self._run.publisher)
            if self._run.membership is None:  # the run is over: nothing is gained by going on meanwhile
                self._checkpoints.wait()
            return
        in_its_place = self.is_global_zero and is_distributed(filepath)  # a file would be moved into that directory
        try:
            with replacing(directory_of(filepath)) if in_its_place else nullcontext():
                super().save_checkpoint(checkpoint, filepath, storage_options)
        except NotWrittenError as error:
            if self.options.on_checkpoint_error == "stop":
                raise
            log.error("training goes on, but %s.", error)
            self._lacks_checkpoint = True
        else:
            self._lacks_checkpoint = False

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if not is_distributed(checkpoint_path):
            asked = self._weights_only if weights_only is None else weights_only
            return super().load_checkpoint(checkpoint_path, asked)
        path = directory_of(checkpoint_path)
        if self._is_set_up:
            return self._checkpoints.load(path, self.checkpoint_io)
        return read_part(path, Ownership({}), None, self.groups, self.checkpoint_io)

    def _know_names(self, trainer: Trainer) -> Callable[[], None]:
        """Let each callback that saves know that a name is taken whose checkpoint another one still writes, and refuse
        places where none can be. Return a function that undoes it."""
        callbacks: list[Any] = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]

        def knowing(callback: Any) -> Callable[..., bool]:
            def file_exists(filepath: Any, trainer: Trainer) -> bool:
                return str(filepath) in self._begun or type(callback).file_exists(callback, filepath, trainer)

            return file_exists

        for callback in callbacks:
            if self._checkpoints.distributed and callback.dirpath is not None:
                directory_of(callback.dirpath)
            callback.file_exists = knowing(callback)

        def undo() -> None:
            self._begun = frozenset()
            for callback in callbacks:
                vars(callback).pop("file_exists", None)

        return undo

    def remove_checkpoint(self, filepath: Any) -> None:
        self._begun -= {str(filepath)}  # on all ranks alike: asking whether a file exists is a collective
        if self._lacks_checkpoint:  # the checkpoint to be removed may be the last one
            return
        if self.is_global_zero:
            self._checkpoints.wait()
        super().remove_checkpoint(filepath)

    def _random_states(self) -> dict[str, Any]:
        """Return all from which a resumed run goes on, counts of updates and rounds included: rounds are due by
        updates."""
        counted = {"data_seed": self._data_seed, "split": self._split, "updates": self.training.updates}
        if self._ends_alone:  # no other process is waited for
            return counted
        if self.training.sync.rounds is not None:
            counted["rounds"] = self._rounds_by_stage()
        return {**counted, **self._run.random_states()}

    def _rounds_by_stage(self) -> list[int]:
        """Gather the number of rounds of each stage; every rank must call it."""
        stage, _ = self.groups.mesh.locate(self.groups.rank)
        rounds = torch.zeros(self.groups.mesh.num_stages, dtype=torch.int64, device=self.root_device)
        rounds[stage] = self.training.sync.rounds or 0
        with waiting_for(self.groups.world, "gathering how many rounds there were"):
            dist.all_reduce(rounds, dist.ReduceOp.MAX)
        return rounds.tolist()

    def _take_over_rounds(self, saved: list[int] | None) -> None:
        """Take over the number of rounds of this stage; the lowest, if the model was cut otherwise."""
        if saved and self.training.sync.rounds is not None:
            stage, _ = self.groups.mesh.locate(self.groups.rank)
            self.training.sync.rounds = saved[stage] if len(saved) == self.groups.mesh.num_stages else min(saved)
