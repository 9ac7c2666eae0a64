"""The path that an alignment with gamma = 0 follows, in NumPy.

path[0] = (0, 0),   path[t + 1] = the one of (i + 1, j + 1), (i + 1, j), (i, j + 1) where E is 1
"""

import numpy as np


def path(E, paths):
    """Write the path of each E (B, N, M), which is 1 along it, to paths (B, N + M - 1, 2).

    Behind its end it is -1.
    """
    B, N, M = E.shape
    on_path = np.zeros((B, N + 1, M + 1), bool)
    on_path[:, :N, :M] = E == 1
    pairs, i, j = np.arange(B), np.zeros(B, int), np.zeros(B, int)
    for t in range(N + M - 1):
        there = on_path[pairs, i, j]
        paths[:, t, 0] = np.where(there, i, -1)
        paths[:, t, 1] = np.where(there, j, -1)
        below, right = np.minimum(i + 1, N), np.minimum(j + 1, M)
        diagonal = on_path[pairs, below, right]
        down = ~diagonal & on_path[pairs, below, j]
        i = np.where(diagonal | down, below, i)
        j = np.where(down, j, right)
