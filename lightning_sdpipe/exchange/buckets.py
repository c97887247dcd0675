"""A stage's parameters in flat contiguous buffers, so that averaging is one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FlatBucket:
    """One contiguous 1-D buffer and the parameters that are views of it, in order. Complex parameters lie in it as
    pairs of real numbers, since collectives, sums and payloads know those only."""

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
        new values, unless other tensors were to lie in the same memory."""
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
    """Check each bucket (:meth:`FlatBucket.check`) and return the buffers, which an exchange moves. Unless that goes on
    ``beside`` training and would be lost, parameters that have other memory are taken back into them."""
    for bucket in buckets:
        bucket.check(take_back=not beside)
    return [bucket.buffer for bucket in buckets]


class PublishedCopy:
    """A copy of a model, with which others may average while a step is computed on the model. It takes the memory of
    the parameters twice.

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
