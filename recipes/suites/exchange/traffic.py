"""Bytes that are sent in one round of an exchange of ``n`` values, headers of the transport left out.

For methods that exchange every so many updates, divide. Gradients and models cost the same.
"""

from __future__ import annotations

from lightning_sdpipe.exchange.codec import parts
from lightning_sdpipe.exchange.payloads import Payload


def pair(payload: Payload, n: int) -> int:
    """Return the bytes that each of two partners sends: b(n), of modulo messages as many as of ``EightBit``."""
    return payload.nbytes(n)


def ring(payload: Payload, n: int, neighbours: int = 2) -> int:
    """Return the bytes that each worker of a ring sends, the same to each neighbour: 2 b(n)."""
    return neighbours * payload.nbytes(n)


def group(payload: Payload, n: int, members: int, place: int = 0) -> int:
    """Return the bytes that the member at ``place`` of a group, or of an all-reduce, of k sends: 2 (k − 1) b(n/k) if k
    divides n."""
    sizes = _sizes(payload, n, members)
    return sum(sizes) - sizes[place] + (members - 1) * sizes[place]


def server(payload: Payload, n: int, workers: int) -> int:
    """Return the bytes that a parameter server, which shares a worker's process, sends to the others: (n − 1) b(n)."""
    return (workers - 1) * payload.nbytes(n)


def _sizes(payload: Payload, n: int, members: int) -> list[int]:
    return [payload.nbytes(part.stop - part.start) for part in parts(n, members)]
