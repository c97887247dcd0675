"""Random draws without a generator: a number that looks random and depends on its arguments only.

So a policy has no random source inside, a log of its events replays, and all stages draw alike where they should.
"""

from __future__ import annotations

import hashlib


def uniform(*key: int) -> float:
    """Return a number in [0, 1), evenly spread over its arguments."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
