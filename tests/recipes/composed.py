"""The parameters of a benchmark suite, as the command line would give them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf"


@cache
def parameters_of(suite: str, *overrides: str) -> dict[str, Any]:
    """The keyword arguments of its ``run``."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("bench", [f"suite={suite}", *overrides])
    plain: Any = OmegaConf.to_container(config.suite, resolve=True)
    return {**plain, "seed": config.seed}
