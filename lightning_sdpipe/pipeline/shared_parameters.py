"""Parameters that several stages of a pipeline hold: tied weights, and parameters outside all blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.partition.ownership import Ownership, buffers_now
from lightning_sdpipe.pipeline.gradients import hooked
from lightning_sdpipe.pipeline.late_sums import LateSum, by_type, joined, parted
from lightning_sdpipe.topology.groups import ProcessGroups


@dataclass(frozen=True)
class _Copies:
    """Parameters with the same owners."""

    group: dist.ProcessGroup
    ranks: Sequence[int]  # the owners in this pipeline, by stage
    owners: Sequence[int]  # stages
    names: Sequence[str]


class SharedParameters:
    """Keeps all copies of a shared parameter equal: they start equal, and get the sum of their gradients.

    Every rank must construct it, since it opens process groups for the pipelines in turn.

    Args:
        module: the whole model.
        ownerships: for each pipeline of this world, what each worker holds.
        by_stage: what each stage holds; a worker may have several stages.
        groups: the process groups, and this worker's place in the mesh.
        timeout: limit of the process groups' operations.
    """

    def __init__(
        self,
        module: nn.Module,
        ownerships: Sequence[Ownership],
        by_stage: Ownership,
        groups: ProcessGroups,
        timeout: timedelta | None,
    ) -> None:
        mesh = groups.mesh
        stage, _ = mesh.locate(groups.rank)
        self._module = module
        self._groups = groups
        self._stage = stage
        self._summed = by_stage.shared_parameters(module)
        self.exist = bool(self._summed)
        """Whether any parameter is on several stages."""
        self._copies: list[_Copies] = []
        for row, ownership in zip(mesh.ranks, ownerships, strict=True):
            shared = ownership.shared_parameters(module)
            if groups.rank in row:
                self._ownership = ownership
            for owners in sorted({owners for owners, _ in shared}):
                ranks = [row[j] for j in owners]
                group = groups.new_group(sorted(ranks), timeout)
                if groups.rank in ranks:
                    names = [name for these, name in shared if these == owners]
                    self._copies.append(_Copies(group, ranks, owners, names))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Shared parameters of this stage."""
        return [p for copies in self._copies for p in self._of(copies)]

    @property
    def train(self) -> bool:
        """True if a shared parameter of this stage gets a gradient."""
        return bool(self._copies) and any(p.requires_grad for p in self.parameters)

    def refuse_hooks(self) -> None:
        """Raise ConfigurationError if a user's hook would see one stage's part of a gradient in place of the sum."""
        for stages, name in self._summed:
            parameter = self._module.get_parameter(name)
            if parameter.requires_grad and hooked([parameter]):
                raise ConfigurationError(
                    f"{name!r} has a hook on its gradient, and stages {list(stages)} hold it, each with a "
                    "part of the gradient: the hook would see the parts, not their sum. Change the gradient in "
                    "on_before_optimizer_step or on_after_backward, which see the sum; or keep all that uses the "
                    "weight on one stage with partition=[...]."
                )

    def make_equal(self) -> None:
        """Give every copy the value of the first stage that holds it."""
        for copies in self._copies:
            with waiting_for(copies.group, "handing on shared parameters"):
                for parameter in self._of(copies):
                    dist.broadcast(parameter.data, copies.ranks[0], group=copies.group)

    def make_buffers_equal(self, device: torch.device) -> None:
        """Give every copy of a buffer, on ``device``, the shape and the value that it has on the last stage that holds
        it. All stages must call this."""
        ranks = self._groups.mesh.pipeline_ranks(self._groups.mesh.locate(self._groups.rank)[1])
        for name, now in buffers_now(self._module, self._ownership, self._groups).items():
            owners = self._ownership.owners(name)
            if len(owners) > 1:
                path, _, own = name.rpartition(".")
                buffers = self._module.get_submodule(path)._buffers
                held = buffers[own] if self._stage in owners else None
                if held is None or (held.shape, held.dtype) != (now.shape, now.dtype):
                    held = torch.empty_like(now, device=device)
                    if self._stage in owners:
                        buffers[own] = held
                value = torch.view_as_real(held) if held.is_complex() else held
                with waiting_for(self._groups.pipeline, "handing on buffers"):
                    dist.broadcast(value, ranks[owners[-1]], group=self._groups.pipeline)

    def copies(self) -> list[tuple[dist.ProcessGroup, int, list[nn.Parameter]]]:
        """Return, for each set of owners that includes this stage, their group, the first one's rank, and the shared
        parameters."""
        return [(copies.group, copies.ranks[0], self._of(copies)) for copies in self._copies]

    def hand_on(self, gradients: dict[nn.Parameter, Tensor | None]) -> None:
        """Give every copy the gradient that its first owner has in ``gradients``."""
        for copies in self._copies:
            trained = [p for p in self._of(copies) if p.requires_grad]
            for parameters in by_type(trained):
                _hand_on(parameters, gradients, copies)

    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients; a parameter that no owner used has none, as in one
        process."""
        for copies in self._copies:
            trained = [p for p in self._of(copies) if p.requires_grad]
            for parameters in by_type(trained):
                _sum_gradients(parameters, copies.group)

    def late_sums(self, trained: Sequence[nn.Parameter]) -> list[LateSum]:
        """Return the objects that sum gradients in a pipeline without a flush, one for each set of owners."""
        return [
            LateSum(c.group, c.ranks, c.owners, c.owners.index(self._stage), self._of(c), trained) for c in self._copies
        ]

    def _of(self, copies: _Copies) -> list[nn.Parameter]:
        return [self._module.get_parameter(name) for name in copies.names]


def _sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of parameters of one type, and count the owners that have each gradient."""
    gradients = [p.grad for p in parameters]
    flat = joined(parameters, gradients, parameters[0].device)
    with waiting_for(group, "summing the gradients of shared parameters"):
        dist.all_reduce(flat, group=group)
    owners, totals = parted(flat, parameters)
    all_here = all(grad is not None for grad in gradients)
    anybody = [1.0] * len(gradients) if all_here else owners.tolist()  # reading the counts waits for a GPU
    for parameter, total, exists in zip(parameters, totals, anybody, strict=True):
        parameter.grad = total if exists else None


def _hand_on(parameters: Sequence[nn.Parameter], gradients: dict[nn.Parameter, Tensor | None], copies: _Copies) -> None:
    """Send the gradients of parameters of one type from their first owner; flags say which parameters have one."""
    flat = joined(parameters, [gradients[p] for p in parameters], parameters[0].device)
    with waiting_for(copies.group, "handing on the gradients of shared parameters"):
        dist.broadcast(flat, copies.ranks[0], group=copies.group)
    if dist.get_rank() == copies.ranks[0]:
        return
    exist, totals = parted(flat, parameters)
    for parameter, total, there in zip(parameters, totals, exist.tolist(), strict=True):
        gradients[parameter] = total if there else None
