"""The compiled half: the layer over plain integers. Private: addresses are believed, so a wrong one is a crash."""

from ._symmetric import SymmetricMemory

class Config:
    """What calls of the same shapes and options share: all but the tensors."""

    def __new__(
        cls,
        group: int,
        sizes: tuple[int, int, int, int, int, bool, bool],
        activation: tuple[str, float | None, float],
        knobs: list[int | None],
        f32: bool,
        wide: bool,
        fused: bool,
        counts: list[int],
    ) -> Config:
        """
        Args:
            group: its number.
            sizes: hidden, intermediate, experts with weights here, top-k, shared intermediate (0: none), output gate,
                biases.
            activation: with limit and alpha.
            knobs: in the order of :class:`kodkod.Knobs`.
            f32: rows and weights are float32, else bfloat16.
            wide: ids are int64, else int32.
            fused: gate and up are one tensor, [experts, 2, intermediate, hidden], in gate's place. On a GPU, without a
                group.
            counts: elements of x, ids, router weights and of each weight that there is, of gate, up, down; their
                biases; shared gate, up, down and output gate.
        """

class StalledError(RuntimeError):
    """A pass waited too long for a task and was given up. The message names ranks, tasks and counters."""

def group_cpu(ranks: int, threads: int) -> int:
    """The number of the group of these virtual ranks on the CPU; ``threads`` 0 is one a core. Number 0 is one rank."""

def group_processes(rank: int, ranks: int, name: str, threads: int, timeout: float) -> int:
    """The number of a new group of processes, of which this one is rank ``rank``; all give the same new name.

    ``timeout`` is in seconds.
    """

def group_cuda(rank: int, ranks: int, name: str, device: int, timeout: float, memory: SymmetricMemory | None) -> int:
    """The same with a GPU for this rank; ``memory`` is for what ranks reach of each other, CUDA IPC if None."""

def group_rank(number: int) -> int | None:
    """The rank that this process is, in a group of processes."""

def group_refuse(number: int, why: str) -> None:
    """Tells the other ranks of a group of processes that this one cannot make its call; in other groups nothing."""

def group_info(number: int) -> tuple[int, int, str]:
    """Ranks, threads, and what they run on in a few words."""

def group_memory(number: int) -> tuple[int, int]:
    """Bytes of symmetric memory held now, and the most ever."""

def group_trim(number: int) -> None:
    """Gives memory that waits for reuse back to the system."""

def forward(config: Config, inputs: list[int], y: int, keep: bool) -> object | None:
    """Writes ``y``; with ``keep`` it returns the DLPack capsule of what the backward needs.

    ``inputs`` are addresses, in the order of the counts.
    """

def backward(
    config: Config,
    inputs: list[int],
    context: int,
    dy: int,
    dx: int,
    d_topk_weights: int,
    weight_gradients: list[int],
    f32_gradients: bool,
    accumulate: bool,
) -> None:
    """Writes ``dx`` and ``d_topk_weights``, and writes or, with ``accumulate``, adds the gradients of the weights.

    ``context`` is the address of the capsule's tensor; where it is gone, the forward runs again.
    """

Place = tuple[int, int, bool, bool]
"""The GPU's number; the handle of the stream; whether to wait for the pass and look for errors; whether the caller has
no memory to give back, so that a forward takes the slot of another, where else a MemoryError is raised."""

def cuda_forward(
    place: Place, config: Config, inputs: list[int], y: int, keep: bool, f32_gradients: bool
) -> object | None:
    """Puts a forward in the stream, which writes ``y``; with ``keep`` as :func:`forward`. Ids are int32.

    ``f32_gradients``: what the backward will store.
    """

def cuda_backward(
    place: Place,
    config: Config,
    inputs: list[int],
    context: int,
    dy: int,
    dx: int,
    d_topk_weights: int,
    weight_gradients: list[int],
    f32_gradients: bool,
    accumulate: bool,
) -> None:
    """As :func:`backward`, put in the stream."""

def cuda_rank_forward(
    place: Place, config: Config, inputs: list[int], y: int, keep: bool, f32_gradients: bool
) -> object | None:
    """As :func:`cuda_forward`, in a group of processes with a GPU each."""

def cuda_rank_backward(
    place: Place,
    config: Config,
    inputs: list[int],
    context: int,
    dy: int,
    dx: int,
    d_topk_weights: int,
    weight_gradients: list[int],
    f32_gradients: bool,
    accumulate: bool,
) -> None:
    """As :func:`cuda_backward`, in a group of processes with a GPU each."""

def cuda_check() -> None:
    """Waits for all passes on all GPUs, and raises where one was given up."""

def cuda_memory(device: int) -> tuple[int, int, int, int, int | None, int]:
    """Slots; those that a forward holds; those of graphs; bytes; the most bytes; forwards that ran again.

    Those of groups of processes are not counted.
    """

def cuda_limit(device: int, limit: int | None) -> None:
    """Sets the most bytes of slots of a GPU."""

def cuda_trim(device: int, captured: bool) -> None:
    """Frees the slots of a GPU that no forward holds; with ``captured`` those of graphs too."""
