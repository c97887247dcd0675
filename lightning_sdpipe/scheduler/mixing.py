"""How fast groups spread updates: the mean mixing matrix and its ρ (P-Reduce §3.2, assumption (3)).

A group S mixes the models by W with 1/|S| between its members and 1 on the diagonal of the others (SDPipe,
equation 2). ρ is the larger modulus of the second largest and the smallest eigenvalue of the mean of W. Three
workers of equal speed in groups of two give 0.5; if one is twice as slow, 0.625.

Plain Python, since the scheduler runs without numpy: this is for looking at a run, not for deciding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Matrix = list[list[float]]

MAX_SWEEPS = 100
TOLERANCE = 1e-12


def mean_mixing_matrix(groups: Sequence[Sequence[int]], workers: Sequence[int]) -> Matrix:
    """The mean of W over ``groups``, for ``workers`` only; the identity when there was no group."""
    index = {worker: row for row, worker in enumerate(workers)}
    size = len(workers)
    mean = [[float(row == column) for column in range(size)] for row in range(size)]
    for group in groups:
        rows = [index[worker] for worker in group if worker in index]
        for u in rows:
            mean[u][u] -= 1 / len(groups)
            for v in rows:
                mean[u][v] += 1 / len(rows) / len(groups)
    return mean


def mixing_radius(matrix: Matrix) -> float:
    """ρ of a symmetric, doubly stochastic matrix: its largest modulus of an eigenvalue beside the 1."""
    size = len(matrix)
    if size < 2:
        return 0.0
    # Taking 1/n off every entry removes the eigenvalue 1 of the constant vector and keeps the others.
    rest = [[value - 1 / size for value in row] for row in matrix]
    return max(abs(value) for value in eigenvalues(rest))


def eigenvalues(matrix: Matrix) -> list[float]:
    """Of a symmetric matrix, by Jacobi's method of plane rotations."""
    a = [row[:] for row in matrix]
    size = len(a)
    for _ in range(MAX_SWEEPS):
        if max((abs(a[p][q]) for p in range(size) for q in range(p)), default=0.0) < TOLERANCE:
            break
        for p in range(size):
            for q in range(p + 1, size):
                _rotate(a, p, q)
    return sorted(a[k][k] for k in range(size))


def _rotate(a: Matrix, p: int, q: int) -> None:
    """Make a[p][q] zero."""
    if a[p][q] == 0.0:
        return
    theta = (a[q][q] - a[p][p]) / (2 * a[p][q])
    t = math.copysign(1.0, theta) / (abs(theta) + math.sqrt(theta * theta + 1))
    c = 1 / math.sqrt(t * t + 1)
    s = t * c
    for k in range(len(a)):
        a[k][p], a[k][q] = c * a[k][p] - s * a[k][q], s * a[k][p] + c * a[k][q]
    for k in range(len(a)):
        a[p][k], a[q][k] = c * a[p][k] - s * a[q][k], s * a[p][k] + c * a[q][k]
