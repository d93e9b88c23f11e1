"""Least squares for costs, which are never negative."""

import numpy as np
import numpy.typing as npt

type Floats = npt.NDArray[np.float64]


def not_negative(columns: Floats, values: Floats) -> Floats:
    """Least squares with coefficients of at least 0: leaves out the most negative one until none is negative."""
    kept = list(range(columns.shape[1]))
    while True:
        solution = np.linalg.lstsq(columns[:, kept], values)[0]
        if len(kept) == 1 or solution.min() >= 0:
            break
        del kept[int(solution.argmin())]
    coefficients = np.zeros(columns.shape[1])
    coefficients[kept] = solution.clip(min=0.0)
    return coefficients
