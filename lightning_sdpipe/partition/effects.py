"""Records the effects of a block's call that user code can see, and repeats them without the block.

On later stages, a stand-in takes a block's place. User code may look at more than what the call returned: forward hooks
on the block's modules record intermediate values (as Hugging Face's models do), a module keeps a value in an attribute,
a block appends to a list that it was given. All of these are effects. Changes elsewhere (a global list, an object of
the user's own) are not; :mod:`~lightning_sdpipe.partition.provenance` finds them. This module also intercepts the calls
of modules.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.placeholder import Placeholder, refuse_placeholders, written_by
from lightning_sdpipe.partition.python_values import attributes_of_object

Original = Callable[..., Any]
Call = Callable[[Original, tuple[Any, ...], dict[str, Any]], Any]

INTERCEPTED = "_intercepted_call"
_OWN_CALL = "_call_impl"
"""torch's method that a call of a module runs: the hooks and the forward."""


class _Intercepted(nn.Module):
    """Mixed into a class that overrides ``__call__`` (Hugging Face's checkpointing layers, torch's compiled modules),
    so that the function given to :func:`intercept` comes before that override."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[INTERCEPTED](super().__call__, args, kwargs)


def intercept(module: nn.Module, call: Call, copies: bool = False) -> Callable[[], None]:
    """Make ``module(*args, **kwargs)`` return ``call(original, args, kwargs)``.

    User code may look at a module's class (``type(layer) is nn.Linear``), so the class stays the same unless it
    overrides ``__call__``. Hooks, and what ``compile()`` has made of the module, keep their place inside the call. With
    ``copies``, a copy of the module is not intercepted; without, copying raises an error.

    Returns:
        A function that undoes this.
    """
    own, attributes = type(module), vars(module)
    before = dict(attributes)
    put: dict[str, Any] = {}
    if own.__call__ is nn.Module.__call__:
        compiled = module._compiled_call_impl is not None
        name = "_compiled_call_impl" if compiled else _OWN_CALL
        original = getattr(module, name)
        put[name] = MethodType(lambda _, *args, **kwargs: call(original, args, kwargs), module)
    else:
        put[INTERCEPTED] = call

    def copied(how: str, argument: Any) -> Any:
        restore()
        try:
            made = getattr(module, how)(argument)
            if isinstance(made, tuple):  # place() changes the attributes again before the tuple is used
                return tuple(dict(part) if part is attributes else part for part in made)
            return made
        finally:
            place()

    for name in (name for name in _COPIED_BY if hasattr(own, name)):
        put[name] = partial(copied, name) if copies else partial(_refuse_copies, own.__name__)

    def place() -> None:
        if INTERCEPTED in put:
            module.__class__ = type(own.__name__, (_Intercepted, own), {"__module__": own.__module__})
        attributes.update(put)

    def restore() -> None:
        if type(module) is not own:
            module.__class__ = own
        for each in put:
            del attributes[each]
            if each in before:
                attributes[each] = before[each]

    place()
    return restore


@contextmanager
def intercepted(root: nn.Module, paths: Sequence[str], call: Callable[..., Any]) -> Iterator[None]:
    """Make calls of the modules at ``paths`` return ``call(number, original, args, kwargs)`` within the context."""
    with ExitStack() as undo:
        for number, path in enumerate(paths):
            undo.callback(intercept(root.get_submodule(path), partial(call, number)))
        yield


class logging_to:
    """Replaces ``self.log`` of ``module`` by ``log`` within the context, and so what ``log_dict`` calls."""

    def __init__(self, module: nn.Module, log: Callable[..., None]) -> None:
        self._values, self._log = vars(module), log

    def __enter__(self) -> None:
        self._before = self._values.get("log")
        self._values["log"] = self._log

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del self._values["log"]
        else:
            self._values["log"] = self._before


_COPIED_BY = ("__reduce_ex__", "__deepcopy__")


def _refuse_copies(name: str, _: Any) -> NoReturn:
    raise ConfigurationError(
        f"A {name} of the model was copied or pickled during a run, in which most of the model is "
        "on other workers. Make a second one (a teacher, a moving average) in __init__, configure_model or setup, "
        "and give it the values of the first one there; steps and hooks may change it then, weight by weight."
    )


Kind: TypeAlias = Literal["output", "hook", "attribute", "extend", "update", "replace", "write", "fill"]
Place: TypeAlias = tuple[str | int, ...]


class Effect(NamedTuple):
    """One effect of a call.

    ======================  ====================  ==============================================
    ``kind``                ``place``             ``value``
    ======================  ====================  ==============================================
    output                  ()                    what the call returned
    hook                    (module,)             the arguments and the output of a module that has forward hooks;
                                                  the block's own arguments are None, since a stand-in has some
    attribute               (module, name)        what an attribute of a module was set to
    extend, update,         where the list or     what was appended to the list, the entries of the dict that are new,
    replace                 dict is               all that it holds now
    write                   where the tensor is   the output, if that is one of the arguments, written to
    fill                    where the tensor is   another tensor in the arguments that was written to, as it is now
    ======================  ====================  ==============================================

    The place of a list or dict is an attribute, ``("attribute", module, name, ...)``, or in the arguments,
    ``("argument", 0 or 1, ...)``: 0 for positional ones, 1 for others. Modules are named by their path in the root. The
    attributes of an object in the arguments are a dict in it, named :data:`ATTRIBUTES`.
    """

    kind: Kind
    place: Place
    value: Any


ATTRIBUTES = "__dict__"


@dataclass(frozen=True)
class Given:
    """Represents, in an output, an object that the block was given, by its place in the arguments."""

    place: tuple[str | int, ...]


_Container: TypeAlias = Any  # a list, dict, set, deque or array
_ENTERED = (list, dict, deque)
_CONTAINERS = (*_ENTERED, set, np.ndarray)
_PLAIN = (type(None), bool, int, float, str)
_DEPTH, _MANY = 6, 10_000  # most levels of nesting, and most values of one container, that are searched

_OF_EVERY_MODULE = {*vars(nn.Module()), INTERCEPTED, _OWN_CALL, *_COPIED_BY}


class EffectRecorder:
    """Records the effects of one block's calls. It sees assignments to attributes only while :func:`hear_assignments`
    is in force.

    Args:
        path: path of the block in the root module.
        block: a module.
        in_hooks: called with True before a module's user hooks run, and with False after them.
    """

    def __init__(self, path: str, block: nn.Module, in_hooks: Callable[[bool], None] | None = None) -> None:
        self._block = block
        self._modules = {m: f"{path}.{name}".rstrip(".") for name, m in block.named_modules()}
        self._in_hooks = in_hooks
        self._kept: list[tuple[Place, _Container]] = []  # containers in attributes
        self._looked = -1  # how many containers had been assigned when those were listed

    def call(
        self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any], fills: bool = False
    ) -> tuple[Any, list[Effect]]:
        """Return the result of ``original(*args, **kwargs)`` and its effects, the output first. Writes to argument
        tensors other than the output are included only with ``fills``."""
        hooked: list[Effect] = []
        attributes: dict[tuple[nn.Module, str], None] = {}
        containers = [(place, c, _copy(c)) for place, c in self._containers(args, kwargs)]
        objects = {id(_reach((args, kwargs), p[1:-1])): p[1:-1] for p, _, _ in containers if p[-1] == ATTRIBUTES}
        tensors = [
            (("argument", w, n), each, version_of(each))
            for w, n, each in _given(args, kwargs)
            if isinstance(each, Tensor)
        ]
        held = [*tensors, *_held(containers)] if fills else []
        writes = _Writes() if any(each.is_inference() for _, each, _ in held) else None
        handles = [handle for m in self._modules if m._forward_hooks for handle in self._listen(m, hooked)]
        _assignments.listeners.append(lambda module, name: attributes.setdefault((module, name)))
        try:
            with writes or nullcontext():
                output = original(*args, **kwargs)
        finally:
            _assignments.listeners.pop()
            for handle in handles:
                handle.remove()
        described = _without(objects, output) if objects else output
        effects = [Effect("output", () if described is output else (ATTRIBUTES,), described), *hooked]
        effects += (
            Effect("write", p, output) for p, each, before in tensors if each is output and _written(each, before)
        )
        effects += (
            Effect("fill", p, each)
            for p, each, before in held
            if each is not output and (version_of(each) != before or (writes is not None and writes.reached(each)))
        )
        effects += (
            Effect("attribute", (self._modules[m], name), getattr(m, name))
            for m, name in attributes
            if m in self._modules and name in vars(m) | m._buffers and name not in _OF_EVERY_MODULE
        )
        effects += (effect for place, now, before in containers for effect in _changes(place, _copy(now), before))
        return output, effects

    def _listen(self, module: nn.Module, hooked: list[Effect]) -> Iterator[Any]:
        note = partial(self._note, hooked)
        yield module.register_forward_hook(note, prepend=True, with_kwargs=True)
        if self._in_hooks is not None:
            after = self._in_hooks
            yield module.register_forward_hook(lambda *_: after(False))

    def _note(self, hooked: list[Effect], module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        arguments = None if module is self._block else (args, kwargs)
        hooked.append(Effect("hook", (self._modules[module],), (arguments, output)))
        if self._in_hooks is not None:
            self._in_hooks(True)

    def _containers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Place, _Container]]:
        """Yield each container once, with the first of its places."""
        seen: set[int] = set()
        for which, name, value in _given(args, kwargs):
            if not isinstance(value, (Tensor, *_PLAIN)):
                yield from _nested(("argument", which, name), value, seen)
        if self._looked != _assignments.of_containers:
            self._looked, known = _assignments.of_containers, set[int]()
            self._kept = [
                found
                for module, path in self._modules.items()
                for name, value in vars(module).items()
                if name not in _OF_EVERY_MODULE
                for found in _nested(("attribute", path, name), value, known, passed=False)
            ]
        yield from ((place, container) for place, container in self._kept if id(container) not in seen)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, str | int, Any]]:
    """Return the arguments of a call with their places: (0, index) or (1, name)."""
    positional = ((0, place, value) for place, value in enumerate(args))
    return [*positional, *((1, name, value) for name, value in kwargs.items())]


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was written to; 0 for inference tensors, which do not count writes."""
    return 0 if tensor.is_inference() else tensor._version


def _written(tensor: Tensor, before: int) -> bool:
    """Return whether ``tensor`` may have been written to since its :func:`version_of` was ``before``."""
    return tensor.is_inference() or version_of(tensor) != before


def _held(containers: Iterable[tuple[Place, _Container, _Container]]) -> Iterator[tuple[Place, Tensor, int]]:
    """Yield the tensors in containers in the arguments, with their places and versions."""
    for place, _, container in containers:
        if place[0] == "argument" and isinstance(container, (list, Mapping)):
            for key, each in container.items() if isinstance(container, Mapping) else enumerate(container):
                if isinstance(each, Tensor) and isinstance(key, (str, int)):
                    yield (*place, key), each, version_of(each)


class _Writes(TorchDispatchMode):
    """Finds out which tensors are written to within the context, since inference tensors have no version counter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for each in tree_leaves(written_by(func, args, kwargs or {})):
            if isinstance(each, Tensor):
                self._storages.add(each.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))

    def reached(self, tensor: Tensor) -> bool:
        """Return whether the memory of ``tensor`` was written to."""
        return bool(self._storages) and tensor.untyped_storage()._cdata in self._storages


def _nested(
    place: Place, value: Any, seen: set[int], depth: int = _DEPTH, *, passed: bool = True
) -> Iterator[tuple[Place, _Container]]:
    """Yield the containers in ``value`` whose ids are not in ``seen``, with their places. If ``value`` is ``passed`` to
    a block, arrays, sets and the attributes of objects are included."""
    kind = type(value)
    attributes = attributes_of_object(value) if passed else None
    if id(value) in seen or not (passed or kind in (list, dict, tuple)):
        return
    if kind is not tuple:
        seen.add(id(value))
    entered: list[tuple[Place, Any]] = []
    if isinstance(value, _CONTAINERS):
        yield place, value
    if isinstance(value, (tuple, *_ENTERED)):
        entered.append((place, value))
    if attributes is not None:
        place = (*place, ATTRIBUTES)
        yield place, attributes
        entered.append((place, attributes))
    for where, inside in entered if depth else ():
        if not passed or len(inside) <= _MANY:
            for key, item in inside.items() if isinstance(inside, Mapping) else enumerate(inside):
                if isinstance(key, (str, int)) and not isinstance(item, (Tensor, *_PLAIN)):
                    yield from _nested((*where, key), item, seen, depth - passed, passed=passed)


def _kind(container: _Container) -> Any:
    """Return Python's class whose methods change ``container``: overrides in subclasses may do more."""
    kinds = (OrderedDict, dict, list, deque, set)
    return next((kind for kind in kinds if isinstance(container, kind)), type(container))


def _copy(container: _Container) -> _Container:
    if isinstance(container, np.ndarray):
        return container.copy()
    kind = _kind(container)
    return dict(container.items()) if isinstance(container, Mapping) else kind(container)


def _without(objects: dict[int, Place], output: Any) -> Any:
    """Return ``output`` with :class:`Given` in place of each of ``objects``, whose keys are ids."""
    if all(id(leaf) not in objects for leaf in tree_leaves(output)):
        return output
    return tree_map(lambda leaf: Given(objects[id(leaf)]) if id(leaf) in objects else leaf, output)


def _changes(place: Place, now: _Container, before: _Container) -> Iterator[Effect]:
    """Yield what has changed from one copy of a container to the next."""
    if isinstance(now, np.ndarray):
        if now.dtype == object or now.tobytes() != before.tobytes():
            yield Effect("replace", place, now)
        return
    if isinstance(now, set):  # a copy may be in another order
        if {id(x) for x in now} != {id(x) for x in before}:
            yield Effect("replace", place, list(now))
        return
    if isinstance(now, deque):
        if len(now) != len(before) or any(x is not y for x, y in zip(now, before, strict=True)):
            yield Effect("replace", place, list(now))
        return
    if isinstance(now, list):
        if len(now) >= len(before) and all(x is y for x, y in zip(now, before, strict=False)):
            if len(now) > len(before):
                yield Effect("extend", place, now[len(before) :])
            return
    elif before.keys() <= now.keys():
        new = {key: value for key, value in now.items() if key not in before or before[key] is not value}
        if new:
            yield Effect("update", place, new)
        return
    yield Effect("replace", place, now)


def replay(effects: Sequence[Effect], root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat the effects of a block's call on ``root``, and on the arguments that a stand-in was called with.

    Returns:
        The output.
    """
    output, *others = effects
    result = output.value
    if output.place:
        result = tree_map(lambda leaf: _reach((args, kwargs), leaf.place) if isinstance(leaf, Given) else leaf, result)
    for effect in others:
        match effect:
            case Effect("write", (_, *inside), value):
                argument = _reach((args, kwargs), inside)
                if not isinstance(argument, Placeholder) and not isinstance(value, Placeholder):
                    # user code that holds the argument must see what the block wrote to it
                    result = argument if argument is value else argument.copy_(value)
            case Effect("fill", (_, *inside), value):
                _reach((args, kwargs), inside).copy_(value)
            case Effect("hook", (path,), (arguments, returned)):
                module = root.get_submodule(str(path))
                given, named = (args, kwargs) if arguments is None else arguments
                _run_hooks(module, given, named, returned)
            case Effect("attribute", (path, name), value):
                setattr(root.get_submodule(str(path)), str(name), value)
            case Effect(kind, ("attribute", path, name, *inside), value):
                module = root.get_submodule(str(path))
                _change(_reach(getattr(module, str(name)), inside), kind, value)
            case Effect(kind, (_, *inside), value):
                _change(_reach((args, kwargs), inside), kind, value)
    return result


def kept_attributes(effects: Sequence[Effect], root: nn.Module) -> list[Callable[[], None]]:
    """Return functions that restore the present values of the module attributes that :func:`replay` will change."""
    undo: list[Callable[[], None]] = []
    for effect in effects:
        if effect.kind == "attribute":
            module, name = root.get_submodule(str(effect.place[0])), str(effect.place[1])
            undo.append(partial(setattr, module, name, getattr(module, name)))
        elif effect.place[:1] == ("attribute",):
            _, path, attribute, *inside = effect.place
            container = _reach(getattr(root.get_submodule(str(path)), str(attribute)), inside)
            undo.append(partial(_change, container, "replace", _copy(container)))
    return undo


def _run_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    for number, hook in list(module._forward_hooks.items()):
        with_kwargs = number in module._forward_hooks_with_kwargs
        changed = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        output = output if changed is None else changed


def _reach(value: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        value = attributes_of_object(value) if key == ATTRIBUTES else value[key]
    return value


def _change(container: Any, kind: Kind, value: Any) -> None:
    if isinstance(container, np.ndarray):  # arrays do not travel
        refuse_placeholders([value], "the step")
    own = _kind(container)
    if kind == "replace":
        own.clear(container)
    if own in (list, deque):
        own.extend(container, value)
    elif own is set:
        set.update(container, value)
    else:
        for key, item in value.items():
            own.__setitem__(container, key, item)


class _Assignments:
    """Reports every assignment to an attribute of a module as it happens. Comparing the attributes of all of a block's
    modules before and after each call would often take longer than the block."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[nn.Module, str], None]] = []
        self.of_containers = 0  # how many containers have been assigned so far
        self._hearers = 0
        self._original = nn.Module.__setattr__

    def hear(self) -> Callable[[], None]:
        """Start reporting, and return a function that stops it."""
        self._hearers += 1
        if self._hearers == 1:
            self._original = original = nn.Module.__setattr__

            def set_attribute(module: nn.Module, name: str, value: Any) -> None:
                original(module, name, value)
                for listener in self.listeners:
                    listener(module, name)
                self.of_containers += type(value) in (list, dict, tuple)

            nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
        return self._stop

    def _stop(self) -> None:
        self._hearers -= 1
        if self._hearers == 0:
            nn.Module.__setattr__ = self._original  # type: ignore[method-assign]


_assignments = _Assignments()
hear_assignments = _assignments.hear
