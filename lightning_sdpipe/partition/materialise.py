"""Initial values for a rank's part of a model built on ``meta``, equal to those of a whole initialisation.

While the user builds the model, every operation on meta tensors is recorded. Replaying them on the CPU, from the
initial random state, gives the values that one process would have got. For tensors that a rank does not hold, only the
random numbers are drawn, one tensor at a time, so that later draws stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.ownership import Ownership, become
from lightning_sdpipe.partition.placeholder import written_by

# Functions of torch.nn.init that do nothing on meta. The first would sample until all values are accepted.
_DO_NOTHING_ON_META = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
_META, _CPU = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True)
class _View:
    """A part of a storage, in place of a meta tensor."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    def filler(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype).fill_(1)


@dataclass(frozen=True)
class _Operation:
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]  # storages
    writes: frozenset[int]
    outputs: Sequence[_View]
    draws: bool  # random numbers
    seed: Tensor | None = None  # the state that the random generator was set to just before


class Initialisation:
    """The operations that would have given a model on ``meta`` its initial values."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no two have the same address
        self._random_state: Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record operations on ``meta`` within the context, so that :meth:`replay` can compute their results."""
        whole = {name: self._whole(name) for name in _DO_NOTHING_ON_META}
        with _KeepData(), _Record(self), _patched(nn.init, whole):
            yield

    def _whole(self, name: str) -> Callable[..., Tensor]:
        """Return a stand-in for a function of ``torch.nn.init``, which is recorded as one operation."""
        original = getattr(nn.init, name)

        def initialise(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if tensor.device != _META:
                return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]
            storages = frozenset({self._place(tensor).storage})
            arguments = tuple(map(self._keep, (tensor, *args)))
            seed = self._new_seed()
            self._operations.append(_Operation(original, arguments, kwargs, storages, storages, (), True, seed))
            return tensor

        return initialise

    def knows(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` was made while recording."""
        return tensor.untyped_storage()._cdata in self._storages

    def replay(self, wanted: Sequence[Tensor]) -> list[Tensor]:
        """Return the values of ``wanted``, which must all be known, on the CPU.

        Peak memory is that of the wanted tensors and the largest other one. Afterwards the CPU's random state is as if
        everything had been initialised.
        """
        places = [self._place(t) for t in wanted]
        needed = self._needed({place.storage for place in places})
        last_use = {s: i for i, (operation, _) in enumerate(needed) for s in operation.reads | operation.writes}
        keep = {place.storage for place in places}
        real: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad():
            for index, (operation, counts) in enumerate(needed):
                _run(operation, real if counts else {}, counts)
                for storage in operation.reads | operation.writes:
                    if last_use[storage] == index and storage not in keep:
                        real.pop(storage, None)
        return [place.over(real[place.storage]) for place in places]

    def forget(self) -> None:
        """Discard all recorded operations."""
        self._operations.clear()
        self._storages.clear()
        self._random_state = None

    def _needed(self, storages: set[int]) -> list[tuple[_Operation, bool]]:
        """Return the operations to run: those on which the storages' values depend (True), and those that run only to
        draw the same random numbers (False)."""
        needed: list[tuple[_Operation, bool]] = []
        for operation in reversed(self._operations):
            if operation.writes & storages:
                storages |= operation.reads
                needed.append((operation, True))
            elif operation.draws:
                needed.append((operation, False))
        return needed[::-1]

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Any) -> None:
        """Record an operation that involves tensors on ``meta``."""
        inputs, outputs = _on_meta((args, kwargs)), _on_meta(outcome)
        if not inputs and not outputs:
            return
        before = {self._place(t).storage for t in inputs}
        created = {self._place(t).storage for t in outputs} - before
        changed = {self._place(t).storage for t in _on_meta(written_by(func, args, kwargs))}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not created and not changed:  # a view
            return
        if "dtype" in {a.name for a in func._schema.arguments} and isinstance(outcome, Tensor):
            kwargs = {**kwargs, "dtype": outcome.dtype}  # the default may change before the replay
        args, kwargs = tree_map(self._keep, (args, kwargs))
        places = [self._place(t) for t in outputs]
        writes = frozenset(created | changed)
        seed = self._new_seed() if draws else None
        self._operations.append(_Operation(func, args, kwargs, frozenset(before), writes, places, draws, seed))

    def _new_seed(self) -> Tensor | None:
        """Return the generator's state if user code has changed it; drawing on meta does not."""
        state = torch.get_rng_state()
        if self._random_state is not None and torch.equal(state, self._random_state):
            return None
        self._random_state = state
        return state

    def _keep(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._place(value) if value.device == _META else value.detach().clone()
        return _CPU if value == _META else value

    def _place(self, tensor: Tensor) -> _View:
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage._cdata, storage)
        return _View(storage._cdata, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def materialise(module: nn.Module, ownership: Ownership, stage: int, initialisation: Initialisation) -> None:
    """Give the tensors of ``module`` that ``stage`` holds and that lie on ``meta`` their initial values, on the CPU.

    They stay the same objects where :func:`~lightning_sdpipe.partition.ownership.become` can do that; ties between
    names are kept. All other tensors stay on ``meta``.

    Raises:
        ConfigurationError: a tensor was put on ``meta`` while nothing was recorded.
    """
    held = set(ownership.held_by(stage))
    slots = [
        (slot, name, tensor)
        for path, owner in module.named_modules()
        for slot in (owner._parameters, owner._buffers)
        for name, tensor in slot.items()
        if tensor is not None and tensor.device == _META and f"{path}.{name}".lstrip(".") in held
    ]
    unknown = sum(not initialisation.knows(tensor) for _, _, tensor in slots)
    if unknown:
        raise ConfigurationError(
            f"{unknown} parameters and buffers of {type(module).__name__} are on the meta device without a "
            "record of how to initialise them. Build the model in configure_model, under "
            'torch.device("meta") if you like, or on the CPU.'
        )
    tensors = {id(tensor): tensor for _, _, tensor in slots}
    values = initialisation.replay(list(tensors.values()))
    real = {key: become(old, _like(old, value)) for (key, old), value in zip(tensors.items(), values, strict=True)}
    for slot, name, tensor in slots:
        slot[name] = real[id(tensor)]
    initialisation.forget()


def _like(old: Tensor, value: Tensor) -> Tensor:
    new = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
    new.__dict__.update(old.__dict__)  # marks that libraries leave on parameters
    return new


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, initialisation: Initialisation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._initialisation = initialisation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outcome = func(*args, **(kwargs or {}))
        self._initialisation.record(func, args, kwargs or {}, outcome)
        return outcome


class _KeepData(TorchFunctionMode):
    """Keeps the data of ``torch.tensor(data)`` on ``meta``, which would be lost before it can be recorded."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func not in (torch.tensor, torch.as_tensor) or device is None or torch.device(device) != _META:
            return func(*args, **kwargs)
        real = func(*args, **{**kwargs, "device": _CPU})
        if not real.numel():
            # Transformers tests the device of an empty tensor, and does not initialise weights if it is meta
            return real
        return torch.empty_like(real, device=_META).copy_(real.detach()).requires_grad_(real.requires_grad)


def _run(operation: _Operation, real: dict[int, torch.UntypedStorage], counts: bool) -> None:
    if operation.seed is not None:
        torch.set_rng_state(operation.seed)

    def tensor(value: Any) -> Any:
        if not isinstance(value, _View):
            return value
        return value.over(real[value.storage]) if counts else value.filler()

    args, kwargs = tree_map(tensor, (operation.args, operation.kwargs))
    outcome = operation.func(*args, **kwargs)
    if counts:
        made = [t for t in tree_leaves(outcome) if isinstance(t, Tensor)]
        for place, value in zip(operation.outputs, made, strict=False):
            real.setdefault(place.storage, value.untyped_storage())


@contextmanager
def _patched(module: Any, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    originals = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(originals)


def _on_meta(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.device == _META]
