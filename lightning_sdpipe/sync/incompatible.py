"""Reasons why options of a run do not go together, each with changes by which they do.

:mod:`lightning_sdpipe.sync.capabilities` says where each of them holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import EightBit, Full, Half
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.decentralized import Decentralized
from lightning_sdpipe.policies.local_sgd import LocalSGD, NoSync
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized


@dataclass(frozen=True)
class Incompatible:
    """A reason why two things do not go together.

    Args:
        why: the reason, as half a sentence.
        instead: what to do, as a sentence that names all of ``changes``.
        changes: the alternatives as values: for each, new values of fields of
            :class:`~lightning_sdpipe.sync.capabilities.Combination`, or of a field's own fields, as in
            ``{"exchange.overlap": "step"}``. ``sync`` may be the name of a method.
    """

    why: str
    instead: str
    changes: tuple[Mapping[str, object], ...] = ()


_IN_FULL, _FLAT = {"exchange.payload": Full()}, {"exchange.hierarchy": "flat"}
_PLAIN = {"exchange": Exchange()}
_AT_ONCE, _STEP = {"exchange.overlap": "none"}, {"exchange.overlap": "step"}
_EIGHT_BIT, _HALF = {"exchange.payload": EightBit()}, {"exchange.payload": Half()}
_ALL_REDUCE, _DILOCO = {"sync": "all_reduce"}, {"sync": "diloco"}
_SEMI, _PARTIAL, _NO_SYNC = ({"sync": policy} for policy in (SemiDecentralized(), PartialReduce(), NoSync()))
_EACH, _EIGHTH = {"sync": LocalSGD(every=1)}, {"sync": LocalSGD(every=8)}
_RING, _PAIRS_WAIT, _PAIRS_GO = ({"sync": policy} for policy in (Decentralized(), ADPSGD(), ADPSGD(asynchronous=True)))
_OWN_SPEED = (_SEMI, _PARTIAL, _NO_SYNC, _PAIRS_GO)
_SHARDED, _EQUAL_SHARES = {"dealt": False}, {"batch_by_speed": False}

OWN_WAY = Incompatible(
    "it moves tensors in its own way, or none",
    "Leave exchange out, or use a method that averages, such as SemiDecentralized(), LocalSGD(every=8) or AllReduce()",
    (_PLAIN, _SEMI, _EIGHTH, _ALL_REDUCE),
)
MOMENTA = Incompatible(
    "momenta take the place of gradients",
    "Use sync=AllReduce(), or momentum=0, or another payload, such as EightBit()",
    (_ALL_REDUCE, {"exchange.payload.momentum": 0}, _EIGHT_BIT),
)
FEEDBACK = Incompatible(
    "its members have no common reference to feed errors back to, and keep what a message left out themselves",
    "Use feedback=False, rounding='nearest'",
    ({"exchange.payload.feedback": False, "exchange.payload.rounding": "nearest"},),
)
DIFFERENCES = Incompatible(
    "its members have no common reference that so few bits could be differences from",
    "Use EightBit() or Half(), or LocalSGD(every=8), DiLoCo() or AllReduce(), whose members have one",
    (_EIGHT_BIT, _HALF, _EIGHTH, _DILOCO, _ALL_REDUCE),
)
FEW_BITS = Incompatible(
    "what so few bits leave out made models of a ring grow apart",
    "Use EightBit() or Half(), or LocalSGD(every=8), DiLoCo() or AllReduce()",
    (_EIGHT_BIT, _HALF, _EIGHTH, _DILOCO, _ALL_REDUCE),
)
OLDER = Incompatible(
    "gradients travel while the backward goes on anyway, and a mean that came one step later would be of an older "
    "model",
    "Use overlap='none', or average models with LocalSGD(every=1), which takes overlap='step'",
    (_AT_ONCE, _EACH),
)
BEFORE_STEP = Incompatible(
    "gradients are needed before the step",
    "Use overlap='none', or average models with LocalSGD(every=1), which takes overlap='free'",
    (_AT_ONCE, _EACH),
)
CHANGES = Incompatible(
    "its groups change with every update",
    "Use overlap='step'; LocalSGD(every=1) and Decentralized() can average freely",
    (_STEP, _EACH, _RING),
)
NO_WAIT = Incompatible(
    "neighbours are not waited for in any case", "Use overlap='step', which hides the transfer too", (_STEP,)
)
ROUNDS = Incompatible(
    "rounds are common to all workers",
    "Use overlap='step', or overlap='none' and delay= to hide more updates behind them",
    (_STEP, _AT_ONCE),
)
EVERY = Incompatible(
    "a thread that averages at its own pace has no use for every=",
    "Use overlap='step', or every=1",
    (_STEP, {"sync.every": 1}),
)
MEET_LATER = Incompatible(
    "a meeting is part of a step",
    "Use overlap='none'; to hide meetings behind the next step add PHDPSGD(asynchronous=True)",
    (_AT_ONCE, {**_AT_ONCE, "sync.asynchronous": True}),
)
MEET_FREELY = Incompatible(
    "a meeting is part of a step",
    "Use overlap='none'; to let no pipeline wait add PHDPSGD(asynchronous=True)",
    (_AT_ONCE, {**_AT_ONCE, "sync.asynchronous": True}),
)
EQUAL_MEMBERS = Incompatible(
    "the members of a group hold equal models, and messages in fewer bits would leave each with another one",
    "Leave exchange out, or use PHDPSGD(within='models')",
    (_PLAIN, {"sync.within": "models"}),
)
PAIRS = Incompatible(
    "a pair exchanges one message each way, of which a hierarchy saves nothing", "Use hierarchy='flat'", (_FLAT,)
)
ADDS_NOTHING = Incompatible(
    "a ring adds up nothing that a machine could add up first",
    "Use hierarchy='flat', or LocalSGD(every=1)",
    (_FLAT, _EACH),
)
HALF_A_HOST = Incompatible(
    "a round by quorum may have one pipeline of a machine and not the others",
    "Use hierarchy='flat', or quorum=None",
    (_FLAT, {"sync.quorum": None}),
)
OWN_HIERARCHY = Incompatible(
    "its groups are a hierarchy", "Use hierarchy='flat', and a group for each host, as without group_size", (_FLAT,)
)
LATE = Incompatible(
    "it groups pipelines all of whose stages have stepped, and without a flush stages step one after the other: each "
    "would wait for the slowest in every update, at a third of the speed of AllReduce (simulated, and in 16 processes)",
    "Use a schedule with a flush, such as schedule='1f1b', or SemiDecentralized()",
    ({"schedule": "1f1b"}, _SEMI),
)
STAYS = Incompatible(
    "its pipelines cannot leave and come back while others train",
    "Use data='sharded', or a method whose pipelines run at their own speed: SemiDecentralized(), PartialReduce(), "
    "NoSync(), or ADPSGD(asynchronous=True)",
    (_SHARDED, *_OWN_SPEED),
)
EQUALLY_MANY = Incompatible(
    "the pipelines of a group average gradients, so they train equally many batches",
    "Use data='sharded', or SemiDecentralized() or PartialReduce()",
    (_SHARDED, _SEMI, _PARTIAL),
)
UNKNOWN = Incompatible(
    "a policy of one's own may hold them in step", "Use data='dealt', which says that it does not", ({"dealt": True},)
)
TOGETHER = Incompatible(
    "all of them take every step together",
    "Use a finite window, such as window='auto', or data='dealt'",
    ({"sync.window": "auto"}, {"dealt": True}),
)
ALONE = Incompatible(
    "its pipelines take no step together",
    "Use sync=AllReduce(), or leave batch_by_speed out; with SemiDecentralized(), PartialReduce(), NoSync() and "
    "ADPSGD(asynchronous=True), data='dealt' makes an epoch as fast as all pipelines together",
    (_ALL_REDUCE, _EQUAL_SHARES, *({**policy, **_EQUAL_SHARES, "dealt": True} for policy in _OWN_SPEED)),
)
WAITS = Incompatible(
    "its exchanges would wait for all pipelines, or for ones that may be gone",
    "Use SemiDecentralized(), PartialReduce(), LocalSGD(every=8), DiLoCo(), ADPSGD(), Decentralized(), AllReduce() or "
    "NoSync()",
    (_SEMI, _PARTIAL, _EIGHTH, _DILOCO, _PAIRS_WAIT, _RING, _ALL_REDUCE, _NO_SYNC),
)
HELD_UP = Incompatible(
    "the pipelines of a group average gradients, and none could take a step without one that may be gone",
    "Use PHDPSGD(within='models', group_size=2), or list groups: models are averaged after each step then",
    ({"sync.within": "models"}, {"sync.within": "models", "sync.group_size": 2}),
)
BY_MACHINE = Incompatible(
    "its groups are the pipelines of each machine, and nobody knows beforehand on which machine a pipeline will come",
    "Give group_size=2 for pairs of consecutive pipelines, or list groups; group_size=1 makes each a group by itself",
    ({"sync.group_size": 2}, {"sync.group_size": 1}),
)
MEAN_MOMENTUM = Incompatible(
    "messages add to the mean momentum of all rounds before, which newcomers lack",
    "Use momentum=0, which sends gradients with error feedback",
    ({"exchange.payload.momentum": 0},),
)
WEIGHED = Incompatible(
    "gradients that count by samples are added up in full, on the way from each pipeline to all",
    "Use AllReduce(weights='equal'), or leave exchange out",
    ({"sync.weights": "equal"}, _PLAIN),
)
DIVIDED = Incompatible(
    "batch_by_speed weighs gradients by samples already",
    "Use AllReduce(weights='equal'), or leave weights out, or leave batch_by_speed out",
    ({"sync.weights": "equal"}, {"sync.weights": None}, _EQUAL_SHARES),
)
NEWCOMERS = Incompatible(
    "its members need a common model, which newcomers lack",
    "Use SemiDecentralized() or PartialReduce(), or send in full",
    (_SEMI, _PARTIAL, _IN_FULL),
)
SEVERAL_BATCHES = Incompatible(
    "a pipeline that is lost would take the gradients of several batches with it",
    "Use accumulate_grad_batches=1, a larger batch size, and as many more num_micro_batches; or SemiDecentralized()",
    ({"accumulate_grad_batches": 1}, _SEMI),
)
NO_TURN = Incompatible(
    "the members of a round of gradients are named as a turn begins, and the updates that drain a pipeline have no "
    "turn",
    "Use schedule='1f1b', or SemiDecentralized()",
    ({"schedule": "1f1b"}, _SEMI),
)
A_TURN_LATER = Incompatible(
    "a round of bases begins when all stages of a pipeline are ready, and without a flush the first one is ready a "
    "turn after the last, which waits for the round",
    "Use schedule='1f1b', or SemiDecentralized()",
    ({"schedule": "1f1b"}, _SEMI),
)
BY_SHARES = Incompatible(
    "shares of a batch are of different sizes, and count by their samples",
    "Leave weights out, or leave batch_by_speed out",
    ({"sync.weights": None}, _EQUAL_SHARES),
)
SHARES_IN_FULL = Incompatible(
    "shares of a batch count by their samples, and gradients that do are added up in full, among all alike",
    "Leave exchange out, or leave batch_by_speed out",
    (_PLAIN, _EQUAL_SHARES),
)

_ALIKE = {"unlike": ()}
ONE_CUT = Incompatible(
    "it needs pipelines of one depth and cut",
    "Use SemiDecentralized(), PartialReduce(), LocalSGD(every=8), ADPSGD(), Decentralized(), AllReduce(), NoSync(), "
    "or one number of stages, and one partition, for all pipelines",
    (_SEMI, _PARTIAL, _EIGHTH, _PAIRS_WAIT, _RING, _ALL_REDUCE, _NO_SYNC, _ALIKE),
)
PAIRS_BY_NUMBER = Incompatible(
    "partners meet by the number of an average, and a newcomer that averages at its own pace would begin at 0",
    "Use overlap='step', or Decentralized(), which has a ring",
    (_STEP, _RING),
)
UNLIKE_FREELY = Incompatible(
    "a thread that averages at its own pace knows the replicas of a stage only", "Use overlap='step'", (_STEP,)
)
UNLIKE_HOSTS = Incompatible(
    "machines are told apart among the replicas of a stage only", "Use hierarchy='flat'", (_FLAT,)
)
UNLIKE_GRADIENTS = Incompatible(
    "gradients of sections are averaged in full, in flat groups", "Leave exchange out", (_PLAIN,)
)
