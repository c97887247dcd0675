"""Cost and gain of exchanging models: writing and reading messages, and training over slow links."""

from __future__ import annotations

from functools import partial

from recipes.suites.exchange import ablations, busy_link, codecs, copies, slow_links, slow_trainings
from recipes.suites.ratios import run_parts

LOWER_IS_BETTER = frozenset({"codec"})
run = partial(
    run_parts,
    "exchange",
    {
        "codecs": codecs.measure,
        "copies": copies.measure,
        "slow_links": slow_links.measure,
        "ablations": ablations.measure,
        "slow_trainings": slow_trainings.measure,
        "busy_link": busy_link.measure,
    },
)
