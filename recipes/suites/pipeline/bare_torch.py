"""This runtime's 1F1B against that of ``torch.distributed.pipelining``, on the same BERT in the same processes.

Both cut the model into the same stages, feed the same micro-batches and step the same optimizer. For torch, the model
is split manually into stages that pass one tensor, the least possible. The embedding is not tied to the decoder, since
bare torch would train the two copies apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from lightning_sdpipe.partition.chain import find_chains
from lightning_sdpipe.partition.plan import cut
from recipes.baselines.pipelining import language_step
from recipes.harness.processes import run_processes
from recipes.suites.grid import Ratios, Row, compared, ratios, versus
from recipes.suites.stages import CPU, TRAINING, open_pipeline, open_stage

BLOCKS = ("model.bert.embeddings", "model.bert.encoder.layer.*", "model.cls")
VOCABULARY = 1024
LEARNING_RATE = 1e-3

Batch = dict[str, Tensor]
TrainStep = Callable[[Batch], Tensor]


class MaskedLM(L.LightningModule):
    """Hugging Face's BERT with four layers, as a user would write it; no dropout, so that losses can be compared."""

    def __init__(self, hidden_size: int, sequence: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = BertForMaskedLM(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=hidden_size,
                num_hidden_layers=4,
                num_attention_heads=max(1, hidden_size // 64),
                intermediate_size=4 * hidden_size,
                max_position_embeddings=sequence,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                tie_word_embeddings=False,
            )
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


def measure(
    *,
    stages: Sequence[int],
    hidden_size: int,
    sequence: int,
    samples: int,
    num_micro_batches: int,
    steps: int,
    repeats: int,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Return the throughput with each number of stages, by the clock and by processor time, which other load disturbs
    less.

    Args:
        stages: numbers of stages M.
        hidden_size: hidden size of the model.
        sequence: number of tokens in a sample.
        samples: number of samples in a micro-batch.
        num_micro_batches: number of micro-batches in a step.
        steps: number of steps in one timing.
        repeats: timings of each runtime.
        seed: seed of the weights and the tokens.
    """

    def compare(rank: int) -> list[Row]:
        batch = random_batch(samples * num_micro_batches, sequence, seed)
        runtimes = {
            "ours": _ours(MaskedLM(hidden_size, sequence, seed), batch, num_micro_batches),
            "bare torch": _bare_torch(MaskedLM(hidden_size, sequence, seed), num_micro_batches),
        }
        _warm_up(runtimes, batch)
        return compared({name: partial(_timed, step, batch, steps) for name, step in runtimes.items()}, repeats)

    rows: list[Row] = []
    goals = {}
    for num_stages in stages:
        done = samples * num_micro_batches * steps
        for of_ranks in zip(*run_processes(num_stages, compare), strict=True):
            row, used = of_ranks[0] | {"stages": num_stages}, sum(each["processor_s"] for each in of_ranks)
            rates = {"samples_per_s": done / row["seconds"], "samples_per_processor_s": done / used}
            rows.append(row | rates | {"processor_s": used})
        what = f"1F1B, BERT of {hidden_size} × 4 layers, {num_stages} stages: {{one}} over {{other}}"
        for key, column in (("bare_torch", "samples_per_s"), ("bare_torch_processor", "samples_per_processor_s")):
            goal = versus(f"{column}, {what}", column, "ours", "bare torch", 0.97, stages=num_stages)
            goals[f"{key}/M{num_stages}"] = goal
    return rows, ratios(rows, goals)


def random_batch(size: int, sequence: int, seed: int) -> Batch:
    """Return random tokens and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2, size, sequence), generator=generator)
    return {"input_ids": tokens[0], "labels": tokens[1]}


def _ours(module: MaskedLM, batch: Batch, num_micro_batches: int) -> TrainStep:
    stage = open_stage(open_pipeline(), module, BLOCKS, batch, num_micro_batches=num_micro_batches)
    optimizer = torch.optim.SGD(stage.freezing.trained, LEARNING_RATE)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = stage.pipeline.train(batch, TRAINING, 0)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def _bare_torch(module: MaskedLM, num_micro_batches: int) -> TrainStep:
    chain = next(find_chains(module, BLOCKS))
    span = cut(len(chain), dist.get_world_size())[dist.get_rank()]
    part = nn.Sequential(*[module.get_submodule(chain[block]) for block in span])
    return language_step(part, CPU, num_micro_batches, torch.optim.SGD(part.parameters(), LEARNING_RATE))


def _warm_up(runtimes: dict[str, TrainStep], batch: Batch) -> None:
    """Make two steps, and check that both runtimes have the same losses, else they would not be comparable."""
    losses = torch.stack([torch.stack([step(batch), step(batch)]) for step in runtimes.values()])
    dist.all_reduce(losses, dist.ReduceOp.MAX)  # bare torch's are zero except on the rank with the last stage
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)


def _timed(step: TrainStep, batch: Batch, steps: int) -> Row:
    """Return seconds by the clock, and of this process's processor time."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step(batch)
    dist.barrier()
    return {"seconds": time.perf_counter() - start, "processor_s": time.process_time() - used}
