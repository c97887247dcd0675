"""Planning of the cut: rank 0 rehearses the user's steps, measures blocks if it is asked to, and sends the plans to all
ranks."""

from __future__ import annotations

import copy
import math
import operator
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NoReturn, TypeVar

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
from lightning_sdpipe.lightning_internals import Method, compute_on_cpu, current, data_source
from lightning_sdpipe.loop.loop import trains_whole_epochs
from lightning_sdpipe.partition import apart, plan, rehearsal
from lightning_sdpipe.partition.chain import Block
from lightning_sdpipe.partition.costs import Costs, rates_of
from lightning_sdpipe.partition.ownership import move
from lightning_sdpipe.partition.pipeline_cut import PipelineCut, is_measured
from lightning_sdpipe.partition.profile import profile
from lightning_sdpipe.partition.rehearsal import StepCalls
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult
from lightning_sdpipe.partition.sample import last_batch_size, sample_batch
from lightning_sdpipe.partition.state_watch import TouchedError, Untouched
from lightning_sdpipe.pipeline import lock_step
from lightning_sdpipe.pipeline.micro_batches import split
from lightning_sdpipe.pipeline.stage_runner import CollectiveGuard


@dataclass(frozen=True)
class Planning:
    """The input of planning.

    Args:
        trainer: is set up to run, so its data can be asked for.
        cuts: as for :func:`~lightning_sdpipe.partition.plan.plans`, with the stages of all workers of a pipeline
            together.
        names: those of the blocks, if the user has named them.
        num_micro_batches: parts of a mini-batch.
        device: that on which rank 0 computes.
        guard: the guard of this worker, which is told when a step is rehearsed.
        timeout: seconds that the other ranks wait for the plan.
        memory: bytes of the device of each stage.
        notes: messages for the user, added during planning.
    """

    trainer: Trainer
    cuts: Sequence[PipelineCut]
    names: Sequence[str] | None
    num_micro_batches: int
    device: torch.device
    guard: CollectiveGuard
    timeout: float
    memory: float = math.inf
    notes: list[str] = field(default_factory=list)

    @property
    def several_stages(self) -> bool:
        """True if any pipeline is cut."""
        return any(cut.num_stages > 1 for cut in self.cuts)


def memory_of(device: torch.device, processes: int) -> float:
    """Return the bytes of memory of a device; for the CPU, one process's share of the machine's."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / processes
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return math.inf if properties is None else float(getattr(properties(device), "total_memory", math.inf))


def plan_on_rank_zero(planning: Planning) -> list[plan.Plan]:
    """Return the plans for the trainer's module, one for each cut, the same on every rank; all must call it.

    Raises:
        ConfigurationError: the module cannot be cut as asked, or differs from rank 0's.
        WorkerFailedError: rank 0 failed for another reason.
    """
    world = dist.group.WORLD
    assert world is not None
    module = planning.trainer.lightning_module
    answer = b""
    if dist.get_rank() == 0:
        try:
            made = _plans(planning)
            answer = pickle.dumps((made, [plan.num_parameters(module, block) for block in made[0].blocks]))
        except Exception as error:
            said: Exception = WorkerFailedError(f"Rank 0 could not plan the stages: {type(error).__name__}: {error}")
            if isinstance(error, ConfigurationError):
                said = ConfigurationError(str(error))
            p2p.broadcast_bytes(pickle.dumps(said), 0, world)
            raise
    sent = pickle.loads(p2p.broadcast_bytes(answer, 0, world))
    if isinstance(sent, Exception):
        raise sent
    plans: list[plan.Plan]
    plans, sizes = sent
    plan.check_same_chain(module, plans[0].blocks, sizes)
    return plans


_Calls = Sequence[tuple[Any, tuple[int, ...]]]


class _LeftToParentError(Exception):
    """Ends the work of a child, which computes on the CPU, and tells its parent what is left to do there.

    Args:
        blocks: the blocks to measure; none if the parent has to do everything, since a step does not run in the child.
        error: what was raised in the child.
    """

    def __init__(self, blocks: tuple[Block, ...], error: str = "") -> None:
        super().__init__(blocks, error)
        self.blocks, self.error = blocks, error
        self.steps: Mapping[str, tuple[_Calls, Any]] = {}
        """The calls of each step by its name, and its micro-batch of one sample."""


_CPU = torch.device("cpu")
_Profiles = dict[tuple[Block, ...], plan.Profile]
_T = TypeVar("_T")


def _plans(planning: Planning) -> list[plan.Plan]:
    """Make the plans in a child process, which computes on the CPU: changes by the user's code would otherwise remain,
    on rank 0 alone. What needs an accelerator is done here, on a copy of the module."""
    module = planning.trainer.lightning_module
    tries = planning.several_stages or any(is_measured(cut.partition) for cut in planning.cuts)
    fits = planning.trainer.state.fn == TrainerFn.FITTING
    if not tries and not (fits and planning.num_micro_batches > 1 and _normalises(module)):
        return plan.plans(module, planning.cuts, planning.names)
    if planning.device.type != "cpu" and not _is_on_meta(module):
        move(module, _CPU)
    profiles: _Profiles = {}
    end = time.monotonic() + planning.timeout / 2
    if not tries:
        with suppress(apart.NoAnswerError):  # a layer that cannot normalise is then met in training
            _in_a_child(planning, end, partial(_try_micro_batches, planning))
        return plan.plans(module, planning.cuts, planning.names)
    try:
        touches = False
        while not isinstance(
            found := _in_a_child(planning, end, partial(_try, planning, profiles, end, touches)), list
        ):
            if found is None:
                touches, planning.notes[:] = True, []
                continue
            if not found.blocks:
                found = _try_a_copy(planning, found)
                break
            (calls, _) = found.steps["training_step"]
            profiles[found.blocks] = _measure(planning, _copied(planning), found.blocks, *_moved(planning, calls)[0])
    except apart.NoAnswerError as error:
        found = _untried(planning, error)
    for note in dict.fromkeys(planning.notes):
        rank_zero_info(note)
    return found


def _in_a_child(planning: Planning, end: float, work: Callable[[], _T]) -> _T:
    """Return what ``work`` returns in a child of this process, which ends by ``end``. Of what it changes, only its
    notes and the guard's finding come back."""

    def noted() -> tuple[_T, list[str], bool]:
        try:
            found = work()
        except ConfigurationError as error:
            error.__notes__ = planning.notes
            raise
        return found, planning.notes, planning.guard.communicates

    left = max(end - time.monotonic(), 1.0)
    found, planning.notes[:], planning.guard.communicates = apart.apart(noted, left)
    return found


def _try(
    planning: Planning, profiles: _Profiles, end: float, touches: bool
) -> list[plan.Plan] | _LeftToParentError | None:
    """Make the plans in this process, which is a child, or return what only its parent can do. Each chain is tried in a
    child of this process. If a step ``touches`` what it finds, costs are counted and Python state is watched in
    children, too, so that each of them finds the module as the run will. Return None if a step does although
    ``touches`` is False."""
    module = planning.trainer.lightning_module
    _compute_here(planning)
    if _has_opened_an_accelerator():  # whose threads autograd would start, and they end a child
        engine: Any = torch.autograd  # both of its grad and backward look it up there
        engine._engine_run_backward = _refuse_to_differentiate
    for parameter in module.parameters():
        parameter.grad = None
    steps = _steps(planning) if planning.several_stages else []

    def calls() -> _Calls:
        return next((step.calls for step in steps if step.trains), None) or _calls_to_measure(planning)

    def measure(blocks: Sequence[Block]) -> plan.Profile:
        if tuple(blocks) not in profiles:
            first = calls()[0]
            if not _is_on_meta(module) and (planning.device.type != "cpu" or not _differentiates()):
                raise _LeftToParentError(tuple(blocks))
            profiles[tuple(blocks)] = _measure(planning, module, blocks, *first)
        return profiles[tuple(blocks)]

    in_a_child = partial(_in_a_child, planning, end)
    alone = in_a_child if touches else Untouched(module).run

    def counted(step: StepCalls) -> Costs:
        return rehearsal.count_apart(module, step, rates_of(planning.device), alone)

    def failed(error: Exception) -> None:
        if planning.device.type != "cpu" or not _differentiates():
            raise _LeftToParentError((), f"{type(error).__name__}: {error}") from error

    trial = _Trial(lambda: module, _CPU, measure, counted, failed, in_a_child, alone)
    try:
        return _made(planning, steps, trial)
    except TouchedError:
        return None
    except _LeftToParentError as left:
        left.steps = {step.name: (step.calls, step.single) for step in steps} or {"training_step": (calls(), None)}
        found = left
    try:
        pickle.dumps(found)
    except Exception as error:  # objects say in their own ways that they cannot be pickled
        return _untried(planning, error)
    return found


def _compute_here(planning: Planning) -> None:
    """Let this process, which is a child, compute on the CPU."""
    if planning.device.type != "cpu":
        compute_on_cpu(planning.trainer)
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # the machine's other ranks wait
        if "torch._dynamo" in sys.modules:
            torch.compiler.set_stance("force_eager")


def _try_micro_batches(planning: Planning) -> None:
    """In this process, which is a child, run the training step of an uncut model on a micro-batch of one sample, if the
    run will have one."""
    _compute_here(planning)
    module, loop = planning.trainer.lightning_module, planning.trainer.fit_loop
    single = None
    with suppress(Exception):  # what fails here is said when it is trained
        calls = _calls(planning, "training_step", loop)
        single = _single(planning, calls[0][0], data_source(loop).dataloader())
    if single is not None and not _is_on_meta(module):
        _try_one_sample(module, _step(planning, "training_step", calls, single), _CPU)


def _has_opened_an_accelerator() -> bool:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    module = torch.get_device_module(accelerator)
    if getattr(module, "_is_in_bad_fork", bool)():  # the parent has opened it, unknown to is_initialized, or has looked
        return int(module.device_count()) > 0
    is_initialized = getattr(module, "is_initialized", None)
    return is_initialized is None or bool(is_initialized())


def _refuse_to_differentiate(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("a child of a process that has opened an accelerator cannot run autograd's backward")


def _differentiates() -> bool:
    """Return whether this process, which is a child, can run a backward."""
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError:  # also where the parent has started autograd's threads for an accelerator
        return False
    return True


def _try_a_copy(planning: Planning, left: _LeftToParentError) -> list[plan.Plan]:
    """Make the plans in this process, on its device, with copies of the module."""
    planning.notes.append(
        f"A step does not run in a child process on the CPU ({left.error}), so copies of the model run on "
        f"{planning.device} before training: what a step keeps in Python is not checked, and what it changes outside "
        "of the model stays changed."
    )
    module = planning.trainer.lightning_module
    steps = []
    for name, (calls, single) in left.steps.items():
        one = single if single is None else module.transfer_batch_to_device(single, planning.device, 0)
        steps.append(_step(planning, name, _moved(planning, calls), one))

    @cache
    def measure(blocks: Sequence[Block]) -> plan.Profile:
        first = next(step.calls[0] for step in steps if step.trains)
        return _measure(planning, _copied(planning), blocks, *first)

    def counted(step: StepCalls) -> Costs:
        copied = _copied(planning)
        found = rehearsal.count(copied, step, rates_of(planning.device), planning.device)
        return found.renamed(dict(zip(copied.modules(), module.modules(), strict=False)))

    trial = _Trial(partial(_copied, planning), planning.device, measure, counted, lambda _: None, operator.call, None)
    return _made(planning, steps, trial)


def _untried(planning: Planning, reason: Exception) -> list[plan.Plan]:
    """Make the plans without the user's steps."""
    _not_rehearsed(planning, "no child process can try the steps", reason)

    def measure(_: object) -> plan.Profile:
        raise ConfigurationError(
            f'partition="balanced" measures the blocks in a child process, and {reason}. Use "auto" or numbers of '
            "blocks."
        )

    module = planning.trainer.lightning_module
    return plan.plans(module, _cuts(planning), planning.names, measure, memory=planning.memory)


@dataclass(frozen=True)
class _Trial:
    """How the steps are tried.

    Args:
        module: returns what runs them.
        device: the device of that module.
        measure: as for :func:`~lightning_sdpipe.partition.plan.plans`.
        count: returns the costs of a step.
        failed: is told that a step does not run.
        attempt: as for :func:`~lightning_sdpipe.partition.plan.plans`.
        watch_in: as for :func:`~lightning_sdpipe.partition.rehearsal.rehearse`.
    """

    module: Callable[[], nn.Module]
    device: torch.device
    measure: Callable[[Sequence[Block]], plan.Profile]
    count: Callable[[StepCalls], Costs]
    failed: Callable[[Exception], None]
    attempt: Callable[[Callable[[], list[plan.Plan]]], list[plan.Plan]]
    watch_in: rehearsal.Alone | None


def _made(planning: Planning, steps: Sequence[StepCalls], trial: _Trial) -> list[plan.Plan]:
    module = planning.trainer.lightning_module

    def count() -> Costs | None:
        if not steps:
            return None
        try:
            return trial.count(next((step for step in steps if step.trains), steps[0]))
        except Exception as error:  # what is not allowed in a step is refused when the real one runs
            planning.notes.append(
                f"The work of a step could not be counted ({type(error).__name__}: {error}), so bytes decide the cut."
            )
            return None

    def rehearse(chain: Sequence[str]) -> RehearsalResult | None:
        if not steps:
            return None
        try:
            tried = trial.module()
            found = rehearsal.rehearse(tried, chain, steps, trial.device, trial.watch_in)
        except Exception as error:  # what is not allowed in a step is refused when the real one runs
            _refuse_one_sample(module, error)
            trial.failed(error)
            _not_rehearsed(planning, "a step could not be run before training", error)
            return None
        for step in (step for step in steps if step.single is not None):
            _try_one_sample(tried, step, trial.device)
        return found

    made = plan.plans(
        module, _cuts(planning), planning.names, trial.measure, rehearse, count, planning.memory, trial.attempt
    )
    planning.notes.extend(dict.fromkeys(each.note for each in made if each.note))
    planning.notes.extend(lock_step.costs(*each) for each in made[0].lock_step.items())
    return made


def _cuts(planning: Planning) -> Sequence[PipelineCut]:
    """Return the cuts, by parameters where there are no training data to measure with."""
    if planning.trainer.state.fn == TrainerFn.FITTING:
        return planning.cuts
    return [replace(cut, partition="parameters") if is_measured(cut.partition) else cut for cut in planning.cuts]


def _is_on_meta(module: nn.Module) -> bool:
    """Return whether the model was built on ``meta``, as a model too large for one worker is."""
    return any(p.is_meta for p in module.parameters())


def _copied(planning: Planning) -> nn.Module:
    """Return a copy of the module on the device, with the same Trainer."""
    copied = copy.deepcopy(planning.trainer.lightning_module)
    copied.trainer = planning.trainer
    move(copied, planning.device)
    return copied


def _moved(planning: Planning, calls: _Calls) -> _Calls:
    """Return the calls with their micro-batches on the device."""
    move_batch = planning.trainer.lightning_module.transfer_batch_to_device
    return [(move_batch(batch, planning.device, 0), arguments) for batch, arguments in calls]


def _steps(planning: Planning) -> list[StepCalls]:
    """Return the steps that the run will make, as far as they can be rehearsed; tell the user why if they cannot."""
    trainer: Any = planning.trainer
    if _is_on_meta(trainer.lightning_module):
        return []
    loops = {
        TrainerFn.FITTING: [
            ("training_step", trainer.fit_loop),
            ("validation_step", trainer.fit_loop.epoch_loop.val_loop),
        ],
        TrainerFn.VALIDATING: [("validation_step", trainer.validate_loop)],
        TrainerFn.TESTING: [("test_step", trainer.test_loop)],
        TrainerFn.PREDICTING: [("predict_step", trainer.predict_loop)],
    }
    try:
        return [
            _step(
                planning,
                name,
                calls,
                _single(planning, calls[0][0], data_source(loop).dataloader()) if name == "training_step" else None,
            )
            for name, loop in loops[trainer.state.fn]
            if (calls := _calls(planning, name, loop))
        ]
    except ConfigurationError:
        raise
    except Exception as error:
        _not_rehearsed(planning, "a batch to rehearse with could not be had", error)
        return []


def _step(planning: Planning, name: str, calls: _Calls, single: Any) -> StepCalls:
    return StepCalls(name, calls, name == "training_step", partial(_within, planning, name), single)


def _single(planning: Planning, part: Any, loader: Any) -> Any:
    """Return one sample of ``part`` if a micro-batch of an epoch's last batch has only one, and the model normalises
    batches.

    Raises:
        ConfigurationError: the schedule needs more micro-batches than that batch has samples.
    """
    strategy: Any = planning.trainer.strategy
    last = last_batch_size(loader, strategy.distributed_sampler_kwargs["num_replicas"])
    multiple = strategy.options.division[1]
    module = planning.trainer.lightning_module
    if last is None or hasattr(module, "split_batch") or not trains_whole_epochs(planning.trainer):
        return None
    if last < multiple:
        raise ConfigurationError(
            f"The last batch of an epoch has {last} samples, and schedule={strategy.options.schedule!r} needs at least "
            f"{multiple} micro-batches. Set drop_last=True, or use schedule='1f1b'."
        )
    is_single = last // min(planning.num_micro_batches, last // multiple * multiple) == 1
    with suppress(ConfigurationError):  # one part, unlike the whole batch, may not tell how many samples it has
        return split(part, sys.maxsize)[0].batch if _normalises(module) and is_single else None


def _normalises(module: nn.Module) -> bool:
    return any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules())


def _try_one_sample(module: nn.Module, step: StepCalls, device: torch.device) -> None:
    try:
        with rehearsal.unheard(module, step.trains, device), step.context(), torch.no_grad():
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


_PRECISION = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


@contextmanager
def _within(planning: Planning, name: str) -> Iterator[None]:
    strategy: Any = planning.trainer.strategy
    precision = getattr(planning.trainer.precision_plugin, _PRECISION[name])
    with planning.guard.rehearsal(name), precision():
        strategy.optimizers, strategy.lr_scheduler_configs = rehearsal.stand_in_optimizers()
        try:
            yield
        finally:
            strategy.optimizers, strategy.lr_scheduler_configs = [], []


def _calls(planning: Planning, name: str, loop: Any) -> _Calls:
    """Return two micro-batches of each data loader of the loop; none if there are no data for it."""
    module, trains = planning.trainer.lightning_module, name == "training_step"
    source = data_source(loop)
    if not is_overridden(name, module) or source.instance is None or not source.is_defined():
        return []
    loaders = source.dataloader()
    several = not trains and isinstance(loaders, Sequence)
    batches = [
        _parts(planning, _as_the_step_gets_it(planning, sample_batch(each, keep=False)), trains)
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
    return trainer.strategy.batch_to_device(batch, _CPU)


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
        f"The stages are planned without a rehearsal, since {what} ({type(error).__name__}: {error}). Only the "
        "output of the last block before a cut crosses it; another value that a later stage needs is refused when it "
        "is used."
    )


def _calls_to_measure(planning: Planning) -> _Calls:
    try:
        return _calls(planning, "training_step", planning.trainer.fit_loop)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f'partition="balanced" measures the blocks with a batch, and none could be had before training '
            f'({type(error).__name__}: {error}). Use "auto" or numbers of blocks.'
        ) from error


def _measure(
    planning: Planning, module: nn.Module, blocks: Sequence[Block], batch: Any, arguments: Sequence[int]
) -> plan.Profile:
    trainer: Any = planning.trainer
    training_step: Any = module.training_step

    def step() -> Any:
        with trainer.precision_plugin.train_step_context():
            return training_step(batch, *arguments)

    return profile(module, blocks, step, planning.device)
