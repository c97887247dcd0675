"""A test that hangs is found, one that works is waited for, and tests of timing have twins without a clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import QUIET

ROOT = Path(__file__).parents[1]
TESTS = """
import subprocess, sys, pytest

pytestmark = pytest.mark.silent(3)

def test_hangs():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"])

def test_works():
    code = "import time\\nwhile time.process_time() < 4: sum(range(1000))"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


@pytest.mark.distributed
def test_what_hangs_is_found_with_all_stacks_and_what_works_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "test_both.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = silent")
    command = [sys.executable, "-m", "pytest", "-p", "tests.patience", "-p", "no:xdist", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "stuck: used 0." in done.stdout
    assert "in call of test_both.py::test_hangs" in done.stdout
    assert 'File "<string>", line 1' in done.stdout, "where the child was"


def test_tests_of_timing_have_twins() -> None:
    assert len(QUIET) <= 10
    for name in (*QUIET, *QUIET.values()):
        file, _, function = name.partition("::")
        assert f"def {function}" in (ROOT / file).read_text(), name
