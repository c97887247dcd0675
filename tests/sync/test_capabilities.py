"""The tables of what goes with which method, in the docs, are what the check says.

``python -m tests.sync.test_capabilities`` writes them anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import combinations_with_replacement, dropwhile
from pathlib import Path
from typing import Any

import pytest

from lightning_sdpipe import SDPipeStrategy, sync
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import FORMS, OneBit
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.policy import Policy, PolicyConfig
from lightning_sdpipe.sync import ADPSGD, PHDPSGD, AllReduce, Decentralized, DiLoCo, PartialReduce, SemiDecentralized
from lightning_sdpipe.sync.capabilities import SENTENCES, WORDS, Capabilities, Combination, capabilities_of, refusals
from lightning_sdpipe.sync.methods import alternatives, check, deals, examples, in_words, method_for, method_of
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer

DOCS = Path(__file__).parents[2] / "docs"


class OwnPolicy(PolicyConfig, frozen=True):
    """A user's own."""

    def make_policy(self, num_stages: int, num_pipelines: int) -> Policy:
        return SemiDecentralized().make_policy(num_stages, num_pipelines)


@dataclass(frozen=True)
class OwnMethod:
    """A user's own."""

    policy: PolicyConfig = field(default_factory=SemiDecentralized)

    def build(self, replica: Replica) -> Synchronizer:
        return Synchronizer(replica)


@dataclass(frozen=True)
class ForEightBits(OwnMethod):
    """One that says what it has been made for."""

    capabilities: Capabilities = field(
        default_factory=lambda: Capabilities(payloads={"full", "one_bit"}, data={"sharded", "dealt", "auto"})
    )


def worded(method: Any) -> str:
    """The method in the tables' words, which leave an example's values out if its class has no form but these."""
    words = in_words(method).replace("'", '"')
    name = type(method).__name__
    return f"`{name}`" if words == f"{name}()" else f"`{words}`"


METHODS: dict[str, Any] = {
    **{worded(each): each for each in examples()},
    "a policy of your own": OwnPolicy(),
    "a method of your own": OwnMethod(),
}
PAYLOADS = {f"`{words.removesuffix('()')}`": payload for words, payload in FORMS.items()}


def goes(given: Any, **asked: Any) -> bool:
    combination = Combination(given, **asked)
    try:
        check(method_for(combination), combination)
    except ConfigurationError:
        return False
    return True


def those(choices: Iterable[str], works: Callable[[str], bool]) -> str:
    """Those of the choices that work, in words."""
    every = list(choices)
    found = [choice for choice in every if works(choice)]
    return "all" if found == every else ", ".join(found) or "–"


def exchanges(given: Any, **asked: Any) -> list[str]:
    """The payloads, overlaps and hierarchies with which it goes besides what is asked for."""

    def goes_with(**values: Any) -> bool:
        return goes(given, exchange=Exchange(**values), **asked)

    return [
        those(PAYLOADS, lambda name: goes_with(payload=PAYLOADS[name])),
        those(["none", "step", "free"], lambda overlap: goes_with(overlap=overlap)),
        those(["flat", "hosts"], lambda hierarchy: goes_with(hierarchy=hierarchy)),
    ]


def moves(given: Any) -> list[str]:
    schedules = those(["1f1b", "pipedream"], lambda schedule: goes(given, schedule=schedule, num_stages=2))
    return [*exchanges(given), schedules]


def trains(given: Any) -> list[str]:
    answers = [goes(given, dealt=True), deals("auto", method_of(given), 4, None), goes(given, batch_by_speed=True)]
    return ["yes" if answer else "–" for answer in answers]


def comes_and_goes(given: Any) -> list[str]:
    found = exchanges(given, elastic=True)
    return [] if found[0] == "–" else found


def is_cut_unlike(given: Any) -> list[str]:
    payloads, overlaps, _ = exchanges(given, unlike=(1, 2))
    return [] if payloads == "–" else [payloads, overlaps]


TABLES: dict[str, tuple[str, Callable[[Any], list[str]]]] = {
    "moves": ("| method | payloads | overlap | hierarchy | schedule |", moves),
    "trains": ('| method | `data="dealt"` | `data="auto"` deals | `batch_by_speed` |', trains),
    "comes_and_goes": ("| method, in elastic runs | payloads | overlap | hierarchy |", comes_and_goes),
    "is_cut_unlike": ("| method, with different depths or cuts | payloads | overlap |", is_cut_unlike),
}


def table(header: str, rows: Iterable[Iterable[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([header, "|" + "---|" * (header.count("|") - 1), *lines]) + "\n"


def table_of_combinations(header: str, cells_of: Callable[[Any], list[str]]) -> str:
    """A line for the methods of which the same is true, and for values only where they differ; none for methods that
    go with nothing."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, given in METHODS.items():
        if cells := cells_of(given):
            rows.setdefault(tuple(cells), []).append(name)
    for names in rows.values():
        names[:] = [name for name in names if "(" not in name or f"{name.partition('(')[0]}`" not in names]
    return table(header, ((", ".join(names), *cells) for cells, names in rows.items()))


def first_sentence(kind: type) -> str:
    text = " ".join(str(inspect.getdoc(kind)).split("\n\n")[0].split()).replace("``", "`")
    text = re.sub(r":\w+:`~?([\w.]+\.)?(\w+)`", r"`\2`", text)
    return re.split(r"(?<=;) (?![^(]*\))|(?<=\.) (?=[A-Z`])", text)[0].rstrip(".;")  # not within parentheses


def table_of_policies() -> str:
    rows = [
        (f"`{name}`", ", ".join(f"`{each}`" for each in kind.__struct_fields__), first_sentence(kind))
        for name, kind in registry.BUILT_IN.items()
    ]
    return table("| policy | values | effect |", rows)


def table_of_payloads() -> str:
    """A line for the forms of a payload that take equally many bytes."""
    rows: dict[tuple[str, str], list[str]] = {}
    for words, payload in FORMS.items():
        cells = f"{payload.nbytes(2**20) / 2**20:.3g}", first_sentence(type(payload))
        rows.setdefault(cells, []).append(f"`{words}`")
    return table(
        "| payload | bytes per float32 value | encoding |", ((", ".join(n), *cells) for cells, n in rows.items())
    )


PAGE = DOCS / "combinations.md"


def written() -> str:
    """The page's text with its tables as they have to be."""
    text = PAGE.read_text()
    made = [table_of_combinations(*each) for each in TABLES.values()] + [table_of_policies(), table_of_payloads()]
    for each in made:
        header = each.partition("\n")[0]
        before, found, after = text.partition(f"\n{header}\n")
        assert found, f"{PAGE.name} has no table that begins with {header}"
        below = dropwhile(lambda line: line.startswith("|"), after.splitlines(keepends=True))
        text = f"{before}\n{each}{''.join(below)}"
    return text


def test_the_tables_of_the_docs_are_what_the_check_says() -> None:
    assert PAGE.read_text() == written(), "write them anew: python -m tests.sync.test_capabilities"


def test_unlike_pipelines_go_with_what_needs_no_replicas_of_a_stage() -> None:
    for given in METHODS.values():
        assert goes(given, unlike=(1, 2)) == (capabilities_of(given).unlike is not None)
    assert goes(ADPSGD(), unlike=(1, 2))
    assert not any(goes(each, unlike=(1, 2)) for each in (ADPSGD(asynchronous=True), DiLoCo(), PHDPSGD(), OwnMethod()))


@pytest.mark.parametrize("policy", [each for each in examples() if isinstance(each, PolicyConfig)], ids=str)
def test_the_workers_half_of_every_policy_is_where_it_says(policy: PolicyConfig) -> None:
    module, _, name = policy.half.partition(":")
    assert callable(getattr(import_module(module), name))


def test_a_method_of_ones_own_goes_with_what_it_says() -> None:
    exchange = Exchange(OneBit())
    SDPipeStrategy(sync=ForEightBits(), exchange=exchange, data="dealt")
    assert deals("auto", ForEightBits(), 4, None)
    for asked, said in (
        (
            {"sync": OwnMethod(), "exchange": exchange},
            r"exchange=.*sync=OwnMethod\(.*\): how few.* Use Full\(\), or sync=",
        ),
        (
            {"sync": ForEightBits(), "exchange": Exchange(overlap="step")},
            "Use overlap='none', or sync=SemiDecentralized",
        ),
        ({"sync": OwnMethod(), "data": "dealt"}, "leave their groups and come back.*Use data='sharded'"),
        ({"sync": ForEightBits(), "batch_by_speed": True}, r"take each step together.* or sync=AllReduce\(\)\."),
        (
            {"sync": ForEightBits(PartialReduce()), "schedule": "pipedream", "num_stages": 2},
            "schedule='pipedream' with num_stages=2 does not go with .*Use schedule='1f1b', or sync=AllReduce",
        ),
    ):
        with pytest.raises(ConfigurationError, match=said):
            SDPipeStrategy(**asked)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"does not work in an elastic run.*members that are lost"):
        check(ForEightBits(), Combination(ForEightBits(), elastic=True))


OFF_DEFAULT: list[dict[str, Any]] = [
    *({"exchange": {"payload": payload}} for name, payload in PAYLOADS.items() if name != "`Full`"),
    *({"exchange": {"overlap": overlap}} for overlap in ("step", "free")),
    {"exchange": {"hierarchy": "hosts"}},
    {"schedule": "pipedream"},
    {"dealt": True},
    {"batch_by_speed": True},
    {"elastic": True},
    {"elastic": True, "accumulate_grad_batches": 2},
    {"unlike": (1, 2)},
]
WALKED = [
    *METHODS.values(),
    AllReduce(weights="samples"),
    Decentralized("ring", every=2),
    DiLoCo(weights="samples"),
    DiLoCo(delay=4),
    DiLoCo(fragments=2),
    DiLoCo(delay=1, mix=0.5),
    DiLoCo(every=1),
    PHDPSGD(within="models"),
    PHDPSGD(groups=((0, 1), (2, 3))),
]


@pytest.mark.parametrize("given", WALKED, ids=lambda given: type(given).__name__)
def test_every_refusal_offers_what_is_accepted(given: Any) -> None:
    """The values that it names are in the dimension's words, and the methods take all of what was asked."""
    for one, other in combinations_with_replacement([{}, *OFF_DEFAULT], 2):
        if {"elastic", "unlike"} <= {*one, *other}:
            continue  # an elastic run is one pipeline
        exchange = Exchange(**{**one.get("exchange", {}), **other.get("exchange", {})})
        asked = Combination(given, num_stages=2, **{**one, **other, "exchange": exchange})
        found = list(refusals(capabilities_of(method_for(asked)), asked))
        for refusal in found:
            known = WORDS.get(refusal.dimension, {}).keys() | {"auto", "by_speed", "several"}
            if refusal.dimension == "payloads":
                known = {kind for payload in FORMS.values() for kind in payload.kinds}
            assert refusal.takes <= known
        if found:
            offered = alternatives(asked)
            for words in offered:
                method = eval(words, vars(sync))
                check(method_of(method), replace(asked, sync=method))
            with pytest.raises(ConfigurationError, match=re.escape(SENTENCES[found[0].why]) + r"\. Use ") as told:
                check(method_for(asked), asked)
            assert found[0].takes or offered or "one or the other" in str(told.value)


def write() -> None:
    PAGE.write_text(written())


if __name__ == "__main__":
    from tests.sync import test_capabilities  # where the registry finds the policy

    test_capabilities.write()
