"""Samples to a loss: a small BERT on islands that are killed, beside the same run without kills, and all-reduce.

This counts the mini-batches that are in the model, in the order of time. The target is the loss of the run without
kills after a part of them, while it still falls. A mini-batch that was lost with a pipeline counts when it was last
trained; the utilisation includes the time of training it twice.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from recipes.harness.pipelines import Record
from recipes.language import LanguageModel
from recipes.text.data import PydocText
from recipes.text.tokens import Batch, Masking

WINDOW = 200
"""Number of mini-batches whose mean loss counts."""
REACHED_AFTER = 0.8
"""The run without kills reaches the target after this share of its mini-batches."""


@dataclass(frozen=True)
class Text:
    """The rows of text that a BERT learns repeatedly, and how it learns them.

    Args:
        network: settings of the BERT; ``vocab_size`` is also the size of the vocabulary.
        length: number of tokens in a row.
        batch: number of rows in a mini-batch.
        lr: learning rate of AdamW.
        warmup_steps: updates over which the learning rate rises.
    """

    network: Mapping[str, Any]
    length: int
    batch: int
    lr: float
    warmup_steps: int


class PacedBert(LanguageModel):
    """A BERT that sleeps before its forward, to be as slow as an island's device.

    Args:
        text: the text that it learns.
        seconds: seconds of sleep.
    """

    def __init__(self, text: Text, seconds: float) -> None:
        super().__init__("bert", text.network, lr=text.lr, warmup_steps=text.warmup_steps)
        self._seconds = seconds

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> Tensor:  # type: ignore[override]
        time.sleep(self._seconds)
        loss: Tensor = self.network(**batch[1]).loss
        return loss


def rows_of(text: Text, seed: int) -> list[Tensor]:
    """Return the rows to train on, shuffled, so that the loss does not rise and fall with the chapters."""
    data = PydocText(text.batch, text.length, text.network["vocab_size"])
    data.prepare_data()
    data.setup("fit")
    rows: list[Tensor] = data.train
    return random.Random(seed).sample(rows, len(rows))


def loader(text: Text, rows: Sequence[Tensor], batches: int) -> DataLoader[Any]:
    """Return a loader of ``batches`` mini-batches: the numbers of their samples, and BERT's input."""
    masking = Masking(text.network["vocab_size"])

    def collate(samples: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Batch]:
        numbers, tokens = zip(*samples, strict=True)
        return torch.tensor(numbers), masking(tokens)

    numbered = [*enumerate(islice(cycle(rows), batches * text.batch))]
    return DataLoader(numbered, text.batch, collate_fn=collate)  # type: ignore[arg-type]  # a list is a dataset, too


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
    """Return the number of mini-batches after which the mean loss of the last :data:`WINDOW` is at most ``target``;
    infinite if it never is."""
    window: deque[float] = deque(maxlen=WINDOW)
    for number, loss in enumerate(found, 1):
        window.append(loss)
        if len(window) == WINDOW and math.fsum(window) / WINDOW <= target:
            return number
    return math.inf


def target(calm: Sequence[float]) -> float:
    """Return the mean loss of the run without kills after :data:`REACHED_AFTER` of its mini-batches.

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
    """Return the loss of each mini-batch when every update averages the gradients of ``replicas`` mini-batches.

    One process computes what all-reduce does: links and devices change its time, not its samples.
    """
    torch.manual_seed(seed)
    model = LanguageModel("bert", text.network, lr=text.lr, warmup_steps=text.warmup_steps)
    made: Any = model.configure_optimizers()
    optimizer, warm_up = made["optimizer"], made["lr_scheduler"]["scheduler"]
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
