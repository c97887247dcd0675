"""Speed at which groups spread updates: the mean mixing matrix and its ρ (P-Reduce §3.2, assumption (3)), and theorem
1.

In a group every member's model becomes the weighted sum of all members' models; other workers keep theirs. W has the
weights in the rows of the members and 1 on the diagonal of the others (SDPipe, equation 2, with weights 1/|S|). ρ is
the modulus of the second largest eigenvalue of the mean of W. Three workers of equal speed in groups of two give 0.5;
if one is twice as slow, 0.625.

This serves the analysis of a run, not decisions, so the scheduler needs no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Matrix = list[list[float]]


def mean_mixing_matrix(groups: Sequence[tuple[Sequence[int], Sequence[float]]], workers: Sequence[int]) -> Matrix:
    """Return the mean of W over ``groups``, each given as members and weights; the identity when there was no group.

    Only ``workers`` have rows; the weight of a member without a row stays with the worker that would have received it.
    """
    index = {worker: row for row, worker in enumerate(workers)}
    size, share = len(workers), 1 / max(1, len(groups))
    mean = [[float(row == column) for column in range(size)] for row in range(size)]
    for members, weights in groups:
        present = [(index[member], weight) for member, weight in zip(members, weights, strict=True) if member in index]
        for u, _ in present:
            for v, weight in present:
                mean[u][v] += share * weight
                mean[u][u] -= share * weight
    return mean


def mixing_radius(matrix: Matrix) -> float:
    """Return ρ of a matrix whose rows add up to 1: the largest modulus of its eigenvalues other than the 1 of the
    constant vector.

    Raises:
        ImportError: numpy is not installed.
    """
    import numpy

    size = len(matrix)
    if size < 2:
        return 0.0
    # Taking 1/n off every entry makes the eigenvalue of the constant vector 0 and keeps the others.
    return float(max(abs(numpy.linalg.eigvals(numpy.array(matrix) - 1 / size))))


def network_error(rho: float) -> float:
    """Return ρ̄ = ρ/(1 − ρ) + 2√ρ/(1 − √ρ)² of P-Reduce's theorem 1, to which its bound for the network error is
    proportional; infinite at ρ = 1, where nothing mixes."""
    root = math.sqrt(rho)
    return rho / (1 - rho) + 2 * root / (1 - root) ** 2 if rho < 1.0 else math.inf


def largest_learning_rate(lipschitz: float, num_workers: int, group_size: float, rho: float) -> float:
    """Return the γ of plain SGD up to which P-Reduce's theorem 1 holds (equation 7); 0 where nothing mixes.

    It holds where ηL + 2N³η²ρ̄/P² with η = Pγ/N is at most 1. It assumes doubly stochastic mixing, so equal weights. As
    it is printed, the second term has no L², which it would need for an L other than 1 if units should agree.

    Args:
        lipschitz: L, the Lipschitz constant of the gradient.
        num_workers: N.
        group_size: P; the mean if sizes differ.
        rho: ρ, from 0 on.
    """
    a = 2 * num_workers**3 * network_error(rho) / group_size**2
    # The positive root of aη² + Lη = 1, without the difference of two large numbers.
    step = 2 / (lipschitz + math.sqrt(lipschitz**2 + 4 * a))
    return num_workers * step / group_size
