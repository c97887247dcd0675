"""``make versions``: what cannot be had is said to be so, and what tests did is counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recipes.tools import versions


def test_a_python_that_is_not_there_is_not_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "ROWS", (("3.99", "2.9"), ("3.98", "2.9")))
    assert versions.main(["--only", "3.99/2.9", "--folder", str(tmp_path)]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    assert row.startswith("| 3.99 | 2.9 | not available | no Python 3.99 |")


def test_what_tests_do_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text("import pytest\ndef test_good(): pass\n@pytest.mark.skip\ndef test_no(): pass\n")
    run = versions.run(Path(sys.executable), ["-n", "0", str(file)], tmp_path / "log")
    assert run == (True, "1 passed, 1 skipped")
    file.write_text("def test_bad(): assert False\n")
    assert versions.run(Path(sys.executable), ["-n", "0", str(file)], tmp_path / "log") == (False, "1 failed")


def test_each_file_of_the_sample_is_there() -> None:
    assert [path for path in versions.PROCESSES if not (versions.ROOT / path).is_file()] == []
