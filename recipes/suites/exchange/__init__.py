"""Cost and gain of exchanging models: encoding and decoding messages, and training over slow links."""

from __future__ import annotations

from functools import partial

from recipes.suites.exchange import averages, busy_link, codecs, copies, slow_trainings
from recipes.suites.grid import Parts, run_parts

LOWER_IS_BETTER = frozenset({"codec"})
PARTS: Parts = {
    "codecs": codecs.measure,
    "copies": copies.measure,
    "slow_links": averages.measure_slow_links,
    "ablations": averages.measure_ablations,
    "slow_trainings": slow_trainings.measure,
    "busy_link": busy_link.measure,
}
run = partial(run_parts, "exchange", PARTS)
