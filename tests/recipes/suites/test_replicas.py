"""Replicas in one process move by the product's own rules."""

from __future__ import annotations

import torch

from lightning_sdpipe.exchange.outer_model import Nesterov
from recipes.suites.courses import Step
from recipes.suites.replicas import Replicas
from tests.recipes.composed import parameters_of


def test_a_round_of_diloco_moves_all_replicas_by_the_outer_optimizer() -> None:
    workload = parameters_of("convergence", "+debug=convergence_debug")["tasks"]["digits"]
    outer = Nesterov(lr=0.7, momentum=0.9)
    replicas = Replicas(workload, 2, 1, seed=0, jointly=False, variance_correction=False, outer=outer)
    models = [list(module.parameters()) for module in replicas._modules]
    base, momentum = [each.detach().clone() for each in models[0]], [torch.zeros_like(each) for each in models[0]]
    for number in range(2):
        for pipeline in range(2):
            replicas.step(Step(0.0, pipeline, 0, 2 * number + pipeline, number))
        moved = [torch.stack(alike).mean(0) - before for *alike, before in zip(*models, base, strict=True)]
        replicas.move_base()
        momentum = [0.9 * m + change for m, change in zip(momentum, moved, strict=True)]
        base = [b + 0.7 * (change + 0.9 * m) for b, change, m in zip(base, moved, momentum, strict=True)]
        for model in models:
            torch.testing.assert_close([each.detach() for each in model], base)
