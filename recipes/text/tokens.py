"""Tokens of text: a WordPiece vocabulary trained on the documents themselves, rows of equal length, and batches."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer
from torch import Tensor

PAD, UNKNOWN, START, END, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
IGNORED = -100  # the label of a token that the loss leaves out, in torch and transformers

Batch = dict[str, Tensor]


def train_wordpiece(documents: Iterable[str], size: int) -> Tokenizer:
    """Return BERT's uncased tokenizer with a vocabulary of at most ``size`` pieces learned from ``documents``.

    The special tokens have the numbers 0 to 4, in the order of ``SPECIAL``.
    """
    tokenizer = Tokenizer(WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    trainer = WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def vocabulary_file(name: str, size: int) -> Path:
    """Return the file in which a trained vocabulary is kept, under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lightning_sdpipe" / "vocabularies" / f"{name}-{size}.json"


def write(tokenizer: Tokenizer, file: Path) -> None:
    """Write the tokenizer atomically, since other processes may be reading the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as part:
        part.write(tokenizer.to_str())
    Path(part.name).replace(file)


def pack(documents: Iterable[str], tokenizer: Tokenizer, length: int, framed: bool) -> Iterator[Tensor]:
    """Cut the documents, each followed by an end token, into rows of ``length`` token numbers.

    Args:
        documents: texts.
        tokenizer: tokenizer with the vocabulary.
        length: tokens in a row.
        framed: whether every row begins with a start token and ends with an end token, as BERT expects.

    Yields:
        int64 tensors of shape ``(length,)``; an incomplete row at the end is dropped.
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


def causal(rows: Sequence[Tensor]) -> Batch:
    """Return a batch in which every token predicts the next one; transformers shifts the labels."""
    tokens = torch.stack(list(rows))
    return {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True)
class Masking:
    """The masked language model of BERT (Devlin et al. 2019, §3.1): 15 % of a row's tokens are to be predicted. Of
    these, 80 % are replaced by the mask, 10 % by a random token, and 10 % stay.

    Equally many are chosen in every row, as in BERT's own data. So the mean over a mini-batch is the mean of its
    micro-batches' means, and pipelines compute what one process does.

    Args:
        vocabulary_size: number of tokens to draw from.
        rate: share of a row that is to be predicted.
        fixed: whether equal rows always get equal masks, for validation. Otherwise, random numbers come from torch's
            global generator, which all stages of a pipeline have in step while they fetch a batch.
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
