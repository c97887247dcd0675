"""Who averages with whom where no scheduler decides: pure functions of places, which count those who take part, and of
the number of the round. Everybody finds the same answer by itself."""

from __future__ import annotations

from lightning_sdpipe.policies.ad_psgd import matching


def ring(place: int, size: int) -> tuple[int, ...]:
    """The neighbours in a ring: none, one or two."""
    return tuple(sorted({(place - 1) % size, (place + 1) % size} - {place}))


def shift_one(place: int, size: int, number: int) -> int | None:
    """The partner in round ``number`` if pairs shift by one: r < n/2 meets (number + r) mod (n/2) + n/2.

    So everybody of the first half has met everybody of the second after n/2 rounds. With an odd number somebody of the
    first half stays alone (None), in turn.
    """
    half = (size + 1) // 2
    partner = (number + place) % half + half if place < half else (place - half - number) % half
    return partner if partner < size else None


def random_pair(place: int, size: int, number: int, seed: int) -> int | None:
    """The partner in round ``number`` of pairs that are drawn afresh each time; None for one that is left over."""
    partner = matching(size, seed, number)[place]
    return partner if partner != place else None
