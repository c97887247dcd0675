"""A WordPiece vocabulary, trained on the documents themselves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

PAD, UNKNOWN, START, END, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def train_wordpiece(documents: Iterable[str], size: int) -> Tokenizer:
    """BERT's uncased tokenizer with a vocabulary of at most ``size`` pieces learned from ``documents``.

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
    home = os.environ.get("XDG_CACHE_HOME")
    return (
        (Path(home) if home else Path.home() / ".cache") / "lightning_sdpipe" / "vocabularies" / f"{name}-{size}.json"
    )


def write(tokenizer: Tokenizer, file: Path) -> None:
    """Put it there at once or not at all, since other processes may be reading."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as part:
        part.write(tokenizer.to_str())
    Path(part.name).replace(file)
