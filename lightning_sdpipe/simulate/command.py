"""The command ``sdpipe simulate``: the behaviour of a policy under stragglers, in virtual time."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence

from lightning_sdpipe.command_line import Parser, depths_of, numbers_of, seconds, shape_of, speeds_of
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import Heterogeneity, Static, Trace, condition
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.decisions import BrokenRule
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.simulate.pipelines import Work
from lightning_sdpipe.simulate.run import Run, jittered, simulate

_FACTORS = (1, 1, 1, 2)

NOMINAL_ITERATION_SECONDS = 0.1
"""Length of a mini-batch that the delays of conditions A and B are meant for: our choice, the paper has none."""


def main(arguments: Sequence[str]) -> int:
    """Print the outcome; the exit status is 1 when the policy gets stuck."""
    options = _parser().parse_args(arguments)
    config = registry.from_text(options.policy, options.set)
    given, listed = options.pipelines, len(options.stages) > 1
    num_stages, num_pipelines, depths = shape_of(options.stages, 4 if given is None and not listed else given)
    of_each = depths or [num_stages] * num_pipelines
    work = Work(
        num_stages,
        num_pipelines,
        options.iterations,
        _seconds(options, of_each),
        options.schedule,
        options.micro_batches,
        _slowness(options, sum(of_each)),
        lambda group: options.exchange if len(group.members) > 1 else 0.0,
        options.announce,
        depths,
    )
    try:
        run, alone = simulate(config, work), simulate(NoSync(), work)
        lines = [report(run, alone)]
        if not run.stuck:
            lines.append(compared(run, simulate(AllReduceModels(), work)))
    except BrokenRule as error:
        raise ConfigurationError(str(error)) from error
    print("\n".join(lines))
    return 1 if run.stuck else 0


def report(run: Run, alone: Run) -> str:
    """Return a page of text about ``run``, beside ``alone``, the same work without any synchronisation."""
    if run.stuck:
        return f"stuck for ever: {', '.join(map(str, run.stuck[:8]))}{', …' if len(run.stuck) > 8 else ''}"
    sizes = sorted({len(group.members) for _, group in run.groups})
    lines = [
        f"mini-batches/s   {run.throughput:.4g}, {run.throughput / alone.throughput:.3f} of pipelines that never wait",
        f"equal shards     {run.seconds:.4g} s until the end, {alone.seconds / run.seconds:.3f} of their speed",
        f"groups           {len(run.groups)}, of {run.mean_group_size:.2f} workers ({sizes[0]} to {sizes[-1]})",
        f"by reason        {', '.join(f'{reason}: {count}' for reason, count in run.reasons.most_common())}",
        f"waiting          {run.waiting_share:.1%} of the workers' time",
        f"ρ of each stage  {', '.join(f'{run.rho(stage):.3f}' for stage in range(run.work.num_stages))}"
        if not run.work.depths
        else f"ρ of pipelines   {run.rho():.3f}",
    ]
    return "\n".join(lines)


def compared(run: Run, in_step: Run) -> str:
    """Compare epochs as a user would see them: with batches dealt by speed, at the rate of ``run``, and with
    all-reduce, which ends with its slowest pipeline."""
    dealt = run.work.num_pipelines * run.work.iterations / run.throughput
    return (
        f"an epoch         about {dealt:.4g} s if batches are dealt by speed; all-reduce on equal shards takes "
        f"{in_step.seconds:.4g} s, {in_step.seconds / dealt:.2f} times as long"
    )


def _seconds(options: Namespace, depths: Sequence[int]) -> Callable[[Worker, int], float]:
    """Return the compute times of pipelines that are cut by the speeds of their devices, so that their stages take
    equally long; a shallow pipeline, or a slow one, takes longer.

    Raises:
        ConfigurationError: the speeds do not fit these pipelines.
    """
    of_deepest = jittered(options.batch_seconds, options.jitter, options.seed)
    given = options.speeds or [[1.0] * depth for depth in depths]
    speeds = given if isinstance(given[0], list) else [given] * len(depths)
    if [*map(len, speeds)] != [*depths] or min(map(min, speeds)) <= 0:
        listed = "/".join(",".join(["1"] * depth) for depth in depths)
        raise ConfigurationError(f"--speeds are above 0, one for each stage of each pipeline: like {listed} here")
    return lambda worker, iteration: of_deepest(worker, iteration) * max(depths) / sum(speeds[worker.pipeline])


def _slowness(options: Namespace, devices: int) -> Heterogeneity | None:
    """Return what slows the devices down.

    Raises:
        ConfigurationError: factors are given that are not used, or do not fit the devices.
    """
    kind, factors = options.heterogeneity, options.factors
    if factors and kind not in (None, "static"):
        raise ConfigurationError(f"--factors go with --heterogeneity static, not with {kind}; leave one of the two out")
    if factors and devices != len(factors):
        raise ConfigurationError(
            f"--factors are {len(factors)}, and there are {devices} devices: give one for each, by global rank"
        )
    match kind or ("static" if factors else "b"):
        case "a" | "b" as letter:
            scale = options.batch_seconds / NOMINAL_ITERATION_SECONDS
            return condition("A" if letter == "a" else "B", "resnet", scale=scale, seed=options.seed)
        case "static":
            return Static(factors or _FACTORS)
        case "trace":
            return Trace(seed=options.seed)
        case _:
            return None


def _parser() -> Parser:
    parser = Parser("simulate", "Runs a policy in virtual time, and compares the length of an epoch with all-reduce's.")
    add = parser.add_argument
    add("--policy", default="semi_decentralized", help="a name, or one of yours, like my_package.policies:RoundRobin")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a value of the policy, like window=0.05")
    add("--stages", type=depths_of, default="4", metavar="M", help="stages of a pipeline, or of each, like 1,2,2")
    add("--pipelines", type=int, metavar="N", help="number of pipelines (default: 4, or those of --stages)")
    add(
        "--speeds",
        type=speeds_of,
        help="relative speed of each stage's device, like 1,0.5 (1/0.5,0.5/0.5,0.5 for three pipelines); pipelines are "
        "cut so that their stages take equally long (default: all 1)",
    )
    add("--iterations", type=int, default=100, help="number of mini-batches of each pipeline")
    add("--schedule", default="1f1b", help="1f1b, gpipe or pipedream")
    add("--micro-batches", type=int, help="of a mini-batch (default: the number of stages; 1 with pipedream)")
    add("--batch-seconds", type=seconds, default=0.1, help="of a mini-batch on a stage of the deepest pipeline")
    add("--jitter", type=float, default=0.05, help="relative variation of that time")
    add("--exchange", type=seconds, default=0.0, help="time that a group takes to average")
    add(
        "--announce",
        choices=["early", "late"],
        help="when workers report ready: before the last backward ends, or after the step (default: the policy's)",
    )
    add(
        "--heterogeneity",
        choices=["none", "a", "b", "static", "trace"],
        help="how devices are slow: docs/heterogeneity.md (default: static with --factors, else b)",
    )
    add(
        "--factors",
        type=numbers_of,
        help=f"slowness of each device, by global rank: 2 takes twice as long (default of static: {_FACTORS})",
    )
    add("--seed", type=int, default=0, help="seed of all random numbers")
    return parser
