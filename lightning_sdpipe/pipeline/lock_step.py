"""Lock step: calls of blocks outside of training, which all workers of a pipeline make together.

Hooks run on every stage, and so do evaluation steps that call blocks in an order that no pipeline can run (a loop that
generates text). The stage that holds a block computes its call; the others receive the output and all other effects,
and repeat them. So user code between blocks sees true values on every stage, and takes the same branches.

If some stages make a call and others do not, it would wait forever. Therefore a waiting worker writes its wait to the
run's store (:func:`tell_waits`). If a worker that has not made the call waits for one that has, it never will.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.p2p import Tag
from lightning_sdpipe.partition.effects import Effect
from lightning_sdpipe.partition.message import Layout, Message, Receiving, TensorMeta, whole_message
from lightning_sdpipe.pipeline.digest import BatchDigest

_FIRST = 2**14  # bytes of the first message, large enough that most calls need no second
_TOGETHER = (
    "Outside of training steps, all ranks of a pipeline call a block together: call it on every rank, and let one of "
    "them report, as in `text = self.generate(prompt)` and then `if self.trainer.is_global_zero: print(text)`. Neither "
    "rank_zero_only nor trainer.is_global_zero nor trainer.strategy.has_results may decide whether it is called."
)


def costs(step: str, calls: int) -> str:
    """Return what to tell the user about an evaluation ``step`` in lock step that makes ``calls`` calls in a batch."""
    return (
        f"{step} calls blocks more than once, or in an order that values decide, so it runs in lock step: stages do "
        f"not overlap, and each call of a block (at least {calls} in a batch) is sent to all stages of the pipeline. "
        "A batch takes about as long as on one device that holds the whole model, and a message for each call."
    )


@dataclass(eq=False)
class LockStep:
    """One worker's part in calls made in lock step.

    Args:
        group: the pipeline's process group.
        ranks: global ranks of its workers.
        owners: the global rank that holds each block.
        chain: paths of the blocks.
        device: where this worker computes.
        steps: whether each step runs in lock step, by name. A step that was not rehearsed does so for one batch, which
            shows whether it must.
    """

    group: dist.ProcessGroup
    ranks: Sequence[int]
    owners: Sequence[int]
    chain: Sequence[str]
    device: torch.device
    steps: dict[str, bool] = field(default_factory=dict)
    on_entry: Callable[[str], None] = lambda _: None
    """Called with the block's path before each call; raises if not all workers make it."""
    first_failure: AbstractContextManager[None] = field(default_factory=nullcontext)
    together: bool = False
    """Whether the present evaluation runs in lock step; then its results are on every stage."""
    _digest: BatchDigest | None = None  # of the present step's batch
    _order: list[int] = field(default_factory=list)  # the blocks that the present step has called
    _calls: int = 0

    def runs(self, step: str) -> bool:
        """Return whether the next batch of ``step`` runs in lock step."""
        self.together = self.steps.get(step, False)
        return self.steps.get(step, True)

    def evaluate(self, step: str, batch: Any, run: Callable[[], Any]) -> Any:
        """Return what ``run``, a whole step on ``batch``, returns; None on stages that need no result."""
        self._digest, self._order = BatchDigest(batch), []
        try:
            output = run()
        finally:
            self._digest = None
        if step not in self.steps:
            self.together = self.steps[step] = any(before >= after for before, after in pairwise(self._order))
            if self.together:
                rank_zero_info(costs(step, len(self._order)))
            elif self.owners[-1] != dist.get_rank():
                return None
        return output

    def call(
        self, block: int, compute: Callable[[], tuple[Any, list[Effect]]], repeat: Callable[[list[Effect]], Any]
    ) -> Any:
        """Call a block: ``compute`` its output and effects if this worker holds it, else ``repeat`` its effects.

        Raises:
            ConfigurationError: another worker calls another block, or from another hook, or has another batch.
            WorkerFailedError: a worker is gone.
        """
        self.on_entry(self.chain[block])
        self._calls += 1
        if self._digest is not None:
            self._order.append(block)
        owner, rank = self.owners[block], dist.get_rank()
        others = [other for other in self.ranks if other != rank]
        place = f"block {self.chain[block]!r} in {_hook()}"
        numbers = [] if self._digest is None else self._digest.numbers
        if owner == rank:
            output, effects = compute()
            message = whole_message(effects)
            values = [_bytes(tensor) for tensor in message.tensors]
            data = pickle.dumps(((place, self._calls, numbers), message.layout.encode(), message.numbers, values))
            with self.first_failure, p2p.awaiting(_Call(place, self._calls, self.ranks, others)):
                for transfer in [
                    p2p.send_bytes(data, to, self.group, Tag.BLOCK_CALL, f"rank {to}", _FIRST) for to in others
                ]:
                    transfer.wait()
            return output
        with self.first_failure, p2p.awaiting(_Call(place, self._calls, self.ranks, [owner])):
            data = p2p.receive_bytes(owner, self.group, Tag.BLOCK_CALL, f"rank {owner}", _FIRST)
        (there, calls, digest), encoded, found, values = pickle.loads(data)
        if (there, calls) != (place, self._calls):
            raise ConfigurationError(f"Rank {owner} has called {there}, and rank {rank} {place}. {_TOGETHER}")
        if self._digest is not None:
            self._digest.compare(digest, self.ranks.index(owner))
        layout = Layout.decode(encoded)
        tensors = [self._tensor(each, meta) for each, meta in zip(values, layout.values, strict=True)]
        message = Message(tensors, found, layout)
        return repeat(Receiving(message, [self.chain[block]], self.device, frozenset()).effects(0) or [])

    def _tensor(self, values: bytes, meta: TensorMeta) -> Tensor:
        if not values:
            return meta.empty(self.device)
        return torch.frombuffer(bytearray(values), dtype=meta.dtype).reshape(meta.shape).to(self.device)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _hook() -> str:
    """Return a description of the hook or step from which a block is called now."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_name
        if name.startswith("on_") or name.endswith("_step"):
            owner = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
            if isinstance(owner, (LightningModule, Callback)):
                return f"{type(owner).__name__}.{name}"
    return "no hook of a module or callback"


@dataclass(eq=False)
class _Call:
    """This worker's wait in a call of a block for ``ranks``, some of its pipeline's ``members``."""

    place: str
    number: int
    members: Sequence[int]
    ranks: Sequence[int]
    _heard: tuple[Mapping[int, _Said], Mapping[int, _Said]] = ({}, {})  # what members said at the last two times

    def __str__(self) -> str:
        return f"a call of {self.place}"

    def hear(self, said: Mapping[int, _Said]) -> None:
        """Note what members have written to the store."""
        self._heard = self._heard[1], said

    def lost(self) -> WorkerFailedError | None:
        """Return an error if an awaited worker waits, directly or through others, for a worker that waits in this call.
        Each must have said so twice, so that no ended wait counts."""
        before, now = self._heard
        lasting = {rank: said for rank, said in now.items() if said.goes_on(before.get(rank))}
        at = {rank: said.call[1] for rank, said in lasting.items() if said.call} | {dist.get_rank(): self.number}
        for rank, said in lasting.items():  # a message from a rank that has passed this one's call may be under way
            if rank in at:
                lasting[rank] = said._replace(ranks=[each for each in said.ranks if at.get(each, 0) <= at[rank]])
        here = {rank for rank, said in lasting.items() if said.call == [self.place, self.number]} | {dist.get_rank()}
        missing = [rank for rank in self.ranks if rank not in here and _leads(rank, here, lasting)]
        if not missing:
            return None
        elsewhere = " and ".join(f"rank {rank} waits in {lasting[rank].what}" for rank in missing)
        return WorkerFailedError(
            f"{self.place} is called on ranks {sorted(here)}, which wait for ranks {missing}, and these do not call "
            f"it: {elsewhere}. {_TOGETHER}"
        )


class _Said(NamedTuple):
    """What a worker has written to the run's store: its wait's id, a count that grows each time, the block call if the
    wait is one, the ranks that it waits for, and a description."""

    wait: int
    times: int
    call: list[Any] | None
    ranks: list[int]
    what: str

    def goes_on(self, before: _Said | None) -> bool:
        return before is not None and before.wait == self.wait and before.times < self.times


def _leads(start: int, goals: Collection[int], said: Mapping[int, _Said]) -> bool:
    """Return whether the worker ``start`` waits, directly or through others, for one of ``goals``."""
    seen, todo = set[int](), [start]
    while todo:
        rank = todo.pop()
        if rank in goals:
            return True
        if rank not in seen and rank in said:
            todo += said[rank].ranks
        seen.add(rank)
    return False


_times = count()


def tell_waits(waits: Collection[p2p.Wait]) -> None:
    """Write this worker's ``waits`` to the run's store, and give what others have written there to the call of a block
    among them. A thread beside the training calls this repeatedly while a wait lasts; it blocks if the store cannot be
    reached."""
    if not waits or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    call = next((each for each in waits if isinstance(each, _Call)), None)
    ranks = sorted({rank for each in waits for rank in each.ranks})
    what = " and ".join(sorted(map(str, waits if call is None else [call])))
    key = None if call is None else [call.place, call.number]
    said = _Said(hash(frozenset(map(id, waits))), next(_times), key, ranks, what)
    with suppress(RuntimeError, ValueError):  # the process with the store may have ended, or the run
        _store().set(f"waits/{dist.get_rank()}", json.dumps(said))
    if call is not None:
        call.hear(_told(call.members))


def port_of_store() -> int:
    """Return the port of the run's store, or 0 if it has none. Bytes over it tell waits, so they are no progress."""
    if not dist.is_initialized():
        return 0
    store: Any = None
    with suppress(ValueError):  # the group has ended with the run
        store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return getattr(store, "port", 0)


def _told(ranks: Sequence[int]) -> dict[int, _Said]:
    keys = {rank: f"waits/{rank}" for rank in ranks if rank != dist.get_rank()}
    with suppress(RuntimeError, ValueError):
        return {rank: _Said(*json.loads(_store().get(key))) for rank, key in keys.items() if _store().check([key])}
    return {}


def _store() -> Any:
    """Return the watching thread's own connection to the run's store."""
    return _connected(dist.distributed_c10d._get_default_store())


@lru_cache(maxsize=1)
def _connected(store: Any) -> Any:
    return store.clone()
