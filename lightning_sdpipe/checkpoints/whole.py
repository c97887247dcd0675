"""Whole checkpoints from parts: each stage holds its own parameters, a ``.ckpt`` file holds them all.

The file is an ordinary Lightning checkpoint. Rank 0 writes it, so the stages of rank 0's pipeline send it their
parameters; on loading, every rank takes its own part of the file.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.p2p import Tag
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.partition.placeholder import Placeholder
from lightning_sdpipe.topology.groups import ProcessGroups

_EXTRA = "_extra_state"  # torch's name of it
_NAMES = "names"


def gather_module_state(module: nn.Module, ownership: Ownership, groups: ProcessGroups) -> dict[str, Any]:
    """Return the whole module's ``state_dict`` on rank 0; on the others, the part that this rank has.

    Every rank of rank 0's pipeline must call it.

    Raises:
        ConfigurationError: a module on another stage than rank 0's has extra state of a kind that cannot be sent.
    """
    stage_of_zero, pipeline_of_zero = groups.mesh.locate(0)
    stage, pipeline = groups.mesh.locate(groups.rank)
    state, entries = _state(module, ownership, stage)
    if pipeline != pipeline_of_zero:
        return state
    others = {n: state[n] for n, entry in entries.items() if stage_of_zero not in entry.owners}
    if groups.rank != 0:
        _send({n: value for n, value in others.items() if entries[n].owners[0] == stage}, groups)
        return state
    for source in groups.mesh.pipeline_ranks(pipeline):
        if source != 0:
            state |= _receive(source, groups)
    return state


def part_of_module_state(module: nn.Module, ownership: Ownership, stage: int) -> dict[str, Any]:
    """Return the part of the module's ``state_dict`` that this stage is the last to hold: buffers outside of blocks
    are up to date where the step runs to its end."""
    state, entries = _state(module, ownership, stage)
    return {name: value for name, value in state.items() if entries[name].owners[-1] == stage}


def held_module_state(module: nn.Module, ownership: Ownership, stage: int) -> dict[str, Any]:
    """Return the part of the module's ``state_dict`` that this stage holds, and None for all other names."""
    state, entries = _state(module, ownership, stage)
    return {name: value if stage in entries[name].owners else None for name, value in state.items()}


def check_module_state(module: nn.Module, ownership: Ownership, stage: int, sends: bool) -> None:
    """Raise ConfigurationError if the ``state_dict`` that the module and its hooks make has an entry that no single
    stage can give, or that this stage cannot send, if it ``sends`` its part."""
    state, entries = _state(module, ownership, stage)
    more = {}
    for name, entry in entries.items():
        if stage not in entry.owners:
            continue
        if isinstance(state[name], Placeholder):
            raise ConfigurationError(
                f"The state_dict of {type(module).__name__} has {name!r}, which its hooks compute from weights of "
                "another stage. Let them keep the weights as they are, or the names that the modules give them."
            )
        if not entry.is_weight:
            more[name] = state[name]
    if sends:
        _packed(more)


def load_module_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load a whole ``state_dict``, of which this stage takes its part: the module's hooks see all of it.

    Raises:
        ConfigurationError: the state does not fit the module.
    """
    extras = _with_extra_state(module)
    with _instead(extras.values(), "get_extra_state", lambda: None):
        here = module.state_dict()
    known = {  # what checkpoints of this stage lack has a name only
        name: here[name] if value is None and isinstance(here.get(name), Tensor) else value
        for name, value in state.items()
    }
    unknown = [part for name, part in extras.items() if name in known and known[name] is None]
    with warnings.catch_warnings(), _instead(unknown, "set_extra_state", lambda _: None):
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")  # that is of another stage
        try:
            module.load_state_dict(known, strict=strict)
        except RuntimeError as error:
            raise ConfigurationError(
                f"The checkpoint does not fit {type(module).__name__}: {error}. Load it with the module that wrote it, "
                "or, if only names are missing or unexpected, with strict=False."
            ) from error


@dataclass(frozen=True)
class _Entry:
    """The stages that have an entry of a ``state_dict``, and whether it is a parameter or buffer."""

    owners: tuple[int, ...]
    is_weight: bool


def _state(module: nn.Module, ownership: Ownership, stage: int) -> tuple[dict[str, Any], dict[str, _Entry]]:
    """Return the part of the ``state_dict`` that this stage has, and its entries. Modules of other stages are not asked
    for their extra state, which may depend on buffers that are not here: it is None."""
    extras = _with_extra_state(module)
    elsewhere = [part for name, part in extras.items() if ownership.stage_of(name) != stage]
    with _instead(elsewhere, "get_extra_state", lambda: None):
        state = module.state_dict()
        return state, _entries(module, ownership, state)


def _entries(module: nn.Module, ownership: Ownership, state: Mapping[str, Any]) -> dict[str, _Entry]:
    """Return the entry of each name in ``state``, which hooks may have renamed. A value other than a parameter or
    buffer (extra state) is where its module runs: on the last stage, if the module is in no block."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = {id(tensor): name for name, tensor in tensors}
    weights = {
        name: ownership.owners(names[id(value)])
        for name, value in module.state_dict(keep_vars=True).items()
        if id(value) in names
    }
    extras = _with_extra_state(module)
    entries = {}
    for name in state:
        owners = ownership.stages.get(name) or weights.get(name)
        of_module = max((e for e in extras if f".{name}".endswith(f".{e}")), key=len, default=name)
        entries[name] = _Entry(owners or (ownership.stage_of(of_module),), owners is not None)
    return entries


def _with_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules of ``module`` that keep extra state, by its name."""
    return {
        f"{path}.{_EXTRA}": part
        for path, part in module.named_modules()
        if path and type(part).get_extra_state is not nn.Module.get_extra_state
    }


@contextmanager
def _instead(modules: Iterable[nn.Module], method: str, other: Callable[..., Any]) -> Iterator[None]:
    """Replace the ``method`` of each of ``modules`` by ``other`` within the context."""
    changed = [part for part in modules if method not in vars(part)]
    for part in changed:
        vars(part)[method] = other
    try:
        yield
    finally:
        for part in changed:
            del vars(part)[method]


def _packed(state: Mapping[Any, Any], of: str = "state_dict", maker: str = "get_extra_state") -> bytes:
    """Pack the state as bytes that are unpacked without running code."""
    for name, value in state.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:  # objects say in their own ways that they cannot be packed
            raise ConfigurationError(
                f"{name!r} in the {of} is a {type(value).__name__}, which cannot be sent from its stage to rank "
                f"0. Let {maker} keep tensors, numbers, strings, and lists "
                "and dicts of them; or write checkpoints with SDPipeStrategy(save_distributed_checkpoint=True)."
            ) from error
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


class OptimizerParts:
    """The optimizer of one stage as a part of the optimizer that ``configure_optimizers`` returned.

    Takes the parameters of other stages out of the optimizer's groups, also out of those that are added later, and
    remembers their places, by which a whole ``state_dict`` numbers them.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, ownership: Ownership, stage: int) -> None:
        self.optimizer = optimizer
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._ownership = ownership
        self._stage = stage
        self._whole: list[list[nn.Parameter]] = []  # parameters of all stages, by group
        self._places: list[list[int]] = []  # their places
        self._local: dict[int, nn.Parameter] = {}  # place → parameter
        self._owners: dict[int, tuple[int, ...]] = {}
        self._name_of: dict[int, str] = {}  # place → name in the module
        for group in optimizer.param_groups:
            self._take(group)
        add = optimizer.add_param_group

        def add_param_group(param_group: dict[str, Any]) -> None:
            add(param_group)
            if not self._take(optimizer.param_groups[-1]):
                del optimizer.param_groups[-1]

        optimizer.__dict__["add_param_group"] = add_param_group

    def _take(self, group: dict[str, Any]) -> bool:
        """Leave this stage's parameters in ``group``. Return False if it has no new parameter, on any stage: users
        leave out parameters that the optimizer already has, but do not see those of other stages in it."""
        known = {id(p) for parameters in self._whole for p in parameters}
        whole = [p for p in group["params"] if id(p) not in known]
        if not whole and group["params"]:
            return False
        first = len(self._owners)
        places = range(first, first + len(whole))
        self._whole.append(whole)
        self._places.append(list(places))
        for place, parameter in zip(places, whole, strict=True):
            name = self._names.get(id(parameter))
            if name is None:
                raise ConfigurationError(
                    f"The optimizer was given a parameter of shape {tuple(parameter.shape)} that the module does not "
                    "have, or got only after it had been cut, so no stage owns it. Make it a parameter of the module, "
                    "in __init__, configure_model or setup."
                )
            self._name_of[place] = name
            owners = self._owners[place] = self._ownership.stages[name]
            if self._stage in owners:
                self._local[place] = parameter
        group["params"] = [self._local[place] for place in places if place in self._local]
        return True

    def groups(self) -> list[dict[str, Any]]:
        """Return ``optimizer.param_groups`` with the parameters of all stages.

        Raises:
            ConfigurationError: groups were removed.
        """
        now = self.optimizer.param_groups
        if len(now) != len(self._whole):
            raise ConfigurationError(
                f"{type(self.optimizer).__name__} had {len(self._whole)} parameter groups and has "
                f"{len(now)} now, so it is not known what they hold on other stages. Add groups "
                "with add_param_group; instead of removing one, set its lr=0."
            )
        return [{**group, "params": whole} for group, whole in zip(now, self._whole, strict=True)]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the parameters of all stages in ``optimizer.param_groups`` within the context. Groups may be added to it
        there: Lightning's wrapper of an optimizer adds them by the method of its class."""
        optimizer = self.optimizer
        for group, whole in zip(optimizer.param_groups, self._whole, strict=False):
            group["params"] = whole
        try:
            yield
        finally:
            for group in optimizer.param_groups[len(self._whole) :]:
                self._take(group)
            for group, places in zip(optimizer.param_groups, self._places, strict=False):
                group["params"] = [self._local[place] for place in places if place in self._local]

    @property
    def places(self) -> Mapping[int, nn.Parameter]:
        """Parameters of this stage by their place in the whole optimizer."""
        return self._local

    def part(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the whole optimizer with the states that this stage is the first to hold."""
        stage = self._stage
        state = {i: value for i, value in self._states().items() if self._owners.get(i, (stage,))[0] == stage}
        return {"state": state, "param_groups": self._packed()}

    def held(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the whole optimizer with all states that this stage has, and the names of its
        parameters, since another pipeline may number them in another order."""
        return {"state": self._states(), "param_groups": self._packed(), _NAMES: self._name_of}

    def gather(self, groups: ProcessGroups) -> dict[str, Any]:
        """Return the whole optimizer's ``state_dict`` on rank 0; an empty one on the others."""
        stage_of_zero, pipeline_of_zero = groups.mesh.locate(0)
        stage, pipeline = groups.mesh.locate(groups.rank)
        if pipeline != pipeline_of_zero:
            return {}
        local = self._states()
        if groups.rank != 0:
            foreign = {i: s for i, s in local.items() if stage_of_zero not in self._owners.get(i, (stage_of_zero,))}
            mine = {i: s for i, s in foreign.items() if self._owners[i][0] == stage}
            values = {(place, key): _as_python(v) for place, state in mine.items() for key, v in state.items()}
            _send(values, groups, "optimizer's state", "the optimizer")
            return {}
        for source in groups.mesh.pipeline_ranks(pipeline):
            if source != 0:
                for (place, key), value in _receive(source, groups).items():
                    local.setdefault(place, {})[key] = value
        state = {place: local[place] for place in self._owners if place in local}
        return {"state": state | local, "param_groups": self._packed()}

    def _states(self) -> dict[Any, Any]:
        """Return the states of this stage's parameters by place, and what the optimizer keeps under keys of its own."""
        states = self.optimizer.state
        own = {key: value for key, value in states.items() if not isinstance(key, Tensor)}
        return {place: states[p] for place, p in self._local.items() if p in states} | own

    def _packed(self) -> list[dict[str, Any]]:
        return [{**group, "params": places} for group, places in zip(self.groups(), self._places, strict=True)]

    def load(self, whole: Mapping[str, Any]) -> None:
        """Load this stage's part of a whole ``state_dict``."""
        numbers = {place: number for number, place in enumerate(self._local)}  # in the order of the groups
        if _NAMES in whole:
            by_name = {self._name_of[place]: number for place, number in numbers.items()}
            places = ((place, by_name.get(name)) for place, name in whole[_NAMES].items())
            numbers = {place: number for place, number in places if number is not None}
        own = {key: value for key, value in whole["state"].items() if not isinstance(key, int)}
        state = {numbers[place]: value for place, value in whole["state"].items() if place in numbers} | own
        packed = [
            {**group, "params": sorted(numbers[place] for place in group["params"] if place in numbers)}
            for group in whole["param_groups"]
        ]
        self.optimizer.load_state_dict({"state": state, "param_groups": packed})


def _as_python(value: Any) -> Any:
    """Return a NumPy number as a Python one, which is unpacked without running code."""
    return value.item() if isinstance(value, np.generic) else value


def _send(values: Mapping[Any, Any], groups: ProcessGroups, *described: str) -> None:
    """Send ``values`` to rank 0, with the shapes of tensors, since a forward may have assigned a buffer of another
    shape; ``described`` is as for :func:`_packed`."""
    dense = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.layout is torch.strided}
    header = {name: value.to("meta") if name in dense else value for name, value in values.items()}
    p2p.send_bytes(_packed(header, *described), 0, groups.pipeline, Tag.MODULE_STATE, "rank 0").wait()
    p2p.send([*dense.values()], 0, groups.pipeline, Tag.MODULE_STATE, "rank 0").wait()


def _receive(source: int, groups: ProcessGroups) -> dict[Any, Any]:
    peer = f"rank {source}"
    values: dict[Any, Any] = torch.load(
        io.BytesIO(p2p.receive_bytes(source, groups.pipeline, Tag.MODULE_STATE, peer)), weights_only=True
    )
    of_meta = [name for name, value in values.items() if isinstance(value, Tensor) and value.is_meta]
    values |= {name: torch.empty_like(values[name], device="cpu") for name in of_meta}
    p2p.receive([values[name] for name in of_meta], source, groups.pipeline, Tag.MODULE_STATE, peer).wait()
    return values
