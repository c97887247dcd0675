"""Traces the provenance of every tensor in a step: the block that made it, its operands, and where it is handed on.

The whole step runs in one process, under a mode that sees each torch operation. A *value* is identified by the write
that last changed its storage, by its place in that storage, and by its gradient's identity: storage alone cannot tell a
Flatten's output from its input, nor a value from its detached alias. Nothing here keeps a tensor or an autograd graph
alive.

:mod:`~lightning_sdpipe.partition.backward_slice` reads these traces.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.partition.effects import EffectRecorder, Original, hear_assignments, intercepted, logging_to
from lightning_sdpipe.partition.message import LeafKey, TensorMeta, effects_apart
from lightning_sdpipe.partition.placeholder import FROM_METADATA, READS, written_by
from lightning_sdpipe.partition.python_values import tensors_within
from lightning_sdpipe.partition.same_memory import kept_over_steps, tensors_in_attributes

OUTSIDE = -1
"""In place of a block's index: user code between blocks, hooks included."""

Origin: TypeAlias = Literal["operation", "weight", "given", "unseen"]
TensorKey: TypeAlias = tuple[Any, ...]
Gradient: TypeAlias = tuple[Any, ...] | None


@dataclass(eq=False)
class Write:
    """The origin of a storage's contents.

    ``origin`` is an "operation", or what had the contents before: a "weight" (the parameter or buffer ``name``),
    "given" (the batch, a tensor in an attribute, a constant of user code between blocks), or "unseen" (first read
    within a block).
    """

    origin: Origin
    block: int
    position: int  # the code at position p runs before block p has returned, and after block p − 1 has
    step: int
    name: str = ""  # the operation and the module in which it ran, or the weight
    reads: Sequence[Value] = ()


@dataclass(eq=False)
class Storage:
    """A storage. ``aliases`` has the views taken of it, by their place: the block that took the view, and the place and
    gradient of the viewed tensor."""

    write: Write
    aliases: dict[TensorKey, set[tuple[int, TensorKey, Gradient]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Value:
    """The contents of a part of a storage after a write, at one place in the autograd graph."""

    write: Write
    storage: Storage
    place: TensorKey
    gradient: Gradient


@dataclass(frozen=True)
class Use:
    """Values that ``what`` needs at ``position`` (see :class:`Write`) in user code between blocks."""

    values: Sequence[Value]
    what: str
    position: int


@dataclass
class StepTrace:
    """The trace of one step: the order in which blocks were called; the values that each block's operations read, with
    the operations' names; where user code between blocks turned values into Python values or shapes, and where it wrote
    them into a tensor (the first of the values); the values that the step returned, logged and kept in buffers; the
    values that the blocks handed on, with the bytes of each tensor and of its gradient; and which of these are written
    to later. ``kept`` has what module attributes hold after each block and at the end, if a step leaves tensors in
    them. ``logged`` has the names that the step logs, with the block and the position."""

    order: list[int] = field(default_factory=list)
    reads: dict[int, list[tuple[Sequence[Value], str]]] = field(default_factory=dict)
    python_reads: list[Use] = field(default_factory=list)
    writes: list[Use] = field(default_factory=list)
    results: list[Use] = field(default_factory=list)
    leaves: dict[LeafKey, Value] = field(default_factory=dict)
    sizes: dict[LeafKey, tuple[int, int]] = field(default_factory=dict)
    changed: frozenset[LeafKey] = frozenset()
    kept: dict[int, frozenset[Storage]] = field(default_factory=dict)
    logged: list[tuple[str, int, int]] = field(default_factory=list)


class CalledAgain(BaseException):
    """Leaves a step that calls a block for the second time, with the number of its calls of blocks. It is not an
    Exception, so that a broad ``except`` in user code does not stop it."""


def note_call(order: list[int], block: int, once: bool) -> None:
    """Add a call of ``block`` to the ``order`` of calls.

    Raises:
        CalledAgain: the block was called before, and may be called only ``once``.
    """
    order.append(block)
    if once and block in order[:-1]:
        raise CalledAgain(len(order))


class ProvenanceTracer(TorchDispatchMode):
    """Traces the tensors of the steps of ``module``, as described above.

    Args:
        module: the whole module.
        chain: paths of its blocks.
        once: whether a second call of a block ends the step by :class:`CalledAgain`.
    """

    def __init__(self, module: nn.Module, chain: Sequence[str], once: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._once = once
        self.traces: list[StepTrace] = []
        self._module = module
        self._chain = chain
        self.weights_read: set[str] = set()  # by the first of each weight's names
        self._storages: dict[int, Storage] = {}  # those that are alive, by address
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._block = OUTSIDE
        self._called = OUTSIDE  # the block whose call is under way, hooks included
        self._position = 0
        self._paths: list[str] = []
        self._names = {m: name for name, m in module.named_modules()}
        self._watches = [EffectRecorder(path, module.get_submodule(path), self._enter_hooks) for path in chain]
        self.keeps = False  # whether a step has left tensors of its own in attributes
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self._begin(tensor, "weight", name)
        for kept in (value for m in self._names for value in vars(m).values() if isinstance(value, Tensor)):
            if _address(kept) not in self._storages:
                self._begin(kept, "given")

    def run(self, step: Callable[[], Any], batch: Any) -> None:
        """Run one whole step on ``batch``, and append its trace."""
        self.traces.append(StepTrace())
        self._position = 0
        for tensor in tensors_within(batch):
            self._begin(tensor, "given")
        with ExitStack() as undo:
            undo.callback(hear_assignments())
            undo.enter_context(intercepted(self._module, self._chain, self._call))
            hooks = nn.modules.module
            undo.callback(hooks.register_module_forward_pre_hook(self._enter_module).remove)
            undo.callback(hooks.register_module_forward_hook(self._leave_module, always_call=True).remove)
            undo.enter_context(logging_to(self._module, self._log))
            # else a block could reuse another block's cast of a shared weight
            undo.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            undo.enter_context(_FunctionsOfPython(self))
            undo.enter_context(self)
            self._result("the result of the step", step())
        for name, tensor in kept_over_steps(self._module):
            value = self._value(tensor)
            if value is not None and value.write.origin == "operation" and value.write.block == OUTSIDE:
                self._result(name, tensor)
        self._keep(len(self._chain) + 1)
        self.keeps = self.keeps or any(storage.write.step == self._step for storage in self._kept())
        trace = self.traces[-1]
        trace.changed = frozenset(key for key, v in trace.leaves.items() if v.storage.write is not v.write)

    def blocks_of_weights(self) -> dict[str, set[int]]:
        """Return the blocks that hold each parameter and buffer, by its first name; none for those outside all
        blocks."""
        inside = [
            {id(t) for t in (*block.parameters(), *block.buffers())}
            for block in map(self._module.get_submodule, self._chain)
        ]
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        return {name: {block for block, held in enumerate(inside) if id(t) in held} for name, t in named}

    # ------------------------------------------------------------------ operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refuse_collectives(func)
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        reads = [] if func in FROM_METADATA else [v for t in inputs if (v := self._value(t)) is not None]
        written = {a for t in tensors_in(written_by(func, args, kwargs)) if (a := _address(t)) is not None}
        given: dict[int | None, set[tuple[TensorKey, Gradient]]] = {}
        for tensor in inputs:
            given.setdefault(_address(tensor), set()).add((_place(tensor), _gradient(tensor)))
        outcome = func(*args, **kwargs)
        self.weights_read.update(v.write.name for v in reads if v.write.origin == "weight")
        self._note_reads(reads, func)
        write = Write("operation", self._block, self._position, self._step, self._place_of(func), reads)
        for changed in written:
            self._note_write([v for v in reads if v.storage is self._storages[changed]], reads, func)
            self._storages[changed].write = write
        for tensor in tensors_in(outcome):
            address = _address(tensor)
            if address is not None and address not in given:
                self._enter(tensor, write)
            elif address is not None and address not in written:
                self._alias(tensor, given[address])
        return outcome

    def read_by_python(self, tensor: Tensor, function: str) -> None:
        """Note that user code reads the tensor's values without an operation."""
        value = self._value(tensor)
        if value is not None and self._block == OUTSIDE:
            self.traces[-1].python_reads.append(Use([value], function, self._position))

    def alias(self, alias: Tensor, original: Tensor) -> None:
        """Note that user code has taken an alias without an operation."""
        if self._value(original) is not None:
            self._alias(alias, {(_place(original), _gradient(original))})

    def _alias(self, alias: Tensor, originals: set[tuple[TensorKey, Gradient]]) -> None:
        aliases = self._storages[_address(alias) or 0].aliases
        aliases.setdefault(_place(alias), set()).update((self._block, *original) for original in originals)

    def _note_reads(self, reads: Sequence[Value], func: Any) -> None:
        trace = self.traces[-1]
        if not reads:
            return
        if self._block != OUTSIDE:
            trace.reads.setdefault(self._block, []).append((reads, self._place_of(func)))
        elif func is _LOCAL_SCALAR or torch.Tag.dynamic_output_shape in func.tags:
            trace.python_reads.append(Use(reads, str(func), self._position))

    def _note_write(self, target: Sequence[Value], reads: Sequence[Value], func: Any) -> None:
        if self._block == OUTSIDE and target and len(reads) > 1:
            self.traces[-1].writes.append(Use([target[0], *reads], str(func), self._position))

    def _value(self, tensor: Tensor) -> Value | None:
        address = _address(tensor)
        if address is None:
            return None
        if address not in self._storages:
            self._begin(tensor, "given" if self._block == OUTSIDE else "unseen")
        storage = self._storages[address]
        return Value(storage.write, storage, _place(tensor), _gradient(tensor))

    def _begin(self, tensor: Tensor, origin: Origin, name: str = "") -> None:
        if _address(tensor) is not None:
            self._enter(tensor, Write(origin, self._block, self._position, self._step, name))

    def _enter(self, tensor: Tensor, write: Write) -> None:
        """Record a storage until it dies, since another one may then get its address. Python's weak reference keeps no
        part of it alive; torch's would keep the C++ object, and thousands of these would fragment the heap."""
        storage = _values_of(tensor).untyped_storage()
        self._storages[storage._cdata] = Storage(write)
        self._references[storage._cdata] = weakref.ref(storage, partial(self._forget, storage._cdata))

    def _forget(self, address: int, _: object) -> None:
        del self._storages[address], self._references[address]

    @property
    def _step(self) -> int:
        return len(self.traces) - 1

    # ------------------------------------------------------------- blocks and modules

    def _call(self, index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trace = self.traces[-1]
        note_call(trace.order, index, self._once)
        self._block = self._called = index
        try:
            output, effects = self._watches[index].call(original, args, kwargs)
        finally:
            self._block = self._called = OUTSIDE
            self._position = max(self._position, index + 1)
        for leaf, key, part in effects_apart(index, effects)[1]:
            value = self._value(leaf) if isinstance(part, TensorMeta) else None
            if value is not None:
                size = leaf.numel() * leaf.element_size()
                trace.leaves[key], trace.sizes[key] = value, (size, size if leaf.requires_grad else 0)
        self._keep(index + 1)
        return output

    def _keep(self, position: int) -> None:
        if self.keeps:
            self.traces[-1].kept[position] = frozenset(self._kept())

    def _kept(self) -> Iterator[Storage]:
        for tensor in tensors_in_attributes(self._names):
            storage = self._storages.get(_address(tensor) or 0)
            if storage is not None and storage.write.origin == "operation":
                yield storage

    def _enter_hooks(self, entered: bool) -> None:
        self._block = OUTSIDE if entered else self._called

    def _enter_module(self, module: nn.Module, *_: Any) -> None:
        self._paths.append(self._names.get(module, type(module).__name__))

    def _leave_module(self, *_: Any) -> None:
        self._paths.pop()

    def _place_of(self, func: Any) -> str:
        return f"{func} in {self._paths[-1]!r}" if self._paths and self._paths[-1] else str(func)

    # ------------------------------------------------------------------------ results

    def _log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        self.traces[-1].logged.append((name, self._block, self._position))
        self._result(f"self.log({name!r})", value)

    def _result(self, what: str, outcome: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, Tensor)]
        values = [v for t in tensors if (v := self._value(t)) is not None]
        if values:
            self.traces[-1].results.append(Use(values, what, self._position))


class Solitary(TorchDispatchMode):
    """Refuses, within the context, operations that communicate with other processes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refuse_collectives(func)
        return func(*args, **(kwargs or {}))


class _FunctionsOfPython(TorchFunctionMode):
    """Reports accesses that are not operations: reading values directly, and ``.data``."""

    def __init__(self, labels: ProvenanceTracer) -> None:
        super().__init__()
        self._labels = labels

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READS:
            self._labels.read_by_python(args[0], func.__name__)
        outcome = func(*args, **(kwargs or {}))
        if func == _DATA:
            self._labels.alias(outcome, args[0])
        return outcome


_LOCAL_SCALAR = torch.ops.aten._local_scalar_dense.default
_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]


def refuse_collectives(func: Any) -> None:
    """Raise RuntimeError if an operation communicates with other processes, which do not rehearse."""
    if "c10d" in func.namespace:
        raise RuntimeError(f"it communicates with other processes ({func.__name__} of torch.distributed)")


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results, much faster than ``tree_leaves``."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def _values_of(tensor: Tensor) -> Tensor:
    """Return the dense tensor that has the values of ``tensor``, which may be sparse or nested."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor if tensor.layout is torch.strided and not tensor.is_nested else tensor.values()


def _address(tensor: Any) -> int | None:
    """Return the address of the storage of ``tensor``, if it has one."""
    try:
        return int(_values_of(tensor).untyped_storage()._cdata)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def _place(tensor: Tensor) -> TensorKey:
    tensor = _values_of(tensor)
    return (
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _gradient(tensor: Tensor) -> Gradient:
    if tensor.grad_fn is not None:
        return tensor.grad_fn._sequence_nr(), tensor.output_nr
    return ("leaf", id(tensor)) if tensor.requires_grad else None
