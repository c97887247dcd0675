"""Sources of English documents."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from recipes.missing import MissingDataError

HUB_NAME = "wikimedia/wikipedia"
HUB_SUBSET = "20231101.en"


def pydoc_documents() -> list[str]:
    """The chapters of the Python reference that ``help()`` shows: half a million characters, always at hand."""
    return [topics[name] for name in sorted(topics)]


def wikipedia(folder: Path | None) -> Any:
    """English Wikipedia, one article after the other.

    Args:
        folder: what ``Dataset.save_to_disk`` left, or one that holds parquet files; streamed from the Hugging Face
            hub if None.

    Returns:
        A ``datasets.IterableDataset`` whose items hold a ``"text"``.

    Raises:
        MissingDataError: there is no such folder, nothing readable is in it, or the hub cannot be reached.
    """
    import datasets

    if folder is None:
        try:
            return datasets.load_dataset(HUB_NAME, HUB_SUBSET, split="train", streaming=True)
        except OSError as error:  # what network errors and missing data sets are
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
