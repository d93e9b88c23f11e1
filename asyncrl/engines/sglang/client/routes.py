"""Routes of experts as SGLang sends them: read, checked, and without dense layers."""

import logging
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.token_columns import Routes

logger = logging.getLogger(__name__)

Experts = NDArray[Any]
"""Expert ids, as ``Routes.experts_NLK``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesShape:
    """The part of a mixture's shape that its routes depend on."""

    num_layers: int
    """Layers of the model, dense ones included."""
    num_dense_layers: int
    """Layers at the start without experts."""
    num_experts: int
    num_chosen: int
    """Experts per token."""

    @property
    def dtype(self) -> "np.dtype[np.uint8] | np.dtype[np.uint16]":
        """The dtype of ``Routes``."""
        return np.dtype(np.uint8) if self.num_experts <= 256 else np.dtype(np.uint16)


class RouteReader:
    """Reads the routes of all answers; the first that are missing or wrong give a warning."""

    def __init__(self, shape: RoutesShape) -> None:
        self._shape = shape
        self._like = Routes(
            experts_NLK=np.zeros((0, shape.num_layers - shape.num_dense_layers, shape.num_chosen), shape.dtype)
        )
        self._has_warned = False

    def read(self, data: bytes, num_rows: int) -> Routes:
        """Return ``num_rows`` rows; rows that cannot be routes are missing."""
        experts = self._parsed(data, num_rows)
        if experts is None:
            self._warn(f"{len(data)} bytes for {num_rows} positions")
            return Routes.unknown(num_rows, self._like)
        missing = _ranges(_is_wrong(experts, self._shape.num_experts))
        if missing:
            start, _ = missing[0]
            self._warn(f"experts {experts[start].tolist()} of {self._shape.num_experts} at one position")
        return Routes(experts_NLK=experts.astype(self._shape.dtype, copy=False), missing=missing)

    def _parsed(self, data: bytes, num_rows: int) -> Experts | None:
        """Return the rows of mixture layers; None unless ``data`` has ``num_rows`` rows.

        The plug-in sends mixture layers in the dtype of ``Routes``, SGLang itself all layers as int32: the number of
        bytes tells them apart, because the latter is at least twice the former.
        """
        shape = self._shape
        num_mixtures = shape.num_layers - shape.num_dense_layers
        if len(data) == num_rows * num_mixtures * shape.num_chosen * shape.dtype.itemsize:
            return np.frombuffer(data, shape.dtype).reshape(num_rows, num_mixtures, shape.num_chosen)
        if len(data) == num_rows * shape.num_layers * shape.num_chosen * 4:
            every = np.frombuffer(data, np.int32).reshape(num_rows, shape.num_layers, shape.num_chosen)
            return every[:, shape.num_dense_layers :]
        return None

    def warn_of_none(self) -> None:
        """Warn that an answer ended without routes."""
        self._warn("an answer without any")

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "SGLang sent routes of experts that cannot be (%s): the trainer's routers choose for themselves where "
                "routes are missing (rollout/routes_missing)",
                what,
            )


def _is_wrong(experts_NLK: Experts, num_experts: int) -> NDArray[np.bool_]:
    """Return which rows have an unknown expert, or one twice in a layer.

    A layer that SGLang never captured has zeros.  Pairs are compared column by column: 512 rows of 48 layers with 8
    experts take 0.3 ms, and sorting them 1.9 ms.
    """
    columns_KNL = np.ascontiguousarray(np.moveaxis(experts_NLK, 2, 0))
    wrong_NL: NDArray[np.bool_] = np.any((columns_KNL < 0) | (columns_KNL >= num_experts), axis=0)
    for left, right in combinations(columns_KNL, 2):
        wrong_NL |= left == right
    return np.asarray(wrong_NL.any(axis=1))


def _ranges(is_in: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Return the ranges (start, stop) of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_in, [False]]).astype(np.int8)))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))
