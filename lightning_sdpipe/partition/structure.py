"""The structure of a block's output: which tensors it holds and how they are nested."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError


@dataclass(frozen=True)
class TensorMeta:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device | str) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Structure:
    """A block's output without its values: tuples, lists and dicts of tensors, numbers, strings and None."""

    skeleton: str  # JSON, in which ["tensor", i] stands for tensors[i]
    tensors: tuple[TensorMeta, ...]

    def rebuild(self, make: Callable[[int, TensorMeta], Any]) -> Any:
        """The output with ``make(i, meta)`` in the place of tensor ``i``."""

        def build(node: list[Any]) -> Any:
            kind, content = node
            if kind == "tensor":
                return make(content, self.tensors[content])
            if kind == "tuple":
                return tuple(build(item) for item in content)
            if kind == "list":
                return [build(item) for item in content]
            if kind == "dict":
                return {key: build(item) for key, item in content.items()}
            return content

        return build(_parsed(self.skeleton))

    def encode(self) -> dict[str, Any]:
        tensors = [[list(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad] for t in self.tensors]
        return {"skeleton": self.skeleton, "tensors": tensors}

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> Structure:
        tensors = (TensorMeta(tuple(shape), getattr(torch, dtype), grad) for shape, dtype, grad in data["tensors"])
        return cls(data["skeleton"], tuple(tensors))


@lru_cache(maxsize=1024)
def _parsed(skeleton: str) -> list[Any]:
    """Not to be changed by those who get it: a few skeletons are rebuilt in every micro-batch."""
    nodes: list[Any] = json.loads(skeleton)
    return nodes


def take_apart(output: Any, block: str) -> tuple[list[Tensor], Structure]:
    """The tensors of a block's output, in order, and its structure.

    Raises:
        ConfigurationError: the output holds something that cannot travel to another process.
    """
    tensors: list[Tensor] = []

    def walk(value: Any) -> list[Any]:
        if isinstance(value, Tensor):
            tensors.append(value)
            return ["tensor", len(tensors) - 1]
        if value is None or isinstance(value, (bool, int, float, str)):
            return ["plain", value]
        if type(value) in (tuple, list):
            return [type(value).__name__, [walk(item) for item in value]]
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return ["dict", {key: walk(item) for key, item in value.items()}]
        raise ConfigurationError(
            f"Block {block!r} returns a {type(value).__qualname__}, which cannot travel between stages. A block that "
            "ends a stage may return tensors, numbers, strings and None in tuples, lists and dicts: "
            "cut elsewhere with partition=[...], or return one of these."
        )

    skeleton = json.dumps(walk(output))
    return tensors, Structure(skeleton, tuple(TensorMeta.of(t) for t in tensors))


def encode_structures(structures: Sequence[Structure | None]) -> bytes:
    """The structures of a chain of outputs as JSON, for the header that precedes the first message of a new shape."""
    return json.dumps([s and s.encode() for s in structures]).encode()


def decode_structures(data: bytes) -> list[Structure | None]:
    return [s and Structure.decode(s) for s in json.loads(data)]
