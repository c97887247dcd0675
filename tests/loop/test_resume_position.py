"""Where a run goes on within an epoch, and what it is told where that is not known."""

from __future__ import annotations

import pytest

from lightning_sdpipe.loop.batch_source import Split, place_in, refuse_other_split


@pytest.mark.parametrize(
    ("before", "described"),
    [
        ([2, 24, 4], "2 pipelines × 24 batches of 4"),
        ([2, 24, 0], "2 pipelines × 24 batches"),
        ([2, 24], "data that another version has counted ([2, 24])"),
        (None, "data that were not counted"),
    ],
)
def test_both_splits_and_what_to_do(before: Split | None, described: str) -> None:
    said = str(refuse_other_split(before, [4, 12, 4]))
    assert f"epoch of {described}, and this run has 4 pipelines × 12 batches of 4" in said
    assert "Resume with the same data, and with the same batch size and number of pipelines if" in said


@pytest.mark.parametrize(
    ("now", "before", "done", "number"),
    [
        ([4, 6, 2], [2, 12, 2], 8, 4),
        ([1, 24, 2], [2, 12, 2], 5, 10),
        ([3, 8, 2], [2, 12, 2], 6, 4),
        ([3, 8, 2], [2, 12, 2], 8, 5),  # 16 batches are done, of which one is trained again
        ([4, 7, 2], [2, 13, 2], 8, 4),  # what is padded differs
        ([4, 3, 4], [2, 12, 2], 8, 2),
        ([4, 6, 4], [2, 12, 2], 8, None),  # other data
        ([4, 6, 0], [2, 12, 0], 8, None),
        ([4, 12, 2], [2, 12, 2], 8, None),
        ([4, 6, 2], [2, 12], 8, None),
        ([4, 6, 2], None, 8, None),
        (None, [2, 12, 2], 8, None),
    ],
)
def test_where_other_pipelines_go_on(now: Split | None, before: Split | None, done: int, number: int | None) -> None:
    assert place_in(now, before, done) == number
