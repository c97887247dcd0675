"""Batches of a language model: rows of tokens as inputs, and what it shall predict as labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.text.vocabulary import MASK, SPECIAL

IGNORED = -100  # the label of a token that the loss leaves out, in torch and transformers

Batch = dict[str, Tensor]


def causal(rows: Sequence[Tensor]) -> Batch:
    """Every token predicts the next one; transformers shifts the labels."""
    tokens = torch.stack(list(rows))
    return {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True)
class Masking:
    """The masked language model of BERT (Devlin et al. 2019, §3.1): of the words of a row, 15 % are to be predicted.
    Of these, 80 % are replaced by the mask, 10 % by a random token, and 10 % stay.

    Equally many are chosen in every row, as in BERT's own data. So the mean over a mini-batch is the mean of its
    micro-batches' means, and pipelines compute what one process computes.

    Args:
        vocabulary_size: tokens to draw from.
        rate: share of a row that is to be predicted.
        fixed: equal rows get equal masks, whenever they come: for validation. Else the random numbers are those of
            torch's global generator, which are equal on all stages of a pipeline while it fetches a batch.
    """

    vocabulary_size: int
    rate: float = 0.15
    fixed: bool = False

    def __call__(self, rows: Sequence[Tensor]) -> Batch:
        """Stack ``rows``, each of shape ``(length,)`` and framed by special tokens.

        Returns:
            ``"input_ids"`` and ``"labels"``, both int64 of shape ``(len(rows), length)``.
        """
        tokens = torch.stack(list(rows))
        generator = torch.Generator().manual_seed(int(tokens.sum())) if self.fixed else None
        lots = torch.rand(tokens.shape, generator=generator).masked_fill(tokens < len(SPECIAL), -1.0)
        chosen = lots.topk(max(1, round(self.rate * (tokens.shape[1] - 2))), dim=1).indices
        labels = torch.full_like(tokens, IGNORED).scatter(1, chosen, tokens.gather(1, chosen))
        fate = torch.rand(chosen.shape, generator=generator)
        drawn = torch.randint(len(SPECIAL), self.vocabulary_size, chosen.shape, generator=generator)
        shown = torch.where(fate < 0.8, SPECIAL.index(MASK), torch.where(fate < 0.9, drawn, tokens.gather(1, chosen)))
        return {"input_ids": tokens.scatter(1, chosen, shown), "labels": labels}
