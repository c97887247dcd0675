"""The newest versions that the tests have passed with, by ``make versions``."""

from __future__ import annotations

import re

VERSION = "0.1.0"
"""Of this package."""

NEWEST = {"python": (3, 13), "torch": (2, 15), "lightning": (2, 6)}
"""The first two numbers of each."""


def verdict(package: str, version: str) -> str:
    """Return ``"tested"`` or ``"newer than tested"`` for a version of ``package``, as ``"2.9.1+cpu"``; nothing for a
    package that this module says nothing of."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if package not in NEWEST or numbers is None:
        return ""
    return "newer than tested" if tuple(map(int, numbers.groups())) > NEWEST[package] else "tested"


def warning(**versions: str) -> str | None:
    """Return what a user is told of those ``versions`` of packages that are newer than tested, if there are any."""
    newer = [f"{name} {version}" for name, version in versions.items() if verdict(name, version).startswith("newer")]
    if not newer:
        return None
    known = ", ".join(f"{name} {'.'.join(map(str, NEWEST[name]))}" for name in versions)
    return (
        f"{' and '.join(newer)} {'is' if len(newer) == 1 else 'are'} newer than what SDPipeStrategy was tested with "
        f"({known} at most). It may work; if it does not, try those, and report it with what `sdpipe env` prints."
    )
