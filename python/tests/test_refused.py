"""Bad input: an exception that names the argument, the value and what is allowed."""

import pytest
import torch
from reference import make, random_ids
from torch.autograd import forward_ad

import kodkod


def call(**changes):
    generator = torch.Generator().manual_seed(0)
    step = make(random_ids(6, 4, 2, generator), experts=4, hidden=16, intermediate=8)
    arguments = {
        "x": step.x,
        "topk_ids": step.ids,
        "topk_weights": step.topk_weights,
        "w_gate": step.weights[0],
        "w_up": step.weights[1],
        "w_down": step.weights[2],
        **changes,
    }
    return kodkod.moe(**arguments)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ids(value, at=(3, 1), dtype=torch.int64):
    ids = torch.zeros(6, 2, dtype=dtype)
    ids[at] = value
    return ids


def with_main_grad(main_grad):
    weight = zeros(4, 8, 16).requires_grad_()
    weight.main_grad = main_grad
    return weight


def biases(**changes):
    parts = {"gate": zeros(4, 8), "up": zeros(4, 8), "down": zeros(4, 16), **changes}
    return kodkod.Biases(**parts)


def shared(**changes):
    parts = {"gate": zeros(24, 16), "up": zeros(24, 16), "down": zeros(16, 24), **changes}
    return kodkod.Shared(**parts)


REFUSED = [
    # types and dtypes
    ({"x": [1.0]}, TypeError, "x is a list: a torch.Tensor"),
    ({"topk_ids": None}, TypeError, "topk_ids is a NoneType"),
    ({"x": zeros(6, 16).to_sparse()}, TypeError, "x is torch.sparse_coo: a tensor of layout torch.strided"),
    ({"w_down": zeros(4, 16, 8).to_sparse()}, TypeError, "w_down is torch.sparse_coo"),
    ({"w_gate": 3}, TypeError, "w_gate is a int"),
    ({"w_down": [zeros(16, 8), 7]}, TypeError, r"w_down\[1\] is a int"),
    ({"x": zeros(6, 16, dtype=torch.float64)}, TypeError, "x is torch.float64: torch.bfloat16 or torch.float32"),
    ({"x": zeros(6, 16, dtype=torch.bfloat16)}, TypeError, "w_gate is torch.float32: torch.bfloat16 is needed"),
    ({"x": zeros(6, 16, dtype=torch.int32), "precision": "f32"}, TypeError, "x is torch.int32: a floating dtype"),
    ({"topk_ids": zeros(6, 2)}, TypeError, "topk_ids is torch.float32: torch.int32 or torch.int64"),
    ({"topk_weights": ids(0)}, TypeError, "topk_weights is torch.int64: a floating dtype"),
    ({"w_up": zeros(4, 8, 16, dtype=torch.int8)}, TypeError, "w_up is torch.int8: a floating dtype"),
    ({"biases": biases(up=None, gate=None)}, TypeError, "b_gate is a NoneType"),
    ({"w_gate": with_main_grad(zeros(4, 8, 16).bfloat16())}, TypeError, "w_gate.main_grad is torch.bfloat16"),
    ({"biases": 5}, TypeError, "biases is a int: a kodkod.Biases"),
    ({"shared": 5}, TypeError, "shared is a int: a kodkod.Shared"),
    ({"limit": "a"}, TypeError, "limit is 'a': a number"),
    ({"knobs": (1, 2, 3)}, TypeError, "knobs is a tuple: a kodkod.Knobs"),
    ({"group": 2}, TypeError, "group is a int: a kodkod.ExpertGroup"),
    ({"knobs": kodkod.Knobs(ring_rows=1.5)}, TypeError, "knobs.ring_rows is 1.5"),
    # shapes
    ({"x": torch.tensor(1.0)}, ValueError, r"x has shape \[\]: expected \[\.\.\., H\]"),
    ({"topk_ids": ids(0)[:5]}, ValueError, r"topk_ids has shape \[5, 2\].*\[6\]"),
    ({"topk_ids": ids(0)[0]}, ValueError, r"topk_ids has shape \[2\]"),
    ({"topk_weights": zeros(6, 3)}, ValueError, r"topk_weights has shape \[6, 3\].*\[6, 2\]"),
    ({"x": zeros(6, 24)}, ValueError, r"w_gate has shape \[4, 8, 16\]: expected \[E, I, H\] = \[4, 8, 24\]"),
    ({"w_up": zeros(4, 16, 16)}, ValueError, r"w_up has shape \[4, 16, 16\]: expected \[E, I, H\]"),
    ({"w_up": None}, ValueError, r"w_gate has shape \[4, 8, 16\]: expected \[E, 2I, H\] = \[4, 16, 16\]"),
    ({"w_down": zeros(8)}, ValueError, r"w_down has shape \[8\]: expected \[E, H, I\]"),
    ({"w_down": zeros(4, 8, 8)}, ValueError, r"shape .* \[E, H, I\] = \[4, 16, 8\]"),
    ({"w_gate": [zeros(8, 16)] * 3}, ValueError, "w_gate has 3 tensors: w_down has 4"),
    ({"w_gate": [zeros(8, 16)] * 3 + [zeros(8, 8)]}, ValueError, r"w_gate\[3\] has shape \[8, 8\]"),
    ({"w_up": []}, ValueError, "w_up is empty"),
    ({"biases": biases(down=zeros(4, 8))}, ValueError, r"b_down has shape \[4, 8\]: expected \[E, H\] = \[4, 16\]"),
    ({"biases": (zeros(4, 8),)}, ValueError, "biases has 1 tensors"),
    ({"shared": shared(up=zeros(16, 16))}, ValueError, r"shared_up has shape \[16, 16\]: expected \[S, H\] = \[24"),
    ({"shared": shared(up=None, gate=zeros(7, 16))}, ValueError, r"shared_gate has shape \[7, 16\].*\[2S, H\]"),
    ({"shared": shared(output_gate=zeros(16, 1))}, ValueError, r"shared_output_gate has shape \[16, 1\]"),
    ({"w_gate": with_main_grad(zeros(4, 8, 8))}, ValueError, r"w_gate.main_grad has shape \[4, 8, 8\]"),
    # devices
    ({"x": zeros(6, 16).to("meta")}, ValueError, "x is on meta: cpu or cuda is needed"),
    ({"w_up": zeros(4, 8, 16).to("meta")}, ValueError, "w_up is on meta: cpu is needed, where x is"),
    ({"topk_weights": zeros(6, 2).to("meta")}, ValueError, "topk_weights is on meta"),
    # values
    ({"topk_ids": ids(4)}, ValueError, r"topk_ids\[3, 1\] is 4: allowed are 0 to 3 and -1"),
    ({"topk_ids": ids(-2, at=(0, 0), dtype=torch.int32)}, ValueError, r"topk_ids\[0, 0\] is -2"),
    ({"topk_ids": ids(2**40, at=(5, 0))}, ValueError, r"topk_ids\[5, 0\] is 1099511627776"),
    ({"activation": "gelu"}, ValueError, "activation is 'gelu': 'swiglu' and 'swiglu_oai'"),
    ({"alpha": 1.5}, ValueError, "alpha is 1.5: activation 'swiglu' has none"),
    ({"activation": "swiglu_oai", "alpha": float("inf")}, ValueError, "alpha is inf"),
    ({"limit": -1.0}, ValueError, "limit is -1: a positive number"),
    ({"limit": float("nan")}, ValueError, "limit is NaN"),
    ({"precision": "fp8"}, ValueError, "precision is 'fp8': 'bf16' and 'f32'"),
    ({"precision": torch.float16}, ValueError, "precision is torch.float16"),
    ({"knobs": kodkod.Knobs(minibatch_rows=100)}, ValueError, "minibatch_rows is 100: .*multiple of 128"),
    ({"knobs": kodkod.Knobs(minibatch_rows=256, ring_rows=384)}, ValueError, "ring_rows is 384"),
    ({"knobs": kodkod.Knobs(fwd_comm_sms=0)}, ValueError, "fwd_comm_sms is 0"),
    ({"knobs": kodkod.Knobs(saved_rows=-5)}, ValueError, "knobs.saved_rows is -5"),
    ({"group": kodkod.ExpertGroup.cpu(3)}, ValueError, "4.*3|3.*4"),
]


@pytest.mark.parametrize(
    ("changes", "kind", "message"), REFUSED, ids=[f"{i} {next(iter(c[0]))}" for i, c in enumerate(REFUSED)]
)
def test_refused(changes, kind, message):
    with pytest.raises(kind, match=message) as error:
        call(**changes)
    print(error.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_layouts_are_looked_at_in_known_calls():
    call()
    call()
    with pytest.raises(TypeError, match=r"x is torch\.sparse_coo"):
        call(x=zeros(6, 16).to_sparse())
    nested = torch.nested.nested_tensor([zeros(3, 16), zeros(2, 16)])
    with pytest.raises(TypeError, match="x is nested"):
        call(x=nested)


@pytest.mark.parametrize("lists", [False, True])
def test_weights_that_share_a_main_grad(lists):
    weights = [zeros(4, 8, 16).requires_grad_() for _ in range(2)]
    if lists:
        weights = [[w.detach().requires_grad_() for w in weight] for weight in weights]
    main_grad = zeros(8, 16) if lists else zeros(4, 8, 16)
    for weight in weights:
        (weight[2] if lists else weight).main_grad = main_grad
    y = call(w_gate=weights[0], w_up=weights[1])
    with pytest.raises(ValueError, match="main_grad of two weights is one tensor"):
        y.sum().backward()


def test_sizes_that_are_no_multiple_name_it():
    step = make(torch.zeros(3, 1, dtype=torch.int64), experts=2, hidden=20, intermediate=8)
    with pytest.raises(ValueError, match="hidden is 20: it must be a multiple of 8"):
        step.kodkod()
    step = make(torch.zeros(3, 1, dtype=torch.int64), experts=2, hidden=16, intermediate=12)
    with pytest.raises(ValueError, match="intermediate is 12: it must be a multiple of 8"):
        step.kodkod()


def test_too_many_routes():
    ids = torch.zeros(3, 33, dtype=torch.int64)
    with pytest.raises(ValueError, match="top_k is 33: 1 to 32"):
        make(ids, experts=2).kodkod()
    with pytest.raises(ValueError, match=r"topk_ids has shape \[3, 0\]: .* 1 to 32"):
        make(ids[:, :0], experts=2).kodkod()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((0,), ValueError, "ranks is 0"),
        ((-1,), ValueError, "ranks is -1"),
        ((5000,), ValueError, "ranks is 5000: 1 to 1024"),
        (("2",), TypeError, "ranks is '2': an int"),
    ],
)
def test_groups(arguments, kind, message):
    with pytest.raises(kind, match=message):
        kodkod.ExpertGroup.cpu(*arguments)
    with pytest.raises(ValueError, match="threads is 9999"):
        kodkod.ExpertGroup.cpu(1, threads=9999)


def test_an_error_in_a_compiled_layer_is_the_same():
    step = make(ids(4), experts=4, hidden=16, intermediate=8)
    compiled = torch.compile(lambda: step.kodkod(), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"topk_ids\[3, 1\] is 4"):
        compiled()


def test_a_refused_call_leaves_nothing_behind():
    want = call()
    with pytest.raises(ValueError, match="topk_ids"):
        call(topk_ids=ids(9))
    assert torch.equal(call(), want)


DIRECT = [
    ({"x": zeros(6, 16).double()}, TypeError, "x is torch.float64"),
    ({"topk_ids": ids(0).short()}, TypeError, "topk_ids is torch.int16"),
    ({"topk_weights": zeros(6, 2).double()}, TypeError, "topk_weights is torch.float64: torch.float32"),
    ({"topk_weights": zeros(6, 1)}, ValueError, r"shapes \[6, 16\], \[6, 2\] and \[6, 1\]"),
    (
        {"weights": [zeros(4, 8, 16), zeros(4, 8, 16).bfloat16(), zeros(4, 16, 8)]},
        TypeError,
        r"weights\[1\] is torch.bf",
    ),
    ({"weights": [zeros(4, 8, 16), zeros(4, 8, 16)]}, ValueError, "parts is .* of 2 weights"),
    ({"weights": [zeros(4, 8), zeros(4, 8, 16), zeros(16)]}, ValueError, "weights: "),
    ({"parts": [1, 1, 1]}, ValueError, r"parts is \[1, 1, 1\]: 10 counts"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), DIRECT)
def test_operators_that_are_called_directly(changes, kind, message):
    """No dtype or length is believed: it would be memory of something else."""
    weights = [zeros(4, 8, 16), zeros(4, 8, 16), zeros(4, 16, 8)]
    call = {"x": zeros(6, 16), "topk_ids": ids(0), "topk_weights": zeros(6, 2), "weights": weights}
    call = {**call, "parts": [1, 1, 1, *[0] * 7], **changes}
    config = ("swiglu", None, 1.0, 0, [-1] * 5)
    with pytest.raises(kind, match=message):
        torch.ops.kodkod.moe(*call.values(), [], [], *config, False)
    context = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(kind, match=message):
        torch.ops.kodkod.moe_backward(torch.zeros_like(call["x"]), context, *call.values(), *config)


def test_gradients_of_operators_that_are_called_directly():
    weights = [zeros(4, 8, 16), zeros(4, 8, 16), zeros(4, 16, 8)]
    rows = (zeros(6, 16), torch.zeros(1, dtype=torch.int64), zeros(6, 16), ids(0), zeros(6, 2), weights)
    call = (*rows, [1, 1, 1, *[0] * 7])
    config = ("swiglu", None, 1.0, 0, [-1] * 5)
    with pytest.raises(TypeError, match=r"dy is torch\.float64"):
        torch.ops.kodkod.moe_backward(call[0].double(), *call[1:], *config)
    for sums, kind, message in (
        (weights[:2], ValueError, "sums has 2 tensors"),
        ([*weights[:2], weights[2].double()], TypeError, r"sums\[2\] is torch.float64"),
    ):
        with pytest.raises(kind, match=message):
            torch.ops.kodkod.moe_backward_into(*call, sums, *config)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["x", "topk_weights", "w_gate"])
def test_forward_mode_is_refused(name, requires_grad):
    """A tangent would be lost without a word."""
    shape = {"x": (6, 16), "topk_weights": (6, 2), "w_gate": (4, 8, 16)}[name]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"kodkod\.moe has no forward-mode"):
        call(**{name: forward_ad.make_dual(zeros(*shape).requires_grad_(requires_grad), zeros(*shape))})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own
def test_transforms_are_refused():
    step = make(ids(0), experts=4, hidden=16, intermediate=8)

    def layer(x):
        return kodkod.moe(x, step.ids, step.topk_weights, *step.weights).sum()

    for transform in (
        lambda x: torch.func.grad(layer)(x),
        lambda x: torch.func.jvp(layer, (x,), (x,)),
        lambda x: torch.func.vmap(layer)(x[None]),
    ):
        with pytest.raises(NotImplementedError, match=r"kodkod\.moe in a transform of torch\.func"):
            transform(step.x)


@pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
        ((64, 32, 4.0, 2), TypeError, "experts is 4.0: an int"),
        ((64, 32.0, 4, 2), TypeError, "intermediate is 32.0: an int"),
        ((0, 32, 4, 2), ValueError, "hidden is 0: 1 or more"),
        ((64, 32, 4, 5), ValueError, "top_k is 5: 1 to 4"),
    ],
)
def test_sizes_of_modules(sizes, kind, message):
    with pytest.raises(kind, match=message):
        kodkod.nn.MoE(*sizes)
    with pytest.raises(ValueError, match="shared is -8: 0 or more"):
        kodkod.nn.MoE(64, 32, 4, 2, shared=-8)
