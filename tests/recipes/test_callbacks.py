"""The picture of a training."""

from __future__ import annotations

from pathlib import Path

from recipes.callbacks import draw


def test_losses_and_accuracies_have_panels_of_their_own(tmp_path: Path) -> None:
    curves = {"train_loss_step": [(1, 2.0), (2, 1.5)], "val_loss": [(2, 1.6)], "val_accuracy": [(2, 0.5)]}
    draw(curves, tmp_path / "curve.svg")
    text = (tmp_path / "curve.svg").read_text()
    for label in ("train loss", "val loss", "val accuracy", "steps"):
        assert f"<!-- {label} -->" in text
