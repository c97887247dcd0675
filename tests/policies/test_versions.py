"""The vectors of versions against what they stand for: which steps a model contains."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.policies.versions import Versions

SIZE = 4
nodes = st.integers(0, SIZE - 1)
changes = st.lists(
    st.one_of(
        st.tuples(st.just("step"), nodes),
        st.tuples(st.just("meet"), st.sets(nodes, min_size=2)),
    ),
    max_size=60,
)


def started(bound: int | None = None, size: int = SIZE) -> Versions:
    versions = Versions(size, bound)
    for node in range(size):
        versions.joins(node)
    return versions


def contents(history: list[tuple[str, object]]) -> list[set[tuple[int, int]]]:
    """The steps of whom each model contains, as (node, number)."""
    models: list[set[tuple[int, int]]] = [set() for _ in range(SIZE)]
    steps = [0] * SIZE
    for kind, what in history:
        if kind == "step":
            assert isinstance(what, int)
            steps[what] += 1
            models[what].add((what, steps[what]))
        else:
            assert isinstance(what, set)
            together = set().union(*(models[node] for node in what))
            for node in what:
                models[node] = set(together)
    return models


@given(changes)
def test_a_vector_names_the_newest_steps_that_a_model_contains(told: list[tuple[str, object]]) -> None:
    versions, history = started(bound=10**6), list[tuple[str, object]]()
    for kind, what in told:
        history.append((kind, what))
        if kind == "step":
            versions.stepped(what)  # type: ignore[arg-type]
        else:
            versions.met(what)  # type: ignore[arg-type]
        models = contents(history)
        for k in range(SIZE):
            for i in range(SIZE):
                assert versions.contained(k, i) == max((n for node, n in models[k] if node == i), default=0)


def test_who_is_behind_a_node_that_would_begin_its_next_step() -> None:
    versions = started(bound=2)
    versions.stepped(0)
    assert versions.behind(0) == set(), "the others lack one step, and would lack two"
    versions.stepped(0)
    assert versions.behind(0) == {1, 2, 3}
    versions.met([0, 1])
    assert versions.behind(0) == {2, 3}
    assert versions.behind(0, after=[2]) == {3}
    versions.leaves(3)
    assert versions.behind(0) == {2}
    assert versions.lag == 2
    versions.met([1, 2])
    assert versions.behind(0) == set(), "2 has it from 1"


def test_one_that_computes_contains_it_from_the_end_of_its_step_on() -> None:
    versions = started(bound=1, size=2)
    versions.stepped(0)
    versions.met([0], computing=[1])
    assert versions.behind(0) == {1}
    versions.stepped(1)
    assert versions.behind(0) == set()
    assert versions.behind(1) == {0}, "0 has what 1 published, not the step it was in"


def test_who_returns_has_its_own_model_and_who_was_lost_perhaps_another() -> None:
    versions = started(bound=8, size=3)
    versions.stepped(0)
    versions.met([0, 1])
    versions.leaves(1)
    versions.joins(1)
    assert versions.contained(1, of=0) == 1
    versions.leaves(1, lost=True)
    versions.joins(1)
    assert versions.contained(1, of=0) == 0, "it may come with the model of 2"


def test_a_newcomer_may_have_the_model_of_anybody() -> None:
    versions = Versions(3, 8)
    versions.joins(0)
    versions.joins(1)
    versions.stepped(0)
    versions.stepped(1)
    versions.joins(2)
    assert (versions.contained(2, of=0), versions.contained(2, of=1)) == (0, 0)
    alone = Versions(2, 8)
    alone.joins(0)
    alone.stepped(0)
    alone.leaves(0)
    alone.joins(1)
    assert alone.contained(1, of=0) == 1, "it comes where nobody trains: all are equal"


def test_after_a_restart_every_model_may_be_as_old_as_the_bound_allows() -> None:
    versions = Versions(2, 3)
    versions.joins(0)
    versions.doubted()
    versions.joins(1)
    assert versions.lag == 3
    versions.stepped(0)
    assert versions.behind(0) == {1}


def test_without_a_bound_only_steps_are_counted() -> None:
    versions = started(bound=None)
    versions.stepped(2)
    versions.met([0, 1])
    versions.doubted()
    assert [versions.steps(node) for node in range(SIZE)] == [0, 0, 1, 0]
    assert versions.behind(2) == set()


@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "lose", "step", "meet"]), st.integers(0, 5), nodes)))
def test_a_newcomer_has_the_least_that_anybody_has(told: list[tuple[str, int, int]]) -> None:
    versions, active, known = Versions(6, 10**6), set[int](), set[int]()
    for kind, node, other in told:
        if kind == "join" and node not in active:
            steps, fresh = versions.steps(node), node not in known
            least = [min((versions.contained(k, i) for k in active), default=versions.steps(i)) for i in range(6)]
            versions.joins(node)
            if fresh:
                assert [versions.contained(node, i) for i in range(6)] == [*least[:node], steps, *least[node + 1 :]]
            active.add(node)
            known.add(node)
        elif kind in ("leave", "lose") and node in active:
            versions.leaves(node, lost=kind == "lose")
            active.remove(node)
        elif kind == "step" and node in active:
            versions.stepped(node)
        elif kind == "meet" and {node, other} <= active and node != other:
            versions.met([node], computing=[other])
