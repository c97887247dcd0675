"""The table of docs/lightning.md, made from the tests that are marked: ``python -m tests.features.table`` writes it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import tests.features

Test = TypeVar("Test", bound=Callable[..., None])
OTHERS = ["tests.loop.test_uneven", "tests.worker.launching.test_launching", "tests.worker.test_failures"]
DOCUMENT = Path(__file__).parents[2] / "docs" / "lightning.md"
SHOWN = 6
"""Words of a message that the table shows."""
START, END = "<!-- table -->\n", "<!-- end of table -->\n"


@dataclass(frozen=True)
class Feature:
    area: str
    name: str
    verdict: str  # what the table says: yes, or the error
    note: str


def supported(area: str, name: str, note: str = "") -> Callable[[Test], Test]:
    """Marks a test that shows that ``name`` works."""
    return _marked(Feature(area, name, "yes", note))


def refused(area: str, name: str, error: str, note: str = "") -> Callable[[Test], Test]:
    """Marks a test that shows that ``name`` is refused with ``error``, a part of the message, which it must check."""
    return _marked(Feature(area, name, f"no: “{' '.join(error.split()[:SHOWN])} …”", note))


def _marked(feature: Feature) -> Callable[[Test], Test]:
    def mark(test: Test) -> Test:
        test.__dict__.setdefault("features", []).insert(0, feature)  # decorators run from below
        return test

    return mark


def features() -> Iterator[Feature]:
    """Of all tests of this folder, in the order of the files, then of :data:`OTHERS`; the table has them by area."""
    here = [module.name for module in pkgutil.iter_modules(tests.features.__path__)]
    for name in [*(f"tests.features.{name}" for name in here if name.startswith("test_")), *OTHERS]:
        found = importlib.import_module(name)
        for test in vars(found).values():
            yield from getattr(test, "features", [])


def table() -> str:
    lines = ["| | works | |", "|---|---|---|"]
    found = list(features())
    for area in dict.fromkeys(feature.area for feature in found):
        lines.append(f"| **{area}** | | |")
        lines += [f"| {each.name} | {each.verdict} | {each.note} |" for each in found if each.area == area]
    return "\n".join(lines) + "\n"


def main() -> None:
    text = DOCUMENT.read_text()
    before, after = text.partition(START)[0], text.partition(END)[2]
    DOCUMENT.write_text(f"{before}{START}{table()}{END}{after}")


if __name__ == "__main__":
    main()
