"""A step of the layer as a file, for ``kodkod replay``."""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _ops
from ._functional import (
    Biases,
    Knobs,
    Shared,
    _activation,
    _check_tensor,
    _expect,
    _shapes,
    _tensors,
)
from ._group import ExpertGroup

_NAMES = ["w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"]
_NAMES += ["shared_gate", "shared_up", "shared_down", "shared_output_gate"]
_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32", torch.int64: "I64"}


@torch.no_grad()
def dump_step(
    path: str | os.PathLike[str],
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate: Tensor | Sequence[Tensor],
    w_up: Tensor | Sequence[Tensor] | None,
    w_down: Tensor | Sequence[Tensor],
    *,
    dy: Tensor | None = None,
    biases: Biases | None = None,
    shared: Shared | None = None,
    activation: str = "swiglu",
    limit: float | None = None,
    alpha: float | None = None,
    group: ExpertGroup | None = None,
    knobs: Knobs | None = None,
    precision: str | torch.dtype | None = None,
) -> None:
    """Writes the safetensors file that ``kodkod replay`` reads: the step that goes wrong, to hand over.

    It takes the arguments of :func:`kodkod.moe`, so that a call can be pasted; ``group``, ``knobs`` and ``precision``
    are options of ``replay`` and not written. The file is there whole or not at all.

    Args:
        path: the file, overwritten if it is there.
        dy: [..., H], the gradient of the output, where the backward is wanted too.

    Raises:
        TypeError, ValueError: an argument has a type or shape that is not allowed. Ids are not looked at: ``replay``
            says what is wrong with them.
    """
    for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        _check_tensor(name, tensor)
    routed = (_tensors("w_gate", w_gate), () if w_up is None else _tensors("w_up", w_up), _tensors("w_down", w_down))
    named, parts = _shapes(x, topk_ids, topk_weights, routed, biases, shared)
    limit, alpha = _activation(activation, limit, alpha)
    hidden, top_k = x.shape[-1], topk_ids.shape[-1]
    tensors = {"x": x.reshape(-1, hidden)}
    if dy is not None:
        _check_tensor("dy", dy)
        _expect("dy", dy, tuple(x.shape), "that of x")
        tensors["dy"] = dy.reshape(-1, hidden)
    tensors["topk_ids"] = topk_ids.reshape(-1, top_k)
    tensors["topk_weights"] = topk_weights.reshape(-1, top_k).float()
    for name, place in zip(_NAMES, _ops._gather([weight for _, weight, _ in named], parts), strict=True):
        if place is not None:
            tensors[name] = place.reshape(1, -1) if name == "shared_output_gate" else place
    metadata = {"activation": activation}
    if limit is not None:
        metadata["limit"] = repr(limit)
    if activation == "swiglu_oai":
        metadata["alpha"] = repr(alpha)
    _write(os.fspath(path), {name: _plain(tensor) for name, tensor in tensors.items()}, metadata)


def _plain(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, of a dtype that the file can have."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.dtype in _DTYPES else tensor.float()


def _write(path: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """The safetensors format: the header's length in 8 bytes, the header as JSON, the elements."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder, name = os.path.split(os.path.abspath(path))
    file, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    try:
        with os.fdopen(file, "wb") as out:
            out.write(len(text).to_bytes(8, "little"))
            out.write(text)
            for tensor in tensors.values():
                if tensor.nbytes:
                    out.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # as a file that is simply opened
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
