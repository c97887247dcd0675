"""Planning of the cut: rank 0 rehearses the user's steps, measures blocks if it is asked to, and sends the plans to all
ranks."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.lightning_internals import Method, current, data_source
from lightning_sdpipe.loop.user_hooks import CollectiveGuard
from lightning_sdpipe.partition import apart, plan, rehearsal
from lightning_sdpipe.partition.chain import Block
from lightning_sdpipe.partition.costs import Costs, rates_of
from lightning_sdpipe.partition.ownership import move
from lightning_sdpipe.partition.pipeline_cut import PipelineCut, is_measured
from lightning_sdpipe.partition.profile import profile
from lightning_sdpipe.partition.rehearsal import StepCalls
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult
from lightning_sdpipe.partition.sample import last_batch_size, sample_batch
from lightning_sdpipe.pipeline.micro_batches import split


@dataclass(frozen=True)
class Planning:
    """The input of planning.

    Args:
        trainer: set up to run; its data can be asked for.
        cuts: as for :func:`~lightning_sdpipe.partition.plan.plans`, with the stages of all workers of a pipeline
            together.
        names: those of the blocks, if the user has named them.
        num_micro_batches: parts of a mini-batch.
        device: that on which rank 0 computes.
        guard: the guard of this worker, which is told when a step is rehearsed.
        timeout: seconds that the other ranks wait for the plan.
        memory: bytes of the device of each stage.
        keeps_loaders: whether this process goes on, so that its data loaders must be copied to take a batch from them.
        notes: messages for the user, filled meanwhile.
    """

    trainer: Trainer
    cuts: Sequence[PipelineCut]
    names: Sequence[str] | None
    num_micro_batches: int
    device: torch.device
    guard: CollectiveGuard
    timeout: float
    memory: float = math.inf
    keeps_loaders: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def several_stages(self) -> bool:
        """True if any pipeline is cut."""
        return any(cut.num_stages > 1 for cut in self.cuts)


def memory_of(device: torch.device, processes: int) -> float:
    """Return the bytes of a device; of the machine's memory, if it is the CPU, the part of one of its processes."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / processes
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return math.inf if properties is None else float(getattr(properties(device), "total_memory", math.inf))


def plan_on_rank_zero(planning: Planning) -> list[plan.Plan]:
    """Return the plans for the trainer's module, one for each cut, the same on every rank; all must call it.

    Raises:
        ConfigurationError: the module cannot be cut so, or this rank has another one than rank 0.
        WorkerFailedError: rank 0 failed for another reason.
    """
    world = dist.group.WORLD
    assert world is not None
    module = planning.trainer.lightning_module
    if dist.get_rank() == 0:
        try:
            made = _plans(planning)
            sizes = [plan.num_parameters(module, block) for block in made[0].blocks]
            answer = b"p" + msgspec.json.encode(_Sent([plan.encode(each) for each in made], sizes))
        except ConfigurationError as error:
            p2p.broadcast_bytes(b"c" + str(error).encode(), 0, world)
            raise
        except Exception as error:
            p2p.broadcast_bytes(b"e" + f"{type(error).__name__}: {error}".encode(), 0, world)
            raise
    else:
        answer = b""
    answer = p2p.broadcast_bytes(answer, 0, world)
    if answer[:1] == b"c":
        raise ConfigurationError(answer[1:].decode())
    if answer[:1] == b"e":
        raise WorkerFailedError(f"Rank 0 could not plan the stages: {answer[1:].decode()}")
    sent = msgspec.json.decode(answer[1:], type=_Sent)
    made = [plan.decode(each) for each in sent.plans]
    plan.check_same_chain(module, made[0].blocks, sent.sizes)
    return made


class _Sent(msgspec.Struct):
    """Rank 0's plans, and the number of parameters of each block there."""

    plans: list[bytes]
    sizes: list[int]


class _Answer(msgspec.Struct):
    """Outcome of trying the user's code."""

    plans: list[bytes]
    notes: list[str]
    communicates: bool


def _plans(planning: Planning) -> list[plan.Plan]:
    """Make the plans in a child process where that is possible: changes by the user's code would else stay on rank 0
    alone."""
    if not planning.several_stages and not any(is_measured(cut.partition) for cut in planning.cuts):
        return plan.plans(planning.trainer.lightning_module, planning.cuts, planning.names)
    data = None
    if apart.is_possible(planning.device):
        try:
            data = apart.apart(partial(_try, replace(planning, keeps_loaders=False)), planning.timeout / 2)
        except apart.NoAnswerError as error:
            planning.notes.append(f"The steps are rehearsed in this process, since in a child of it {error}.")
    if data is None:
        data = _try_here(planning)
    answer = msgspec.json.decode(data, type=_Answer)
    for note in answer.notes:
        rank_zero_info(note)
    planning.guard.communicates = answer.communicates
    return [plan.decode(made) for made in answer.plans]


def _try_here(planning: Planning) -> bytes:
    trainer: Any = planning.trainer
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    sources = [data_source(loop).instance for loop in (*loops, trainer.predict_loop)]
    with rehearsal.without_a_trace(trainer.lightning_module, *sources) as lost:
        if lost:
            planning.notes.append(
                f"The steps are tried before training, and {lost} cannot be put back then. Where a step uses them, "
                "other stages see other values than rank 0's: draw from generators, or keep what can be copied."
            )
        return _try(planning)


def _try(planning: Planning) -> bytes:
    steps = _steps(planning) if planning.several_stages else []
    try:
        made = _made(planning, steps)
    except ConfigurationError as error:
        error.__notes__ = planning.notes
        raise
    answer = _Answer([plan.encode(each) for each in made], planning.notes, planning.guard.communicates)
    return msgspec.json.encode(answer)


def _made(planning: Planning, steps: Sequence[StepCalls]) -> list[plan.Plan]:
    module = planning.trainer.lightning_module
    cuts = planning.cuts
    if planning.trainer.state.fn != TrainerFn.FITTING:  # there is no training data to measure with
        cuts = [replace(cut, partition="parameters") if is_measured(cut.partition) else cut for cut in cuts]

    @cache
    def measure(blocks: Sequence[Block]) -> plan.Profile:
        calls = next((step.calls for step in steps if step.trains), None)
        try:
            calls = calls or _calls(planning, "training_step", planning.trainer.fit_loop)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f'partition="balanced" measures the blocks with a batch, and none could be had before training '
                f'({type(error).__name__}: {error}). Use "auto" or numbers of blocks.'
            ) from error
        return _measure(planning, blocks, *calls[0])

    def count() -> Costs | None:
        if not steps:
            return None
        move(module, planning.device)
        step = next((step for step in steps if step.trains), steps[0])
        try:
            return rehearsal.count(module, step, rates_of(planning.device), planning.device)
        except Exception as error:  # what is not allowed in a step is refused when the real one runs
            planning.notes.append(
                f"The work of a step could not be counted ({type(error).__name__}: {error}), so bytes decide the cut."
            )
            return None

    def rehearse(chain: Sequence[str]) -> RehearsalResult | None:
        if not steps:
            return None
        move(module, planning.device)
        try:
            found = rehearsal.rehearse(module, chain, steps, planning.device)
            for step in (step for step in steps if step.single is not None):
                _try_one_sample(module, step)
            return found
        except Exception as error:  # what is not allowed in a step is refused when the real one runs
            _refuse_one_sample(module, error)
            _not_rehearsed(planning, "a step could not be run before training", error)
            return None

    made = plan.plans(module, cuts, planning.names, measure, rehearse, count, planning.memory)
    planning.notes.extend(dict.fromkeys(each.note for each in made if each.note))
    return made


def _steps(planning: Planning) -> list[StepCalls]:
    """Return the steps that the run will make, as far as they can be rehearsed; tell the user why if they cannot."""
    trainer: Any = planning.trainer
    module, precision = trainer.lightning_module, trainer.precision_plugin
    if any(p.is_meta for p in module.parameters()):
        return []  # the model was built to be larger than one worker
    loops = {
        TrainerFn.FITTING: [
            ("training_step", trainer.fit_loop, precision.train_step_context),
            ("validation_step", trainer.fit_loop.epoch_loop.val_loop, precision.val_step_context),
        ],
        TrainerFn.VALIDATING: [("validation_step", trainer.validate_loop, precision.val_step_context)],
        TrainerFn.TESTING: [("test_step", trainer.test_loop, precision.test_step_context)],
        TrainerFn.PREDICTING: [("predict_step", trainer.predict_loop, precision.predict_step_context)],
    }
    try:
        found = [
            StepCalls(
                name,
                calls,
                name == "training_step",
                partial(_within, planning, name, context),
                _single(planning, calls[0][0], data_source(loop).dataloader()) if name == "training_step" else None,
            )
            for name, loop, context in loops[trainer.state.fn]
            if (calls := _calls(planning, name, loop))
        ]
    except ConfigurationError:
        raise
    except Exception as error:
        _not_rehearsed(planning, "a batch to rehearse with could not be had", error)
        return []
    return found


def _single(planning: Planning, part: Any, loader: Any) -> Any:
    """Return one sample of ``part``, if that is a micro-batch of the last batch of an epoch, and the model normalises
    batches.

    Raises:
        ConfigurationError: the schedule cannot order so few.
    """
    strategy: Any = planning.trainer.strategy
    last = last_batch_size(loader, strategy.distributed_sampler_kwargs["num_replicas"])
    multiple = strategy.options.division[1]
    module = planning.trainer.lightning_module
    if last is None or hasattr(module, "split_batch") or planning.trainer.limit_train_batches != 1.0:
        return None
    if last < multiple:
        raise ConfigurationError(
            f"The last batch of an epoch has {last} samples, and schedule={strategy.options.schedule!r} needs at least "
            f"{multiple} micro-batches. Set drop_last=True, or use schedule='1f1b'."
        )
    normalises = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules())
    is_single = last // min(planning.num_micro_batches, last // multiple * multiple) == 1
    with suppress(ConfigurationError):  # one part, unlike the whole batch, may not tell how many samples it has
        return split(part, sys.maxsize)[0].batch if normalises and is_single else None


def _try_one_sample(module: nn.Module, step: StepCalls) -> None:
    try:
        with rehearsal.without_a_trace(module), step.context(), torch.no_grad():
            getattr(module, step.name)(step.single, *step.calls[0][1])
    except Exception as error:  # any other one is raised where it happens
        _refuse_one_sample(module, error)


def _refuse_one_sample(module: nn.Module, error: Exception) -> None:
    if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
        kinds = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
        names = [name for name, each in module.named_modules() if isinstance(each, kinds)]
        raise ConfigurationError(
            f"A micro-batch, perhaps of the last batch of an epoch, has one sample only, and one of the layers "
            f"{names[:4]} cannot normalise it: {error}. Use larger batches, fewer micro-batches "
            "(num_micro_batches=...) or drop_last=True."
        ) from error


@contextmanager
def _within(planning: Planning, name: str, precision: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    strategy: Any = planning.trainer.strategy
    with planning.guard.rehearsal(name), precision():
        strategy.optimizers, strategy.lr_scheduler_configs = rehearsal.stand_in_optimizers()
        try:
            yield
        finally:
            strategy.optimizers, strategy.lr_scheduler_configs = [], []


def _calls(planning: Planning, name: str, loop: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Return two micro-batches of each data loader of the loop; none if there are no data for it."""
    module, trains = planning.trainer.lightning_module, name == "training_step"
    source = data_source(loop)
    if not is_overridden(name, module) or source.instance is None or not source.is_defined():
        return []
    loaders = source.dataloader()
    several = not trains and isinstance(loaders, Sequence)
    batches = [
        _parts(planning, _as_the_step_gets_it(planning, sample_batch(each, planning.keeps_loaders)), trains)
        for each in (loaders if several else [loaders])
        if each is not None
    ]
    index = (0,) if is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2) else ()
    return [
        (part, (*index, number) if len(batches) > 1 else index)
        for number, parts in enumerate(batches)
        for part in parts
    ]


def _as_the_step_gets_it(planning: Planning, batch: Any) -> Any:
    module, trainer = planning.trainer.lightning_module, planning.trainer
    batch = current(module, Method.BEFORE_TRANSFER)(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, planning.device)


def _parts(planning: Planning, batch: Any, trains: bool) -> Sequence[Any]:
    try:
        parts = split(batch, planning.num_micro_batches, planning.trainer.lightning_module)
    except ConfigurationError:
        if trains:
            raise
        return batch, batch
    return parts[0].batch, parts[-1].batch


def _not_rehearsed(planning: Planning, what: str, error: Exception) -> None:
    planning.notes.append(
        f"The stages are planned without a rehearsal, since {what} ({type(error).__name__}: {error}). So only the "
        "output of the last block before a cut crosses it, and values that would have to besides are refused when they "
        "are met."
    )


def _measure(planning: Planning, blocks: Sequence[Block], batch: Any, arguments: Sequence[int]) -> plan.Profile:
    trainer: Any = planning.trainer
    module = trainer.lightning_module
    if all(not p.is_meta for p in module.parameters()):  # else the profile says what is wrong
        move(module, planning.device)

    def step() -> Any:
        with trainer.precision_plugin.train_step_context():
            return module.training_step(batch, *arguments)

    return profile(module, blocks, step, planning.device)
