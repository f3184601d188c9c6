"""``kodkod.moe``: checks the arguments, and hands tensors on to the operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _gpu, _kodkod, _ops
from ._group import ExpertGroup

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
OAI_ALPHA = 1.702


class Biases(NamedTuple):
    """Biases of the routed experts. Computed with in float32."""

    gate: Tensor
    """[E, I]; where ``up`` is None, [E, 2I], that of gate before that of up."""
    up: Tensor | None
    """[E, I], or None"""
    down: Tensor
    """[E, H]"""


class Shared(NamedTuple):
    """The shared experts, taken together: several are one of their total width S."""

    gate: Tensor
    """[S, H]; where ``up`` is None, [2S, H], the rows of gate before those of up."""
    up: Tensor | None
    """[S, H], or None"""
    down: Tensor
    """[H, S]"""
    output_gate: Tensor | None = None
    """[1, H] or [H]: their output is multiplied by ``sigmoid(x . output_gate)``. Computed with in float32."""


class Knobs(NamedTuple):
    """How a pass is cut into pieces. None of them changes a bit of the result; None is the default."""

    fwd_comm_sms: int | None = None
    """Workers that look for rows to move first, in a forward."""
    bwd_comm_sms: int | None = None
    """The same in a backward."""
    minibatch_rows: int | None = None
    """Rows whose communication and arithmetic overlap as a unit: a multiple of 128."""
    ring_rows: int | None = None
    """Rows of the buffer that all rows pass through: a multiple of ``minibatch_rows``."""
    saved_rows: int | None = None
    """Rows of a rank that are kept for the backward, the others being computed again; the default keeps all."""


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate: Tensor | Sequence[Tensor],
    w_up: Tensor | Sequence[Tensor] | None,
    w_down: Tensor | Sequence[Tensor],
    *,
    biases: Biases | None = None,
    shared: Shared | None = None,
    activation: str = "swiglu",
    limit: float | None = None,
    alpha: float | None = None,
    group: ExpertGroup | None = None,
    knobs: Knobs | None = None,
    precision: str | torch.dtype | None = None,
) -> Tensor:
    """The mixture-of-experts layer: ``y = shared(x) + sum over k, in order, of w_k expert_k(x)``.

    With N tokens in any leading dimensions, H hidden, E experts, I intermediate, K routes a token, S the width of the
    shared experts; H, I and S are multiples of 8::

        g = x W_gate[e]^T + b_gate[e]      u = x W_up[e]^T + b_up[e]
        expert_e(x) = act(g, u) W_down[e]^T + b_down[e]

    It is differentiable, once, in ``x``, ``topk_weights``, all weights, biases and the output gate. The same inputs
    give the same bits on every run, for any number of ranks and any knobs.

    A gradient is added to ``parameter.main_grad`` (float32, of the parameter's shape) where the parameter has one, and
    ``parameter.grad`` stays as it is. The sum begins with what is there, in float32.

    In a group of processes it is a collective call, and so is its backward. Gradients of the experts and of the shared
    experts are sums over the tokens of all ranks; the shared experts' are whole, with the same bits, on every rank.

    Args:
        x: [..., H], bfloat16 or float32.
        topk_ids: [..., K], int32 or int64: the experts of each token; -1 is no route. An expert may come twice.
        topk_weights: [..., K], any floating dtype; computed with in float32.
        w_gate: [E, I, H], or a sequence of E tensors [I, H]; where ``w_up`` is None, [E, 2I, H] or [2I, H] each, the
            rows of gate before those of up.
        w_up: as ``w_gate``, or None. Tensors of all experts are used as they lie, those of gate and up in one on a GPU;
            sequences are copied, and on the CPU those in one too.
        w_down: [E, H, I], or a sequence of E tensors [H, I].
        biases: of the routed experts.
        shared: the shared experts.
        activation: ``"swiglu"``, ``silu(g) u``; or ``"swiglu_oai"`` (gpt-oss), ``(u + 1) g sigmoid(alpha g)``.
        limit: clamps ``g <= limit`` and ``|u| <= limit``; the gradient is zero beyond.
        alpha: of ``swiglu_oai``; 1.702 by default.
        group: the ranks that share the experts; one rank, where ``x`` is, by default. In a group of processes, ``x``,
            ``topk_ids`` and ``topk_weights`` are this rank's own tokens, of any number, also 0; the weights and biases
            are those of its own experts, E in number; ids count the experts of all ranks, 0 to E * ranks - 1.
        knobs: how the work is cut into pieces.
        precision: ``"bf16"``, ``"f32"`` or the dtype: what rows and weights are computed in. Those of another dtype are
            converted, and ``y`` is converted back to the dtype of ``x``. By default it is the dtype of ``x``, which
            the weights must have; under autocast it is autocast's, also of ``y``.

    Returns:
        [..., H], of the dtype of ``x``.

    Raises:
        TypeError: an argument has a type or dtype that is not allowed.
        ValueError: an argument has a shape, device or value that is not allowed, ids included. Nothing is computed.
        kodkod.StalledError: a task waited too long.
        RuntimeError: a process of the group has ended, or did not come; the message names its rank.

    In a group of processes an error is raised on every rank: where another rank's argument is the cause, a ValueError
    names the rank, the argument and the value. In compiled code torch itself looks first whether a saved tensor was
    changed in place: that error is this process's alone.
    """
    routed = (w_gate, w_up, w_down)
    options = (activation, limit, alpha, group, knobs, precision)
    key = None
    if not torch.compiler.is_compiling():  # a compiler looks at arguments once
        plan, key, weights = _known(x, topk_ids, topk_weights, routed, biases, shared, options)
        if plan is not None and (main_grads := _main_grads(weights)) is not None:
            try:
                if plan.gpu and topk_ids.dtype != torch.int32:
                    topk_ids = topk_ids.to(torch.int32)
                if topk_weights.dtype != torch.float32:
                    topk_weights = topk_weights.to(torch.float32)
            except Exception as error:
                refuse(group, error)
                raise
            return _ops.run(plan, x, topk_ids, topk_weights, weights, main_grads)
    try:
        args, out_dtype = _checked(x, topk_ids, topk_weights, routed, biases, shared, options)
    except Exception as error:
        refuse(group, error)
        raise
    y = _ops.run(*args)
    if key is not None and y.dtype == out_dtype:
        _remember(key, args, (x, *weights))
    return y if y.dtype == out_dtype else y.to(out_dtype)


# Of calls that were checked and had no rows or weights to convert, by their signature: checks take longer than all the
# rest here.
_plans: dict[tuple, _ops.Plan] = {}
_MOST_PLANS = 1024
_kind = operator.attrgetter("shape", "dtype", "device")


def _known(x, topk_ids, topk_weights, routed, biases, shared, options):
    """The plan of a call that was checked before, all that the checks look at, and the weights, one tensor each."""
    weights = routed if routed[1] is not None else (routed[0], routed[2])
    if biases is not None:
        weights = (*weights, *biases) if type(biases) is Biases else (None,)
    if shared is not None:
        weights = (*weights, *shared[: 3 + (shared[3] is not None)]) if type(shared) is Shared else (None,)
    knobs = options[4]
    if _gpu.checks or torch._C._is_any_autocast_enabled() or (knobs is not None and type(knobs) is not Knobs):
        return None, None, weights
    try:
        kinds = map(_kind, (x, topk_ids, topk_weights, *weights))
        key = (*kinds, routed[1] is None, biases is None, shared is None, options)
        return _plans.get(key), key, weights
    except (AttributeError, TypeError, RuntimeError):
        return None, None, weights  # a sequence of weights, or something that is refused


def _remember(key: tuple, args: tuple, given: Sequence[Tensor]) -> None:
    plan, x, _, _, weights, _ = args
    used = (x, *weights)
    if len(used) == len(given) and all(a is b for a, b in zip(used, given, strict=True)) and plan.config is not None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = plan


def _main_grads(weights: Sequence[Tensor]) -> _ops.MainGrads | None:
    """The weights' main_grad; None where one is not as it must be."""
    found = {}
    for i, weight in enumerate(weights):
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is not None and weight.requires_grad:
            try:
                _check_main_grad("", weight, main_grad)
            except (TypeError, ValueError):
                return None
            found[i] = main_grad
    return found


def refuse(group: ExpertGroup | None, error: Exception) -> None:
    """Tells the other processes of a group that this one cannot make its call, and why."""
    if isinstance(group, ExpertGroup) and group.of_processes:
        if torch.compiler.is_compiling():
            _refuse(group._number, str(error))
        else:
            _ops._refuse(group._number, error)


@torch.compiler.assume_constant_result  # so that a compiler calls it while it looks at the arguments
def _refuse(number: int, why: str) -> None:
    """The other processes may wait for this one's call: they get the reason as an error."""
    _kodkod.group_refuse(number, why)


def _checked(x, topk_ids, topk_weights, routed, biases, shared, options):
    """The arguments of :func:`_ops.run`, and the dtype of ``y``."""
    *act, group, knobs, precision = options
    number = _group_number(group)
    _check_tensor("x", x)
    _check_tensor("topk_ids", topk_ids)
    _check_tensor("topk_weights", topk_weights)
    device = x.device
    on_gpu = device.type == "cuda"
    if not on_gpu and device.type != "cpu":
        raise ValueError(f"x is on {device}: cpu or cuda is needed")
    if group is not None and group.device != device:
        raise ValueError(f"x is on {device}: {group.device} is needed, where the ranks of group are")
    dtype, out_dtype = _precision(x, precision)
    w_gate, w_up, w_down = routed
    routed = (_tensors("w_gate", w_gate), () if w_up is None else _tensors("w_up", w_up), _tensors("w_down", w_down))
    named, parts = _shapes(x, topk_ids, topk_weights, routed, biases, shared)
    if on_gpu:
        first = routed[2][0].shape
        own = first[0] if len(first) == 3 else len(routed[2])
        _gpu.check_ids(topk_ids, own if group is None else own * group.ranks)
        topk_ids = topk_ids.to(torch.int32)

    weights: list[Tensor] = []
    main_grads: _ops.MainGrads = {}
    for name, weight, in_f32 in named:
        if weight.device != device:
            raise ValueError(f"{name} is on {weight.device}: {device} is needed, where x is")
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is not None and weight.requires_grad:
            _check_main_grad(name, weight, main_grad)
            main_grads[len(weights)] = main_grad
        wanted = torch.float32 if in_f32 else dtype
        if weight.dtype != wanted:
            if not weight.dtype.is_floating_point:
                raise TypeError(f"{name} is {weight.dtype}: a floating dtype is needed")
            if not in_f32 and precision is None and dtype == x.dtype:
                allowed = f"{dtype} is needed, as x is, or the argument precision"
                raise TypeError(f"{name} is {weight.dtype}: {allowed}")
            weight = weight.to(wanted)
        weights.append(weight.resolve_neg().contiguous())

    if knobs is not None and not isinstance(knobs, Knobs):
        raise TypeError(f"knobs is a {type(knobs).__name__}: a kodkod.Knobs is needed")
    knob_values = [-1] * 5 if knobs is None else [_knob(n, v) for n, v in zip(Knobs._fields, knobs, strict=True)]
    plan = _ops.Plan(parts, (act[0], *_activation(*act), number, knob_values), on_gpu)
    rows = x if x.dtype == dtype else x.to(dtype)
    topk_weights = topk_weights.to(torch.float32)
    rows, topk_weights = rows.resolve_neg().contiguous(), topk_weights.resolve_neg().contiguous()
    return (plan, rows, topk_ids.contiguous(), topk_weights, weights, main_grads), out_dtype


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}: a torch.Tensor is needed")
    if value.layout != torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else value.layout
        raise TypeError(f"{name} is {layout}: a tensor of layout torch.strided is needed")


def _tensors(name: str, value: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        _check_tensor(name, value)
        return (value,)
    if not isinstance(value, (Sequence, torch.nn.ParameterList)) or isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}: a torch.Tensor or a sequence of them is needed")
    for i, tensor in enumerate(value):
        _check_tensor(f"{name}[{i}]", tensor)
    if len(value) == 0:
        raise ValueError(f"{name} is empty: one tensor an expert is needed")
    return value


def _precision(x: Tensor, precision: str | torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """What is computed in, and the dtype of ``y``."""
    if precision is None:
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            out = dtype
        else:
            dtype = out = x.dtype
        if x.is_cuda and dtype != torch.bfloat16:
            what = "autocast's dtype" if dtype != x.dtype else "x"
            allowed = "a GPU computes in torch.bfloat16, which is needed, or precision='bf16' to convert"
            raise TypeError(f"{what} is {dtype}: {allowed}")
        if dtype not in DTYPES.values():
            raise TypeError(f"x is {dtype}: torch.bfloat16 or torch.float32 is needed")
        return dtype, out
    dtype = DTYPES.get(precision, precision) if isinstance(precision, str) else precision
    if dtype not in DTYPES.values():
        raise ValueError(f"precision is {precision!r}: 'bf16' and 'f32' are allowed")
    if x.is_cuda and dtype != torch.bfloat16:
        raise ValueError(f"precision is {precision!r}: a GPU computes in bf16, 'bf16' is needed on {x.device}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"x is {x.dtype}: a floating dtype is needed")
    return dtype, x.dtype


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], text: str) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {text} = {list(shape)}")


# A weight's name, the weight, and whether it is computed with in float32 always.
_Named = tuple[str, Tensor, bool]


def _stack(name: str, tensors: Sequence[Tensor], experts: int, shape: tuple[int, int], text: str) -> list[_Named]:
    """One tensor of all experts, or one each."""
    if len(tensors) == 1 and (tensors[0].dim() == 3 or experts != 1):
        if tensors[0].shape != (experts, *shape):
            _expect(name, tensors[0], (experts, *shape), f"[E, {text}]")
        return [(name, tensors[0], False)]
    if len(tensors) != experts:
        raise ValueError(f"{name} has {len(tensors)} tensors: w_down has {experts}, one an expert is needed")
    for i, tensor in enumerate(tensors):
        _expect(f"{name}[{i}]", tensor, shape, f"[{text}]")
    if experts == 1:
        return [(f"{name}[0]", _views(f"{name}[0]", tensors[0], lambda t: (t.unsqueeze(0),))[0], False)]
    return [(f"{name}[{i}]", tensor, False) for i, tensor in enumerate(tensors)]


def _shapes(x, topk_ids, topk_weights, routed, biases, shared) -> tuple[list[_Named], list[int]]:
    """All weights in order, and the ``parts`` of the operators. ``w_down`` sets E and I."""
    shape, ids_shape = x.shape, topk_ids.shape
    if len(shape) == 0 or shape[-1] == 0:
        raise ValueError(f"x has shape {list(shape)}: expected [..., H]")
    hidden = shape[-1]
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids is {topk_ids.dtype}: torch.int32 or torch.int64 is needed")
    if not topk_weights.dtype.is_floating_point:
        raise TypeError(f"topk_weights is {topk_weights.dtype}: a floating dtype is needed")
    if len(ids_shape) != len(shape) or ids_shape[:-1] != shape[:-1]:
        allowed = f"expected [..., K] with the leading dimensions of x, {list(shape[:-1])}"
        raise ValueError(f"topk_ids has shape {list(ids_shape)}: {allowed}")
    if ids_shape[-1] == 0:
        raise ValueError(f"topk_ids has shape {list(ids_shape)}: expected [..., K], K from 1 to 32")
    _expect("topk_weights", topk_weights, ids_shape, "that of topk_ids")
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}: {x.device} is needed, where x is")

    gate, up, down = routed
    first = down[0].shape
    if len(first) not in (2, 3) or (len(first) == 3 and len(down) > 1):
        raise ValueError(f"w_down has shape {list(first)}: expected [E, H, I], or a sequence of [H, I]")
    experts, intermediate = (first[0] if len(first) == 3 else len(down)), first[-1]
    width, text = (intermediate, "I, H") if up else (2 * intermediate, "2I, H")
    named = _stack("w_gate", gate, experts, (width, hidden), text)
    parts = [len(named), 0, 0, 0, 0, 0, 0, 0, 0, 0]
    if up:
        named += _stack("w_up", up, experts, (intermediate, hidden), "I, H")
        parts[1] = len(named) - parts[0]
    stacked = _stack("w_down", down, experts, (hidden, intermediate), "H, I")
    named += stacked
    parts[2] = len(stacked)

    if biases is not None:
        b_gate, b_up, b_down = _fused("b_gate", biases, 3)
        for name, tensor, size, text in (
            ("b_gate", b_gate, intermediate, "[E, I]"),
            ("b_up", b_up, intermediate, "[E, I]"),
            ("b_down", b_down, hidden, "[E, H]"),
        ):
            _check_tensor(name, tensor)
            _expect(name, tensor, (experts, size), text)
            named.append((name, tensor, True))
        parts[3:6] = 1, 1, 1
    if shared is not None:
        s_gate, s_up, s_down, *rest = _fused("shared_gate", shared, 3, 4)
        _check_tensor("shared_gate", s_gate)
        size = s_gate.shape[0] if s_gate.dim() else 0
        for name, tensor, wanted, text in (
            ("shared_gate", s_gate, (size, hidden), "[S, H]"),
            ("shared_up", s_up, (size, hidden), "[S, H]"),
            ("shared_down", s_down, (hidden, size), "[H, S]"),
        ):
            _check_tensor(name, tensor)
            _expect(name, tensor, wanted, text)
            named.append((name, tensor, False))
        parts[6:9] = 1, 1, 1
        if rest and rest[0] is not None:
            name, tensor = "shared_output_gate", rest[0]
            _check_tensor(name, tensor)
            _expect(name, tensor, (hidden,) if tensor.dim() == 1 else (1, hidden), "[1, H]")
            named.append((name, tensor, True))
            parts[9] = 1
    return named, parts


def _views(name: str, tensor: Tensor, view: Callable[[Tensor], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Views of a tensor that have the same views of its main_grad."""
    views = view(tensor)
    main_grad = getattr(tensor, "main_grad", None)
    if main_grad is not None:
        _check_main_grad(name, tensor, main_grad)
        for part, of_main_grad in zip(views, view(main_grad), strict=True):
            part.main_grad = of_main_grad
    return views


def _fused(name: str, tensors: Sequence[Tensor | None], *counts: int) -> list[Tensor | None]:
    """Gate and up apart, where they are one tensor."""
    argument = "biases" if name == "b_gate" else "shared"
    if not isinstance(tensors, Sequence):
        raise TypeError(f"{argument} is a {type(tensors).__name__}: a kodkod.{argument.capitalize()} is needed")
    tensors = list(tensors)
    if len(tensors) not in counts:
        raise ValueError(f"{argument} has {len(tensors)} tensors: gate, up, down are needed")
    if tensors[1] is None:
        _check_tensor(name, tensors[0])
        dim = 1 if name == "b_gate" else 0
        if tensors[0].dim() != 2 or tensors[0].shape[dim] % 2:
            allowed = "without an up, [E, 2I] is needed" if dim else "without an up, [2S, H] is needed"
            raise ValueError(f"{name} has shape {list(tensors[0].shape)}: {allowed}")
        tensors[:2] = _views(name, tensors[0], lambda t: t.chunk(2, dim=dim))
    return tensors


def _check_main_grad(name: str, weight: Tensor, main_grad: object) -> None:
    _check_tensor(f"{name}.main_grad", main_grad)
    if main_grad.dtype != torch.float32:
        raise TypeError(f"{name}.main_grad is {main_grad.dtype}: torch.float32 is needed")
    _expect(f"{name}.main_grad", main_grad, tuple(weight.shape), "that of the parameter")
    if main_grad.device != weight.device:
        raise ValueError(f"{name}.main_grad is on {main_grad.device}: {weight.device} is needed")


def _activation(name: str, limit: float | None, alpha: float | None) -> tuple[float | None, float]:
    if name not in ("swiglu", "swiglu_oai"):
        raise ValueError(f"activation is {name!r}: 'swiglu' and 'swiglu_oai' are allowed")
    for argument, value in (("limit", limit), ("alpha", alpha)):
        if value is not None and not isinstance(value, (int, float)):
            raise TypeError(f"{argument} is {value!r}: a number or None is needed")
    if name == "swiglu" and alpha is not None and alpha != 1.0:
        raise ValueError(f"alpha is {alpha}: activation 'swiglu' has none, 'swiglu_oai' does")
    return None if limit is None else float(limit), OAI_ALPHA if alpha is None else float(alpha)


def _knob(name: str, value: int | None) -> int:
    if value is None:
        return -1
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"knobs.{name} is {value!r}: an int or None is needed")
    if not 0 <= value < 2**63:
        raise ValueError(f"knobs.{name} is {value}: it cannot be negative")
    return value


def _group_number(group: ExpertGroup | None) -> int:
    if group is None:
        return 0
    if not isinstance(group, ExpertGroup):
        raise TypeError(f"group is a {type(group).__name__}: a kodkod.ExpertGroup is needed")
    return group._number


StalledError = _kodkod.StalledError
