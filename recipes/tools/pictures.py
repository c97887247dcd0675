"""``make pictures``: those of docs/pictures, as headless Chromium shows them.

They are of ``sdpipe demo``, of ``sdpipe status`` on a recorded run, and of a run of recipes/examples/elastic.py in
which a pipeline is killed. Look at them before you commit them.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SDPIPE = [sys.executable, "-m", "lightning_sdpipe.cli"]
SLOW = ROOT / "tests/seeing/golden/straggler.jsonl"
SEEN = 30.0
"""Seconds of training before each picture."""


def main() -> None:
    """Make them."""
    parser = argparse.ArgumentParser(prog="recipes.tools.pictures", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--without-demo", action="store_true", help="only the pages")
    parser.add_argument(
        "--for", dest="seconds", type=float, default=180.0, help="seconds of training; more if it is busy"
    )
    options = parser.parse_args()
    output = options.output.resolve()
    if shutil.which("chromium") is None:
        parser.exit(2, "chromium is missing: apt-get install chromium\n")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if not options.without_demo:
            subprocess.run([*SDPIPE, "demo"], check=True)
            shutil.copy("sdpipe-demo.png", output / "demo.png")
        _status(output)
        _elastic(output, options.seconds)


def _status(output: Path) -> None:
    shown = subprocess.run([*SDPIPE, "status", str(SLOW)], check=True, capture_output=True, text=True).stdout
    style = "margin: 0; padding: 1em; background: #1e1e1e; color: #ddd; font: 15px monospace; white-space: pre-wrap"
    Path("status.html").write_text(f'<meta charset="utf-8"><body style="{style}">{html.escape(shown)}</body>')
    _picture(Path("status.html").resolve().as_uri(), output / "status.png", 1180, 260)


def _elastic(output: Path, seconds: float) -> None:
    script = str(ROOT / "recipes/examples/elastic.py")
    with Path("printed").open("wb") as printed:
        run = subprocess.Popen(
            [*SDPIPE, "run", "--pipelines", "2", "--logs", "logs", script, str(seconds)], stdout=printed, stderr=printed
        )
    _until(lambda: _said("all 2 pipelines train"), run)
    (address,) = re.findall(r"scheduler at (\S+);", Path("printed").read_text(errors="replace"))
    serving = subprocess.Popen([*SDPIPE, "serve", address, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        page = serving.stdout.readline().split()[0]
        time.sleep(SEEN)
        _picture(page, output / "page-healthy.png")
        pids = re.findall(r"pipeline 1 is process (\d+)", Path("printed").read_text(errors="replace"))
        os.kill(int(pids[-1]), signal.SIGKILL)
        time.sleep(SEEN / 10)
        _picture(page, output / "page-lost.png")
        _until(lambda: _said("is back"), run)
        run.wait()
        time.sleep(SEEN / 10)
        _picture(page, output / "page-finished.png")
        _picture(page, output / "page-narrow.png", 400)
    finally:
        serving.kill()
        serving.wait()
        run.terminate()
        run.wait()
    subprocess.run([*SDPIPE, "report", "logs/scheduler.jsonl"], check=True)
    _picture(Path("report.html").resolve().as_uri(), output / "report.png")


def _until(true: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    while not true():
        if run.poll() is not None:
            sys.exit(f"the run ended too early:\n{Path('printed').read_text(errors='replace')}")
        time.sleep(0.5)


def _said(words: str) -> bool:
    return words in Path("printed").read_text(errors="replace")


def _picture(url: str, file: Path, width: int = 1280, height: int = 800) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=1000"]
    command = ["chromium", *options, f"--window-size={width},{height}", f"--screenshot={file}", url]
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    main()
