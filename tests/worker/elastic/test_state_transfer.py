"""A state on its way from a donor to a newcomer, over gloo between threads."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.worker.elastic import state_transfer

SOON = timedelta(seconds=20)


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
    [
        (lambda: 0, r"<lambda>"),
        ((number for number in range(3)), "generator"),
        (Broken(), "ArithmeticError: half"),
    ],
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
