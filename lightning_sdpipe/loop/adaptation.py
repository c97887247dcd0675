"""Adapts all that Lightning, torchmetrics and the precision plugin do per rank to a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from lightning.pytorch import Trainer

from lightning_sdpipe.exchange.buckets import FlatBucket
from lightning_sdpipe.loop.clipping import clip_over_stages, clip_without_flush, clips_by_norm
from lightning_sdpipe.loop.collective_guard import CollectiveGuard
from lightning_sdpipe.loop.freezing import adapt_finetuning
from lightning_sdpipe.loop.last_stage import gather_metrics_over, leave_results_to_the_last_stage
from lightning_sdpipe.loop.loss_scale import agree_on_overflow, scale_without_flush
from lightning_sdpipe.loop.refusals import leave_out_example
from lightning_sdpipe.loop.user_hooks import refuse_metrics_elsewhere, show_whole_groups
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.partition.sections import Sections
from lightning_sdpipe.pipeline.pipedream import PipeDreamPipeline
from lightning_sdpipe.pipeline.pipeline import Pipeline
from lightning_sdpipe.pipeline.ready_signal import LastWait, ReadySignal
from lightning_sdpipe.topology.groups import ProcessGroups


def last_wait(trainer: Trainer, num_stages: int, flush: bool) -> LastWait:
    """Return the point of an update after which it waits for no other stage. A module that clips by itself may not do
    so; then it is the end of the step. Without a flush there is no vote."""
    if num_stages == 1:
        return "backward"
    if clips_by_norm(trainer):
        return "norm"
    return "vote" if flush and getattr(trainer.precision_plugin, "scaler", None) is not None else "backward"


def adapt(
    trainer: Trainer,
    groups: ProcessGroups,
    ownership: Ownership,
    pipeline: Pipeline,
    buckets: Sequence[FlatBucket],
    whereabouts: CollectiveGuard,
    ready: ReadySignal,
    whole_groups: Callable[[], list[dict[str, Any]]],
    whole_groups_shown: Callable[[], AbstractContextManager[None]],
    hand_on: Callable[[str], None],
    logged_late: Collection[str],
    sections: Sections | None = None,
) -> list[Callable[[], None]]:
    """Adapt hooks, metrics, callbacks, clipping and the loss scale of ``trainer``.

    Args:
        trainer: about to run.
        groups: this worker's process groups.
        ownership: which stage holds what.
        pipeline: this worker's part of it.
        buckets: this worker's parameters; the sequence may change.
        whereabouts: is told when hooks run that only last stages run.
        ready: is told when an update has passed its waits for other stages.
        whole_groups: those of the optimizer, with the parameters of all stages.
        whole_groups_shown: within, the optimizer's own groups have them.
        hand_on: gives other stages what the last one's Python has changed in an evaluation that ends with this hook.
        logged_late: metrics that the training step logs after the first stage has ended.
        sections: those of the chain, if pipelines are cut unlike.

    Returns:
        Functions that undo it.
    """
    module, precision = trainer.lightning_module, trainer.precision_plugin
    callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]
    is_last, is_cut = groups.mesh.is_last(groups.rank), groups.mesh.num_stages > 1
    result_hook = partial(whereabouts.result_hook, parameters=lambda: [bucket.buffer for bucket in buckets])
    if isinstance(pipeline, PipeDreamPipeline):
        pipeline.notes.norms = clips_by_norm(trainer)
        clip_without_flush(precision, module, ownership, groups, pipeline, ready)
        scale_without_flush(precision, pipeline)
    else:
        clip_over_stages(precision, module, ownership, groups, ready, sections)
        agree_on_overflow(precision, groups, ready)
    return [
        leave_results_to_the_last_stage(module, callbacks, is_last, result_hook, hand_on),
        leave_out_example(module) if is_cut else lambda: None,
        gather_metrics_over(module, callbacks, groups.stage, lambda: not is_last and whereabouts.in_step),
        adapt_finetuning(callbacks, whole_groups),
        show_whole_groups(module, callbacks, whole_groups_shown) if is_cut else lambda: None,
        refuse_metrics_elsewhere(module, callbacks, logged_late) if not is_last else lambda: None,
    ][::-1]  # several may have changed the same hook
