import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.pipeline.micro_batches import split


@given(st.integers(1, 40), st.integers(1, 8))
def test_a_split_keeps_every_sample_once(size: int, count: int) -> None:
    batch = {"x": torch.arange(size), "scale": torch.tensor(3.0)}
    if size < count:
        with pytest.raises(ConfigurationError, match=f"batch of {size} samples.*num_micro_batches={count}"):
            split(batch, count)
        return
    parts = split(batch, count)
    assert torch.equal(torch.cat([part.batch["x"] for part in parts]), batch["x"])
    assert all(part.batch["scale"] is batch["scale"] for part in parts)
    assert [part.size for part in parts] == [len(part.batch["x"]) for part in parts]
    assert sum(part.weight for part in parts) == pytest.approx(1)
    assert len({part.signature for part in parts}) == len({part.size for part in parts})
