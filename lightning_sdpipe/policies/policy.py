"""Interface of a policy: events and the time go in, decisions come out.

A policy owns no clock, socket, thread or random source, so the scheduler, the simulator and the tests drive the same
object, and a log of its events gives the same decisions again. The rules that all policies share:

- A worker is a node of its stage between ``Joined`` and ``Left`` or ``Lost``.
- A worker has at most one unanswered ``Ready``; every ``Ready`` is answered by exactly one group that contains the
  worker as a member that is not passive, unless the worker leaves first.
- An event that breaks a rule raises :class:`RefusedEvent` and changes nothing.
- Time never runs backwards between two calls.

:class:`~lightning_sdpipe.policies.group_policy.GroupPolicy` keeps all of this; a policy derived from it decides when a
group goes out, and with which members.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from lightning_sdpipe.errors import ConfigurationError, nearest, refusal
from lightning_sdpipe.policies.capabilities import ASKED, GROUPS, Capabilities
from lightning_sdpipe.policies.decisions import Decision
from lightning_sdpipe.policies.events import Event

Unit = Literal["rounds", "groups"]
When = Literal["early", "late"]


class RefusedEvent(ValueError):
    """The event breaks a rule of the protocol; the policy is as it was before."""


class Policy(Protocol):
    """A policy that decides for all stages of a run at once."""

    def on(self, event: Event, now: float) -> list[Decision]:
        """Handle ``event``, which happened at ``now``, in seconds of any clock that never runs backwards.

        Raises:
            RefusedEvent: the event breaks a rule; nothing has changed.
        """

    def deadline(self) -> float | None:
        """Return when a :class:`~lightning_sdpipe.policies.events.Tick` is due next; None when only another event can
        change anything."""


class Refusing(msgspec.StructMeta):
    """Refuses unknown values with the registry's message for values in JSON, and gives classes an ``__init__`` with the
    values as its arguments, where LightningCLI looks for them."""

    def __init__(cls, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)

        def __init__(self: Any, *_: Any, **__: Any) -> None:
            """Do nothing: msgspec makes the object."""

        values = inspect.signature(cls).parameters.values()
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        __init__.__signature__ = inspect.Signature([itself, *values])  # type: ignore[attr-defined]
        __init__.__module__ = cls.__module__  # where names in annotations are looked up
        cls.__init__ = __init__  # type: ignore[misc]

    def __call__(cls, *args: Any, **values: Any) -> Any:
        for name in {*values} - {*cls.__struct_fields__}:
            raise ConfigurationError(f"{name} is not a value of {cls.__name__}{nearest(name, cls.__struct_fields__)}")
        return super().__call__(*args, **values)


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, metaclass=Refusing):
    """The values of a policy, as a user writes them and as they cross process borders.

    A subclass has a field for each value, and checks them in ``__post_init__`` (:mod:`lightning_sdpipe.errors` has
    checks that word the errors). The class is found by its name in the registry, or by its import path. It also
    describes the method that uses the policy: names, refusals and tables are derived from that.
    """

    registered: ClassVar[str] = ""
    """Name of a built-in policy, as users give it and as ``conf/sync`` has it."""
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    """Example values for each form of the policy that differs in what it takes or in how it is carried out."""
    in_step: ClassVar[bool] = False
    """True if pipelines train equally many batches; advice about slow devices depends on it."""

    @property
    def capabilities(self) -> Capabilities:
        """What the method takes."""
        return replace(GROUPS, data=ASKED)

    @property
    def half(self) -> str:
        """Import path of what builds the worker's half of the method from a
        :class:`~lightning_sdpipe.sync.synchronizer.Replica` and these values."""
        return "lightning_sdpipe.sync.model_averaging:in_groups"

    @property
    def must_hold(self) -> Mapping[str, object]:
        """Values that the scheduler's policy must have, too, for the worker's half to work."""
        return {}

    def make_policy(self, num_stages: int, num_pipelines: int) -> Policy:
        """Make a policy in its first state, for ``num_stages`` × ``num_pipelines`` workers."""
        raise NotImplementedError(f"{type(self).__name__} must say in make_policy how its policy is made")

    @property
    def looks_back(self) -> tuple[int, Unit]:
        """Number of rounds P, or of groups, over which ``sdpipe status`` looks back for meetings."""
        return 10, "rounds"

    @property
    def keeps_equal(self) -> bool:
        """True if replicas are equal after every group. Then the workers of a segment begin it together, and a
        newcomer is in the first group after its state was copied."""
        return False

    @property
    def rounds_are_apart(self) -> bool:
        """True if workers make many updates between two rounds. Then a newcomer begins to train before it shares a
        process group with the others."""
        return False

    @property
    def announces(self) -> When:
        """When a worker announces that it is ready: ``"early"``, before or within its last backward (SDPipe §4), or
        ``"late"``, after the optimizer's step."""
        return "early"


def checked_groups(name: str, value: object, allowed: str) -> tuple[tuple[int, ...], ...]:
    """Return ``value`` as tuples of pipelines.

    Raises:
        ConfigurationError: ``value`` is not a list of lists of pipelines, or some are in two places; the message begins
            with ``allowed``.
    """
    try:
        checked = tuple(tuple(group) for group in value)  # type: ignore[attr-defined]
    except TypeError:
        checked = ()
    listed = [pipeline for group in checked for pipeline in group]
    if not checked or not all(checked) or any(type(p) is not int or p < 0 for p in listed):
        raise refusal(name, value, f"{allowed} with the pipelines of each group, as in [[0, 1], [2, 3]]")
    twice = sorted({pipeline for pipeline in listed if listed.count(pipeline) > 1})
    if twice:
        raise refusal(name, value, f"groups that do not overlap; {twice} are in more than one place")
    return checked
