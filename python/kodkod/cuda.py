"""What kodkod holds on GPUs, and how to look for errors there.

A pass on a GPU is put in the current stream of torch and returns at once. It uses memory of kodkod's own: a *slot* for
each forward whose backward is still to come, with its rows, and one slot for all passes that leave nothing. Slots are
kept for the next step.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from . import _gpu, _kodkod

__all__ = ["Memory", "check", "memory", "set_checks", "set_memory_limit", "trim"]


class Memory(NamedTuple):
    """Of one GPU."""

    slots: int
    """Passes that there is memory for at once."""
    held: int
    """Slots that a forward holds, until its backward is done or its graph freed."""
    captured: int
    """Slots that belong to CUDA graphs."""
    bytes: int
    """Of all slots, as the driver's count of free memory told when each was made."""
    limit: int | None
    """Most bytes, or None."""
    again: int
    """Forwards that ran again for their backward, since the process began, as their slot was taken."""


def check() -> None:
    """Waits for all passes on all GPUs.

    Raises:
        kodkod.StalledError: a pass waited too long for a task and was given up; what it wrote is worth nothing.
    """
    _not_captured("check")
    _kodkod.cuda_check()


def set_checks(enabled: bool) -> None:
    """Whether every call looks at the ids, waits for its pass and raises what went wrong there. Slow: for debugging.

    It is off, unless the environment variable ``KODKOD_CHECKS`` is 1. In a capture nothing is looked at.
    """
    _gpu.checks = bool(enabled)


def memory(device: torch.device | str | int | None = None) -> Memory:
    """What kodkod holds on a GPU; by default the current one.

    Slots of groups of processes are not counted: :meth:`kodkod.ExpertGroup.memory` does that.
    """
    return Memory(*_kodkod.cuda_memory(_ordinal(device)))


def set_memory_limit(limit: int | None, device: torch.device | str | int | None = None) -> None:
    """The most bytes of slots on a GPU, the current one by default; None is what the GPU has.

    Where a forward needs a slot beyond the limit, it takes that of the oldest forward of its size, whose backward then
    runs its forward again, with the same bits. Each size has one slot in any case. If the GPU's memory is used up, what
    there is then becomes the limit.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise TypeError(f"limit is {limit!r}: an int or None is needed")
    if limit is not None and not 0 <= limit < 2**63:
        raise ValueError(f"limit is {limit}: 0 or more are needed, and less than 2**63")
    _kodkod.cuda_limit(_ordinal(device), limit)


def trim(device: torch.device | str | int | None = None, *, captured: bool = False) -> None:
    """Frees the slots of a GPU that no forward holds.

    With ``captured`` also those that belong to CUDA graphs: graphs with passes of kodkod must not be replayed after it.
    """
    _not_captured("trim")
    _kodkod.cuda_trim(_ordinal(device), captured)


def _ordinal(device: torch.device | str | int | None) -> int:
    if isinstance(device, int) and not isinstance(device, bool):
        if device < 0:
            raise ValueError(f"device is {device}: it cannot be negative")
        return device
    if device is not None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device is {device}: cuda is needed")
        if device.index is not None:
            return device.index
    return torch.cuda.current_device()


def _not_captured(what: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"kodkod.cuda.{what} waits for the GPU: a CUDA graph that is captured cannot")


_gpu.checks = os.environ.get("KODKOD_CHECKS", "") not in ("", "0")
