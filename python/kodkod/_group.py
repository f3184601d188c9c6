"""The ranks that share the experts of a layer."""

from __future__ import annotations

from . import _kodkod


class ExpertGroup:
    """The ranks that share the experts of a layer, and the machine that they run on.

    Made by :meth:`cpu`. Groups of equal options are one group: its threads and its memory stay for the life of the
    process, and one pass runs at a time. The results have the same bits for any number of ranks.
    """

    def __init__(self, ranks: int, threads: int) -> None:
        self._options = (ranks, threads)
        self._number = _kodkod.group_cpu(ranks, threads)

    @classmethod
    def cpu(cls, ranks: int = 1, *, threads: int = 0) -> ExpertGroup:
        """``ranks`` virtual ranks in this process, on ``threads`` threads (0: one a core).

        The number of experts of a layer must be a multiple of ``ranks``. Tokens are dealt evenly.

        Raises:
            ValueError: ``ranks`` or ``threads`` is out of range.
        """
        for name, value in (("ranks", ranks), ("threads", threads)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}: an int is needed")
            if value < 0:
                raise ValueError(f"{name} is {value}: it cannot be negative")
        return cls(ranks, threads)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return _kodkod.group_info(self._number)[0]

    @property
    def threads(self) -> int:
        """Number of worker threads."""
        return _kodkod.group_info(self._number)[1]

    def memory(self) -> tuple[int, int]:
        """Bytes of symmetric memory that the group, and forwards before their backward, hold now; and the most ever."""
        return _kodkod.group_memory(self._number)

    def trim(self) -> None:
        """Gives memory that waits for reuse back to the system."""
        _kodkod.group_trim(self._number)

    def __reduce__(self) -> tuple[type[ExpertGroup], tuple[int, int]]:
        return ExpertGroup, self._options  # a number means nothing in another process

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertGroup) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)

    def __repr__(self) -> str:
        ranks, _, description = _kodkod.group_info(self._number)
        return f"ExpertGroup({ranks} ranks, {description})"
