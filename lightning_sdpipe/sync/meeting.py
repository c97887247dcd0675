"""Where the workers of a stage find each other when one of them cannot go on alone.

Between two meetings nobody knows how far the others are. Most meetings are known in advance, since every worker counts
the same batches: validation after 100 of them, a checkpoint after 500, the end of the epoch. But a worker that runs
out of data earlier does not know which meeting comes next. So each meeting begins with one small all-reduce, in which
those that have arrived say where they are, and those that are out of data learn it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.p2p import waiting_for


@dataclass(frozen=True)
class Meeting:
    """``position``: after how many batches of the epoch the workers meet. ``closing``: it is the end of the epoch,
    which everybody's last batch remains to be trained for."""

    position: int
    closing: bool


def meet(position: int, out_of_data: bool, group: dist.ProcessGroup, device: torch.device) -> Meeting:
    """Waits for all members of ``group``, which have begun ``position`` batches each.

    A worker is ``out_of_data`` when one batch is left, which it keeps for the end of the epoch.

    Raises:
        ConfigurationError: the workers with data are at different batches, so that they have come for different things.
        WorkerFailedError: a member is gone, or the group's timeout passed.
    """
    nowhere = -(2**62)
    here = [nowhere, nowhere, position + 1] if out_of_data else [position, -position, nowhere]
    places = torch.tensor(here, device=device)
    with waiting_for(group, "meeting"):
        dist.all_reduce(places, dist.ReduceOp.MAX, group=group)
    furthest, nearest, last = (int(place) for place in places)
    if furthest == nowhere:
        return Meeting(last, closing=True)
    if furthest != -nearest or last > furthest:
        raise ConfigurationError(
            f"Some workers came together after {-nearest} batches of this epoch and others after "
            f"{max(furthest, last - 1)}: something was decided differently on them. Validation, checkpoints, barriers "
            "and skipped epochs must depend on the number of the batch, not on the rank, its data or its clock; and a "
            "loader must give as many batches as its length says."
        )
    return Meeting(furthest, closing=False)
