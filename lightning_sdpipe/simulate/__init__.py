"""Simulation of pipelines under a virtual clock around the real policies: a policy is tried in seconds, reproducibly.

``simulate(SemiDecentralized(), Work(num_stages=4, num_pipelines=16, iterations=1000))`` runs in this process, without
torch, tensors or sockets.
"""

from lightning_sdpipe.simulate.pipelines import Pipelines as Pipelines
from lightning_sdpipe.simulate.pipelines import Schedule as Schedule
from lightning_sdpipe.simulate.pipelines import Work as Work
from lightning_sdpipe.simulate.run import Run as Run
from lightning_sdpipe.simulate.run import jittered as jittered
from lightning_sdpipe.simulate.run import simulate as simulate

__all__ = ["Pipelines", "Run", "Schedule", "Work", "jittered", "simulate"]
