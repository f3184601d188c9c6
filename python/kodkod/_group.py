"""The ranks that share the experts of a layer."""

from __future__ import annotations

import atexit
import os
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from . import _kodkod
from ._symmetric import SymmetricMemory, chosen, meeting_place

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_MOST_THREADS = 1024


class ExpertGroup:
    """The ranks that share the experts of a layer, and the machine that they run on.

    Made by :meth:`cpu` or :meth:`processes`. It stays, with its threads and memory, for the life of the process, and
    one pass runs at a time. The results have the same bits for any number of ranks.
    """

    def __init__(self, number: int, virtual: tuple[int, int] | None, device: torch.device) -> None:
        self._number = number
        self.device = device
        """Where a layer's tensors are."""
        self._virtual = virtual  # ranks and threads of virtual ranks: how to make them again in another process

    @classmethod
    def cpu(cls, ranks: int = 1, *, threads: int = 0) -> ExpertGroup:
        """``ranks`` virtual ranks in this process, on ``threads`` threads (0: one a core).

        The number of experts of a layer must be a multiple of ``ranks``. Tokens are dealt evenly. Groups of equal
        options are one group.

        Raises:
            ValueError: ``ranks`` or ``threads`` is out of range.
        """
        _check_count("ranks", ranks)
        _check_count("threads", threads)
        return cls(_kodkod.group_cpu(ranks, threads), (ranks, threads), torch.device("cpu"))

    @classmethod
    def processes(
        cls,
        process_group: ProcessGroup | DeviceMesh | None = None,
        *,
        device: torch.device | str | None = None,
        threads: int = 0,
        timeout: float = 600.0,
        memory: Literal["symmetric", "ipc"] | None = None,
    ) -> ExpertGroup:
        """Each process of a torch process group as a rank, on the CPU or the GPUs of one host: expert parallelism.

        All processes of ``process_group`` call it together; make one group and give it to all layers. With R ranks,
        rank r holds experts r E/R to (r + 1) E/R - 1 of a layer, and gives :func:`kodkod.moe` its own tokens. All ranks
        make the same calls, forward and backward, in the same order. Rows move through shared memory (``/dev/shm``), or
        from GPU to GPU over NVLink.

        Args:
            process_group: a process group of any backend, or a DeviceMesh of one dimension; the default process group
                if None.
            device: ``"cpu"``; or this rank's GPU, where ``"cuda"`` is the current one. By default a GPU where the
                process group has NCCL for GPUs.
            threads: worker threads of this rank on the CPU; 0 is its share of the cores.
            timeout: seconds that a rank waits for one that does not come to a call, or not on with it. Once the group
                is made, a process that has ended is found out at once.
            memory: what ranks on GPUs reach of each other. ``"symmetric"`` is torch's symmetric memory, of its backend
                CUDA, which needs ``process_group`` for as long as calls are made; ``"ipc"`` is CUDA IPC. By default the
                first, or the second where a trial finds that a rank has none: the group's ``repr`` says which. While
                torch maps memory, in this call and where a later one needs more, nothing else of Python runs. It waits
                for ranks by its store: for 60 seconds, ``timeout`` or the store's own limit, whichever is least, and
                then it is an error on every rank. A rank that is killed while torch passes a file descriptor is not
                found out. kodkod does not use NVLink multicast: ``TORCH_SYMM_MEM_DISABLE_MULTICAST=1`` keeps torch from
                making objects for it.

        Raises:
            TypeError, ValueError: an argument has a type or value that is not allowed, here or on another rank.
            RuntimeError: there is no process group, its processes are on several hosts, one has ended, or one has no
                symmetric memory and ``memory`` asks for it; with the ranks' names, on every rank.
        """
        import torch.distributed as dist

        process_group = _resolve(process_group)
        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        if device is None:
            device = "cuda" if "cuda:nccl" in str(dist.get_backend_config(process_group)) else "cpu"
        error = _problem(device, threads, timeout, memory)
        kind = "" if error is not None else torch.device(device).type
        index, symmetric, lacks = 0, None, None
        if kind == "cuda":
            index = torch.device(device).index
            index = torch.cuda.current_device() if index is None else index
            if memory != "ipc":
                symmetric = SymmetricMemory(process_group, index, float(timeout))
                lacks = symmetric.problem()
        why = None if error is None else str(error)
        chose = memory if error is None else None
        mine = _Said(_host(), uuid.uuid4().hex, kind, chose, why, lacks, meeting_place())
        every = [mine] * ranks
        dist.all_gather_object(every, mine, group=process_group)
        if error is not None:
            raise error
        _check_said(every)
        if symmetric is not None and chosen(memory, _lacks(every)):
            lacking: list[str | None] = [None] * ranks
            dist.all_gather_object(lacking, symmetric.trial(), group=process_group)
            symmetric = symmetric if chosen(memory, lacking) else None
        else:
            symmetric = None
        name = every[0].name
        if kind == "cpu":
            number = _kodkod.group_processes(rank, ranks, name, threads, float(timeout))
            return cls(number, None, torch.device("cpu"))
        atexit.unregister(_finish)
        atexit.register(_finish, os.getpid())
        number = _kodkod.group_cuda(rank, ranks, name, index, float(timeout), symmetric)
        return cls(number, None, torch.device("cuda", index))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return _kodkod.group_info(self._number)[0]

    @property
    def of_processes(self) -> bool:
        """Whether it was made by :meth:`processes`."""
        return self._virtual is None

    @property
    def rank(self) -> int | None:
        """The rank that this process is, in a group of processes; None in others."""
        return _kodkod.group_rank(self._number)

    @property
    def threads(self) -> int:
        """Number of worker threads of this process."""
        return _kodkod.group_info(self._number)[1]

    def memory(self) -> tuple[int, int]:
        """Bytes of symmetric memory that the group, and forwards before their backward, hold now; and the most ever.

        On a GPU those of this rank, as the driver's count of free memory tells, kept slots included.
        """
        return _kodkod.group_memory(self._number)

    def trim(self) -> None:
        """Gives memory that waits for reuse back to the system. On GPUs :func:`kodkod.cuda.trim` does."""
        _kodkod.group_trim(self._number)

    def __reduce__(self) -> tuple[object, tuple[int, int] | None]:
        if self.of_processes:
            raise TypeError("a group of processes cannot be pickled: its ranks are these processes")
        return _virtual, self._virtual

    def __copy__(self) -> ExpertGroup:
        return self

    def __deepcopy__(self, memo: object) -> ExpertGroup:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertGroup) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)

    def __repr__(self) -> str:
        ranks, _, description = _kodkod.group_info(self._number)
        own = "" if self.rank is None else f"rank {self.rank} of "
        return f"ExpertGroup({own}{ranks} ranks, {description})"


def _finish(process: int) -> None:
    """Others reach this process's memory until their passes, and so its own, have ended."""
    if os.getpid() == process:
        _kodkod.cuda_check()


def _virtual(ranks: int, threads: int) -> ExpertGroup:
    return ExpertGroup.cpu(ranks, threads=threads)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: an int is needed")
    if not 0 <= value < 2**63:
        raise ValueError(f"{name} is {value}: 0 or more are needed, and less than 2**63")


class _Said(NamedTuple):
    """What a rank tells the others when they make a group."""

    host: tuple[str, str]
    name: str
    """Of the group, if this is rank 0."""
    kind: str
    memory: str | None
    error: str | None
    lacks: str | None
    """Why it has no symmetric memory."""
    place: tuple[object, ...]


def _check_said(every: Sequence[_Said]) -> None:
    """Raises where a rank has an error, or the ranks do not fit together."""
    for rank, said in enumerate(every):
        if said.error is not None:
            raise ValueError(f"ExpertGroup.processes of rank {rank} is refused: {said.error}")
    for what, values in (("device", [s.kind for s in every]), ("memory", [s.memory for s in every])):
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ValueError(
                    f"{what} of rank {rank} is {value}: rank 0 has {values[0]}, and all must have the same"
                )
    _check_hosts([said.host for said in every])


def _lacks(every: Sequence[_Said]) -> list[str | None]:
    """Why each rank has no symmetric memory."""
    folder = every[0].place[0]
    elsewhere = f"torch meets in {folder} on rank 0, and in another folder, or among other PIDs, on this one"
    return [said.lacks or (elsewhere if said.place != every[0].place else None) for said in every]


def _problem(device: object, threads: object, timeout: object, memory: object) -> Exception | None:
    """What is wrong with the arguments of a rank: raised after the others have heard of it."""
    try:
        if not isinstance(device, (str, torch.device)):
            raise TypeError(f"device is {device!r}: a torch.device or a str is needed")
        try:
            kind = torch.device(device).type
        except RuntimeError:
            kind = None
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"device is {str(device)!r}: cpu and cuda are allowed")
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {str(device)!r}: torch finds no GPU here")
        if kind == "cuda":
            torch.cuda.init()
        _check_count("threads", threads)
        if threads > _MOST_THREADS:
            raise ValueError(f"threads is {threads}: 0 to {_MOST_THREADS} are allowed")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout is {timeout!r}: a number of seconds is needed")
        if not 1e-3 <= timeout < 1e9:
            raise ValueError(f"timeout is {timeout}: 0.001 seconds or more are needed, and less than 1e9")
        if memory is not None and memory not in ("symmetric", "ipc"):
            raise ValueError(f"memory is {memory!r}: 'symmetric', 'ipc' and None are allowed")
        if memory is not None and kind == "cpu":
            raise ValueError(f"memory is {memory!r}: only ranks on GPUs have the choice, and device is cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        return error
    return None


def _resolve(process_group: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("there is no process group: torch.distributed.init_process_group is needed first")
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return process_group
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group is NON_GROUP_MEMBER: this process is none of its ranks")
    if isinstance(process_group, dist.device_mesh.DeviceMesh):
        if process_group.ndim != 1:
            names = process_group.mesh_dim_names
            example = f", such as mesh[{names[-1]!r}]" if names else ""
            raise ValueError(f"process_group is a DeviceMesh of {process_group.ndim} dimensions: 1 is needed{example}")
        return process_group.get_group()
    raise TypeError(f"process_group is a {type(process_group).__name__}: a ProcessGroup or a DeviceMesh is needed")


def _host() -> tuple[str, str]:
    """The host's name, and what tells whether two processes share memory: the boot and the file system of /dev/shm."""
    name = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return name, f"{boot} {Path('/dev/shm').stat().st_dev}"
    except OSError:
        return name, name


def _check_hosts(hosts: Sequence[tuple[str, str]]) -> None:
    if len({identity for _, identity in hosts}) == 1:
        return
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    places = "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} on {name}"
        for (name, _), ranks in ranks_of.items()
    )
    raise RuntimeError(
        f"the processes do not share memory: {places}. Those of one host, with one /dev/shm, are needed, also on GPUs: "
        "a process group for each host is made by torch.distributed.new_subgroups"
    )
