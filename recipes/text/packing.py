"""Documents, one after the other, as rows of equal length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from tokenizers import Tokenizer
from torch import Tensor

from recipes.text.vocabulary import END, SPECIAL, START


def pack(documents: Iterable[str], tokenizer: Tokenizer, length: int, framed: bool) -> Iterator[Tensor]:
    """Rows of ``length`` token numbers, cut from the documents in turn with an end token behind each.

    Args:
        documents: texts.
        tokenizer: of this package's vocabulary.
        length: tokens in a row.
        framed: every row starts with a start token and closes with an end token, as BERT expects.

    Yields:
        int64 tensors of shape ``(length,)``; what is left at the end and does not fill a row is dropped.
    """
    start, end = SPECIAL.index(START), SPECIAL.index(END)
    room = length - 2 if framed else length
    waiting: list[int] = []
    for document in documents:
        waiting += tokenizer.encode(document).ids
        waiting.append(end)
        full = len(waiting) // room * room
        for first in range(0, full, room):
            row = waiting[first : first + room]
            yield torch.tensor([start, *row, end] if framed else row)
        del waiting[:full]
