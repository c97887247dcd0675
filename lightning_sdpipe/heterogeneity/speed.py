"""Measures a device's present speed, as the rate of a matrix product, and lists the devices."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_KERNEL_SECONDS = 2e-3
"""Least length of one product, by which the matrices are sized: long against its launch, short against an interval."""

_SIZES = (64, 4096)
"""Smallest and largest number of rows."""


def devices() -> list[tuple[str, str]]:
    """Return the accelerators of this machine: torch's name and the model of each."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if kind is None else torch.accelerator.device_count()
    found = [torch.device(kind.type, index) for index in range(count) if kind is not None]
    return [(str(device), name_of(device)) for device in found]


def name_of(device: torch.device) -> str:
    """Return the model of ``device`` as its driver names it, or its type."""
    names = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if names is None else str(names(device))


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
    """Return a function that computes a matrix product and waits for it, in about :data:`_KERNEL_SECONDS`, and its
    number of floating-point operations."""
    size = _SIZES[0]
    while True:
        product = _product(size, device)
        product()  # allocates memory and chooses an algorithm
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
