"""Records a device's speed over time: ``python -m recipes.tools.record FILE``.

A device is slower while other programs use it, too. At even intervals a matrix product is repeated for a part of the
interval; the ratio of its rate to the best rate of the recording is the relative speed (SDPipe, §5.5).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch

from lightning_sdpipe.command_line import carried_out
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity.speed import matrix_product, name_of, sample
from lightning_sdpipe.heterogeneity.tracks import write_tracks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 2 when it cannot be carried out."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.tools.record",
        description="Records a device's relative speed over time, to replay it elsewhere.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="the trace to write")
    parser.add_argument("--device", default="cpu", help="as torch names it, as in cuda:0")
    parser.add_argument("--seconds", type=float, default=300.0, help="length in all")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples")
    parser.add_argument("--share", type=float, default=0.2, help="of the interval that is used")
    options = parser.parse_args(arguments)

    def recorded() -> None:
        speeds = record(options.file, options.device, options.seconds, options.interval, options.share)
        print(f"{options.file}: {len(speeds)} samples; relative speed {min(speeds):.2f} to 1, mean {fmean(speeds):.2f}")

    return carried_out(recorded, parser.prog)


def record(path: Path, device: str, seconds: float, interval: float, share: float) -> list[float]:
    """Measure ``device`` and write a trace file with one track.

    Args:
        path: the file, which is overwritten.
        device: torch's name of the device, as in ``"cuda:0"``.
        seconds: length of the recording.
        interval: seconds between two measurements.
        share: the share of each interval for which the device is kept busy, above 0 and at most 1.

    Returns:
        The relative speeds.

    Raises:
        ConfigurationError: a value is out of range, or the device does not exist.
    """
    if not (0.0 < interval <= seconds and math.isfinite(seconds)):
        raise ConfigurationError(f"An interval of {interval} s must be above 0 and fit into the {seconds} s in all.")
    if not 0.0 < share <= 1.0:
        raise ConfigurationError(f"share={share} must lie above 0 and up to 1.")
    try:
        kernel, _ = matrix_product(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"The device {device!r} cannot be used: {error}") from error
    rates = sample(kernel, round(seconds / interval), interval, share)
    speeds = [rate / max(rates) for rate in rates]
    source = f"recorded on {device} ({name_of(torch.device(device))}), {share:.0%} of each interval"
    write_tracks(path, source, interval, [speeds])
    return speeds


if __name__ == "__main__":
    sys.exit(main())
