"""Sources of English documents, as Lightning's data modules."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from recipes.loaders import Loaders, MissingDataError
from recipes.text.tokens import Masking, causal, pack, train_wordpiece, vocabulary_file, write

HUB_NAME = "wikimedia/wikipedia"
HUB_SUBSET = "20231101.en"


class _Text(Loaders):
    """Common base of both sources: their vocabulary, and how rows become batches.

    ``setup`` of a source sets the rows ``train`` and ``val``.

    Args:
        name: name of the vocabulary's file.
        batch_size: rows in a batch of one pipeline.
        length: tokens in a row.
        vocabulary_size: most pieces in the vocabulary.
        masked: whether batches are for a masked language model, else for a causal one.
        num_workers: processes that prepare batches for each rank.
    """

    def __init__(
        self, name: str, batch_size: int, length: int, vocabulary_size: int, masked: bool, num_workers: int
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.length = length
        self.vocabulary_size = vocabulary_size
        self.masked = masked
        self._vocabulary = vocabulary_file(name, vocabulary_size)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._vocabulary))

    def loader(self, data: Any, train: bool, **options: Any) -> DataLoader[Any]:
        collate = Masking(self.vocabulary_size, fixed=not train) if self.masked else causal
        return super().loader(data, train, collate_fn=collate, **options)


class PydocText(_Text):
    """The text of Python's reference manual, which comes with Python: about a thousand rows of 128 tokens.

    One row in ten is for validation.
    """

    def __init__(
        self,
        batch_size: int = 32,
        length: int = 128,
        vocabulary_size: int = 8192,
        masked: bool = True,
        num_workers: int = 0,
    ) -> None:
        version = ".".join(platform.python_version_tuple()[:2])  # the text differs between versions
        super().__init__(f"pydoc-{version}", batch_size, length, vocabulary_size, masked, num_workers)

    def prepare_data(self) -> None:
        if not self._vocabulary.exists():
            write(train_wordpiece(pydoc_documents(), self.vocabulary_size), self._vocabulary)

    def setup(self, stage: str) -> None:
        rows = list(pack(pydoc_documents(), self.tokenizer(), self.length, self.masked))
        self.train = [row for number, row in enumerate(rows) if number % 10]
        self.val = rows[::10]


class WikipediaText(_Text):
    """English Wikipedia, read as a stream; every pipeline reads its own share.

    Args:
        folder: folder that holds it; streamed from the Hugging Face hub if None.
        seed: seed of the order of articles, which are shuffled a thousand at a time.
        vocabulary_articles: number of first articles on which the vocabulary is trained.
        validation_articles: number of first articles that are for validation, not for training.

    The other arguments are those of :class:`PydocText`.
    """

    def __init__(
        self,
        folder: str | None = None,
        batch_size: int = 256,
        length: int = 128,
        vocabulary_size: int = 30522,
        masked: bool = True,
        num_workers: int = 4,
        seed: int = 0,
        vocabulary_articles: int = 20_000,
        validation_articles: int = 1_000,
    ) -> None:
        super().__init__(f"wikipedia-{vocabulary_articles}", batch_size, length, vocabulary_size, masked, num_workers)
        self.folder = Path(folder) if folder else None
        self.seed = seed
        self.vocabulary_articles = vocabulary_articles
        self.validation_articles = validation_articles

    def prepare_data(self) -> None:
        articles = wikipedia(self.folder)  # always, so that only one rank reports missing articles
        if not self._vocabulary.exists():
            texts = (article["text"] for article in islice(articles, self.vocabulary_articles))
            write(train_wordpiece(texts, self.vocabulary_size), self._vocabulary)

    def setup(self, stage: str) -> None:
        from datasets.distributed import split_dataset_by_node

        assert self.trainer is not None
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        articles = wikipedia(self.folder)
        rows = (self.tokenizer(), self.length, self.masked)
        parts = (
            articles.skip(self.validation_articles).shuffle(seed=self.seed, buffer_size=1000),
            articles.take(self.validation_articles),
        )
        self.train, self.val = (
            _Rows(split_dataset_by_node(part, share["rank"], share["num_replicas"]), *rows) for part in parts
        )


class _Rows(IterableDataset[Tensor]):
    """The rows of a stream of articles; each of a loader's workers packs the articles of its own shards."""

    def __init__(self, articles: Any, tokenizer: Tokenizer, length: int, framed: bool) -> None:
        self._articles = articles
        self._tokenizer = tokenizer
        self._length = length
        self._framed = framed
        self._epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        self._articles.set_epoch(self._epoch)  # shuffles differently
        self._epoch += 1
        texts = (article["text"] for article in self._articles)
        return pack(texts, self._tokenizer, self._length, self._framed)


def pydoc_documents() -> list[str]:
    """Return the chapters of the Python reference that ``help()`` shows, half a million characters."""
    return [topics[name] for name in sorted(topics)]


def wikipedia(folder: Path | None) -> Any:
    """Return English Wikipedia as a stream of articles.

    Args:
        folder: a folder that ``Dataset.save_to_disk`` wrote, or with parquet files; streamed from the Hugging Face hub
            if None.

    Returns:
        A ``datasets.IterableDataset`` whose items have a ``"text"``.

    Raises:
        MissingDataError: the folder does not exist or has nothing readable, or the hub cannot be reached.
    """
    import datasets

    if folder is None:
        try:
            return datasets.load_dataset(HUB_NAME, HUB_SUBSET, split="train", streaming=True)
        except OSError as error:  # network errors and missing data sets
            raise MissingDataError(
                "Wikipedia",
                f"{HUB_NAME} ({HUB_SUBSET}) on the Hugging Face hub ({type(error).__name__}: {error})",
                "Without a connection, name a folder that holds it (data.folder=FOLDER), or use data=pydoc.",
            ) from error
    if (folder / "state.json").is_file():
        saved: Any = datasets.load_from_disk(str(folder))
        return saved.to_iterable_dataset(num_shards=max(1, len(saved.cache_files)))
    files = sorted(str(file) for file in folder.rglob("*.parquet"))
    if not files:
        raise MissingDataError(
            "Wikipedia",
            f"state.json or *.parquet in {folder.absolute()}",
            f"On a machine with a connection: datasets.load_dataset('{HUB_NAME}', '{HUB_SUBSET}', split='train')"
            f".save_to_disk('{folder}'). Leave data.folder out to stream it from the hub, or use data=pydoc.",
        )
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
