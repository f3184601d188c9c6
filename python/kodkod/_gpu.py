"""Passes on a GPU, as the compiled module takes them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _kodkod

checks = False
"""Whether every call looks at ids, waits and looks for errors: :func:`kodkod.cuda.set_checks`."""


def forward(group: int, x: Tensor, *arguments: Any) -> object | None:
    """As the CPU's: a capsule of what the backward needs, or None."""
    return _in_stream(_kodkod.cuda_rank_forward if group else _kodkod.cuda_forward, x, arguments)


def backward(group: int, x: Tensor, *arguments: Any) -> None:
    _in_stream(_kodkod.cuda_rank_backward if group else _kodkod.cuda_backward, x, arguments)


def check_ids(ids: Tensor, experts: int) -> None:
    """Raises for the first id that is no expert's, where checks are on. Waits for the GPU."""
    if not checks or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return
    wrong = ((ids < -1) | (ids >= experts)).reshape(-1, ids.shape[-1]).nonzero()
    if len(wrong):
        token, k = wrong[0].tolist()
        value = ids.reshape(-1, ids.shape[-1])[token, k].item()
        allowed = f"allowed are 0 to {experts - 1} and -1 (no route)"
        raise ValueError(f"topk_ids[{token}, {k}] is {value}: {allowed}")


def _in_stream(call: Callable[..., Any], x: Tensor, arguments: tuple[Any, ...]) -> Any:
    """Calls with the GPU of ``x`` and its current stream. If there is no memory, with what torch can give back."""
    device = x.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return _in_stream(call, x, arguments)
    stream = torch._C._cuda_getCurrentRawStream(device)
    if not _compiler_found:
        _find_compiler()
    try:
        return call((device, stream, checks, False), *arguments)
    except MemoryError:
        torch.cuda.empty_cache()
    try:
        return call((device, stream, checks, True), *arguments)
    except MemoryError as error:
        raise torch.OutOfMemoryError(f"a pass of kodkod does not fit on {x.device}: {error}") from None


_compiler_found = False


def _find_compiler() -> None:
    """Names NVRTC of this interpreter's wheels, which torch brings along, as the compiled half knows no interpreter."""
    global _compiler_found
    nvidia = importlib.util.find_spec("nvidia")
    folders = [] if nvidia is None else list(nvidia.submodule_search_locations or [])
    found = sorted(
        path for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.*") if "alt" not in path.name
    )
    if found:
        os.environ.setdefault("KODKOD_NVRTC", str(found[-1]))
    _compiler_found = True
