"""Samples to a loss: a small BERT on islands that are killed, over the same run without kills, and over all-reduce.

Counted are the mini-batches that are in the model, in the order of time; the target is the loss that the run without
kills has after a part of them, while it still falls. A mini-batch that died with a pipeline counts where it was trained
at last: that it is trained twice costs time, which the utilisation says.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import get_constant_schedule_with_warmup

from recipes.harness.pipelines import Record
from recipes.language import LanguageModel
from recipes.text.data import PydocText
from recipes.text.tokens import Batch, Masking

WINDOW = 200
"""Mini-batches whose mean loss counts."""
REACHED_AFTER = 0.8
"""Part of the run without kills after which the target is reached there."""


@dataclass(frozen=True)
class Text:
    """The rows of text that a BERT learns, again and again, and how it learns them.

    Args:
        network: settings of the BERT; its ``vocab_size`` is that of the vocabulary.
        length: tokens of a row.
        batch: rows of a mini-batch.
        lr: learning rate of AdamW.
        warmup_steps: updates over which it rises.
    """

    network: Mapping[str, Any]
    length: int
    batch: int
    lr: float
    warmup_steps: int


class _Numbered(Dataset[tuple[int, Tensor]]):
    """Give so many rows, with their numbers."""

    def __init__(self, rows: Sequence[Tensor], count: int) -> None:
        self._rows, self._count = rows, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        return number, self._rows[number % len(self._rows)]


class PacedBert(LanguageModel):
    """A BERT whose forward takes some seconds more, as an island's device does.

    Args:
        text: what it learns.
        seconds: of sleep.
    """

    def __init__(self, text: Text, seconds: float) -> None:
        super().__init__("bert", text.network, lr=text.lr, warmup_steps=text.warmup_steps)
        self._seconds = seconds

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> Tensor:  # type: ignore[override]
        time.sleep(self._seconds)
        loss: Tensor = self.network(**batch[1]).loss
        return loss


def rows_of(text: Text, seed: int) -> list[Tensor]:
    """Return the rows to train on, shuffled, so that chapters do not raise and lower the loss by turns."""
    data = PydocText(text.batch, text.length, text.network["vocab_size"])
    data.prepare_data()
    data.setup("fit")
    rows: list[Tensor] = data.train
    return random.Random(seed).sample(rows, len(rows))


def loader(text: Text, rows: Sequence[Tensor], batches: int) -> DataLoader[Any]:
    """Return so many mini-batches: the numbers of their samples, and what BERT gets."""
    masking = Masking(text.network["vocab_size"])

    def collate(samples: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Batch]:
        numbers, tokens = zip(*samples, strict=True)
        return torch.tensor(numbers), masking(tokens)

    return DataLoader(_Numbered(rows, batches * text.batch), text.batch, collate_fn=collate)


def losses(records: Sequence[Record]) -> list[float]:
    """Return the loss of each mini-batch that is in the model, in the order of time."""
    last: dict[tuple[int, ...], tuple[float, float]] = {}
    for record in records:
        samples: tuple[int, ...] | None = None
        for line in record.lines:
            if "trained" in line:
                samples = tuple(line["trained"])
            elif "update" in line and samples is not None and line["loss"] is not None:
                last[samples] = max(last.get(samples, (0.0, 0.0)), (line["at"], line["loss"]))
                samples = None
    return [loss for _, loss in sorted(last.values())]


def reached(found: Sequence[float], target: float) -> float:
    """Return after how many mini-batches the mean loss of the last ones is ``target`` or less; infinite if never."""
    window: deque[float] = deque(maxlen=WINDOW)
    for number, loss in enumerate(found, 1):
        window.append(loss)
        if len(window) == WINDOW and math.fsum(window) / WINDOW <= target:
            return number
    return math.inf


def target(calm: Sequence[float]) -> float:
    """Return the mean loss that the run without kills has after a part of its mini-batches.

    Raises:
        ValueError: the run is too short for a mean.
    """
    stop = round(REACHED_AFTER * len(calm))
    if stop < WINDOW:
        raise ValueError(
            f"{len(calm)} mini-batches are too few for a mean of {WINDOW} after {REACHED_AFTER:.0%} of them"
        )
    return math.fsum(calm[stop - WINDOW : stop]) / WINDOW


def learn_together(text: Text, rows: Sequence[Tensor], replicas: int, batches: int, seed: int) -> list[float]:
    """Return the loss of each mini-batch where every update averages the gradients of ``replicas`` of them.

    One process computes what all-reduce computes: links and devices change its time, not its samples.
    """
    torch.manual_seed(seed)
    model = LanguageModel("bert", text.network, lr=text.lr, warmup_steps=text.warmup_steps)
    optimizer = torch.optim.AdamW(model.parameters(), text.lr, weight_decay=model.hparams["weight_decay"])
    warm_up = get_constant_schedule_with_warmup(optimizer, text.warmup_steps)
    found: list[float] = []
    for number, (_, batch) in enumerate(loader(text, rows, batches), 1):
        loss = model.network(**batch).loss
        (loss / replicas).backward()
        found.append(float(loss.detach()))
        if number % replicas == 0:
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
    return found
