"""Two neighbouring stages' ends of their cut, in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sdpipe import meter, p2p
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.message import Layout, Message, TensorMeta
from lightning_sdpipe.pipeline.digest import BatchDigest
from lightning_sdpipe.pipeline.link import StageLink


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[StageLink]:
    """Those of stages 0 and 1, whose transfers are over at once."""
    sent: dict[int, deque[Tensor]] = {}

    def send(tensors: Sequence[Tensor], to: int, group: Any, tag: int, peer: str) -> p2p.Transfer:
        sent.setdefault(tag, deque()).extend(tensors)
        return p2p.Transfer(peer)

    def receive(into: Sequence[Tensor], source: int, group: Any, tag: int, peer: str) -> p2p.Transfer:
        for tensor in into:
            found = sent[tag].popleft()
            assert found.shape == tensor.shape, "a transfer of another length"
            tensor.copy_(found)
        return p2p.Transfer(peer, tensors=list(into))

    monkeypatch.setattr(p2p, "send", send)
    monkeypatch.setattr(p2p, "receive", receive)
    group: Any = None
    return [StageLink(group, [0, 1], stage, torch.device("cpu")) for stage in (0, 1)]


def send(link: StageLink) -> None:
    values = [torch.ones(2)]
    link.begin(BatchDigest(values))
    link.send_activations(Message(values, [], Layout((TensorMeta.of(values[0]),), ())), "key")


def receive(link: StageLink) -> list[float]:
    link.begin(BatchDigest([torch.ones(2)]))
    return link.receive_activations("key").tensors[0].tolist()


def test_layers_that_are_frozen_on_both_stages(links: list[StageLink]) -> None:
    for link in links:
        link.tell_freezing()
    for _ in range(2):  # with a header, and with a note
        send(links[0])
        assert receive(links[1]) == [1, 1]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stage", [0, 1])
def test_layers_that_are_frozen_on_one_stage_only(links: list[StageLink], begun: bool, stage: int) -> None:
    if begun:
        send(links[0])
        receive(links[1])
    (send if stage else StageLink.tell_freezing)(links[0])
    with pytest.raises(ConfigurationError, match=rf"changed on stage {stage} .*, and not on stage {1 - stage} "):
        (StageLink.tell_freezing if stage else receive)(links[1])


def test_both_ends_number_the_messages_of_a_lane(links: list[StageLink]) -> None:
    kept = meter.current().kept
    kept.clear()
    for _ in range(2):
        send(links[0])
        receive(links[1])
        links[1].send_gradients([torch.ones(2)], [None])
        links[0].receive_gradients([torch.ones(2)])
        links[1].send_gradients([], [])  # nothing that was sent needs one
        links[0].receive_gradients([])
    marks = [(what, *divmod(number, meter.LANES)) for what, _, number in kept if what < 0]
    down, up = 2, 1
    assert marks == [
        (what, number, lane) for number in (1, 2) for lane in (down, up) for what in (meter.SENT, meter.RECEIVED)
    ]


@pytest.mark.parametrize("used", [[True], [False], [True, False], [False, False]])
def test_tensors_that_were_not_used_get_no_gradient(links: list[StageLink], used: list[bool]) -> None:
    tensors = [torch.zeros(2, 3) for _ in used]
    gradients = [torch.full((2, 3), float(number)) if each else None for number, each in enumerate(used)]
    links[1].send_gradients(tensors, gradients)
    outputs, found = links[0].receive_gradients(tensors)
    assert [id(t) for t in outputs] == [id(t) for t, each in zip(tensors, used, strict=True) if each]
    assert [g.tolist() for g in found] == [g.tolist() for g in gradients if g is not None]
