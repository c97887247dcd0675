"""State that user code keeps in Python, and in buffers outside of blocks: the last stage, where steps end, hands it on.

Validation ends on last stages: there the module's hooks have results, and may lower a temperature, step a schedule or
freeze layers. So what has changed on the last stage of a pipeline while it validated, tested or predicted is handed on
to its other stages when the module's hook has run. Values that cannot travel may not be used there any more.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.lightning_internals import OF_EVERY_MODULE
from lightning_sdpipe.lightning_results import is_metric, metrics_of, pack_metrics, unpack_metrics
from lightning_sdpipe.loop.user_hooks import StandIn, has_own_rule
from lightning_sdpipe.p2p import Tag
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.partition.placeholder import Placeholder
from lightning_sdpipe.partition.python_values import (
    GENERATORS,
    LARGEST,
    NotPackedError,
    attributes_of,
    has_values,
    is_of_the_user,
    pack,
    unpack,
)
from lightning_sdpipe.topology.groups import ProcessGroups

_DEPTH = 4  # levels of objects in objects
_MANY = 10_000  # values in a container beyond which only their number is compared

_made_alike: WeakSet[nn.Module] = WeakSet()
"""Modules whose stages have made their Python state alike in this process."""

Address = tuple[str | int, ...]
_Change = tuple[Address, str, Any]


@dataclass(frozen=True)
class _Slot:
    """The place of a value: an item or an attribute of ``owner``, or whether a parameter trains."""

    owner: Any
    name: Any

    @property
    def value(self) -> Any:
        if isinstance(self.owner, nn.Parameter):
            return self.owner.requires_grad
        return self._names[self.name] if isinstance(self.owner, dict) else self._names.get(self.name)

    def put(self, value: Any) -> None:
        if isinstance(self.owner, nn.Parameter):
            self.owner.requires_grad_(value)
        else:
            self._names[self.name] = value

    def remove(self) -> None:
        self._names.pop(self.name, None)

    @property
    def _names(self) -> Any:
        return self.owner if isinstance(self.owner, dict) else attributes_of(self.owner)


class PythonState:
    """The Python state of one stage.

    Args:
        trainer: the Trainer whose module, optimizers and schedules have the state.
        ownership: which stage holds what.
        groups: this worker's process groups.
        device: that on which it computes.
        first_failure: context for waits for other stages.
        late: the attributes of modules that training steps change at a point that only the last stage reaches.
    """

    def __init__(
        self,
        trainer: Trainer,
        ownership: Ownership,
        groups: ProcessGroups,
        device: torch.device,
        first_failure: AbstractContextManager[None],
        late: Sequence[str],
    ) -> None:
        self._trainer: Any = trainer
        self._device = device
        self._groups = groups
        self._first_failure = first_failure
        self._late = late
        _, pipeline = groups.mesh.locate(groups.rank)
        self._ranks: Sequence[int] = groups.mesh.pipeline_ranks(pipeline)
        self._is_last = groups.mesh.is_last(groups.rank)
        module = trainer.lightning_module
        self._buffers = [name for name, _ in module.named_buffers() if len(ownership.stages[name]) > 1]
        self._over_parameters = {id(tensor) for tensor, _ in ownership.memory.attributes}
        self._before: dict[Address, Any] | None = None
        self._hook = ""
        self._offer: bytes | None = None  # what other stages get before they run the hook; empty when they have it

    def make_alike(self) -> None:
        """Give the other stages the last one's generators, tensors and arrays where theirs differ: each process has
        made its own, perhaps without a seed. All stages must call it before a run. Later runs of the module in this
        process go on with what each stage has.

        Raises:
            ConfigurationError: a tensor or an array differs and is too large to be handed on.
        """
        module = self._trainer.lightning_module
        if len(self._ranks) == 1 or module in _made_alike:
            return
        _made_alike.add(module)
        *others, last = self._ranks
        mine = {json.dumps(address): place for address, place in self._made_by_the_user()}
        digests = {address: _digest(place.value) for address, place in mine.items()}
        with self._first_failure:
            if not self._is_last:
                theirs = json.loads(self._receive(last))
                known = {address: digest for address, digest in digests.items() if digest is not None}
                self._send([each for each, digest in known.items() if theirs.get(each) not in (None, digest)], last)
                given = json.loads(self._receive(last))
                for address in (address for address, what, _ in given if what == "elsewhere"):
                    raise ConfigurationError(
                        f"{'.'.join(map(str, address[1:]))!r} differs between the stages of a pipeline, because each "
                        f"process has made its own, and it is larger than the {LARGEST} bytes that can be handed on. "
                        "Seed the script, as by L.seed_everything(1), or make it a buffer."
                    )
                self._apply(given, "the setup of the run")
                return
            for rank in others:
                self._send(digests, rank)
            for rank in others:
                wanted = json.loads(self._receive(rank))
                self._send([_packed(json.loads(each), mine[each]) for each in wanted], rank)

    def _made_by_the_user(self) -> Iterator[tuple[Address, _Slot]]:
        """Yield the values in modules and callbacks, without tensors over the memory of parameters."""
        roots: dict[Address, Any] = {("callback", n): c for n, c in enumerate(self._trainer.callbacks)}
        roots = {address: callback for address, callback in roots.items() if is_of_the_user(callback)}
        roots |= {address: root for address, root in self._roots().items() if address[0] == "module"}
        seen: set[int] = set()
        for address, root in roots.items():
            for where, place in _attributes(address, root, seen, _DEPTH):
                if not any(id(leaf) in self._over_parameters for leaf in tree_leaves(place.value)):
                    yield where, place

    def _send(self, value: Any, rank: int) -> None:
        data = json.dumps(value).encode()
        p2p.send_bytes(data, rank, self._groups.world, Tag.PYTHON_STATE, f"rank {rank}").wait()

    def _receive(self, rank: int) -> bytes:
        return p2p.receive_bytes(rank, self._groups.world, Tag.PYTHON_STATE, f"rank {rank}")

    def begin(self) -> None:
        """Record the state, so that changes from now on are handed on."""
        if self._is_last and len(self._ranks) > 1:
            self._before = {address: _print(place.value) for address, place in self._places().items()}

    def prints(self) -> dict[str, Any]:
        """Return a summary of each of the module's values, by name; it differs when the value has changed."""
        module = self._trainer.lightning_module
        seen: set[int] = set()
        found: dict[str, Any] = {}
        for path, owner in module.named_modules():
            if not is_metric(owner):
                places = _attributes(("module", path) if path else ("module",), owner, seen, _DEPTH)
                found |= {".".join(map(str, address[1:])): _print(place.value) for address, place in places}
        return found

    def hand_on(self, hook: str, run: Callable[[], Any], everywhere: bool, instead: Callable[[], Any] | None) -> Any:
        """Call ``run``, the ``hook`` at the end of an evaluation (a no-op on stages without its results), and return
        what it returns. Then give the other stages what has changed on the last one since :meth:`begin`, unless the
        hook runs ``everywhere``; all stages must call this. Where the last stage calls the others to the hook, they get
        what had changed before it and run ``instead``, the hook itself; None if it is not the user's."""
        if everywhere or len(self._ranks) == 1:
            output = run()
        elif not self._is_last:
            output = run()
            sent = self._from_last(hook, bytes)
            assert sent is not None
            called, changes = json.loads(sent)
            self._apply(changes, hook)
            if called and instead is not None:
                instead()
        else:
            self._hook = hook
            if instead is not None:
                self._offer = json.dumps([True, self._changes()]).encode()
            output = run()
            called, self._offer = self._offer == b"", None
            if not called:
                self._from_last(hook, lambda: json.dumps([False, self._changes()]).encode())
        self._before = None
        self.hand_on_metrics(hook)
        return output

    def call_others(self) -> bool:
        """Call the other stages to the module's hook at the end of an evaluation. Return whether one is running."""
        if self._offer:
            offer, self._offer = self._offer, b""
            self._from_last(self._hook, lambda: offer)
        return self._offer is not None

    def hand_on_metrics(self, hook: str) -> None:
        """Give the other stages the last one's states of torchmetrics objects, since steps end there; all stages must
        call it, before or after ``hook`` has run."""
        found = metrics_of(self._trainer.lightning_module, self._trainer.callbacks).items()
        metrics = {name: metric for name, metric in found if not has_own_rule(metric)}
        packed = self._from_last(hook, partial(pack_metrics, metrics))  # of none, too: others may have some
        if packed is not None:
            unpack_metrics(metrics, packed)

    def hand_on_late(self) -> None:
        """Give the other stages the last one's values of the attributes that training steps change late; all stages
        must call it after a step."""
        if self._late:
            sent = self._from_last("training_step", lambda: json.dumps(self._values()).encode())
            if sent is not None:
                self._apply(json.loads(sent), "training_step")

    def _from_last(self, hook: str, made: Callable[[], bytes]) -> bytes | None:
        """Send ``made()`` from the last stage to the others, and return it there."""
        if len(self._ranks) == 1:
            return None
        last = self._ranks[-1]
        group = self._groups.world  # a process that fails closes it at once, and ends with its other groups
        with self._first_failure:
            if self._is_last:
                data = made()
                others = self._ranks[:-1]
                sent = [p2p.send_bytes(data, r, group, Tag.PYTHON_STATE, f"rank {r}") for r in others]
                for transfer in sent:
                    transfer.wait()
                return None
            return p2p.receive_bytes(last, group, Tag.PYTHON_STATE, f"the last stage (rank {last}), which runs {hook}")

    def _changes(self) -> list[_Change]:
        before, places = self._before or {}, self._places()
        gone: list[_Change] = [(address, "gone", None) for address in before.keys() - places.keys()]
        here = ((a, place) for a, place in places.items() if not isinstance(place.value, Placeholder))
        changed = (a for a, place in here if a not in before or before[a] != _print(place.value))
        return gone + [_packed(address, places[address]) for address in changed]

    def _values(self) -> list[_Change]:
        module, found = self._trainer.lightning_module, list[_Change]()
        for path, _, name in (name.rpartition(".") for name in self._late):
            owner, address = module.get_submodule(path), ("module", path)
            places = _attributes(address, owner, set(), _DEPTH, only=name)
            found += (_packed(*place) for place in places)
        return found

    def _apply(self, changes: Sequence[Any], hook: str) -> None:
        for address, what, value in changes:
            place = self._place(address)
            if place is None:
                continue  # in an object that is not here, which is a change itself
            if what == "gone":
                place.remove()
                continue
            try:
                if what == "elsewhere":
                    raise NotPackedError(value)
                place.put(unpack(value, place.value, self._device))
            except NotPackedError as error:
                place.put(_not_here(".".join(map(str, address[1:])), hook, str(error)))

    def _place(self, address: Sequence[Any]) -> _Slot | None:
        *inside, name = address
        module = self._trainer.lightning_module
        if inside == ["requires_grad"]:
            return _Slot(module.get_parameter(name), "requires_grad")
        if inside == ["buffer"]:
            path, _, name = name.rpartition(".")
            return _Slot(module.get_submodule(path)._buffers, name)
        owner: Any = self._root(*inside[:2])
        for key in inside[2:]:
            entered = isinstance(owner, nn.Module) or _is_entered(owner)
            owner = (attributes_of(owner) or {}).get(key) if entered else None
        return None if owner is None else _Slot(owner, name)

    def _root(self, kind: str, place: Any) -> Any:
        if kind == "module":
            return self._trainer.lightning_module.get_submodule(place)
        if kind == "callback":
            return self._trainer.callbacks[place]
        if kind == "schedule":
            return self._trainer.lr_scheduler_configs[place].scheduler
        return self._trainer.optimizers[int(kind.removeprefix("optimizer "))].param_groups[place]

    def _roots(self) -> dict[Address, Any]:
        trainer, module = self._trainer, self._trainer.lightning_module
        roots: dict[Address, Any] = {("module", path): m for path, m in module.named_modules() if not is_metric(m)}
        for number, optimizer in enumerate(trainer.optimizers):
            roots |= {(f"optimizer {number}", place): group for place, group in enumerate(optimizer.param_groups)}
        roots |= {("schedule", place): config.scheduler for place, config in enumerate(trainer.lr_scheduler_configs)}
        return roots

    def _places(self) -> dict[Address, _Slot]:
        module = self._trainer.lightning_module
        found: dict[Address, _Slot] = {}
        seen: set[int] = set()
        for address, root in self._roots().items():
            found.update(_attributes(address, root, seen, _DEPTH))
        for name, parameter in module.named_parameters():
            found["requires_grad", name] = _Slot(parameter, "requires_grad")
        for name in self._buffers:
            path, _, own = name.rpartition(".")
            found["buffer", name] = _Slot(module.get_submodule(path)._buffers, own)
        return found


def _packed(address: Address, place: _Slot) -> _Change:
    try:
        return address, "is", pack(place.value)
    except NotPackedError as error:
        return address, "elsewhere", str(error)


def _attributes(
    address: Address, owner: Any, seen: set[int], depth: int, only: str | None = None
) -> Iterator[tuple[Address, _Slot]]:
    """Yield the values in ``owner`` and in the user's own objects there; ``only`` those of one name."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    left_out: Set[str] = frozenset()
    if isinstance(owner, nn.Module):
        left_out = OF_EVERY_MODULE
    elif isinstance(owner, LRScheduler):
        left_out = {"optimizer"}
    elif isinstance(owner, dict):
        left_out = {"params"}
    for name, value in list((owner if isinstance(owner, dict) else attributes_of(owner) or {}).items()):
        if name in left_out or (only is not None and name != only):
            continue
        if not isinstance(name, str) or isinstance(value, (nn.Module, nn.Parameter)):
            continue
        if _is_entered(value) and depth:
            yield from _attributes((*address, name), value, seen, depth - 1)
        elif not callable(value):
            yield (*address, name), _Slot(owner, name)


def _is_entered(value: Any) -> bool:
    return isinstance(value, LRScheduler) or (is_of_the_user(value) and not isinstance(value, StandIn))


def _is_data(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_data(each) for name, each in value.items()) and bool(value)
    if isinstance(value, (list, tuple, deque)):
        return all(map(_is_data, value)) and bool(value)
    return isinstance(value, (Tensor, np.ndarray, *GENERATORS))


def _digest(value: Any) -> int | None:
    """Return a digest of tensors, arrays and generators, also in containers; None of other values, since numbers may be
    a process's own (``id(parameter)``)."""
    if not _is_data(value):
        return None
    if isinstance(value, Tensor) and has_values(value):
        value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return crc32(np.ascontiguousarray(value).tobytes())
    try:
        return crc32(json.dumps(pack(value)).encode())
    except NotPackedError:
        return None


def _print(value: Any) -> Any:
    """Return a summary of the value, which differs when the value has changed."""
    if isinstance(value, Tensor):
        if value.is_inference():  # which does not count how often it was written to
            return id(value), _digest(value)
        return id(value), value._version, str(value.detach().sum().item()) if has_values(value) else ""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return str(value.dtype), value.shape, crc32(np.ascontiguousarray(value).tobytes())
    if isinstance(value, (list, tuple, deque, dict, set)) and len(value) > _MANY:
        return id(value), len(value)
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, tuple(map(_print, value))
    if isinstance(value, dict):
        return type(value).__name__, tuple((str(key), _print(item)) for key, item in value.items())
    try:
        return json.dumps(pack(value))
    except NotPackedError:
        return id(value)


def _not_here(name: str, hook: str, reason: str) -> StandIn:
    return StandIn(
        f"{name!r} was changed on the last stage by {hook} or before it in an evaluation, and what it "
        f"is now does not travel to other stages ({reason}), where it is used. Numbers, strings, tensors and "
        "random generators do, in lists, dicts and objects of your own; or use it on last stages only, where "
        "trainer.strategy.has_results is true."
    )
