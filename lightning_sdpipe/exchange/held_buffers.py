"""Buffers of a module, as replicas average them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor, nn


class HeldBuffers(Sequence[Tensor]):
    """The buffers of ``module`` whose names are ``held`` by a worker, in a form that can be averaged in place:
    contiguous, complex ones as pairs of real numbers, sparse ones as their values. They are looked up at each use,
    since a forward may assign them anew."""

    def __init__(self, module: nn.Module, held: Callable[[str], bool]) -> None:
        self._module = module
        self._held = held

    def __str__(self) -> str:
        return ", ".join(f"{name!r} is {tuple(buffer.shape)}, {buffer.dtype}" for name, buffer in self._named().items())

    def _named(self) -> dict[str, Tensor]:
        found = {}
        for name, buffer in self._module.named_buffers():
            if self._held(name):
                if buffer.is_inference():  # assigned while the model was evaluated
                    path, _, own = name.rpartition(".")
                    buffer = self._module.get_submodule(path)._buffers[own] = buffer.clone()
                values = contiguous(buffer).detach()
                if values.layout is not torch.strided:
                    values = values._values() if values.layout is torch.sparse_coo else values.values()
                found[name] = torch.view_as_real(values) if values.is_complex() else values
        return found

    @overload
    def __getitem__(self, place: int) -> Tensor: ...

    @overload
    def __getitem__(self, place: slice) -> list[Tensor]: ...

    def __getitem__(self, place: int | slice) -> Tensor | list[Tensor]:
        return [*self._named().values()][place]

    def __len__(self) -> int:
        return len(self._named())


def contiguous(buffer: Tensor) -> Tensor:
    """Return ``buffer``, in memory of its own if it was transposed or expanded: buffers are averaged as they lie in
    memory."""
    if buffer.layout is torch.strided and not buffer.is_contiguous():
        buffer.data = buffer.data.contiguous()
    return buffer
