"""The newest versions with which ``make versions`` has passed."""

from __future__ import annotations

import re

VERSION = "0.1.0"
"""This package's version."""

NEWEST = {"python": (3, 13), "torch": (2, 15), "lightning": (2, 6)}
"""The newest tested versions, by their first two numbers."""


def verdict(package: str, version: str) -> str:
    """Return ``"tested"`` or ``"newer than tested"`` for a version of ``package`` such as ``"2.9.1+cpu"``; empty for a
    package that is not in :data:`NEWEST`."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if package not in NEWEST or numbers is None:
        return ""
    return "newer than tested" if tuple(map(int, numbers.groups())) > NEWEST[package] else "tested"


def warning(**versions: str) -> str | None:
    """Return a warning that names those ``versions`` of packages that are newer than tested, or None."""
    newer = [f"{name} {version}" for name, version in versions.items() if verdict(name, version).startswith("newer")]
    if not newer:
        return None
    known = ", ".join(f"{name} {'.'.join(map(str, NEWEST[name]))}" for name in versions)
    return (
        f"{' and '.join(newer)} {'is' if len(newer) == 1 else 'are'} newer than what SDPipeStrategy was tested with "
        f"({known} at most). It may work; if it does not, try those, and report it with what `sdpipe env` prints."
    )
