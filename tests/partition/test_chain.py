import pytest
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.chain import find_chains
from lightning_sdpipe.partition.pipeline_cut import PipelineCut
from lightning_sdpipe.partition.plan import check


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
    assert next(find_chains(model)) == ("0", "1", "2.0", "2.1")


def test_blocks_can_be_named() -> None:
    names = ["encoder.embedding", "encoder.layers.*", "head"]
    assert next(find_chains(Model(), names)) == (
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
        next(find_chains(Model(), names))


class Plain(nn.Module):
    """Neither it nor a part of it has a container."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 8)
        self.middle = Parts()
        self.exit = nn.Linear(8, 2)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(8, 8)
        self.activation = nn.ReLU()
        self.up = nn.Linear(8, 8)


def test_without_containers_modules_are_blocks_and_the_largest_one_can_be_opened() -> None:
    finer = ("entry", "middle.down", "middle.up", "exit")
    assert list(find_chains(Plain())) == [("entry", "middle", "exit"), finer]
    check(Plain(), None, [PipelineCut(4)])


def test_a_model_that_is_one_module_is_opened() -> None:
    model = nn.Module()
    model.net = Plain()
    finer = ("net.entry", "net.middle.down", "net.middle.up", "net.exit")
    assert list(find_chains(model)) == [finer]
    with pytest.raises(ConfigurationError, match=r"the model's 4 blocks, net\.entry … net\.exit\. Use at most 4"):
        check(model, None, [PipelineCut(5, "uniform")])


def test_a_module_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="No blocks were found in Module"):
        next(find_chains(nn.Module()))
