from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.partition.message import (
    Constant,
    EffectLayout,
    Layout,
    Number,
    Opaque,
    Structure,
    TensorMeta,
    take_apart,
)


class Pair(NamedTuple):
    left: Tensor
    right: int


def sent(structure: Structure) -> Structure:
    layout = Layout((), ((EffectLayout("output", (), structure),),))
    assert Layout.decode(layout.encode()) == layout
    ((effect,),) = Layout.decode(layout.encode()).blocks
    return effect.structure


def test_a_value_is_put_together_again_elsewhere() -> None:
    x = torch.ones(2, 3, dtype=torch.float16, requires_grad=True)
    value = (x, [None, "text", 1.5], {(1, 2): Pair(x, 3), "b": OrderedDict(c=True)}, torch.float32, 2**60)
    leaves, structure = take_apart(value)
    meta = TensorMeta((2, 3), torch.float16, True)
    assert structure.parts[:4] == (meta, Constant(None), Constant("text"), Number("float"))
    assert structure.parts[4:] == (meta, Number("int"), Number("bool"), Constant(torch.float32), Constant(2**60))
    assert sent(structure) == structure
    rebuilt = sent(structure).rebuild(leaves)
    assert rebuilt == value
    assert type(rebuilt[2][1, 2]) is Pair


def test_the_outputs_of_transformers_are_put_together_again() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.BaseModelOutput(last_hidden_state=torch.ones(2), hidden_states=(torch.zeros(1), torch.ones(1)))
    leaves, structure = take_apart(output)
    rebuilt = sent(structure).rebuild(leaves)
    assert type(rebuilt) is outputs.BaseModelOutput
    assert rebuilt.hidden_states[1] is leaves[2]


class _Local(NamedTuple):
    number: int


_Local.__qualname__ = "nowhere._Local"


@pytest.mark.parametrize("value", [{1, 2}, _Local(1), torch.eye(2).to_sparse()], ids=["set", "local", "sparse"])
def test_what_cannot_be_described_is_one_part(value: object) -> None:
    leaves, structure = take_apart(value)
    assert leaves[0] is value
    assert isinstance(structure.parts[0], Opaque)
    assert sent(structure) == structure


@pytest.mark.parametrize("number", [True, -3, 2**53, 0.1, float("inf")])
def test_numbers_keep_their_type_and_value(number: float) -> None:
    _, structure = take_apart(number)
    (part,) = sent(structure).parts
    assert isinstance(part, Number)
    restored = part.restore(float(number))
    assert (restored, type(restored)) == (number, type(number))
