"""A policy's only inputs are events and their times."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lightning_sdpipe

PURE = ("policies", "dealing", "membership")
FILES = sorted(path for room in PURE for path in (Path(lightning_sdpipe.__file__).parent / room).glob("*.py"))
IMPURE = {"time", "datetime", "random", "secrets", "uuid", "os", "socket", "select", "threading", "asyncio"}
HEAVY = {"torch", "lightning", "zmq", "numpy", "networkx"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_policy_imports_no_clock_socket_thread_or_random_source(path: Path) -> None:
    tree = ast.parse(path.read_text())
    at_the_top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            root = name.partition(".")[0]
            assert root not in IMPURE, name
            assert root not in HEAVY or node not in at_the_top, f"{name} is imported before anybody needs it"
            if root == "lightning_sdpipe":
                assert name.startswith((*(f"lightning_sdpipe.{room}" for room in PURE), "lightning_sdpipe.errors")), (
                    name
                )
