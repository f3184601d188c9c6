"""The layer as operators of torch: ``kodkod::moe`` and its backward, with fake kernels and autograd.

The operators take tensors as the caller stores them: ``weights`` is one flat list, and ``parts`` says how many of its
tensors each of ten places has:

====  ==============  ==========================================================================================
0     gate            1 of [E, I, H], or E of [I, H]; without an up, 1 of [E, 2I, H] or E of [2I, H]: gate, then up
1     up              as gate, or none
2     down            1 of [E, H, I], or E of [H, I]
3-5   biases          gate [E, I], up [E, I], down [E, H], in float32
6-8   shared experts  gate [S, H], up [S, H], down [H, S]
9     output gate     [1, H], in float32
====  ==============  ==========================================================================================

In eager mode the kernels are called directly, since the way through the dispatcher costs more than the checks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import _gpu, _kodkod

PLACES = 10
# What the operators call it: activation, limit, alpha, group, knobs.
Options = tuple[str, "float | None", float, int, list[int]]
# Parameters' main_grad, by the number of the weight.
MainGrads = dict[int, Tensor]

_library = torch.library.Library("kodkod", "DEF")
_CONFIG = "str activation, float? limit, float alpha, int group, int[] knobs"
_INPUTS = "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] weights, int[] parts"
_library.define(
    f"moe({_INPUTS}, Tensor[] main_grads, int[] main_grad_of, {_CONFIG}, bool keep) -> (Tensor y, Tensor context)"
)
_library.define(f"moe_backward(Tensor dy, Tensor context, {_INPUTS}, {_CONFIG}) -> Tensor[]")
_library.define(
    f"moe_backward_into(Tensor dy, Tensor context, {_INPUTS}, Tensor(a!)[] sums, {_CONFIG}) -> (Tensor, Tensor)"
)


def _gather(tensors: Sequence[Tensor], parts: Sequence[int], fused: bool = False) -> list[Tensor | None]:
    """One tensor a place; gate and up that are one are views of it, or with ``fused`` stay so."""
    places: list[Tensor | None] = []
    at = 0
    for count in parts:
        if count == 0:
            places.append(None)
        elif count == 1:
            places.append(tensors[at])
        else:
            places.append(torch.stack(list(tensors[at : at + count])))
        at += count
    if places[1] is None and not fused:
        places[0], places[1] = places[0].chunk(2, dim=1)
    return places


class Plan:
    """What all calls of the same shapes and options share."""

    __slots__ = ("config", "f32", "fused", "gpu", "options", "parts", "whole")

    def __init__(self, parts: Sequence[int], options: Options, gpu: bool) -> None:
        self.parts, self.options, self.gpu = list(parts), options, gpu
        # Whether gate and up are used as the one tensor that they are.
        self.fused = parts[1] == 0 and gpu
        # Whether all weights are used as they are given.
        self.whole = max(parts) == 1 and (parts[1] == 1 or self.fused)
        self.config: _kodkod.Config | None = None

    @property
    def group(self) -> int:
        return self.options[3]

    def complete(self, x: Tensor, ids: Tensor, given: Sequence[Tensor]) -> None:
        """For the kernels, which have tensors of checked shapes."""
        biases, shared, output_gate = (self.parts[place] > 0 for place in (3, 6, 9))
        down, *others = given[1 if self.fused else 2 :]
        experts, hidden, intermediate = down.shape
        width = others[3 if biases else 0].shape[0] if shared else 0
        sizes = (hidden, intermediate, experts, ids.shape[-1], width, output_gate, biases)
        activation, limit, alpha, group, knobs = self.options
        self.f32 = x.dtype == torch.float32
        self.config = _kodkod.Config(
            group,
            sizes,
            (activation, limit, alpha),
            [None if knob < 0 else knob for knob in knobs],
            self.f32,
            ids.dtype == torch.int64,
            self.fused,
            [x.numel(), ids.numel(), ids.numel(), *(tensor.numel() for tensor in given)],
        )

    def given(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """One tensor for each place that has some; gate and up apart, unless they are used as one."""
        if self.whole:
            return tensors
        return [place for place in _gather(tensors, self.parts, self.fused) if place is not None]


_address, _is_contiguous, _is_negated = Tensor.data_ptr, Tensor.is_contiguous, Tensor.is_neg


def _lay(tensors: list[Tensor], gpu: bool) -> list[int]:
    """Addresses for the compiled module. A tensor that it cannot read where it lies is replaced by a copy."""
    addresses = list(map(_address, tensors))
    # A GPU copies 16 bytes at once.
    if (
        all(map(_is_contiguous, tensors))
        and not any(map(_is_negated, tensors))
        and not (gpu and any(map((15).__and__, addresses)))
    ):
        return addresses
    for i, tensor in enumerate(tensors):
        if not tensor.is_contiguous() or tensor.is_neg() or (gpu and addresses[i] & 15):
            tensors[i] = tensor.resolve_neg().clone(memory_format=torch.contiguous_format)
            addresses[i] = tensors[i].data_ptr()
    return addresses


def _scatter(given: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    """The other way: tensors as the caller stores them, none a view of another."""
    if plan.parts[1] == 0 and not plan.fused:
        given = [torch.cat(given[:2], dim=1), *given[2:]]
    tensors: list[Tensor] = []
    for tensor, count in zip(given, filter(None, plan.parts), strict=True):
        tensors += [tensor] if count == 1 else [expert.clone() for expert in tensor.unbind()]
    return tensors


def _told(group: int, error: Exception) -> bool:
    """Whether the other processes of a group know of the error: from now on they do."""
    known = getattr(error, "_kodkod_told", ())
    error._kodkod_told = (*known, group)
    return group in known


def _refuse(group: int, error: Exception) -> None:
    """The other processes of a group may wait for this one's call: they get the reason as an error, once."""
    if group and not _told(group, error):
        _kodkod.group_refuse(group, str(error))


def _layout_problem(x: Tensor, ids: Tensor, topk_weights: Tensor, weights: Sequence[Tensor]) -> TypeError | None:
    """What a call that failed may have: a call like one that was checked is not asked for layouts."""
    named = {"x": x, "topk_ids": ids, "topk_weights": topk_weights}
    named |= {f"weights[{i}]": weight for i, weight in enumerate(weights)}
    for name, tensor in named.items():
        if tensor.layout != torch.strided:
            return TypeError(f"{name} is {tensor.layout}: a tensor of layout torch.strided is needed")
    return None


def _forward(
    plan: Plan, x: Tensor, ids: Tensor, topk_weights: Tensor, weights: Sequence[Tensor], keep: bool, sums: bool
) -> tuple[Tensor, Tensor]:
    """``y`` and the context; ``sums``: whether the backward will add to float32."""
    try:
        given = plan.given(weights)
        if plan.config is None:
            plan.complete(x, ids, given)
        tensors = [x, ids, topk_weights, *given]
        inputs = _lay(tensors, plan.gpu)
        y = torch.empty_like(tensors[0])
    except Exception as error:
        why = _layout_problem(x, ids, topk_weights, weights) or error
        _refuse(plan.group, why)
        raise why from None
    try:
        if plan.gpu:
            capsule = _gpu.forward(plan.group, x, plan.config, inputs, y.data_ptr(), keep, sums)
        else:
            capsule = _kodkod.forward(plan.config, inputs, y.data_ptr(), keep)
    except Exception as error:
        _told(plan.group, error)  # a layer's backward may meet it again, where a checkpoint calls this in one
        raise
    if capsule is None:
        return y, torch.empty(0, dtype=torch.int64)
    return y, torch.utils.dlpack.from_dlpack(capsule)


def _backward(
    plan: Plan,
    dy: Tensor,
    context: Tensor,
    x: Tensor,
    ids: Tensor,
    topk_weights: Tensor,
    weights: Sequence[Tensor],
    sums: Sequence[Tensor],
) -> list[Tensor]:
    """``[dx, d_topk_weights, gradient of each weight]``; with ``sums``, one a weight in float32, those are added to."""
    try:
        given = plan.given(weights)
        if plan.config is None:
            plan.complete(x, ids, given)
        tensors = [dy, x, ids, topk_weights, *given]
        at_dy, *inputs = _lay(tensors, plan.gpu)
        if sums:
            if len({total.data_ptr() for total in sums}) < len(sums):
                raise ValueError("main_grad of two weights is one tensor: each needs its own")
            # A sum begins with what is there, in any storage: so it is gathered first, and not added to later.
            gradients = list(plan.given(sums))
            into = _lay(gradients, plan.gpu)
        else:
            gradients = list(map(torch.empty_like, tensors[4:]))
            into = list(map(_address, gradients))
        dx, d_topk_weights = torch.empty_like(tensors[1]), torch.empty_like(tensors[3])
    except Exception as error:
        _refuse(plan.group, error)
        raise
    arguments = (
        plan.config,
        inputs,
        context.data_ptr(),
        at_dy,
        dx.data_ptr(),
        d_topk_weights.data_ptr(),
        into,
        plan.f32 or len(sums) > 0,
        len(sums) > 0,
    )
    try:
        if plan.gpu:
            _gpu.backward(plan.group, x, *arguments)
        else:
            _kodkod.backward(*arguments)
    except Exception as error:
        _told(plan.group, error)
        raise
    results = gradients if plan.whole else _scatter(gradients, plan)
    for total, result in zip(sums, results, strict=False):
        if result is not total:
            total.copy_(result)
    return [dx, d_topk_weights] if sums else [dx, d_topk_weights, *results]


def _checked_operator(group, x, ids, topk_weights, weights, parts, dy=None, sums=None) -> Tensor:
    """The ids, in a type that the compiled module takes where ``x`` is, of a call that is checked."""
    try:
        _check_operator(x, ids, topk_weights, weights, parts, dy, sums)
        return ids.to(torch.int32) if ids.is_cuda else ids
    except Exception as error:
        _refuse(group, error)
        raise


def _check_operator(x, ids, topk_weights, weights, parts, dy, sums) -> None:
    """What Python's layer has checked, for who calls an operator directly: the compiled module believes addresses."""
    if len(parts) != PLACES or min(parts) < 0 or sum(parts) != len(weights) or not (parts[0] and parts[2]):
        raise ValueError(f"parts is {list(parts)}: {PLACES} counts are needed, in all those of {len(weights)} weights")
    in_f32 = [place in (3, 4, 5, 9) for place, count in enumerate(parts) for _ in range(count)]
    tensors = [("topk_weights", topk_weights, torch.float32), ("topk_ids", ids, ids.dtype)]
    tensors += [(f"weights[{i}]", w, torch.float32 if in_f32[i] else x.dtype) for i, w in enumerate(weights)]
    tensors += [] if dy is None else [("dy", dy, x.dtype)]
    if sums is not None:
        if [t.shape for t in sums] != [w.shape for w in weights]:
            raise ValueError(
                f"sums has {len(sums)} tensors: one of the shape of each of {len(weights)} weights is needed"
            )
        tensors += [(f"sums[{i}]", t, torch.float32) for i, t in enumerate(sums)]
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"x is {x.dtype}: torch.bfloat16 or torch.float32 is needed")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids is {ids.dtype}: torch.int32 or torch.int64 is needed")
    for name, tensor, dtype in tensors:
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}: {dtype} is needed")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}: {x.device} is needed, where x is")
    if topk_weights.shape != ids.shape or ids.dim() == 0 or ids.shape[:-1] != x.shape[:-1]:
        shapes = f"{list(x.shape)}, {list(ids.shape)} and {list(topk_weights.shape)}"
        raise ValueError(
            f"x, topk_ids and topk_weights have shapes {shapes}: [..., H], [..., K] and [..., K] are needed"
        )
    if dy is not None and dy.shape != x.shape:
        raise ValueError(f"dy has shape {list(dy.shape)}: that of x, {list(x.shape)}, is needed")
    if any(w.dim() not in (2, 3) for w, small in zip(weights, in_f32, strict=True) if not small):
        raise ValueError("weights: [E, I, H] and [E, H, I], or matrices of them, are needed")


def _unsupported(plan: Plan, what: str) -> NotImplementedError:
    """For the caller to raise: what torch has and this layer does not, as the documentation says."""
    error = NotImplementedError(what)
    _refuse(plan.group, error)
    return error


def _check_derivatives(plan: Plan, x: Tensor, topk_weights: Tensor, weights: Sequence[Tensor]) -> None:
    """A forward-mode tangent would be lost without a word."""
    for tensor in (x, topk_weights, *weights):
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise _unsupported(plan, "kodkod.moe has no forward-mode derivative: a backward gives its gradients")


def _through_operators(x: Tensor) -> bool:
    """Whether something looks at the operators that are called: a compiler, a mode, a tensor of another class."""
    plain = type(x) is Tensor or type(x) is torch.nn.Parameter
    return not plain or torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, direct, plan, main_grads, x, ids, topk_weights, *weights):
        if direct:
            y, context = _forward(plan, x, ids, topk_weights, weights, True, len(main_grads) > 0)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                y, context = _operator(plan, x, ids, topk_weights, weights, main_grads, True)
        # The accumulators are no inputs of the gradient, and change between a forward and its backward.
        ctx.plan, ctx.main_grads = plan, main_grads
        ctx.save_for_backward(x, ids, topk_weights, context, *weights)
        ctx.set_materialize_grads(False)
        if direct:
            return y
        ctx.mark_non_differentiable(context)
        return y, context

    @staticmethod
    def backward(ctx, dy, *_):
        plan, main_grads = ctx.plan, ctx.main_grads
        try:
            x, ids, topk_weights, context, *weights = ctx.saved_tensors
        except Exception as error:  # one was changed in place, or a hook fails
            _refuse(plan.group, error)
            raise
        if dy is None and _kodkod.group_rank(plan.group) is None:
            return (None,) * (6 + len(weights))
        # Where one weight has a main_grad all are summed in float32, and those without are rounded here.
        sums: list[Tensor] = []
        try:
            if dy is None:
                dy = torch.zeros_like(x)  # the other processes' rows may have a gradient here
            if main_grads:
                sums = [
                    main_grads[i] if i in main_grads else torch.zeros_like(w, dtype=torch.float32)
                    for i, w in enumerate(weights)
                ]
        except Exception as error:
            _refuse(plan.group, error)
            raise
        if not _through_operators(dy):
            args = (plan, dy, context, x, ids, topk_weights, weights, sums)
            second = torch.is_grad_enabled()  # somebody wants a derivative of this
            results = _Once.apply(args, dy, x, topk_weights, *weights) if second else _backward(*args)
        elif sums:
            results = torch.ops.kodkod.moe_backward_into.default(
                dy, context, x, ids, topk_weights, weights, plan.parts, sums, *plan.options
            )
        else:
            results = torch.ops.kodkod.moe_backward.default(
                dy, context, x, ids, topk_weights, weights, plan.parts, *plan.options
            )
        if not sums:
            return None, None, None, results[0], None, *results[1:]
        d_weights = [
            None if i in main_grads else s.to(w.dtype) for i, (s, w) in enumerate(zip(sums, weights, strict=True))
        ]
        return None, None, None, results[0], None, results[1], *d_weights


class _Once(torch.autograd.Function):
    """Says that a backward has no backward, instead of a gradient that is silently wrong."""

    @staticmethod
    def forward(ctx, args, *tensors):
        return tuple(_backward(*args))

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("kodkod.moe has no second derivative")


def _operator(plan: Plan, x, ids, topk_weights, weights, main_grads: MainGrads, keep: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.kodkod.moe.default(
        x, ids, topk_weights, weights, plan.parts, list(main_grads.values()), list(main_grads), *plan.options, keep
    )


def run(
    plan: Plan, x: Tensor, ids: Tensor, topk_weights: Tensor, weights: Sequence[Tensor], main_grads: MainGrads
) -> Tensor:
    """``y`` of checked arguments; ``x`` and ids are [..., H] and [..., K]."""
    keep = torch.is_grad_enabled() and (
        x.requires_grad or topk_weights.requires_grad or any([w.requires_grad for w in weights])
    )
    if _through_operators(x):
        if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
            _check_derivatives(plan, x, topk_weights, weights)
        return _operator(plan, x, ids, topk_weights, weights, main_grads, keep)[0]
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise _unsupported(plan, "kodkod.moe in a transform of torch.func: autograd gives its gradients")
    if forward_ad._current_level >= 0:
        _check_derivatives(plan, x, topk_weights, weights)
    if keep:
        return _Moe.apply(True, plan, main_grads, x, ids, topk_weights, *weights)
    return _forward(plan, x, ids, topk_weights, weights, False, False)[0]


def _moe_kernel(x, ids, topk_weights, weights, parts, main_grads, main_grad_of, *options_and_keep):
    *options, keep = options_and_keep
    ids = _checked_operator(options[3], x, ids, topk_weights, weights, parts)
    plan = Plan(parts, options, x.is_cuda)
    return _forward(plan, x, ids, topk_weights, weights, keep, len(main_grads) > 0)


def _moe_fake(x, ids, topk_weights, weights, parts, main_grads, main_grad_of, *options_and_keep):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, torch.empty(int(options_and_keep[-1]), dtype=torch.int64, device="cpu")


def _moe_autograd(x, ids, topk_weights, weights, parts, main_grads, main_grad_of, *options_and_keep):
    *options, keep = options_and_keep
    plan, by_weight = Plan(parts, options, x.is_cuda), dict(zip(main_grad_of, main_grads, strict=True))
    if keep and torch.is_grad_enabled():
        return _Moe.apply(False, plan, by_weight, x, ids, topk_weights, *weights)
    with torch._C._AutoDispatchBelowAutograd():
        return _operator(plan, x, ids, topk_weights, weights, by_weight, keep)


def _backward_kernel(dy, context, x, ids, topk_weights, weights, parts, *options):
    ids = _checked_operator(options[3], x, ids, topk_weights, weights, parts, dy)
    plan = Plan(parts, options, x.is_cuda)
    return _backward(plan, dy, context, x, ids, topk_weights, weights, [])


def _backward_into_kernel(dy, context, x, ids, topk_weights, weights, parts, sums, *options):
    ids = _checked_operator(options[3], x, ids, topk_weights, weights, parts, dy, sums)
    plan = Plan(parts, options, x.is_cuda)
    return tuple(_backward(plan, dy, context, x, ids, topk_weights, weights, sums))


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _backward_fake(dy, context, x, ids, topk_weights, weights, parts, *options):
    return _like([x, topk_weights, *weights])


def _backward_into_fake(dy, context, x, ids, topk_weights, weights, parts, sums, *options):
    return tuple(_like([x, topk_weights]))


for _device in ("CPU", "CUDA"):
    _library.impl("moe", _moe_kernel, _device)
    _library.impl("moe_backward", _backward_kernel, _device)
    _library.impl("moe_backward_into", _backward_into_kernel, _device)
_library.impl("moe", _moe_autograd, "Autograd")
torch.library.register_fake("kodkod::moe", _moe_fake, lib=_library)
torch.library.register_fake("kodkod::moe_backward", _backward_fake, lib=_library)
torch.library.register_fake("kodkod::moe_backward_into", _backward_into_fake, lib=_library)
