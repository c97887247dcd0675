"""The error for a data set that was not found."""

from __future__ import annotations

from pathlib import Path


class MissingDataError(FileNotFoundError):
    """A data set was not found; the message says where it was looked for and how to get it."""

    def __init__(self, name: str, looked_for: str | Path, remedy: str) -> None:
        super().__init__(f"{name} was not found: looked for {looked_for}. {remedy}")
