"""What a checkpoint of the middle of an epoch is refused with."""

from __future__ import annotations

import pytest

from lightning_sdpipe.trainer.split import Split, refuse_other_split


@pytest.mark.parametrize(
    ("before", "described"),
    [
        ([2, 24, 4], "2 pipelines × 24 batches of 4"),
        ([2, 24, 0], "2 pipelines × 24 batches"),
        ([2, 24], "data that another version has counted ([2, 24])"),
        (None, "data that nobody has counted"),
    ],
)
def test_both_splits_and_what_to_do(before: Split | None, described: str) -> None:
    said = str(refuse_other_split(before, [4, 12, 4]))
    assert f"epoch of {described}, and this run has 4 pipelines × 12 batches of 4" in said
    assert "Resume with the same number of pipelines, batch size and data, or from the end of an epoch." in said
