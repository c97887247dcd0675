"""Parameters that live on several stages of a pipeline: tied weights, and those outside of every block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lightning_sdpipe.mesh import Mesh
from lightning_sdpipe.partition.ownership import Ownership


class SharedGradients:
    """Sums the gradient of every shared parameter over the stages that hold it, so that all copies take one step.

    Every rank must construct it, since it opens process groups for the pipelines in turn.
    """

    def __init__(self, module: nn.Module, ownership: Ownership, mesh: Mesh, rank: int, timeout: object) -> None:
        shared = ownership.shared_parameters(module)
        stage, pipeline = mesh.locate(rank)
        named = dict(module.named_parameters())
        self._buckets: list[tuple[dist.ProcessGroup, Sequence[nn.Parameter]]] = []
        for owners in sorted({owners for owners, _ in shared}):
            for row in range(mesh.num_pipelines):
                group = dist.new_group([mesh.rank(j, row) for j in owners], timeout=timeout)
                if row == pipeline and stage in owners:
                    trained = [named[name] for these, name in shared if these == owners and named[name].requires_grad]
                    self._buckets.append((group, trained))

    def reduce(self) -> None:
        for group, parameters in self._buckets:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            if not gradients:
                continue
            flat = _flatten_dense_tensors(gradients)
            dist.all_reduce(flat, group=group)
            for p, total in zip(parameters, _unflatten_dense_tensors(flat, gradients), strict=True):
                p.grad = total
