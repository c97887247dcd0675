"""The outer momentum belongs to parameters, whatever else trains. In threads, beside its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.exchange.buckets import flatten
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.sync import DiLoCo
from lightning_sdpipe.sync.rendezvous import Rendezvous
from lightning_sdpipe.sync.synchronizer import Replica
from tests.exchange.test_group_mean import values
from tests.exchange.threads import Crew, together
from tests.patience import limit
from tests.sync.stage import Office, Places

N, SIZES = 2, (6, 6, 5)
PHASES = [(0,), (1,), (0,), (0, 1, 2), (1, 2), (0, 1)]
"""Which parameters train from one pause to the next; the first two are of one size."""
UPDATES = 4  # in each phase: two rounds


def update(pipeline: int, phase: int, number: int, parameter: int) -> Tensor:
    return 0.1 * values(1000 * phase + 100 * number + 10 * parameter + pipeline, SIZES[parameter])


def expected(fragments: int) -> list[Tensor]:
    """What Nesterov's momentum makes of the mean of what pipelines have moved by, element by element."""
    bases = [values(p, size) for p, size in enumerate(SIZES)]
    momenta, moved = ([torch.zeros(size) for size in SIZES] for _ in range(2))
    for phase, trained in enumerate(PHASES):
        order = torch.tensor_split(torch.cat([torch.full((SIZES[p],), p) for p in trained]), fragments)
        places = torch.tensor_split(torch.cat([torch.arange(SIZES[p]) for p in trained]), fragments)
        for number in range(UPDATES):
            for p in trained:
                moved[p] += torch.stack([update(i, phase, number, p) for i in range(N)]).mean(0)
            for fragment in range(fragments):
                if (number + 1) % 2 == (fragment + 1) * 2 // fragments % 2 or number == UPDATES - 1:
                    for p in trained:
                        here = places[fragment][order[fragment] == p]
                        momenta[p][here] = 0.9 * momenta[p][here] + moved[p][here]
                        bases[p][here] += 0.7 * (moved[p][here] + 0.9 * momenta[p][here])
                        moved[p][here] = 0
    return bases


@pytest.mark.parametrize("fragments", [1, 2])
def test_layers_that_train_in_turn_have_momenta_of_their_own(fragments: int) -> None:
    """Loaded ones likewise, between the phases, as from a checkpoint."""
    method = DiLoCo(every=2, fragments=fragments)
    crews, office = (Crew(N), Crew(N)), Office(method.policy, N)

    def work(rank: int) -> tuple[int, list[Tensor]]:
        places: Any = Places(*crews, rank)
        client: Any = office.clients[places.mesh.locate(rank)[1]]
        parameters = [nn.Parameter(values(p, size)) for p, size in enumerate(SIZES)]
        buckets: list[Any] = []
        replica = Replica(client, places, buckets, [], [], limit(), exchange=Exchange())
        sync: Any = method.build(replica)
        rendezvous, updates = Rendezvous(sync), 0
        for phase, trained in enumerate(PHASES):
            for p, parameter in enumerate(parameters):
                parameter.requires_grad_(p in trained)
            buckets[:] = flatten(parameters)
            if phase == 4:
                saved = sync.parameter_states()
                sync = method.build(replica)
                sync.load_parameter_states(saved)
                rendezvous = Rendezvous(sync)
            rendezvous.join()
            for number in range(UPDATES):
                sync.announce(updates)
                for p in trained:
                    parameters[p].data.add_(update(replica.pipeline, phase, number, p))
                sync.synchronise()
                updates += 1
            rendezvous.pause(position=updates)
        return replica.pipeline, [parameter.detach() for parameter in parameters]

    outcomes = together(N, work)
    for _, parameters in outcomes:
        for found, wanted in zip(parameters, expected(fragments), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
