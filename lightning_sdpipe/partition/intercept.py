"""Standing in for the calls of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from lightning_sdpipe.errors import ConfigurationError

Original = Callable[..., Any]
Call = Callable[[Original, tuple[Any, ...], dict[str, Any]], Any]


INTERCEPTED = "_intercepted_call"


class _Intercepted(nn.Module):
    """Mixed into a module's class, so that its calls go through the function given to :func:`intercept`.

    The class is changed rather than ``forward``, so that hooks, in-place ``compile()`` and classes that
    override ``__call__`` (Hugging Face's checkpointing layers) keep their place inside the call.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[INTERCEPTED](super().__call__, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigurationError(
            f"A {type(self).__name__} of the model was copied or pickled during a run, in which most of the model is "
            "on other workers. Make a second one (a teacher, a moving average) in __init__, configure_model or setup, "
            "and give it the values of the first one there; steps and hooks may change it then, weight by weight."
        )


def intercept(module: nn.Module, call: Call) -> Callable[[], None]:
    """Makes ``module(*args, **kwargs)`` return ``call(original, args, kwargs)``.

    Returns:
        A function that gives the module its own class back.
    """
    own = type(module)
    module.__class__ = type(own.__name__, (_Intercepted, own), {"__module__": own.__module__})
    module.__dict__[INTERCEPTED] = call

    def restore() -> None:
        module.__class__ = own
        del module.__dict__[INTERCEPTED]

    return restore
