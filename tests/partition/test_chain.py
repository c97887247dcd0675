import pytest
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.chain import find_chain


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.layers = nn.ModuleList([Residual(), Residual(), Residual()])
        self.norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(4, 2)


def test_every_child_of_a_sequential_is_a_block_and_nested_ones_are_opened() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert find_chain(model) == ("0", "1", "2.0", "2.1")


def test_the_module_that_holds_most_is_opened_and_residual_blocks_are_not() -> None:
    assert find_chain(Model()) == (
        "encoder.embedding",
        "encoder.layers.0",
        "encoder.layers.1",
        "encoder.layers.2",
        "encoder.norm",
        "head",
    )


def test_blocks_can_be_named() -> None:
    names = ["encoder.embedding", "encoder.layers.*", "head"]
    assert find_chain(Model(), names) == (
        "encoder.embedding",
        "encoder.layers.0",
        "encoder.layers.1",
        "encoder.layers.2",
        "head",
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["encoder.layer.*"], "has no such module.*encoder.layers"),
        (["head", "head"], "twice"),
        (["encoder", "encoder.norm"], "within another"),
    ],
)
def test_wrong_names_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_chain(Model(), names)


def test_a_module_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="No chain of blocks was found in Module"):
        find_chain(nn.Module())
