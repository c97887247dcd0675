"""Measurements that survive an interruption: each finished one is a line of a file, found again by what was asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recipes.suites.ratios import Row

_ROOT = Path(__file__).parents[2]


class Journal:
    """Finished measurements by their parameters.

    A measurement is known again if its parameters, the ``setting`` (versions, machine) and the source code are the
    same.

    Args:
        path: of the file, which is made on first use; None to forget everything.
        setting: what else a result depends on.
    """

    def __init__(self, path: Path | None, setting: Mapping[str, Any]) -> None:
        self._path = path
        self._setting = {**setting, "source": source_digest()}
        self._rows: dict[str, Row] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                entry = _entry(line)
                if entry is not None and entry["setting"] == self._setting:
                    self._rows[_key(entry["asked"])] = entry["row"]

    def measured(self, asked: Mapping[str, Any], measure: Callable[[], Row]) -> Row:
        """The row of an earlier run that asked the same, or else what ``measure`` returns, which is kept.

        Args:
            asked: everything that determines the measurement, as plain values.
            measure: its row must be plain values too.
        """
        key = _key(asked)
        if key not in self._rows:
            row = measure()
            if self._path is not None:
                with self._path.open("a") as file:
                    entry = json.dumps({"asked": asked, "setting": self._setting, "row": row})
                    file.write(f"\n{entry}")  # on a line of its own, even after one that was cut short
            self._rows[key] = row
        return self._rows[key]


def source_digest() -> str:
    """Return a digest of the code of the package, the recipes and their configuration."""
    digest = hashlib.sha256()
    for directory, pattern in (("lightning_sdpipe", "*.py"), ("recipes", "*.py"), ("conf", "*.yaml")):
        for file in sorted((_ROOT / directory).rglob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _key(asked: Mapping[str, Any]) -> str:
    return json.dumps(asked, sort_keys=True)


def _entry(line: str) -> Any:
    """None for an empty line, and for one that an interruption cut short."""
    try:
        return json.loads(line)
    except ValueError:
        return None
