"""One stage of a module on this rank, assembled as the strategy does it, without a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import lightning as L
import torch
from torch import nn

from lightning_sdpipe.averaging.buckets import flatten
from lightning_sdpipe.groups import ProcessGroups
from lightning_sdpipe.heterogeneity.delays import Delays
from lightning_sdpipe.heterogeneity.injector import DelayInjector
from lightning_sdpipe.partition.chain import find_chain
from lightning_sdpipe.partition.cut import cut
from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.ownership import assign_owners, keep_only
from lightning_sdpipe.pipeline.flush import FlushPipeline
from lightning_sdpipe.pipeline.link import StageLink
from lightning_sdpipe.pipeline.pipedream import PipeDreamPipeline
from lightning_sdpipe.pipeline.shared_parameters import SharedParameters
from lightning_sdpipe.pipeline.stage_runner import StageRunner, Step
from recipes.suites.processes import TRANSFER_TIMEOUT

CPU = torch.device("cpu")
TRAINING = Step("training_step", (0,), nullcontext)


@dataclass(frozen=True)
class OpenStage:
    """What this rank holds of a module, and how it runs."""

    runner: StageRunner
    parameters: Sequence[nn.Parameter]
    shared: SharedParameters

    def flush(self, schedule: str, num_micro_batches: int) -> FlushPipeline:
        num_workers = len(self.runner.link.ranks)
        return FlushPipeline(
            [self.runner], num_workers, self.parameters, self.shared, _no_delays(), schedule, num_micro_batches
        )

    def pipedream(self) -> PipeDreamPipeline:
        return PipeDreamPipeline(self.runner, self.parameters, _no_delays())


def open_stage(module: L.LightningModule, blocks: Sequence[str], groups: ProcessGroups) -> OpenStage:
    """Cuts ``module`` uniformly over the stages of one pipeline and keeps this rank's part, in flat buckets.

    Args:
        module: whole, with the same values on every rank.
        blocks: paths that name its chain.
        groups: of a mesh with one pipeline.
    """
    mesh = groups.mesh
    stage, pipeline = mesh.locate(groups.rank)
    chain = find_chain(module, blocks)
    spans = cut(len(chain), mesh.num_stages)
    ownership = assign_owners(module, chain, spans)
    shared = SharedParameters(module, ownership, groups, TRANSFER_TIMEOUT)
    keep_only(module, ownership, stage, CPU)
    parameters = [p for p in module.parameters() if not p.is_meta]
    flatten(parameters)
    link = StageLink(groups.pipeline, mesh.pipeline_ranks(pipeline), stage, CPU)
    runner = StageRunner(module, CutModel(module, chain, [spans[stage]], CPU), spans[stage], link)
    return OpenStage(runner, parameters, shared)


def _no_delays() -> DelayInjector:
    return DelayInjector(Delays(), 0, 0)
