"""A stage's parameters: the flat contiguous buffers that they lie in, so that averaging is one pass over memory, and
which of them train.

Freezing determines which gradients exist and travel, which parameters are averaged, and which boundary between stages
needs a gradient. So a change is taken over between two mini-batches, where nothing is under way and all pipelines are
together; until then all go by what was agreed last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.topology.groups import ProcessGroups


@dataclass(frozen=True)
class FlatBucket:
    """One contiguous 1-D buffer and the parameters that are views of it, in order. Complex parameters lie in it as
    pairs of real numbers, since collectives, sums and payloads take only those."""

    buffer: Tensor
    parameters: Sequence[nn.Parameter]
    trains: bool
    """Whether its parameters trained when it was made; equal on all replicas, whatever their users do meanwhile."""
    tied: Mapping[nn.Parameter, Sequence[Tensor]] = field(default_factory=dict)
    """Other objects over the memory of a parameter: parameters, and tensors that users keep."""
    section: int | None = None
    """Section of the chain, where replicas are known by section."""

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """Parameters in order, with tied ones."""
        return [t for p in self.parameters for t in (p, *self.tied.get(p, ())) if isinstance(t, nn.Parameter)]

    def check(self, take_back: bool = False) -> None:
        """Raise RuntimeError if a parameter no longer is a view of the buffer, which averaging would then miss. With
        ``take_back``, one that has been given other memory (``p.data = ...``) is moved into the buffer again, with its
        new values, unless other tensors share its memory."""
        first, size, end = self.buffer.data_ptr(), self.buffer.element_size(), 0
        for parameter in self.parameters:
            start, end = end, end + parameter.numel() * (2 if parameter.is_complex() else 1)
            tied = [tensor for tensor in self.tied.get(parameter, ()) if isinstance(tensor, nn.Parameter)]
            if start == end or all(tensor.data_ptr() == first + start * size for tensor in (parameter, *tied)):
                continue
            place = self.buffer[start:end]
            kind = place.dtype.to_complex() if parameter.is_complex() else place.dtype
            whole = sum(p.numel() * (2 if p.is_complex() else 1) for p in self.parameters) == len(self.buffer)
            fits = (parameter.dtype, parameter.device) == (kind, place.device) and whole
            if tied or not take_back or not fits:
                raise RuntimeError(
                    f"A parameter of shape {tuple(parameter.shape)} was given other memory after set-up (an assignment "
                    "to .data, or .to()), so it cannot be averaged. Change parameters in place instead."
                )
            pairs = torch.view_as_complex(place.view(-1, 2)) if parameter.is_complex() else place
            parameter.data = pairs.view(parameter.shape).copy_(parameter.data)


def tensors_of(buckets: Sequence[FlatBucket], beside: bool = False) -> list[Tensor]:
    """Check each bucket (:meth:`FlatBucket.check`) and return the buffers, which an exchange moves. Parameters that
    have other memory are taken back into them, unless the exchange goes on ``beside`` training, where new values would
    be lost."""
    for bucket in buckets:
        bucket.check(take_back=not beside)
    return [bucket.buffer for bucket in buckets]


class PublishedCopy:
    """A copy of a model, with which others may average while a step is computed on the model. Memory: twice the
    parameters.

    Args:
        buckets: the model.
    """

    def __init__(self, buckets: Sequence[FlatBucket]) -> None:
        self._buckets = buckets
        self.tensors = [bucket.buffer.clone() for bucket in buckets]
        self._computed_on = [tensor.clone() for tensor in self.tensors]

    def add_step(self) -> None:
        """Add the changes of the model since :meth:`take`."""
        for new, base, published in zip(tensors_of(self._buckets), self._computed_on, self.tensors, strict=True):
            published.add_(new - base)

    def take(self) -> None:
        """Replace the model by the copy."""
        for new, base, published in zip(tensors_of(self._buckets), self._computed_on, self.tensors, strict=True):
            new.copy_(published)
            base.copy_(published)


def flatten(
    parameters: Iterable[nn.Parameter],
    together: Iterable[Sequence[Tensor]] = (),
    sections: Mapping[nn.Parameter, int] = MappingProxyType({}),
) -> list[FlatBucket]:
    """Move parameters into flat buffers and make each parameter a view of its buffer: one per dtype for those that
    train, and one for those that are frozen.

    The parameter objects stay the same; peak memory is the parameters of one buffer, twice, while they are copied.

    Args:
        parameters: parameters in the order in which they are laid out.
        together: tensors over the same memory, which lie in one place. They count as trained if a parameter among them
            is.
        sections: section of each parameter; parameters of different sections, and those of none, lie in different
            buffers.
    """
    same = {id(tensor): tensors for tensors in together for tensor in tensors}
    alike: dict[tuple[torch.dtype, bool, int | None], dict[nn.Parameter, Sequence[Tensor]]] = {}
    placed: set[int] = set()
    for parameter in parameters:
        if id(parameter) in placed:
            continue
        tensors = same.get(id(parameter), (parameter,))
        placed.update(map(id, tensors))
        trained = (t for t in tensors if isinstance(t, nn.Parameter) and t.requires_grad)
        first = next(trained, parameter)
        others = [tensor for tensor in tensors if tensor is not first]
        alike.setdefault((first.dtype, first.requires_grad, sections.get(first)), {})[first] = others
    return [_flatten_one(list(group), group, section) for (_, _, section), group in alike.items()]


def _flatten_one(
    parameters: list[nn.Parameter], tied: Mapping[nn.Parameter, Sequence[Tensor]], section: int | None
) -> FlatBucket:
    total = sum(p.numel() for p in parameters)
    flat = torch.empty(total, dtype=parameters[0].dtype, device=parameters[0].device)
    offset = 0
    for parameter in parameters:
        view = flat[offset : offset + parameter.numel()].view(parameter.shape)
        view.copy_(parameter.data)
        for tensor in (parameter, *tied[parameter]):
            tensor.data = view
        offset += parameter.numel()
    tied_here = {p: tied[p] for p in parameters if tied[p]}
    return FlatBucket(as_real(flat), parameters, parameters[0].requires_grad, tied_here, section)


def as_real(flat: Tensor) -> Tensor:
    """Return a view of the same memory as real numbers, where it holds complex ones; ``flat`` is contiguous and
    1-D."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


class Freezing:
    """Tracks which parameters of a stage train. As a context around a step it refuses changes within: then the block
    ends with a ConfigurationError.

    Args:
        module: the whole module. Parameters of other stages are on ``meta``, and have ``requires_grad`` all the same.
        parameters: this stage's, roughly in the order in which a backward completes their gradients.
        groups: this worker's process groups.
        together: tensors over the same memory.
        sections: that of each parameter, if its replicas depend on it.

    Raises:
        ConfigurationError: ranks differ in which parameters train, or in which modules are in training mode. All ranks
            must construct it.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        groups: ProcessGroups,
        together: Sequence[Sequence[Tensor]] = (),
        sections: Mapping[nn.Parameter, int] = MappingProxyType({}),
    ) -> None:
        self._module = module
        self._named = list(module.named_parameters())
        modes = {name: m.training for name, m in module.named_modules()}
        self._parameters = parameters
        self._groups = groups
        self._together = together
        self._sections = sections
        self.generation = 0
        """Number of changes; equal on all stages."""
        self.trained: list[nn.Parameter] = []
        """Parameters of ``parameters`` that train, in their order. The list itself changes."""
        self.buckets: list[FlatBucket] = []
        """Buckets of all ``parameters``. The list itself changes."""
        self._refuse_different(self._flags(), "comparing which layers train")
        different = self._different(list(modes.values()), "comparing training modes")
        if different is not None:
            raise ConfigurationError(
                f"Module {list(modes)[different]!r} is in training mode on some ranks only. Every rank has every "
                "module, those of other stages too: call train() and eval() on the same modules on every rank."
            )
        self._agree()

    def changed(self) -> bool:
        """Return whether the user has frozen or unfrozen anything since :meth:`take_over`."""
        return self._flags() != self._agreed

    def refuse_new_parameters(self) -> None:
        """Raise ConfigurationError if the module has parameters that it did not have when it was cut."""
        known = {id(p) for _, p in self._named}
        new = next((name for name, p in self._module.named_parameters() if id(p) not in known), None)
        if new is not None:
            raise ConfigurationError(
                f"{new!r} was added to {type(self._module).__name__} after it had been cut, so no stage owns it. Make "
                "all parameters in __init__, configure_model or setup; later, change their values, as by "
                "layer.reset_parameters()."
            )

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of ``parameter`` in the module."""
        return next((name for name, named in self._named if named is parameter), "")

    def take_over(self) -> None:
        """Take over what the user has changed. All workers of the run must call it, and nothing may be under way.

        Raises:
            ConfigurationError: it was changed on some ranks only.
            WorkerFailedError: another rank is gone, or has not changed anything within the timeout.
        """
        self._refuse_different(self._flags(), "agreeing on which layers train (requires_grad has changed)")
        self.generation += 1
        self._agree()

    def __enter__(self) -> None:
        """Enter a step, in which changes are refused."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if (error is None or isinstance(error, Exception)) and self.changed():
            raise ConfigurationError(
                "requires_grad was changed within training_step, which runs once for each micro-batch. Freeze and "
                "unfreeze layers in on_train_epoch_start or on_train_batch_start."
            ) from error

    def _refuse_different(self, flags: Sequence[bool], doing: str) -> None:
        different = self._different(flags, doing)
        if different is not None:
            raise ConfigurationError(
                f"requires_grad of {self._named[different][0]!r} was set on some ranks only. Every rank has "
                "every parameter, most of them on the meta device: set requires_grad of those too, through the module "
                "(not through parameters kept from before training), and in all pipelines at the same batch."
            )

    def _different(self, flags: Sequence[bool], doing: str) -> int | None:
        """Return the place of the first of ``flags`` that is not the same on all ranks."""
        mine = torch.tensor(flags, dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        with waiting_for(self._groups.world, doing):
            dist.all_gather(gathered, mine)
        places = (torch.stack(gathered) != mine).any(0).nonzero()
        return int(places[0]) if len(places) else None

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for _, parameter in self._named]

    def _agree(self) -> None:
        self._agreed = self._flags()
        self.trained[:] = [p for p in self._parameters if p.requires_grad]
        self.buckets.clear()  # before the new ones are made, so that old memory is let go of meanwhile
        self.buckets += flatten(self._parameters, self._together, self._sections)
