"""Torch's symmetric memory, for what the ranks of a group with a GPU each reach of each other."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LIMIT = 60.0
"""Seconds that a rendezvous may take. The ranks have met right before it, so it takes far less."""


class SymmetricMemory:
    """Symmetric memory of a rank's GPU, allocated and mapped for the ranks of a process group.

    Whoever makes a group calls :meth:`problem` and then, on all ranks, :meth:`trial`. The rest is for the compiled
    module, on the thread of a call of the layer.
    """

    def __init__(self, process_group: ProcessGroup | None, device: int, timeout: float) -> None:
        import torch.distributed as dist

        group = dist.group.WORLD if process_group is None else process_group
        # The name, since a group that is destroyed should not live on here.
        self._group: Any = "" if group is None else group.group_name
        self._device = torch.device("cuda", device)
        self._limit = min(timeout, _LIMIT)
        self._first: torch.Tensor | None = None

    def problem(self) -> str | None:
        """Why this rank has none, as far as it can tell alone; else a first allocation is made."""
        try:
            import torch.distributed._symmetric_memory as symm_mem

            backend = symm_mem.get_backend(self._device)
            if backend != "CUDA":
                # NVSHMEM and NCCL allocate collectively: a rank that has no memory would leave the others waiting.
                return f"its backend is {backend}, and CUDA is needed (TORCH_SYMMMEM, set_backend)"
            with _limited(self._group, self._limit):  # the process group has a store
                self._first, _ = self.allocate(1)
        except Exception as error:
            return _line(error)
        return None

    def trial(self) -> str | None:
        """Why the ranks do not reach each other's memory. All call it together, if none has a :meth:`problem`."""
        first, self._first = self._first, None
        try:
            assert first is not None
            self.rendezvous(first)
        except Exception as error:
            return _line(error)
        return None

    def allocate(self, size: int) -> tuple[torch.Tensor, int]:
        """Bytes on the GPU and their address. They are free again when the tensor is, with its rendezvous."""
        from torch._C._distributed_c10d import _SymmetricMemory

        # Not `empty` of the public module: from torch 2.11 on it is in a memory pool, which might keep what is freed.
        with torch.cuda.device(self._device):
            tensor = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self._device)
        return tensor, tensor.data_ptr()

    def rendezvous(self, tensor: torch.Tensor) -> tuple[Any, list[int]]:
        """What keeps the ranks' memory mapped, and the address of each rank's. All ranks call it together.

        Torch holds the interpreter's lock meanwhile, and waits for its store: no longer than the limit.
        """
        import torch.distributed._symmetric_memory as symm_mem

        with torch.cuda.device(self._device), _limited(self._group, self._limit):
            handle = symm_mem.rendezvous(tensor, self._group)
        if handle is None:
            raise RuntimeError("torch does not know the tensor as symmetric memory")
        return handle, list(handle.buffer_ptrs)


def chosen(memory: str | None, problems: Sequence[str | None]) -> bool:
    """Whether symmetric memory is used, given why each rank has none.

    Raises:
        RuntimeError: it was asked for, and a rank has none.
    """
    for rank, why in enumerate(problems):
        if why is not None:
            if memory == "symmetric":
                raise RuntimeError(f"memory is 'symmetric', and rank {rank} has no symmetric memory of torch: {why}")
            return False
    return True


def meeting_place() -> tuple[object, ...]:
    """What ranks have the same that pass each other file descriptors as torch does, by a socket that a PID names."""
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
    folder = next((os.environ[name] for name in names if name in os.environ), "/tmp")
    try:
        status = os.stat(folder)
        return folder, status.st_dev, status.st_ino, os.readlink("/proc/self/ns/pid")
    except OSError as error:
        return (str(error),)


_limits = threading.Lock()


@contextlib.contextmanager
def _limited(group: Any, seconds: float) -> Iterator[None]:
    """With the store of a process group, which other groups may have too, waiting no longer than that."""
    from torch.distributed import distributed_c10d as c10d

    store: Any = c10d._get_process_group_store(c10d._resolve_process_group(group))
    with _limits:  # so that each thread sees the store's own limit
        before = store.timeout
        store.set_timeout(min(before, timedelta(seconds=seconds)))
        try:
            yield
        finally:
            store.set_timeout(before)


def _line(error: Exception) -> str:
    """Its first line: torch may append where it was raised."""
    return next(iter(str(error).splitlines()), type(error).__name__)
