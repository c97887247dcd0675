"""How fast groups spread updates: the mean mixing matrix and its ρ (P-Reduce §3.2, assumption (3)).

In a group every member's model becomes the weighted sum of all of them; other workers keep theirs. W has the weights in
the rows of the members and 1 on the diagonal of the others (SDPipe, equation 2, with weights 1/|S|). ρ is the modulus
of the second largest eigenvalue of the mean of W. Three workers of equal speed in groups of two give 0.5; if one is
twice as slow, 0.625.

This is for looking at a run, not for deciding, so that the scheduler needs no numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

Matrix = list[list[float]]


def mean_mixing_matrix(groups: Sequence[tuple[Sequence[int], Sequence[float]]], workers: Sequence[int]) -> Matrix:
    """The mean of W over ``groups``, each given as members and weights; the identity when there was no group.

    Only ``workers`` have rows; the weight of a member that is none of them stays with whoever would have taken it over.
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
    """ρ of a matrix whose rows add up to 1: its largest modulus of an eigenvalue beside the 1 of the constant vector.

    Raises:
        ImportError: numpy is not installed.
    """
    import numpy

    size = len(matrix)
    if size < 2:
        return 0.0
    # Taking 1/n off every entry makes the eigenvalue of the constant vector 0 and keeps the others.
    return float(max(abs(numpy.linalg.eigvals(numpy.array(matrix) - 1 / size))))
