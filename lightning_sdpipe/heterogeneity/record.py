"""Recording of a device's speed over time: ``sdpipe record FILE``.

A device that other programs use too is slower for this one meanwhile. At even intervals a matrix product is repeated
for a part of the interval; its rate, divided by the best rate of the recording, is the relative speed (SDPipe, §5.5).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity.tracks import write_tracks

_KERNEL_SECONDS = 2e-3
"""Length of one product for which the matrices are sized: long against its launch, short against an interval."""

_SIZES = (64, 4096)
"""Smallest and largest number of rows."""


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
        ConfigurationError: a value is outside of its range, or the device does not exist.
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
    source = f"recorded on {device} ({_name(torch.device(device))}), {share:.0%} of each interval"
    write_tracks(path, source, interval, [speeds])
    return speeds


def devices() -> list[tuple[str, str]]:
    """Return the accelerators of this machine: torch's names, and their models."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if kind is None else torch.accelerator.device_count()
    found = [torch.device(kind.type, index) for index in range(count) if kind is not None]
    return [(str(device), _name(device)) for device in found]


def sample(
    kernel: Callable[[], None],
    samples: int,
    interval: float,
    share: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[float]:
    """Return the calls of ``kernel`` per second, measured ``samples`` times, ``interval`` seconds apart."""
    rates = []
    first = clock()
    for index in range(samples):
        start, calls = clock(), 0
        while calls == 0 or clock() - start < share * interval:
            kernel()
            calls += 1
        rates.append(calls / (clock() - start))
        sleep(max(0.0, first + (index + 1) * interval - clock()))
    return rates


def matrix_product(device: torch.device) -> tuple[Callable[[], None], int]:
    """Return a matrix product that takes about :data:`_KERNEL_SECONDS` here, and return when it is done; and its
    number of floating-point operations."""
    size = _SIZES[0]
    while True:
        product = _product(size, device)
        product()  # memory, and the choice of an algorithm
        if min(_timed(product) for _ in range(3)) >= _KERNEL_SECONDS or size >= _SIZES[1]:
            return product, 2 * size**3
        size *= 2


def _timed(product: Callable[[], None]) -> float:
    start = time.perf_counter()
    product()
    return time.perf_counter() - start


def _product(size: int, device: torch.device) -> Callable[[], None]:
    factor = torch.rand(size, size, device=device)
    result = torch.empty_like(factor)

    def product() -> None:
        torch.mm(factor, factor, out=result)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return product


def _name(device: torch.device) -> str:
    names = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if names is None else str(names(device))
