"""Which package may import which: no arrow of docs/architecture.md runs back up, and none in a circle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_sdpipe
from tests.test_bars import imports, of_the_package

ROOT = Path(lightning_sdpipe.__file__).parent
ARCHITECTURE = ROOT.parent / "docs" / "architecture.md"

# From the top down: what is further left imports what is further right.
HOUSE = (
    *("cli", "demo", "environment", "supervision", "sweep", "configuration", "check"),
    *("strategy", "worker", "loop", "checkpoints", "sync", "data", "seeing"),
    *("placement", "pipeline", "partition", "exchange", "scheduler", "simulate", "membership", "dealing", "policies"),
    *("optim", "heterogeneity", "topology", "random_streams", "p2p", "lightning_internals", "lightning_results"),
    *("meter", "command_line", "openmp", "tested", "errors"),
)


def layer(name: str) -> str:
    """Of :data:`HOUSE`, the longest that a module's name begins with."""
    return max((each for each in HOUSE if f"{name}.".startswith(f"{each}.")), key=len, default=name)


@pytest.mark.parametrize("package", HOUSE)
def test_no_import_runs_back_up(package: str) -> None:
    above = HOUSE[: HOUSE.index(package)]
    for module in of_the_package():
        name = module.removeprefix("lightning_sdpipe.")
        if layer(name) == package and name != "scheduler.__main__":
            for other in imports(module) & {*of_the_package()}:
                assert layer(other.removeprefix("lightning_sdpipe.")) not in above, f"{name} imports {other}"


def test_every_package_has_its_place_in_the_house_and_its_line_in_the_docs() -> None:
    names = {name.split(".")[1] for name in of_the_package() if "." in name} - {"conf"}
    assert names == {name.partition(".")[0] for name in HOUSE}
    drawing = ARCHITECTURE.read_text().split("```")[1]
    missing = [name for name in sorted(names) if f"  {name}/" not in drawing and f"{name}.py" not in drawing]
    assert missing == []


SIMULATES = """
from lightning_sdpipe.heterogeneity import Delays
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.simulate import Work, simulate
assert not simulate(SemiDecentralized(), Work(2, 2, 5, heterogeneity=Delays(0.1, 1.0))).stuck
"""


@pytest.mark.parametrize(
    ("program", "others"),
    [
        ("import lightning_sdpipe.scheduler.server.process, lightning_sdpipe.scheduler.client.client", {"numpy"}),
        (SIMULATES, {"numpy"}),
        ("from lightning_sdpipe.placement import arrange, cost, matching, model, network, rate, search", set()),
        ("import recipes.baselines.admission", set()),
    ],
)
def test_what_decides_needs_no_torch(program: str, others: set[str]) -> None:
    checks = f"import sys; sys.exit(', '.join({others | {'torch', 'lightning'}} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", f"{program}\n{checks}"], check=True)
