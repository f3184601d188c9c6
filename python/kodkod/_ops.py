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
# What is neither tensor nor weight: parts, main_grad_of, activation, limit, alpha, group, knobs.
Meta = tuple[list[int], list[int], str, "float | None", float, int, list[int]]

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


def _gather(tensors: Sequence[Tensor], parts: Sequence[int]) -> list[Tensor | None]:
    """One contiguous tensor a place, gate and up apart; what is stored so already is not copied.

    On a GPU it also begins at a multiple of 16 bytes, as tensors do that are no views.
    """
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
    if places[1] is None:
        places[0], places[1] = places[0].chunk(2, dim=1)
    return [None if place is None else _plain(place) for place in places]


def _plain(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % 16 else tensor


def _ids(ids: Tensor) -> Tensor:
    """A GPU takes int32."""
    return _plain(ids.to(torch.int32) if ids.is_cuda else ids)


def _scatter(places: list[Tensor | None], parts: Sequence[int]) -> list[Tensor]:
    """The other way: tensors as ``parts`` stores them, none a view of another."""
    if parts[1] == 0:
        places = [torch.cat([places[0], places[1]], dim=1), None, *places[2:]]
    tensors: list[Tensor] = []
    for place, count in zip(places, parts, strict=True):
        if count == 1:
            tensors.append(place)
        elif count > 1:
            tensors.extend(expert.clone() for expert in place.unbind())
    return tensors


def _span(tensor: Tensor | None) -> tuple[int, int] | None:
    return None if tensor is None else (tensor.data_ptr(), tensor.numel())


def _call(x: Tensor, ids: Tensor, topk_weights: Tensor, places: list[Tensor | None], meta: Meta):
    """The arguments that a forward and a backward of the compiled module share."""
    _, _, activation, limit, alpha, group, knobs = meta
    gate, shared = places[0], places[6]
    experts, intermediate, hidden = gate.shape
    sizes = (
        hidden,
        intermediate,
        experts,
        ids.shape[-1],
        0 if shared is None else shared.shape[0],
        places[9] is not None,
        places[3] is not None,
    )
    config = (
        group,
        sizes,
        (activation, limit, alpha),
        [None if knob < 0 else knob for knob in knobs],
        x.dtype == torch.float32,
    )
    inputs = (
        (x.data_ptr(), x.numel()),
        (ids.data_ptr(), ids.numel()),
        ids.dtype == torch.int64,
        (topk_weights.data_ptr(), topk_weights.numel()),
        [None if place is None else (place.data_ptr(), place.numel()) for place in places],
    )
    return config, inputs


def _forward(
    x: Tensor, ids: Tensor, topk_weights: Tensor, weights: Sequence[Tensor], meta: Meta, keep: bool
) -> tuple[Tensor, Tensor]:
    x, ids, topk_weights = _plain(x), _ids(ids), _plain(topk_weights)
    places = _gather(weights, meta[0])
    config, inputs = _call(x, ids, topk_weights, places, meta)
    y = torch.empty_like(x)
    if x.is_cuda:
        capsule = _gpu.forward(x, config, inputs, y, keep, len(meta[1]) > 0)
    else:
        capsule = _kodkod.forward(config, inputs, (y.data_ptr(), y.numel()), keep)
    if capsule is None:
        return y, torch.empty(0, dtype=torch.int64)
    return y, torch.utils.dlpack.from_dlpack(capsule)


def _backward(
    dy: Tensor,
    context: Tensor,
    x: Tensor,
    ids: Tensor,
    topk_weights: Tensor,
    weights: Sequence[Tensor],
    sums: Sequence[Tensor],
    meta: Meta,
) -> list[Tensor]:
    """``[dx, d_topk_weights, gradient of each weight]``; with ``sums``, one a weight in float32, those are added to."""
    x, ids, topk_weights, dy = _plain(x), _ids(ids), _plain(topk_weights), _plain(dy)
    parts = meta[0]
    places = _gather(weights, parts)
    config, inputs = _call(x, ids, topk_weights, places, meta)
    if sums:
        if len({total.data_ptr() for total in sums}) < len(sums):
            why = "main_grad of two weights is one tensor: each needs its own"
            _kodkod.group_refuse(meta[5], why)
            raise ValueError(why)
        # A sum begins with what is there, in any storage: so it is gathered first, and not added to later.
        gradients = _gather(sums, parts)
    else:
        gradients = [None if place is None else torch.empty_like(place) for place in places]
    dx, d_topk_weights = torch.empty_like(x), torch.empty_like(topk_weights)
    arguments = (
        config,
        inputs,
        context.data_ptr(),
        (dy.data_ptr(), dy.numel()),
        (dx.data_ptr(), dx.numel()),
        (d_topk_weights.data_ptr(), d_topk_weights.numel()),
        [_span(gradient) for gradient in gradients],
        len(sums) > 0 or x.dtype == torch.float32,
        len(sums) > 0,
    )
    if x.is_cuda:
        _gpu.backward(x, *arguments)
    else:
        _kodkod.backward(*arguments)
    results = _scatter(gradients, parts)
    for total, result in zip(sums, results, strict=False):
        if result is not total:
            total.copy_(result)
    return [dx, d_topk_weights] if sums else [dx, d_topk_weights, *results]


def _check_operator(x, ids, topk_weights, weights, parts, dy=None, sums=None) -> None:
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


def _check_derivatives(x: Tensor, topk_weights: Tensor, weights: Sequence[Tensor]) -> None:
    """A forward-mode tangent would be lost without a word."""
    for tensor in (x, topk_weights, *weights):
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError("kodkod.moe has no forward-mode derivative: a backward gives its gradients")


def _through_operators(x: Tensor) -> bool:
    """Whether something looks at the operators that are called: a compiler, a mode, a tensor of another class."""
    plain = type(x) is Tensor or type(x) is torch.nn.Parameter
    return not plain or torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, direct, meta, main_grads, x, ids, topk_weights, *weights):
        parts, main_grad_of, *config = meta
        if direct:
            y, context = _forward(x, ids, topk_weights, weights, meta, True)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                y, context = torch.ops.kodkod.moe.default(
                    x, ids, topk_weights, weights, parts, main_grads, main_grad_of, *config, True
                )
        # The accumulators are no inputs of the gradient, and change between a forward and its backward.
        ctx.meta, ctx.main_grads = meta, main_grads
        ctx.save_for_backward(x, ids, topk_weights, context, *weights)
        ctx.set_materialize_grads(False)
        if direct:
            return y
        ctx.mark_non_differentiable(context)
        return y, context

    @staticmethod
    def backward(ctx, dy, *_):
        x, ids, topk_weights, context, *weights = ctx.saved_tensors
        parts, main_grad_of, *config = ctx.meta
        if dy is None:
            if _kodkod.group_rank(ctx.meta[5]) is None:
                return (None,) * (6 + len(weights))
            dy = torch.zeros_like(x)  # the other processes' rows may have a gradient here
        # Where one weight has a main_grad all are summed in float32, and those without are rounded here.
        sums: list[Tensor] = []
        if main_grad_of:
            sums = [torch.zeros_like(w, dtype=torch.float32) for w in weights]
            for i, main_grad in zip(main_grad_of, ctx.main_grads, strict=True):
                sums[i] = main_grad
        if not _through_operators(dy):
            args = (dy, context, x, ids, topk_weights, weights, sums, ctx.meta)
            second = torch.is_grad_enabled()  # somebody wants a derivative of this
            results = _Once.apply(args, dy, x, topk_weights, *weights) if second else _backward(*args)
        elif sums:
            results = torch.ops.kodkod.moe_backward_into.default(
                dy, context, x, ids, topk_weights, weights, parts, sums, *config
            )
        else:
            results = torch.ops.kodkod.moe_backward.default(dy, context, x, ids, topk_weights, weights, parts, *config)
        dx, d_topk_weights, *d_weights = results
        if sums:
            d_weights = [
                None if i in main_grad_of else s.to(w.dtype) for i, (s, w) in enumerate(zip(sums, weights, strict=True))
            ]
        return None, None, None, dx, None, d_topk_weights, *d_weights


class _Once(torch.autograd.Function):
    """Says that a backward has no backward, instead of a gradient that is silently wrong."""

    @staticmethod
    def forward(ctx, args, *tensors):
        return tuple(_backward(*args))

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("kodkod.moe has no second derivative")


def run(x: Tensor, ids: Tensor, topk_weights: Tensor, weights: list[Tensor], main_grads: list[Tensor], meta: Meta):
    """``y`` of checked arguments; ``x`` and ids are [..., H] and [..., K]."""
    keep = torch.is_grad_enabled() and (
        x.requires_grad or topk_weights.requires_grad or any(w.requires_grad for w in weights)
    )
    if _through_operators(x):
        if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
            _check_derivatives(x, topk_weights, weights)
        parts, main_grad_of, *config = meta
        return torch.ops.kodkod.moe.default(
            x, ids, topk_weights, weights, parts, main_grads, main_grad_of, *config, keep
        )[0]
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError("kodkod.moe in a transform of torch.func: autograd gives its gradients")
    if forward_ad._current_level >= 0:
        _check_derivatives(x, topk_weights, weights)
    if keep:
        return _Moe.apply(True, meta, main_grads, x, ids, topk_weights, *weights)
    return _forward(x, ids, topk_weights, weights, meta, False)[0]


def _moe_kernel(x, ids, topk_weights, weights, parts, main_grads, main_grad_of, *config_and_keep):
    *config, keep = config_and_keep
    _check_operator(x, ids, topk_weights, weights, parts)
    return _forward(x, ids, topk_weights, weights, (parts, main_grad_of, *config), keep)


def _moe_fake(x, ids, topk_weights, weights, parts, main_grads, main_grad_of, *config_and_keep):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, torch.empty(int(config_and_keep[-1]), dtype=torch.int64, device="cpu")


def _moe_autograd(x, ids, topk_weights, weights, parts, main_grads, main_grad_of, *config_and_keep):
    *config, keep = config_and_keep
    if keep and torch.is_grad_enabled():
        return _Moe.apply(False, (parts, main_grad_of, *config), main_grads, x, ids, topk_weights, *weights)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.kodkod.moe.default(
            x, ids, topk_weights, weights, parts, main_grads, main_grad_of, *config, keep
        )


def _backward_kernel(dy, context, x, ids, topk_weights, weights, parts, *config):
    _check_operator(x, ids, topk_weights, weights, parts, dy)
    return _backward(dy, context, x, ids, topk_weights, weights, [], (parts, [], *config))


def _backward_into_kernel(dy, context, x, ids, topk_weights, weights, parts, sums, *config):
    _check_operator(x, ids, topk_weights, weights, parts, dy, sums)
    return tuple(_backward(dy, context, x, ids, topk_weights, weights, sums, (parts, [], *config)))


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _backward_fake(dy, context, x, ids, topk_weights, weights, parts, *config):
    return _like([x, topk_weights, *weights])


def _backward_into_fake(dy, context, x, ids, topk_weights, weights, parts, sums, *config):
    return tuple(_like([x, topk_weights]))


for _device in ("CPU", "CUDA"):
    _library.impl("moe", _moe_kernel, _device)
    _library.impl("moe_backward", _backward_kernel, _device)
    _library.impl("moe_backward_into", _backward_into_kernel, _device)
_library.impl("moe", _moe_autograd, "Autograd")
torch.library.register_fake("kodkod::moe", _moe_fake, lib=_library)
torch.library.register_fake("kodkod::moe_backward", _backward_fake, lib=_library)
torch.library.register_fake("kodkod::moe_backward_into", _backward_into_fake, lib=_library)
