"""A tied weight's update in a captured step: most of it at the start of the backward pass.

The head's product touches every row and exists first; the embedding's rows come last. Waiting for
them keeps the gradient of the logits until the end, and the sum of both must be formed before the
update. Instead every row is updated from the product at once, by the fused kernel, and the rows
that were looked up once more at the end (:class:`~forge.kernels.rows_apart.RowsApart`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from forge.kernels.row_update import is_rows
from forge.kernels.rows_apart import RowsApart


class SplitUpdate:
    """The two parts of one weight's update. Any other use of the weight is an error.

    That is noticed, at the latest, when the gradient is complete: during a capture, when nothing
    has run. ``forge.TrainStep`` then captures the step without.

    Args:
        name: of the weight, for messages.
        start: given (x, dy, ids, first, apart), launches the update of the rows from ``first`` on
            that ``dy`` has columns of; ``apart`` is what it returned for the rows behind them.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[Tensor, Tensor, Tensor, int, RowsApart | None], RowsApart],
    ) -> None:
        self.name = name
        self._start = start
        self._ids: list[Tensor] = []
        self._left = 0  # rows that wait for their slice of the product
        self.apart: RowsApart | None = None  # once the first part is launched

    def look_up(self, ids: Tensor) -> None:
        """Note what the forward pass looks up; negative ids do not count."""
        self._ids.append(ids)

    def take(self, x: Tensor, dy: Tensor, rows: tuple[int, int] | None = None) -> bool:
        """Update from the product of these factors now; False if it is to be done at the end.

        ``rows``: where they begin and end, if they are not all; the last ones come first.

        That is so for factors that are not the head's, for a head alone, and where more tokens are
        looked up than the weight has rows: their part of the product, ``dy[:, ids]^T x``, would
        take more time and memory than all of it.

        Raises:
            RuntimeError: this weight was updated already.
        """
        if is_rows(dy) or not self._ids:
            return False
        first, end = rows or (0, dy.shape[-1])
        if len(self._ids) > 1 or self.apart is not None and end != self._left:
            self._refuse()
        if self.apart is None and self._ids[0].numel() > end:
            return False
        x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        self.apart = self._start(x, dy, self._ids[0], first, self.apart)
        self._left = first
        return True

    def check(self, factors: list[Any], grad: Tensor | None) -> None:
        """Refuse what the two parts do not cover.

        Raises:
            RuntimeError: the gradient has other parts.
        """
        lookups = all(is_rows(dy) for _, dy, _ in factors)
        if grad is not None or len(self._ids) > 1 or len(factors) > 1 or not lookups or self._left:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(f"{self.name!r} is used by more than one head and one embedding")
