"""From documents to batches, on Python's own text and on files as Hugging Face writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from recipes.loaders import MissingDataError
from recipes.text.data import PydocText, WikipediaText, pydoc_documents, wikipedia
from recipes.text.tokens import IGNORED, MASK, SPECIAL, Masking, causal, pack, train_wordpiece, vocabulary_file, write


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_wordpiece(pydoc_documents(), 2000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_vocabulary_knows_the_text_it_was_trained_on(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 2000
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2, 3, 4]
    encoded = tokenizer.encode("The statement raises an exception, unusuallyish.")
    assert encoded.tokens[:3] == ["the", "statement", "raises"]
    assert "unusuallyish" not in encoded.tokens
    assert any(token.startswith("##") for token in encoded.tokens)
    documents = pydoc_documents()
    ids = [number for document in documents[:10] for number in tokenizer.encode(document).ids]
    assert ids.count(SPECIAL.index("[UNK]")) < 0.001 * len(ids)


def test_a_vocabulary_is_written_whole(tokenizer: Tokenizer, cache: Path) -> None:
    file = vocabulary_file("some", 2000)
    assert cache in file.parents
    write(tokenizer, file)
    assert Tokenizer.from_file(str(file)).get_vocab() == tokenizer.get_vocab()
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("framed", [True, False])
def test_rows_hold_the_documents_in_order(tokenizer: Tokenizer, framed: bool) -> None:
    documents = ["the value of an expression", "a name", "an object " * 50]
    rows = torch.stack(list(pack(documents, tokenizer, 16, framed)))
    assert rows.shape[1] == 16
    if framed:
        assert (rows[:, 0] == SPECIAL.index("[CLS]")).all()
        assert (rows[:, -1] == SPECIAL.index("[SEP]")).all()
        rows = rows[:, 1:-1]
    stream = [number for document in documents for number in [*tokenizer.encode(document).ids, 3]]
    assert rows.flatten().tolist() == stream[: rows.numel()]
    assert len(stream) - rows.numel() < rows.shape[1]


def test_fifteen_percent_are_predicted_of_which_eight_in_ten_are_masked() -> None:
    torch.manual_seed(0)
    size = 1000
    rows = [torch.cat([torch.tensor([2]), torch.randint(5, size, (126,)), torch.tensor([3])]) for _ in range(800)]
    rows[0][10:20] = SPECIAL.index("[SEP]")
    batch = Masking(size)(rows)
    tokens, inputs, labels = torch.stack(rows), batch["input_ids"], batch["labels"]

    chosen = labels != IGNORED
    assert (chosen.sum(1) == 19).all()  # 15 % of 126, in every row
    assert (tokens[chosen] >= len(SPECIAL)).all()
    assert torch.equal(labels[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])

    count = int(chosen.sum())
    for share, expected in {
        (inputs[chosen] == SPECIAL.index(MASK)).float().mean().item(): 0.8,
        (inputs[chosen] == tokens[chosen]).float().mean().item(): 0.1 + 0.1 / (size - 5),
    }.items():
        assert abs(share - expected) < 4 * (expected * (1 - expected) / count) ** 0.5
    assert inputs.min() > 0
    assert inputs.max() < size
    places = chosen[1:, 1:-1].float().mean(0)  # no place is preferred
    assert (places - 19 / 126).abs().max() < 5 * (0.15 * 0.85 / len(rows)) ** 0.5


def test_masks_follow_the_global_generator_except_for_validation() -> None:
    rows = list(torch.randint(5, 100, (4, 32), generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(1)
    first, second = Masking(100)(rows), Masking(100)(rows)
    torch.manual_seed(1)
    again = Masking(100)(rows)
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["input_ids"], second["input_ids"])

    state = torch.get_rng_state()
    fixed, repeated = Masking(100, fixed=True)(rows), Masking(100, fixed=True)(rows)
    assert torch.equal(fixed["input_ids"], repeated["input_ids"])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_causal_batch_is_its_own_label() -> None:
    batch = causal([torch.arange(4), torch.arange(4, 8)])
    assert torch.equal(batch["input_ids"], torch.arange(8).view(2, 4))
    assert torch.equal(batch["labels"], batch["input_ids"])


def test_pydoc_makes_a_thousand_rows(cache: Path) -> None:
    data = PydocText(batch_size=8, vocabulary_size=4000)
    data.prepare_data()
    data.setup("fit")
    assert 500 < len(data.train) < 2000
    assert len(data.val) == pytest.approx(len(data.train) / 9, rel=0.05)
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == batch["labels"].shape == (8, 128)
    assert batch["input_ids"].max() < 4000
    once, twice = ([b["labels"] for b in data.val_dataloader()] for _ in range(2))
    assert torch.equal(torch.cat(once), torch.cat(twice))


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_articles_are_read_from_a_folder(tmp_path: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    articles = datasets.Dataset.from_dict({"title": ["a", "b", "c"], "text": ["one", "two", "three"]})
    if form == "saved":
        articles.save_to_disk(str(tmp_path / "wiki"))
    else:
        (tmp_path / "wiki/en").mkdir(parents=True)
        articles.to_parquet(str(tmp_path / "wiki/en/0.parquet"))
    assert [article["text"] for article in wikipedia(tmp_path / "wiki")] == ["one", "two", "three"]


def test_a_missing_folder_is_named_with_what_to_do(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("datasets")
    missing = tmp_path / "nowhere"
    with pytest.raises(MissingDataError, match=rf"{missing}(.|\n)*save_to_disk(.|\n)*data=pydoc"):
        WikipediaText(folder=str(missing)).prepare_data()


def test_without_a_connection_the_hub_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(MissingDataError, match=r"wikimedia/wikipedia(.|\n)*data.folder=FOLDER"):
        wikipedia(None)
