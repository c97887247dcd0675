"""The picture of a training."""

from __future__ import annotations

from pathlib import Path

from recipes.suites.figures import plot


def test_losses_and_accuracies_have_panels_of_their_own(tmp_path: Path) -> None:
    rows = [{"what": "train loss", "steps": step, "loss": loss} for step, loss in ((1, 2.0), (2, 1.5))]
    rows += [{"what": "val loss", "steps": 2, "loss": 1.6}, {"what": "val accuracy", "steps": 2, "accuracy": 0.5}]
    plot(rows, tmp_path / "curve.svg", x="steps", y=["loss", "accuracy"], kinds=(".svg",))
    text = (tmp_path / "curve.svg").read_text()
    for label in ("train loss", "val loss", "val accuracy", "steps", "loss", "accuracy"):
        assert f"<!-- {label} -->" in text
