"""Injected delays: workers sleep at random, independently of each other (SDPipe, evaluation; conditions A and B).

A draw depends only on the seed, the worker, the iteration and the pass. So every synchronisation method meets the same
delays at the same iterations, and their least cost can be computed beforehand.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

from lightning_sdpipe.errors import ConfigurationError, check_choices, check_number
from lightning_sdpipe.heterogeneity.tracks import Track

Draws = Literal["iteration", "pass"]
Pass = Literal["forward", "backward"]
Condition = Literal["A", "B"]
Model = Literal["resnet", "bert"]

_CONDITIONS: dict[tuple[str, str], float] = {
    ("A", "resnet"): 0.1,
    ("A", "bert"): 0.2,
    ("B", "resnet"): 0.3,
    ("B", "bert"): 0.6,
}


@dataclass(frozen=True)
class Delays:
    """Frequency and length of a worker's sleeps; by default it never sleeps.

    Args:
        probability: chance of a delay at each draw, between 0 and 1.
        seconds: length of one delay.
        draws: "iteration" for one draw per iteration, before its forward (as in the paper); "pass" for one before each
            forward and each backward of a mini-batch (as in its published code).
        scale: multiplies `seconds`, to shrink the paper's delays along with a smaller model.
        seed: seed of all draws.

    Raises:
        ConfigurationError: a value is out of range.
    """

    probability: float = 0.0
    seconds: float = 0.0
    draws: Draws = "iteration"
    scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("probability", self.probability, "a number from 0 to 1", least=0, most=1)
        for name, value in (("seconds", self.seconds), ("scale", self.scale)):
            check_number(name, value, "a finite number from 0", least=0, below=math.inf)
        check_choices(self)

    def delay(self, stage: int, pipeline: int, iteration: int, during: Pass) -> float:
        """Return the seconds for which worker (stage, pipeline) sleeps before this pass of this iteration; a pure
        function."""
        if self.draws == "iteration" and during == "backward":
            return 0.0
        if self.probability == 0.0 or uniform(self.seed, stage, pipeline, iteration, during) >= self.probability:
            return 0.0
        return self.seconds * self.scale

    def track(self, rank: int) -> Track | None:
        """Return None: between its delays, every device runs at full speed."""
        return None


def condition(name: Condition, model: Model, *, scale: float = 1.0, seed: int = 0) -> Delays:
    """Return the delays of one of the paper's conditions: each worker is delayed in 10 % of its iterations.

    A: 0.1 s (ResNet) or 0.2 s (BERT); B: 0.3 s or 0.6 s.

    Raises:
        ConfigurationError: the condition or model does not exist.
    """
    if (name, model) not in _CONDITIONS:
        known = "; ".join(f"{condition} with {model}" for condition, model in _CONDITIONS)
        raise ConfigurationError(f"There is no condition {name!r} with model {model!r}; there are: {known}.")
    return Delays(probability=0.1, seconds=_CONDITIONS[name, model], scale=scale, seed=seed)


def uniform(*key: object) -> float:
    """Return a hash of ``key`` as a number in [0, 1), uniform over keys, in place of a stateful generator."""
    text = " ".join(map(str, key)).encode()
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11) / (1 << 53)
