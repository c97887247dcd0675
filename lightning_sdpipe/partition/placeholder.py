"""Tensors with a shape but no values, in place of the output of another stage's block, or of a weight that another
stage holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_sdpipe.errors import ConfigurationError

_aten = torch.ops.aten
# These read only the shape, dtype and device of a tensor, so their results are real.
FROM_METADATA = {
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.empty_like.default,
    _aten.full_like.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_empty.default,
    _aten.new_full.default,
    _aten.new_empty_strided.default,
}
# These draw until they accept a number, so stages with other values would draw a different number of times.
_DRAW_BY_VALUE = {
    _aten._standard_gamma.default,
    _aten._sample_dirichlet.default,
    _aten.poisson.default,
    _aten.binomial.default,
}
# These read a tensor's values without dispatching an operation.
READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}
# So do these when torch itself calls them, as torch.tensor([...]) does for each element.
READS_NUMBER = {Tensor.__float__, Tensor.__int__, Tensor.__complex__, Tensor.__bool__, Tensor.__index__}


class OtherStages(str):
    """The name of a weight of other stages, as a placeholder's origin."""


class Placeholder(Tensor):
    """A tensor with the shape, dtype and device of a value that exists only on an earlier stage.

    User code between blocks may read its metadata and compute with it: operations on placeholders run on shapes alone
    and give placeholders, at no cost in memory or arithmetic. It is an error if one reaches a block of this stage, or
    is read as a Python number: its value skips the cut.
    """

    origin: str
    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, origin: str, requires_grad: bool = False) -> Placeholder:
        placeholder: Placeholder = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        placeholder.meta = meta
        placeholder.origin = origin
        return placeholder

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """True for a weight that another stage holds, so that code that walks all weights recognises it."""
        return isinstance(self.origin, OtherStages)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READS or func in READS_NUMBER:
            raise SkippedCutError(args[0], f"is read {'by Python' if func in READS else 'as a Python number'}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has it as an instance method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        placeholders = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Placeholder)]
        if func in FROM_METADATA and not placeholders[0].is_meta:  # a tensor like a weight is where the weight is
            return func(*tree_map_only(Placeholder, _without_values, args), **kwargs)
        if (wrong := _needs_values(func, args, kwargs)) is not None:
            raise SkippedCutError(placeholders[0], wrong)
        if torch.Tag.nondeterministic_seeded in func.tags:  # draw, so that later draws equal those of other stages
            func(*tree_map_only(Placeholder, _any_values, args), **tree_map_only(Placeholder, _any_values, kwargs))
        device = torch.device(kwargs.get("device") or placeholders[0].device)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        metas = tree_map_only(Tensor, _meta, (args, kwargs))
        try:
            outcome = func(*metas[0], **metas[1])
        except RuntimeError:  # or its NotImplementedError: some operations do not run on shapes alone
            if func._schema.is_mutable:
                raise SkippedCutError(placeholders[0], f"is written to by {func}") from None
            real = func(
                *tree_map_only(Placeholder, _any_values, args), **tree_map_only(Placeholder, _any_values, kwargs)
            )
            outcome = tree_map_only(Tensor, lambda t: t.to("meta"), real)
        # an in-place operation returns the placeholder that it changed
        known = {id(placeholder.meta): placeholder for placeholder in placeholders}

        def as_placeholder(meta: Tensor) -> Placeholder:
            return known[id(meta)] if id(meta) in known else Placeholder(meta, device, placeholders[0].origin)

        return tree_map_only(Tensor, as_placeholder, outcome)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "This worker holds only its own stage of the module, so what would be saved here is not the whole. During "
            "a run, trainer.save_checkpoint(path), called on all ranks, writes all of it into one file. After a run "
            "every worker has it whole, unless it was built on the meta device in configure_model: then set "
            "SDPipeStrategy(gather_module=True) if it fits into the memory of every worker."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({tuple(self.shape)}, dtype={self.dtype}, of={self.origin!r})"


class Unusable:
    """Stands for a value that is not here: it may be passed around, but any operation on it raises what ``error``
    returns."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        object.__setattr__(self, "_makes_error", error)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _use(next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Unusable)))


def _use(value: Unusable, *_: Any, **__: Any) -> NoReturn:
    raise object.__getattribute__(value, "_makes_error")()


def refuse_operations(kind: type[Unusable], *operations: str) -> None:
    """Make these special methods of ``kind``, named without underscores, raise its error."""
    for operation in operations:
        setattr(kind, f"__{operation}__", _use)


refuse_operations(
    Unusable,
    *("getattr", "setattr", "delattr", "call", "bool", "len", "iter", "next", "getitem", "setitem", "delitem"),
    *("contains", "lt", "le", "gt", "ge", "float", "int", "index", "complex", "round"),
    *("neg", "pos", "abs", "invert", "enter", "exit", "reversed"),
    *(f"{side}{each}" for side in ("", "r", "i") for each in ("add", "sub", "mul", "truediv", "floordiv", "mod")),
    *(f"{side}{each}" for side in ("", "r", "i") for each in ("pow", "and", "or", "xor", "matmul", "lshift", "rshift")),
)


class Absent(Unusable):
    """A stand-in for an earlier stage's object that is no tensor and cannot travel."""

    def __init__(self, kind: str, origin: str) -> None:
        message = (
            f"Block {origin!r}, which runs on an earlier stage, made a {kind}, which is used on a later one, "
            "but only tensors, numbers, strings and None in tuples, lists and dicts travel between stages. Cut "
            "elsewhere with partition=[...], or let the block hand on one of these."
        )
        super().__init__(lambda: ConfigurationError(message))


class WeightElsewhere(Placeholder):
    """A parameter or buffer that another stage holds, and that is on ``meta`` here; operations on it alone are done
    only there. It reports this stage's device, since user code may ask any parameter of a module for its device, and it
    has the attributes that the user has set on the weight, by which parameters may be sorted into groups."""

    @staticmethod
    def __new__(cls, weight: Tensor, device: torch.device, name: str) -> WeightElsewhere:
        meta = weight.detach().to("meta")
        placeholder = Placeholder.__new__(cls, meta, device, OtherStages(repr(name)), weight.requires_grad)
        assert isinstance(placeholder, WeightElsewhere)
        vars(placeholder).update(attributes_of(weight))
        placeholder._is_param = isinstance(weight, nn.Parameter)  # decides isinstance(placeholder, nn.Parameter)
        return placeholder

    @property
    def grad(self) -> Placeholder | None:
        """A placeholder of the gradient on another stage: a norm of all gradients without it would be wrong."""
        if not (self._is_param and self.requires_grad):
            return None
        return Placeholder(self.meta, self.device, OtherStages(f"the gradient of {self.origin}"))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Do nothing: the stage that holds the weight sets its gradient."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightElsewhere:
        copied = WeightElsewhere.__new__(type(self), self, self.device, "")
        copied.origin, copied._is_param = self.origin, self._is_param
        memo[id(self)] = copied
        return copied


_OWN = ("meta", "origin", "_is_param")


def attributes_of(weight: Tensor) -> dict[str, Any]:
    """Return the attributes that the user has set on a parameter or buffer, which another stage may hold."""
    return {name: value for name, value in vars(weight).items() if name not in _OWN}


class SkippedCutError(ConfigurationError):
    """A value of another stage is used on a stage that does not have it."""

    def __init__(self, placeholder: Placeholder, use: str) -> None:
        super().__init__(
            f"Another stage holds {placeholder.origin}, of which this one has the shape only, and what was computed "
            f"from it {use}. A norm over all gradients is known to Trainer(gradient_clip_val=...), and to "
            "self.clip_gradients in configure_gradient_clipping; what each stage may do for its own weights can leave "
            "out those for which weight.is_meta is true; else train with num_stages=1."
            if placeholder.is_meta
            else f"A value of block {placeholder.origin!r}, which runs on an earlier stage, {use} on a later one, and "
            "it did not travel there. Keep both places on one stage with partition=[...], or name one larger block "
            "that holds them with blocks=[...]. `sdpipe check` compares a cut model with the whole one."
        )


def refuse_placeholders(value: Any, where: str) -> None:
    """Raise ConfigurationError if ``value``, with which ``where`` is about to compute, has a placeholder or an
    :class:`Absent`."""
    for leaf in (value,) if isinstance(value, Tensor) else tree_leaves(value):
        if isinstance(leaf, Placeholder):
            raise SkippedCutError(leaf, f"is used by {where}")
        if isinstance(leaf, Absent):
            _use(leaf)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that a torch operation changes."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _needs_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why an operation needs the values of a placeholder; None if it runs on shapes alone."""
    if func is _aten._local_scalar_dense.default:
        return "is read as a Python number"
    if torch.Tag.dynamic_output_shape in func.tags:
        return f"decides on the shape of what {func} returns"
    if func in _DRAW_BY_VALUE:
        return f"decides how many random numbers {func} draws, and so on later ones"
    written = tree_leaves(written_by(func, args, kwargs))
    real = any(isinstance(t, Tensor) and not isinstance(t, Placeholder) for t in written)
    return "is written into a tensor that lives" if real else None


def _without_values(placeholder: Placeholder) -> Tensor:
    return torch.empty((), dtype=placeholder.dtype, device=placeholder.device).expand(placeholder.shape)


def _any_values(placeholder: Placeholder) -> Tensor:
    return torch.ones(placeholder.shape, dtype=placeholder.dtype, device=placeholder.device)


def _meta(tensor: Tensor) -> Tensor:
    return tensor.meta if isinstance(tensor, Placeholder) else tensor.to("meta")
