"""The functional interface of Mixture-of-Kittens (MoK), on kodkod's layer.

Code written for MoK's racks runs here with another import, to be developed and debugged on a laptop's CPU or one GPU::

    from kodkod.compat import mok as functional

    config = functional.MoKConfig()
    workspace = functional.get_workspace(
        config, group, device=x.device, num_local_tokens=x.shape[0], hidden_size=x.shape[1], topk=8
    )
    schedule = functional.build_schedule(workspace, config, top_experts, num_local_experts=64)
    output, context = functional.forward(config, workspace, schedule, x, router_weights, *weights)
    gradients = functional.backward(config, workspace, schedule, context, d_output, x, router_weights, *weights)

Shapes, with N tokens, H hidden, K routes a token, E experts, I intermediate and S the width of the shared experts:
x, output and their gradients [N, H] in bfloat16; router weights [N, K] in float32; expert ids [N, K] in int64 or
int32; routed gate and up [E, I, H], down [E, H, I]; shared gate and up [S, H], down [H, S], in bfloat16, as are their
gradients. N is any number, 0 included; H, I and S are multiples of 8, on a GPU of 64, and S may differ from I. An id of
-1 is no route.

A group has one rank for now. Nothing here is recorded by autograd: gradients come from :func:`backward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import Knobs, Shared, moe

__all__ = [
    "MoKConfig",
    "MoKForwardContext",
    "MoKSchedule",
    "MoKWorkspace",
    "backward",
    "build_schedule",
    "create_workspace",
    "forward",
    "get_workspace",
    "mxfp8_quantize",
    "recompute_forward_context",
]

MX_BLOCK = 32
E4M3_MAX = 448.0
E4M3_EXPONENT = 8  # of E4M3_MAX: floor(log2(448))


@dataclass(frozen=True)
class MoKConfig:
    """How the work is cut into pieces. No field changes a bit of a result."""

    fwd_num_comm_sms: int = 40
    """``Knobs.fwd_comm_sms``, 1 to 1024; a GPU keeps at least one SM of a rank for tiles."""
    bwd_num_comm_sms: int = 28
    """``Knobs.bwd_comm_sms``, likewise."""
    minibatch_size: int = 4096
    """``Knobs.minibatch_rows``: a multiple of 128."""
    macrobatch_size: int = 131072
    """``Knobs.ring_rows``: a multiple of ``minibatch_size``."""
    schedule_capacity_multiplier: float = 0.5
    """Ignored: a schedule here holds every route, however unequal the experts' loads."""


@dataclass(frozen=True)
class MoKWorkspace:
    """What all layers of one shape share. It holds no memory: the layer's own is pooled in the process."""

    device: torch.device
    num_local_tokens: int
    hidden_size: int
    topk: int
    ep_rank: int = 0
    ep_size: int = 1


@dataclass(frozen=True, eq=False)
class MoKSchedule:
    """The routes of one batch."""

    top_experts: Tensor
    """[N, K], int32: a copy, so that the caller's may change."""
    num_local_experts: int


@dataclass(frozen=True, eq=False)
class MoKForwardContext:
    """What a backward needs of a forward; without an output the backward computes that again."""

    schedule: MoKSchedule
    swiglu_limit: float | None
    inputs: tuple[Tensor | None, ...] = ()
    output: Tensor | None = None


_workspaces: dict[tuple, MoKWorkspace] = {}


def get_workspace(
    config: MoKConfig, group: Any, *, device: torch.device, num_local_tokens: int, hidden_size: int, topk: int
) -> MoKWorkspace:
    """The workspace of these sizes: made at the first call, the same object after it. Arguments: create_workspace's."""
    sizes = (num_local_tokens, hidden_size, topk)
    made = create_workspace(
        config, group, device=device, num_local_tokens=num_local_tokens, hidden_size=hidden_size, topk=topk
    )
    return _workspaces.setdefault((group, made.device, *sizes), made)


def create_workspace(
    config: MoKConfig, group: Any, *, device: torch.device, num_local_tokens: int, hidden_size: int, topk: int
) -> MoKWorkspace:
    """A new workspace, which belongs to the caller.

    Args:
        config: the same as for the calls after it.
        group: a ``torch.distributed.ProcessGroup`` of one rank, or None.
        device: the CPU or a GPU.
        num_local_tokens: N, 0 or more.
        hidden_size: H, a multiple of 8.
        topk: K, 1 or more.

    Raises:
        TypeError, ValueError: an argument is not as above, or the group has several ranks.
    """
    _check_config(config)
    for name, value, least, step in (
        ("num_local_tokens", num_local_tokens, 0, 1),
        ("hidden_size", hidden_size, 8, 8),
        ("topk", topk, 1, 1),
    ):
        _integer(name, value)
        if value < least or value % step:
            allowed = f"a multiple of {step}" if step > 1 else f"{least} or more"
            raise ValueError(f"{name} is {value}: {allowed} is needed")
    if group is not None:
        _instance("group", group, dist.ProcessGroup)
        if group.size() != 1:
            works = "a group of one rank, or None, works in this version"
            raise ValueError(f"group has {group.size()} ranks: {works}, with all experts on it")
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device}: cpu or cuda is needed")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return MoKWorkspace(device, num_local_tokens, hidden_size, topk)


def build_schedule(
    workspace: MoKWorkspace, config: MoKConfig, top_experts: Tensor, *, num_local_experts: int
) -> MoKSchedule:
    """Checks and keeps the routes of a batch.

    Args:
        workspace: of these sizes.
        config: as for the workspace.
        top_experts: [N, K], int64 or int32: 0 to ``num_local_experts - 1``, or -1 for no route. An expert may come
            twice in a token: both routes count.
        num_local_experts: E, 1 or more.

    Raises:
        TypeError, ValueError: an argument is not as above; the first id out of range is named. On a GPU ids are not
            looked at, and one out of range is no route.
    """
    _instance("workspace", workspace, MoKWorkspace)
    _check_config(config)
    _integer("num_local_experts", num_local_experts)
    if num_local_experts < 1:
        raise ValueError(f"num_local_experts is {num_local_experts}: 1 or more is needed")
    _instance("top_experts", top_experts, Tensor)
    if top_experts.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"top_experts is {top_experts.dtype}: torch.int64 or torch.int32 is needed")
    shape = (workspace.num_local_tokens, workspace.topk)
    _tensor("top_experts", top_experts, top_experts.dtype, shape, "[num_local_tokens, topk]", workspace.device)
    if workspace.device.type == "cpu":  # a GPU would have to be waited for
        wrong = ((top_experts < -1) | (top_experts >= num_local_experts)).nonzero()
        if len(wrong):
            token, k = wrong[0].tolist()
            allowed = f"0 to {num_local_experts - 1}, and -1 for no route, are allowed"
            raise ValueError(f"top_experts[{token}, {k}] is {top_experts[token, k].item()}: {allowed}")
    return MoKSchedule(top_experts.detach().to(torch.int32, copy=True), num_local_experts)


def forward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    router_weights: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_shared_down: Tensor | None,
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    w_routed_down: Tensor,
    swiglu_limit: float | None = None,
) -> tuple[Tensor, MoKForwardContext]:
    """The output [N, H] in bfloat16, and the context of its backward.

    Args:
        config, workspace, schedule: as made above.
        x: [N, H], bfloat16.
        router_weights: [N, K], float32.
        w_shared_gate, w_shared_up, w_shared_down: [S, H], [S, H], [H, S], bfloat16; none if S is 0 or all are None.
        w_routed_gate, w_routed_up, w_routed_down: [E, I, H], [E, I, H], [E, H, I], bfloat16.
        swiglu_limit: clamps gate <= limit and \\|up\\| <= limit, of shared and routed experts; gradients beyond are 0.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    inputs = (
        x,
        router_weights,
        w_shared_gate,
        w_shared_up,
        w_shared_down,
        w_routed_gate,
        w_routed_up,
        w_routed_down,
    )
    _check(config, workspace, schedule, dict(zip(_INPUTS, inputs, strict=True)), swiglu_limit)
    context = _run(config, schedule, inputs, swiglu_limit)
    return context.output.detach(), context


def recompute_forward_context(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    swiglu_limit: float | None = None,
) -> MoKForwardContext:
    """A context in place of one that was dropped: :func:`backward` gives the same bits with either.

    It only checks the arguments, which are those of :func:`forward`: the backward computes the forward again, from the
    tensors that it is given.
    """
    inputs = {
        "x": x,
        "w_shared_gate": w_shared_gate,
        "w_shared_up": w_shared_up,
        "w_routed_gate": w_routed_gate,
        "w_routed_up": w_routed_up,
    }
    _check(config, workspace, schedule, inputs, swiglu_limit)
    return MoKForwardContext(schedule, swiglu_limit)


def backward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    context: MoKForwardContext,
    d_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_shared_down: Tensor | None,
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    w_routed_down: Tensor,
    swiglu_limit: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a forward.

    Args:
        context: of a :func:`forward` or :func:`recompute_forward_context` with this schedule and limit. It may be used
            again. Where tensors lie elsewhere than the forward's did, the forward is computed again from these.
        d_output: [N, H], bfloat16.
        config, workspace, schedule, x, router_weights, weights, swiglu_limit: as in the forward.

    Returns:
        ``(d_x, d_router_weights, d_w_routed_gate, d_w_routed_up, d_w_routed_down, d_w_shared_gate, d_w_shared_up,
        d_w_shared_down)``, of the shapes and dtypes of what they are gradients of; None where that is None.

    Raises:
        TypeError, ValueError: an argument is not as above.
        RuntimeError: a tensor of the forward was changed in place since then.
    """
    inputs = (
        x,
        router_weights,
        w_shared_gate,
        w_shared_up,
        w_shared_down,
        w_routed_gate,
        w_routed_up,
        w_routed_down,
    )
    _instance("context", context, MoKForwardContext)
    _check(config, workspace, schedule, dict(zip(_INPUTS, inputs, strict=True)), swiglu_limit)
    _tensor("d_output", d_output, torch.bfloat16, tuple(x.shape), "that of x", workspace.device)
    if context.schedule is not schedule:
        raise ValueError("context is of another schedule: a context of this schedule is needed")
    if context.swiglu_limit != swiglu_limit:
        raise ValueError(f"swiglu_limit is {swiglu_limit}: the context's is {context.swiglu_limit}, which is needed")
    if context.output is None or not all(map(_same_memory, inputs, context.inputs)):
        context = _run(config, schedule, inputs, swiglu_limit)
    leaves = [tensor for tensor in context.inputs if tensor is not None]
    # Shared experts of width 0 are no part of the graph.
    gradients = iter(
        torch.autograd.grad(context.output, leaves, d_output.detach(), retain_graph=True, materialize_grads=True)
    )
    of = {n: None if t is None else next(gradients) for n, t in zip(_INPUTS, context.inputs, strict=True)}
    routed = (of["w_routed_gate"], of["w_routed_up"], of["w_routed_down"])
    return (of["x"], of["router_weights"], *routed, of["w_shared_gate"], of["w_shared_up"], of["w_shared_down"])


@torch.no_grad()
def mxfp8_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds to MXFP8 of the OCP Microscaling (MX) Formats Specification 1.0: E4M3 elements, one E8M0 scale per 32.

    A value is ``element * 2**(scale - 127)``, with ``scale = floor(log2(m)) - 8 + 127``, at least 0, where m is the
    largest magnitude of the block, NaN left out. Elements are rounded to nearest, ties to even, and saturate at
    +-448, which happens where m is more than 1.75 times its power of two. A block of zeros has scale 0. A NaN is a
    NaN element, and changes no other; an infinity is +-448 times 2**120, which float32 reads as infinity.

    Args:
        x: [..., C], bfloat16, float16 or float32; C a multiple of 32, the dimension along which blocks lie.

    Returns:
        Elements [..., C] in ``torch.float8_e4m3fn``, and scales [..., C / 32] in uint8, rows in order (not in the
        tiles that a tensor core reads); ``scales.view(torch.float8_e8m0fnu)`` are the scales as numbers.

    Raises:
        TypeError, ValueError: ``x`` is not as above.
    """
    _instance("x", x, Tensor)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"x is {x.dtype}: torch.bfloat16, torch.float16 or torch.float32 is needed")
    if x.dim() == 0 or x.shape[-1] % MX_BLOCK:
        raise ValueError(f"x has shape {list(x.shape)}: a last dimension that is a multiple of {MX_BLOCK} is needed")
    blocks = x.float().unflatten(-1, (x.shape[-1] // MX_BLOCK, MX_BLOCK))
    largest = blocks.abs().masked_fill(blocks.isnan(), 0).amax(-1)
    # The exponent field of a float32 is floor(log2) + 127; subnormal numbers have 0, which is below the least scale.
    scales = ((largest.view(torch.int32) >> 23) - E4M3_EXPONENT).clamp(min=0)
    inverse = ((254 - scales) << 23).view(torch.float32)  # 2**(127 - scale), exactly
    elements = (blocks * inverse.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return elements.flatten(-2), scales.to(torch.uint8)


_INPUTS = (
    "x",
    "router_weights",
    "w_shared_gate",
    "w_shared_up",
    "w_shared_down",
    "w_routed_gate",
    "w_routed_up",
    "w_routed_down",
)


def _run(
    config: MoKConfig, schedule: MoKSchedule, inputs: tuple[Tensor | None, ...], swiglu_limit: float | None
) -> MoKForwardContext:
    """A forward from leaves of its own, so that a backward through it ends at this layer."""
    leaves = tuple(None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs)
    x, router_weights, *shared, gate, up, down = leaves
    knobs = Knobs(
        fwd_comm_sms=config.fwd_num_comm_sms,
        bwd_comm_sms=config.bwd_num_comm_sms,
        minibatch_rows=config.minibatch_size,
        ring_rows=config.macrobatch_size,
    )
    options = {
        "shared": Shared(*shared) if shared[0] is not None and len(shared[0]) else None,
        "limit": swiglu_limit,
        "knobs": knobs,
        "precision": "bf16",
    }
    with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
        output = moe(x, schedule.top_experts, router_weights, gate, up, down, **options)
    return MoKForwardContext(schedule, swiglu_limit, leaves, output)


def _same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else a.is_set_to(b)


def _check(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    inputs: dict[str, Tensor | None],
    swiglu_limit: float | None,
) -> None:
    """Those of a pass's arguments that are there."""
    _check_config(config)
    _instance("workspace", workspace, MoKWorkspace)
    _instance("schedule", schedule, MoKSchedule)
    tokens, hidden, topk = workspace.num_local_tokens, workspace.hidden_size, workspace.topk
    experts = schedule.num_local_experts
    if schedule.top_experts.shape != (tokens, topk):
        made = list(schedule.top_experts.shape)
        raise ValueError(f"schedule is of {made} routes: the workspace's are [{tokens}, {topk}]")
    if swiglu_limit is not None and not swiglu_limit > 0:
        raise ValueError(f"swiglu_limit is {swiglu_limit}: a positive number or None is needed")
    shared = [name for name in inputs if name.startswith("w_shared")]
    missing = [name for name in shared if inputs[name] is None]
    if missing and len(missing) < len(shared):
        raise TypeError(f"{missing[0]} is None: the shared experts' weights are tensors, or all None")

    def size(name: str, dim: int) -> int:
        weight = inputs[name]
        return weight.shape[dim] if isinstance(weight, Tensor) and weight.dim() > dim else 0

    intermediate = size("w_routed_gate", 1)
    routed, routed_text = (experts, intermediate, hidden), "[num_local_experts, intermediate, hidden_size]"
    down, down_text = (experts, hidden, intermediate), "[num_local_experts, hidden_size, intermediate]"
    expected = {
        "x": ((tokens, hidden), "[num_local_tokens, hidden_size]"),
        "router_weights": ((tokens, topk), "[num_local_tokens, topk]"),
        "w_routed_gate": (routed, routed_text),
        "w_routed_up": (routed, routed_text),
        "w_routed_down": (down, down_text),
    }
    if not missing:
        width = size("w_shared_gate", 0)
        expected |= {
            "w_shared_gate": ((width, hidden), "[shared, hidden_size]"),
            "w_shared_up": ((width, hidden), "[shared, hidden_size]"),
            "w_shared_down": ((hidden, width), "[hidden_size, shared]"),
        }
    for name, tensor in inputs.items():
        if isinstance(tensor, tuple) and name.startswith("w_routed"):
            raise TypeError(f"{name} is a tuple: this version has no MXFP8, a torch.Tensor in bfloat16 is needed")
        if name in expected:
            dtype = torch.float32 if name == "router_weights" else torch.bfloat16
            _tensor(name, tensor, dtype, *expected[name], workspace.device)


def _check_config(config: MoKConfig) -> None:
    _instance("config", config, MoKConfig)
    for name in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
        value = getattr(config, name)
        _integer(f"config.{name}", value)
        if not 1 <= value <= 1024:
            raise ValueError(f"config.{name} is {value}: 1 to 1024 are allowed")
    for name, unit in (("minibatch_size", 128), ("macrobatch_size", config.minibatch_size)):
        value = getattr(config, name)
        _integer(f"config.{name}", value)
        if value < 1 or value % unit:
            raise ValueError(f"config.{name} is {value}: a positive multiple of {unit} is needed")


def _tensor(
    name: str, value: object, dtype: torch.dtype, shape: tuple[int, ...], text: str, device: torch.device
) -> None:
    _instance(name, value, Tensor)
    if value.dtype != dtype:
        raise TypeError(f"{name} is {value.dtype}: {dtype} is needed")
    if value.shape != shape:
        raise ValueError(f"{name} has shape {list(value.shape)}: expected {text} = {list(shape)}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}: {device} is needed, where the workspace is")


def _instance(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise TypeError(f"{name} is a {type(value).__name__}: a {wanted.__name__} is needed")


def _integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: an int is needed")
