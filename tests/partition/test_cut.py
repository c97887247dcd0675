import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.plan import cut


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_uniform_cut_covers_the_chain_evenly(blocks: int, stages: int) -> None:
    if stages > blocks:
        with pytest.raises(ConfigurationError, match=f"at most {blocks}, or name"):
            cut(blocks, stages)
        return
    spans = cut(blocks, stages)
    assert [block for span in spans for block in span] == list(range(blocks))
    sizes = [len(span) for span in spans]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("partition", [[3, 3], [5], [5, 0]])
def test_a_partition_that_does_not_fit_is_refused(partition: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="partition="):
        cut(5, 2, partition)
