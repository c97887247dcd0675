"""A state on its way from a donor to a newcomer, over gloo between threads."""

from __future__ import annotations

import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.worker.elastic import state_transfer
from tests import relay
from tests.patience import until

SOON = timedelta(minutes=10)


class Unknown:
    """No process takes its objects from another one."""


class Broken:
    def __reduce__(self) -> Any:
        raise ArithmeticError("half\nof it")


def given(state: dict[str, Any]) -> dict[str, Any]:
    store = dist.HashStore()
    state_transfer.send_state(state, store, SOON)
    return state_transfer.receive_state(store, SOON, "pipeline 3")


def test_a_newcomer_gets_what_the_donor_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "_CHUNK", 100)
    state = given({"weights": torch.arange(50.0), "epoch": 4, "names": ["a"]})
    assert torch.equal(state.pop("weights"), torch.arange(50.0))
    assert state == {"epoch": 4, "names": ["a"]}


@pytest.mark.parametrize(
    ("kept", "reason"),
    [(lambda: 0, r"<lambda>"), ((number for number in range(3)), "generator"), (Broken(), "ArithmeticError: half")],
)
def test_a_state_that_cannot_be_sent_is_refused_where_it_is_waited_for(
    kept: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigurationError, match=rf"of pipeline 3 holds objects that cannot be sent: .*{reason}.* Let"):
        given({"callbacks": {"Mine": kept}})
    assert "a newcomer did not get the state" in caplog.text, "the donor goes on, and says so"


def test_objects_that_are_not_taken_from_others_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"not taken from another process: .* Let callbacks"):
        given({"callbacks": {"Mine": Unknown()}})


def test_a_donor_that_sends_late_is_waited_for_longer_than_one_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_transfer, "CONNECTING", timedelta(seconds=2))
    packs = state_transfer._pack

    def packs_long(state: Any) -> Any:
        time.sleep(3)
        return packs(state)

    monkeypatch.setattr(state_transfer, "_pack", packs_long)
    assert given({"epoch": 4}) == {"epoch": 4}


def test_a_connection_that_is_lost_amid_a_part_ends_the_transfer_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gloo itself would go on waiting until the timeout, and the donor would keep its copy of the state until then."""
    monkeypatch.setattr(state_transfer, "_CHUNK", 2**25)  # more than a network holds
    state = {"weights": torch.ones(state_transfer._CHUNK // 2)}  # two parts
    kept = weakref.ref(state["weights"])
    with relay.lost_after(state_transfer._CHUNK + 10**6, sender=0) as groups:
        monkeypatch.setattr(state_transfer, "_connect", lambda _, rank: groups[rank])
        began = time.monotonic()
        state_transfer.send_state(state, dist.HashStore(), SOON)
        del state
        with pytest.raises(WorkerFailedError, match=r"pipeline 3 did not give its state: .* was broken off"):
            state_transfer.receive_state(dist.HashStore(), SOON, "pipeline 3")
        while kept() is not None:
            assert time.monotonic() - began < SOON.total_seconds() / 2
            time.sleep(0.01)
        assert time.monotonic() - began < SOON.total_seconds() / 2
    assert "exchanging with the newcomer" in caplog.text


def test_a_donor_that_is_not_needed_any_more_is_not_waited_for() -> None:
    store, needless, groups = dist.HashStore(), threading.Event(), list[Any]()

    def give_nothing() -> None:
        groups.append(dist.ProcessGroupGloo(store, 0, 2, state_transfer.CONNECTING))
        needless.set()

    threading.Thread(target=give_nothing).start()
    began = time.monotonic()
    with pytest.raises(WorkerFailedError, match="pipeline 3 need no longer give its state"):
        state_transfer.receive_state(store, SOON, "pipeline 3", needless.is_set)
    assert time.monotonic() - began < SOON.total_seconds() / 2


def test_a_donor_keeps_the_connection_until_the_newcomer_has_all() -> None:
    """Over a slow link much of the state is still on its way when all of it is sent."""
    store, before = dist.HashStore(), {*threading.enumerate()}
    state_transfer.send_state({"epoch": 4}, store, SOON)
    (donation,) = (thread for thread in {*threading.enumerate()} - before if thread.name == "donation")
    take = state_transfer._Peer("pipeline 3", 1, store, SOON, p2p.Connections())
    size, _ = take.move(take.group.recv, torch.zeros(2, dtype=torch.int64)).tolist()
    take.move(take.group.recv, torch.empty(size, dtype=torch.uint8))
    donation.join(0.2)
    assert donation.is_alive()
    take.move(take.group.send, torch.ones(1))
    until(lambda: not donation.is_alive())


def test_a_newcomer_that_has_all_needs_its_donor_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = state_transfer._Peer.move

    def with_a_donor_that_ends(peer: Any, begin: Any, part: torch.Tensor) -> torch.Tensor:
        if peer._name == "pipeline 3" and begin == peer.group.send:
            raise WorkerFailedError("it has ended")
        return moves(peer, begin, part)

    monkeypatch.setattr(state_transfer._Peer, "move", with_a_donor_that_ends)
    assert given({"epoch": 4}) == {"epoch": 4}
