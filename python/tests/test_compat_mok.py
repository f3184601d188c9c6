"""``kodkod.compat.mok`` against plain PyTorch, and its quantizer against arithmetic on single values."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from reference import Step, bits_equal, make, random_ids, reference

from kodkod.compat import mok

NAMES = ["x", "topk_weights", "w_gate", "w_up", "w_down", "shared_gate", "shared_up", "shared_down"]
CONFIG = mok.MoKConfig()


def ids(tokens, experts, top_k, seed=0):
    return random_ids(tokens, experts, top_k, torch.Generator().manual_seed(seed))


def workspace_of(step: Step, **changes):
    (tokens, hidden), topk = step.x.shape, step.ids.shape[1]
    sizes = {"num_local_tokens": tokens, "hidden_size": hidden, "topk": topk, **changes}
    return mok.get_workspace(CONFIG, None, device=torch.device("cpu"), **sizes)


def start(step: Step, dtype=torch.bfloat16):
    """Workspace, schedule and the eight tensors in MoK's order."""
    workspace = workspace_of(step)
    schedule = mok.build_schedule(workspace, CONFIG, step.ids, num_local_experts=step.weights[0].shape[0])
    shared = [s.to(dtype) for s in step.shared] or [None] * 3
    return workspace, schedule, [step.x.to(dtype), step.topk_weights, *shared, *(w.to(dtype) for w in step.weights)]


def d_output_of(step: Step):
    return torch.randn(step.x.shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def mine(step: Step, config=CONFIG, recompute=False):
    workspace, schedule, tensors = start(step)
    output, context = mok.forward(config, workspace, schedule, *tensors, swiglu_limit=step.limit)
    assert not output.requires_grad
    if recompute:
        x, _, shared_gate, shared_up, _, gate, up, _ = tensors
        weights = (shared_gate, shared_up, gate, up)
        context = mok.recompute_forward_context(config, workspace, schedule, x, *weights, swiglu_limit=step.limit)
    gradients = mok.backward(config, workspace, schedule, context, d_output_of(step), *tensors, swiglu_limit=step.limit)
    return {"output": output, **{n: g for n, g in zip(NAMES, gradients, strict=True) if g is not None}}


def wanted(step: Step):
    wide = step.to(torch.float64)
    leaves = wide.leaves()
    y = reference(wide)
    gradients = torch.autograd.grad(
        y, list(leaves.values()), d_output_of(step).double(), allow_unused=True, materialize_grads=True
    )
    return {"output": y.detach(), **dict(zip(leaves, gradients, strict=True))}


STEPS = {
    "plain": lambda: make(ids(150, 4, 2), experts=4),
    "shared experts as wide as the routed": lambda: make(ids(150, 4, 2), experts=4, shared=48),
    "shared experts of another width": lambda: make(ids(37, 8, 3), experts=8, shared=136),
    "limit": lambda: make(ids(150, 4, 2), experts=4, shared=40, limit=0.8),
    "-1 in some routes": lambda: make(
        ids(90, 4, 3).masked_fill(torch.rand(90, 3, generator=torch.Generator().manual_seed(3)) < 0.4, -1),
        experts=4,
        shared=24,
    ),
    "-1 everywhere": lambda: make(torch.full((20, 2), -1), experts=4, shared=24),
    "an expert twice in a token": lambda: make(torch.full((30, 2), 3), experts=4),
    "all tokens to one expert": lambda: make(torch.zeros(700, 1, dtype=torch.int64), experts=8),
    "one token, one expert": lambda: make(torch.zeros(1, 1, dtype=torch.int64), experts=1),
}


@pytest.mark.parametrize("build", STEPS.values(), ids=STEPS.keys())
def test_against_plain_pytorch(build):
    step = build()
    got, want = mine(step), wanted(step)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == (torch.float32 if name == "topk_weights" else torch.bfloat16), name
        assert got[name].shape == want[name].shape, name
        error, size = (got[name].double() - want[name]).abs().sum().item(), want[name].abs().sum().item()
        print(f"{name:14} sum {size:9.4g}  sum of errors {error:9.3g}  {error / max(size, 1e-30):.2e}")
        assert error <= 0.01 * size, name


@pytest.mark.parametrize("shared", [0, 16])
def test_no_tokens(shared):
    step = make(torch.zeros(0, 2, dtype=torch.int64), experts=4, shared=shared)
    got = mine(step)
    assert got["output"].shape == (0, 64)
    assert got["topk_weights"].shape == (0, 2)
    assert len(got) == (9 if shared else 6)
    assert all(g.count_nonzero() == 0 for g in got.values())


@pytest.mark.parametrize("build", STEPS.values(), ids=STEPS.keys())
def test_a_context_that_was_recomputed_gives_the_same_bits(build):
    step = build()
    bits_equal(mine(step), mine(step, recompute=True))


def test_no_config_changes_a_bit():
    step = make(ids(300, 4, 2), experts=4, shared=40)
    configs = [
        mok.MoKConfig(2, 4, 128, 128, 1e-9),
        mok.MoKConfig(minibatch_size=256, macrobatch_size=512),
        mok.MoKConfig(schedule_capacity_multiplier=1.5),
    ]
    for config in configs:
        bits_equal(mine(step), mine(step, config))


def test_the_same_bits_as_the_layer():
    step = make(ids(60, 4, 2), experts=4, shared=40, limit=2.0)
    layer = step.to(torch.bfloat16)
    y = layer.kodkod()
    leaves = layer.leaves()
    gradients = torch.autograd.grad(y, list(leaves.values()), d_output_of(step))
    bits_equal({"output": y.detach(), **dict(zip(leaves, gradients, strict=True))}, mine(step))


def test_shared_experts_of_width_0_are_none():
    step = make(ids(30, 4, 2), experts=4)
    want = mine(step)
    step.shared = [torch.empty(0, 64), torch.empty(0, 64), torch.empty(64, 0)]
    got = mine(step)
    assert [got.pop(n).shape for n in NAMES[5:]] == [(0, 64), (0, 64), (64, 0)]
    bits_equal(want, got)


def test_a_context_serves_twice_and_after_the_tensors_moved():
    step = make(ids(60, 4, 2), experts=4, shared=40)
    workspace, schedule, tensors = start(step)
    _, context = mok.forward(CONFIG, workspace, schedule, *tensors)
    moved = [t.clone() for t in tensors]
    results = [
        mok.backward(CONFIG, workspace, schedule, context, d_output_of(step), *inputs)
        for inputs in (tensors, tensors, moved)
    ]
    for other in results[1:]:
        bits_equal(dict(zip(NAMES, results[0], strict=True)), dict(zip(NAMES, other, strict=True)))


def test_inside_an_autograd_function():
    """As a layer of a model has it: neither forward nor backward is recorded, and no ``grad`` is written."""
    step = make(ids(60, 4, 2), experts=4, shared=40)
    workspace, schedule, tensors = start(step)

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output, ctx.context = mok.forward(CONFIG, workspace, schedule, *inputs)
            ctx.save_for_backward(*inputs)
            return output

        @staticmethod
        def backward(ctx, d_output):
            gradients = mok.backward(CONFIG, workspace, schedule, ctx.context, d_output, *ctx.saved_tensors)
            return *gradients[:2], *gradients[5:], *gradients[2:5]

    leaves = [t.requires_grad_() for t in tensors]
    Layer.apply(*leaves).backward(d_output_of(step))
    order = [*NAMES[:2], *NAMES[5:], *NAMES[2:5]]
    want = mine(step)
    del want["output"]
    bits_equal({n: want[n] for n in order}, {n: t.grad for n, t in zip(order, leaves, strict=True)})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.float16)])
def test_a_forward_has_the_same_bits_in_every_mode(mode):
    step = make(ids(30, 4, 2), experts=4, shared=16)
    workspace, schedule, tensors = start(step)
    want = mok.forward(CONFIG, workspace, schedule, *tensors)[0]
    with mode():
        got = mok.forward(CONFIG, workspace, schedule, *tensors)[0]
    bits_equal({"output": want}, {"output": got.clone()})


def test_a_tensor_changed_since_the_forward_is_an_error():
    step = make(ids(30, 4, 2), experts=4)
    workspace, schedule, tensors = start(step)
    _, context = mok.forward(CONFIG, workspace, schedule, *tensors)
    tensors[5].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mok.backward(CONFIG, workspace, schedule, context, d_output_of(step), *tensors)


def test_a_schedule_keeps_its_own_ids():
    step = make(ids(30, 4, 2), experts=4)
    want = mine(step)["output"]
    workspace, schedule, tensors = start(step)
    step.ids.fill_(0)
    bits_equal({"output": want}, {"output": mok.forward(CONFIG, workspace, schedule, *tensors)[0]})


def test_workspaces():
    sizes = {"device": torch.device("cpu"), "num_local_tokens": 7, "hidden_size": 64, "topk": 2}
    one = mok.get_workspace(CONFIG, None, **sizes)
    assert one is mok.get_workspace(mok.MoKConfig(minibatch_size=256), None, **sizes)
    assert one is not mok.get_workspace(CONFIG, None, **{**sizes, "topk": 3})
    assert one == mok.create_workspace(CONFIG, None, **sizes)
    assert one is not mok.create_workspace(CONFIG, None, **sizes)


class Ranks(dist.ProcessGroup):
    def __init__(self, ranks: int):
        super().__init__(0, ranks)


def test_groups():
    sizes = {"device": torch.device("cpu"), "num_local_tokens": 7, "hidden_size": 64, "topk": 2}
    assert mok.get_workspace(CONFIG, Ranks(1), **sizes).ep_size == 1
    with pytest.raises(ValueError, match="group has 4 ranks: a group of one rank, or None, works"):
        mok.get_workspace(CONFIG, Ranks(4), **sizes)
    with pytest.raises(TypeError, match="group is a int: a ProcessGroup is needed"):
        mok.get_workspace(CONFIG, 4, **sizes)


def refused(error, message, call, *args, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    print(f"{error.__name__}: {caught.value}")
    assert str(caught.value) == message


def test_refused_workspaces_and_schedules():
    sizes = {"device": torch.device("cpu"), "num_local_tokens": 7, "hidden_size": 64, "topk": 2}

    def workspace(**changes):
        return mok.get_workspace(CONFIG, None, **{**sizes, **changes})

    refused(TypeError, "config is a NoneType: a MoKConfig is needed", mok.get_workspace, None, None, **sizes)
    refused(ValueError, "num_local_tokens is -1: 0 or more is needed", workspace, num_local_tokens=-1)
    refused(ValueError, "hidden_size is 60: a multiple of 8 is needed", workspace, hidden_size=60)
    refused(ValueError, "hidden_size is 0: a multiple of 8 is needed", workspace, hidden_size=0)
    refused(ValueError, "topk is 0: 1 or more is needed", workspace, topk=0)
    refused(TypeError, "topk is 2.0: an int is needed", workspace, topk=2.0)
    message = "device is meta: cpu or cuda is needed"
    refused(ValueError, message, workspace, device=torch.device("meta"))

    def schedule(top_experts, num_local_experts=4):
        return mok.build_schedule(workspace(), CONFIG, top_experts, num_local_experts=num_local_experts)

    good = ids(7, 4, 2)
    refused(TypeError, "top_experts is torch.float32: torch.int64 or torch.int32 is needed", schedule, good.float())
    message = "top_experts has shape [6, 2]: expected [num_local_tokens, topk] = [7, 2]"
    refused(ValueError, message, schedule, good[:6])
    refused(ValueError, "num_local_experts is 0: 1 or more is needed", schedule, good, 0)
    for bad in (4, -2):
        wrong = good.clone()
        wrong[5, 1] = bad
        message = f"top_experts[5, 1] is {bad}: 0 to 3, and -1 for no route, are allowed"
        refused(ValueError, message, schedule, wrong)
        refused(ValueError, message, schedule, wrong.int())


PARAMETERS = ["x", "router_weights", "w_shared_gate", "w_shared_up", "w_shared_down"]
PARAMETERS += ["w_routed_gate", "w_routed_up", "w_routed_down"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_refused_tensors(name):
    step = make(ids(30, 4, 2), experts=4, shared=40)
    workspace, schedule, tensors = start(step)
    good = dict(zip(PARAMETERS, tensors, strict=True))
    _, context = mok.forward(CONFIG, workspace, schedule, **good)

    for call in (
        lambda **changes: mok.forward(CONFIG, workspace, schedule, **{**good, **changes}),
        lambda **changes: mok.backward(CONFIG, workspace, schedule, context, d_output_of(step), **{**good, **changes}),
    ):
        dtype = good[name].dtype
        with pytest.raises(TypeError, match=f"{name} is torch.float64: {dtype} is needed"):
            call(**{name: good[name].double()})
        with pytest.raises(TypeError, match=f"{name} is a list: a Tensor is needed"):
            call(**{name: [good[name]]})
        if name not in ("w_routed_gate", "w_shared_gate"):  # these set the widths
            with pytest.raises(ValueError, match=f"{name} has shape"):
                call(**{name: good[name][:-1]})
        with pytest.raises(ValueError, match="has shape"):
            call(**{name: good[name].unsqueeze(0)})
        with pytest.raises(ValueError, match=f"{name} is on meta: cpu is needed, where the workspace is"):
            call(**{name: good[name].to("meta")})
        if name.startswith("w_routed"):
            with pytest.raises(TypeError, match=f"{name} is a tuple: this version has no MXFP8"):
                call(**{name: (good[name], good[name])})
        if name.startswith("w_shared"):
            with pytest.raises(TypeError, match=f"{name} is None: the shared experts' weights are tensors, or all"):
                call(**{name: None})


def test_refused_passes():
    step = make(ids(30, 4, 2), experts=4)
    workspace, schedule, tensors = start(step)
    _, context = mok.forward(CONFIG, workspace, schedule, *tensors)
    dy = d_output_of(step)
    run = (CONFIG, workspace, schedule)
    again = mok.build_schedule(workspace, CONFIG, step.ids, num_local_experts=4)
    message = "swiglu_limit is {}: a positive number or None is needed"
    for limit in (0.0, -1.0, math.nan):
        refused(ValueError, message.format(limit), mok.forward, *run, *tensors, swiglu_limit=limit)
    message = "context is of another schedule: a context of this schedule is needed"
    refused(ValueError, message, mok.backward, CONFIG, workspace, again, context, dy, *tensors)
    message = "swiglu_limit is 2.0: the context's is None, which is needed"
    refused(ValueError, message, mok.backward, *run, context, dy, *tensors, swiglu_limit=2.0)
    message = "d_output is torch.float32: torch.bfloat16 is needed"
    refused(TypeError, message, mok.backward, *run, context, dy.float(), *tensors)
    message = "d_output has shape [29, 64]: expected that of x = [30, 64]"
    refused(ValueError, message, mok.backward, *run, context, dy[:-1], *tensors)
    refused(TypeError, "context is a NoneType: a MoKForwardContext is needed", mok.backward, *run, None, dy, *tensors)
    refused(TypeError, "schedule is a list: a MoKSchedule is needed", mok.forward, CONFIG, workspace, [], *tensors)
    message = "schedule is of [30, 2] routes: the workspace's are [31, 2]"
    other = workspace_of(step, num_local_tokens=31)
    refused(ValueError, message, mok.forward, CONFIG, other, schedule, *tensors)


@pytest.mark.parametrize(
    ("field", "value", "needed"),
    [
        ("fwd_num_comm_sms", 0, "1 to 1024 are allowed"),
        ("bwd_num_comm_sms", 1025, "1 to 1024 are allowed"),
        ("minibatch_size", 100, "a positive multiple of 128 is needed"),
        ("macrobatch_size", 5000, "a positive multiple of 4096 is needed"),
    ],
)
def test_refused_configs(field, value, needed):
    step = make(ids(30, 4, 2), experts=4)
    workspace, schedule, tensors = start(step)
    config = replace(CONFIG, **{field: value})
    message = f"config.{field} is {value}: {needed}"
    refused(ValueError, message, mok.forward, config, workspace, schedule, *tensors)
    refused(ValueError, message, mok.build_schedule, workspace, config, step.ids, num_local_experts=4)


# E4M3: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; no infinity; the code 0x7f is NaN.
E4M3 = [Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)]
E4M3 += [(1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)]
E4M3 = E4M3[:-1]


def quantize_slowly(values: list[float]) -> tuple[list[int], int]:
    """Codes of the elements and of the scale of one block: a search over all codes in exact arithmetic."""
    finite = [abs(v) for v in values if math.isfinite(v)]
    if any(math.isinf(v) for v in values):
        power = 128
    elif any(finite):
        power = math.frexp(max(finite))[1] - 1
    else:
        power = -1000
    scale = max(power - 8, -127)
    codes = []
    for v in values:
        if math.isnan(v):
            codes.append(0x7F)
            continue
        sign = 0x80 if math.copysign(1, v) < 0 else 0
        if math.isinf(v):
            codes.append(sign | 0x7E)
            continue
        exact = abs(Fraction(v)) / Fraction(2) ** scale
        # Nearest; of two as near, the even code.
        codes.append(sign | min(range(0x7F), key=lambda c: (abs(E4M3[c] - exact), c % 2)))
    return codes, scale + 127


def check_quantizer(x: torch.Tensor):
    elements, scales = mok.mxfp8_quantize(x)
    assert elements.dtype == torch.float8_e4m3fn
    assert elements.shape == x.shape
    assert scales.dtype == torch.uint8
    assert scales.shape == (*x.shape[:-1], x.shape[-1] // 32)
    codes = elements.view(torch.uint8).reshape(-1, 32)
    blocks = x.float().reshape(-1, 32)
    differ = 0
    for block, got, scale in zip(blocks.tolist(), codes.tolist(), scales.flatten().tolist(), strict=True):
        want, want_scale = quantize_slowly(block)
        got = [0x7F if c & 0x7F == 0x7F else c for c in got]  # the sign of a NaN says nothing
        assert scale == want_scale, (block, scale, want_scale)
        assert got == want, [(v, g, w) for v, g, w in zip(block, got, want, strict=True) if g != w]
        differ += got != want
    print(f"{len(blocks)} blocks, {differ} differ; scales {scales.min().item()} to {scales.max().item()}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantizer_against_arithmetic(dtype):
    r = torch.Generator().manual_seed(0)
    spread = torch.randint(-12, 12, (6, 4, 1), generator=r)
    within = torch.randint(-14, 1, (6, 4, 32), generator=r)
    x = torch.randn(6, 4, 32, generator=r) * 2.0**spread * 2.0**within
    check_quantizer(x.reshape(3, 2, 128).to(dtype))


def block(*values: float) -> torch.Tensor:
    return torch.tensor([*values, *[0.0] * (32 - len(values))])


EDGES = {
    "zeros": block(0.0, -0.0),
    "powers of two": block(*(2.0**-e for e in range(32))),
    "largest element": block(448.0, -448.0, 256.0, 447.0, 240.0, 1.0),
    "saturation": block(449.0, -500.0, 511.0, 480.0, 464.0),
    "ties": block(256.0, 17.0, 19.0, 21.0, 2.0**-10, 3 * 2.0**-10, 5 * 2.0**-10, -(2.0**-10)),
    "elements below the least": block(256.0, 2.0**-11, 2.0**-9, -(2.0**-11), 1.5 * 2.0**-11),
    "largest of float32": block(torch.finfo(torch.float32).max, -1.0, 1e30),
    "smallest scale": block(2.0**-119, 2.0**-120, 2.0**-126),
    "subnormal": block(2.0**-127, 2.0**-149, -(2.0**-133)),
    "one NaN": block(1.0, math.nan, -3.0),
    "all NaN": torch.full((32,), math.nan),
    "infinities": block(math.inf, -math.inf, 1.0, torch.finfo(torch.float32).max),
    "infinity and NaN": block(math.inf, math.nan),
}


@pytest.mark.parametrize("values", EDGES.values(), ids=EDGES.keys())
def test_quantizer_edges(values):
    check_quantizer(values.unsqueeze(0))


def test_quantizer_reads_back():
    """With torch's own E8M0. Half a step of three mantissa bits is 1/16, and saturation loses up to 1/8."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    elements, scales = mok.mxfp8_quantize(x)
    back = elements.float() * scales.view(torch.float8_e8m0fnu).float().repeat_interleave(32, -1)
    error = ((back - x.float()).abs() / x.float().abs().clamp(min=2.0**-8)).max().item()
    print(f"largest relative error {error:.4f}")
    assert 1 / 64 < error <= 1 / 8
    infinite, scale = mok.mxfp8_quantize(block(math.inf))
    assert infinite[0].float() * scale.view(torch.float8_e8m0fnu).float() == math.inf


def test_quantizer_of_views_empty_and_recorded_tensors():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    for got, want in zip(mok.mxfp8_quantize(x.T), mok.mxfp8_quantize(x.T.contiguous()), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    elements, scales = mok.mxfp8_quantize(torch.empty(0, 64, dtype=torch.bfloat16))
    assert (elements.shape, scales.shape) == ((0, 64), (0, 2))
    assert not mok.mxfp8_quantize(torch.ones(32, requires_grad=True))[0].requires_grad


def test_quantizer_refuses():
    message = "x is torch.float64: torch.bfloat16, torch.float16 or torch.float32 is needed"
    refused(TypeError, message, mok.mxfp8_quantize, torch.ones(32, dtype=torch.float64))
    message = "x has shape [2, 33]: a last dimension that is a multiple of 32 is needed"
    refused(ValueError, message, mok.mxfp8_quantize, torch.ones(2, 33))
    message = "x has shape []: a last dimension that is a multiple of 32 is needed"
    refused(ValueError, message, mok.mxfp8_quantize, torch.tensor(1.0))
    refused(TypeError, "x is a list: a Tensor is needed", mok.mxfp8_quantize, [1.0])
