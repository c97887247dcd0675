"""Values that steps log in some pipelines only, or in another order: the loss of each class in a batch, for example.

Where an epoch ends, Lightning reduces the logged values one by one, in the order in which they were logged. A pipeline
that has logged others would be at another value, and numbers that have nothing to do with each other would be reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_sdpipe import p2p
from lightning_sdpipe.lightning_internals import Method, of_its_class, replace, restore
from lightning_sdpipe.lightning_results import expect_values, values_to_reduce
from lightning_sdpipe.topology.groups import ProcessGroups


def agree(trainer: Trainer, groups: ProcessGroups) -> None:
    """Make the replicas of this stage reduce the same values next, in one order: all that any of them has logged. A
    mean is that over those that logged it. All of them must call it.

    Raises:
        WorkerFailedError: another one is gone.
    """
    replicas = dist.get_process_group_ranks(groups.stage)
    if len(replicas) == 1:
        return
    mine = values_to_reduce(trainer)
    digest = crc32(repr([*mine]).encode())
    extremes = torch.tensor([digest, -digest])
    with p2p.waiting_for(groups.stage, "agreeing on the values that were logged"):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=groups.stage)
    if extremes.sum() != 0:
        each = [p2p.broadcast_value(mine, replica, groups.stage) for replica in replicas]
        expect_values(trainer, {key: options for said in each[::-1] for key, options in said.items()})


def agree_in_evaluations(
    trainer: Trainer, groups: ProcessGroups, first_failure: AbstractContextManager[None]
) -> Callable[[], None]:
    """Let the replicas of this stage agree where the evaluation of a dataloader ends. Return a function that undoes
    it."""
    loops = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]

    def agreeing(loop: object) -> Callable[[], None]:
        def store() -> None:
            with first_failure:
                agree(trainer, groups)
            of_its_class(loop, Method.STORE_RESULTS)()

        return store

    for loop in loops:
        replace(loop, Method.STORE_RESULTS, agreeing(loop))

    def undo() -> None:
        for loop in loops:
            restore(loop, Method.STORE_RESULTS)

    return undo
