"""Losses, parameters and decisions of every method stay what they were, to the last bit.

What must change is written anew by ``python -m tests.golden.test_golden``, and the commit says what changed and why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.distributed

EXPECTED = Path(__file__).with_name("expected.json")
ON_ANY_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}


def outcome(directory: Path) -> dict[str, dict[str, Any]]:
    """What every case of one pipeline and of two comes to, each of two stages."""
    command = [sys.executable, "-m", "tests.golden.train", str(directory)]
    run = subprocess.run(command, env=os.environ | ON_ANY_PROCESSOR, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_nothing_has_changed(tmp_path: Path) -> None:
    recorded = json.loads(EXPECTED.read_text())
    if recorded["torch"] != torch.__version__:
        pytest.skip(f"recorded with torch {recorded['torch']}, and this is {torch.__version__}")
    for count, cases in outcome(tmp_path).items():
        expected = recorded[count]
        assert cases.keys() == expected.keys()
        for case, result in cases.items():
            assert result == expected[case], case


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        outcomes = outcome(Path(directory))
    lines = [f'"torch": {json.dumps(torch.__version__)}']
    for count, cases in outcomes.items():
        entries = ",\n".join(f"  {json.dumps(case)}: {json.dumps(result)}" for case, result in cases.items())
        lines.append(f'"{count}": {{\n{entries}\n}}')
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
