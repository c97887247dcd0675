"""What a browser and Prometheus make of a report and of ``sdpipe serve``, where they are installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy
import pytest
from matplotlib.image import imread

from lightning_sdpipe.cli import main
from tests.patience import until
from tests.seeing.test_report import check_losses, with_losses
from tests.seeing.test_serve import at, seen, status
from tests.workers import free_port

__all__ = ["status"]

GOLDEN = Path(__file__).parent / "golden"
SIZE = 1000, 900

pytestmark = pytest.mark.slow
in_a_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium, of the package chromium")
in_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus, of that package")


def browse(url: str, *what: str) -> str:
    """What the browser prints."""
    # no sandbox: in a container, or as root, it does not start
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={SIZE[0]},{SIZE[1]}"]
    done = subprocess.run([*command, "--timeout=15000", *what, url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_picture(path: Path) -> None:
    """It is large, and neither blank nor of one line."""
    picture = (imread(path)[..., :3] * 255).astype(numpy.uint8)
    assert picture.shape[:2] == SIZE[::-1]
    assert len(numpy.unique(picture.reshape(-1, 3), axis=0)) > 20
    assert (picture.min(2) < 200).any(1).sum() > 200, "rows with something dark"


@in_a_browser
def test_a_browser_shows_a_report(tmp_path: Path) -> None:
    assert main(["report", str(GOLDEN / "straggler.jsonl"), "-o", str(tmp_path / "run.html")]) == 0
    url = (tmp_path / "run.html").as_uri()
    assert "1.54 × as slow as its peers (injected): others waited 6.4 % of the time" in browse(url, "--dump-dom")
    browse(url, f"--screenshot={tmp_path / 'report.png'}")
    check_picture(tmp_path / "report.png")


@in_a_browser
def test_a_browser_shows_what_was_lost(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(with_losses())
    check_losses(browse((tmp_path / "page.html").as_uri(), "--dump-dom"))


@in_a_browser
def test_a_browser_shows_a_run(tmp_path: Path, status: Any) -> None:
    with at(seen(status)) as connection:
        url = f"http://{connection.host}:{connection.port}/"
        assert "1.50 × as slow as its peers" in browse(url, "--dump-dom")
        browse(url, f"--screenshot={tmp_path / 'run.png'}")
    check_picture(tmp_path / "run.png")


@contextmanager
def prometheus(directory: Path, target: str) -> Iterator[str]:
    """The address of one that asks ``target`` every second."""
    address = f"127.0.0.1:{free_port()}"
    scrape = {"job_name": "sdpipe", "static_configs": [{"targets": [target]}]}
    config = directory / "prometheus.json"  # YAML, too
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
    options = [f"--config.file={config}", f"--storage.tsdb.path={directory}", f"--web.listen-address={address}"]
    with (directory / "said").open("wb") as said:
        process = subprocess.Popen(["prometheus", *options], stderr=said)
        try:
            yield address
        finally:
            process.terminate()
            process.wait()


def ask(address: str, query: str) -> list[Any]:
    """The samples that it finds, once there are any."""
    url = f"http://{address}/api/v1/query?{urlencode({'query': query})}"

    def found() -> list[Any]:
        with suppress(OSError), urlopen(url) as answer:  # it may not be there yet
            return list(json.load(answer)["data"]["result"])
        return []

    return until(found, lambda: f"{address} has found nothing for {query}")


@in_prometheus
def test_prometheus_has_what_is_served(tmp_path: Path, status: Any) -> None:
    with at(seen(status)) as connection, prometheus(tmp_path, f"{connection.host}:{connection.port}") as address:
        (cost,) = ask(address, 'sdpipe_finding_cost{kind="compute_straggler",who="0.1"}')
        assert ask(address, "up")[0]["value"][1] == "1"
    assert cost["metric"]["job"] == "sdpipe"
    assert float(cost["value"][1]) == pytest.approx(0.15, abs=0.001)
