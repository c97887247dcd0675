import pytest
import torch

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.structure import decode_structures, encode_structures, take_apart


def test_nested_outputs_survive_the_journey() -> None:
    hidden, mask = torch.randn(2, 3, requires_grad=True), torch.ones(2, dtype=torch.bool)
    output = (hidden, None, {"mask": mask, "scale": 2.5}, [hidden, "text"])
    tensors, structure = take_apart(output, "block")
    travelled, nothing = decode_structures(encode_structures([structure, None]))
    assert nothing is None
    assert travelled == structure
    rebuilt = travelled.rebuild(lambda i, _: tensors[i])
    assert rebuilt[0] is hidden
    assert rebuilt[1] is None
    assert rebuilt[2]["mask"] is mask
    assert rebuilt[2]["scale"] == 2.5
    assert rebuilt[3] == [hidden, "text"]
    assert [(t.shape, t.dtype, t.requires_grad) for t in travelled.tensors] == [
        ((2, 3), torch.float32, True),
        ((2,), torch.bool, False),
        ((2, 3), torch.float32, True),
    ]


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"Block 'net\.2' returns a .*set"):
        take_apart({1, 2}, "net.2")
