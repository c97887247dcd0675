"""Which package may import which: no arrow of docs/architecture.md runs back up, and none in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_sdpipe

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


@cache
def modules() -> dict[str, Path]:
    """By their names without the package's."""
    paths = [path for path in sorted(ROOT.rglob("*.py")) if "conf" not in path.relative_to(ROOT).parts[:1]]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def layer(name: str) -> str:
    """Of :data:`HOUSE`, the longest that a module's name begins with."""
    return max((each for each in HOUSE if f"{name}.".startswith(f"{each}.")), key=len, default=name)


def imports(path: Path, everywhere: bool) -> Iterator[str]:
    """Modules of the package that one imports: wherever it does, or when it is imported itself."""
    known, tree = modules(), ast.parse(path.read_text())
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("lightning_sdpipe.") in known else node.module for name in whole]
        else:
            continue
        for name in names:
            if name.removeprefix("lightning_sdpipe.") in known and name.startswith("lightning_sdpipe."):
                yield name.removeprefix("lightning_sdpipe.")


@pytest.mark.parametrize("package", HOUSE)
def test_no_import_runs_back_up(package: str) -> None:
    above = HOUSE[: HOUSE.index(package)]
    for name, path in modules().items():
        if layer(name) == package and name != "scheduler.__main__":
            for other in imports(path, everywhere=True):
                assert layer(other) not in above, f"{name} imports {other}"


def test_every_package_has_its_place_in_the_house_and_its_line_in_the_docs() -> None:
    names = {name.partition(".")[0] for name in modules()} - {"__init__"}
    assert names == {name.partition(".")[0] for name in HOUSE}
    drawing = ARCHITECTURE.read_text().split("```")[1]
    missing = [name for name in sorted(names) if f"  {name}/" not in drawing and f"{name}.py" not in drawing]
    assert missing == []
