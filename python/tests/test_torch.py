"""What torch's own layers can do: storage, compilation, checkpoints, interleaved passes."""

import copy
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from reference import Step, bits_equal, compare, everything, gradients, make, random_ids, reference
from torch.utils.checkpoint import checkpoint

import kodkod


def ids(tokens, experts, top_k, seed=0):
    return random_ids(tokens, experts, top_k, torch.Generator().manual_seed(seed))


def grads(step: Step, **options) -> dict[str, torch.Tensor]:
    y = step.kodkod(**options)
    return gradients(step, y, torch.ones_like(y))


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 1, 4), (0, 3)], ids=str)
def test_leading_dimensions(lead):
    n = 1
    for size in lead:
        n *= size
    step = everything(ids(n, 4, 2).reshape(*lead, 2)).to(torch.float32)
    got = grads(step)
    wide = step.to(torch.float64)
    y = reference(wide)
    compare(got, gradients(wide, y, torch.ones_like(y)), 1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_inputs_that_are_not_contiguous(dtype):
    step = everything(ids(24, 4, 2)).to(torch.bfloat16)
    want = grads(step)

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        """The same values with another element between any two."""
        wide = torch.full((*tensor.shape, 2), 77, dtype=tensor.dtype)
        wide[..., 0] = tensor.detach()
        view = wide[..., 0]
        return view.requires_grad_() if tensor.dtype.is_floating_point else view

    other = Step(
        x=strided(step.x),
        ids=strided(step.ids.to(dtype)),
        topk_weights=strided(step.topk_weights),
        weights=[w.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for w in step.weights],
        biases=[strided(b) for b in step.biases],
        shared=[strided(s) for s in step.shared],
        activation=step.activation,
        limit=step.limit,
    )
    assert not any(t.is_contiguous() for t in (other.x, other.ids, *other.weights, *other.shared))
    bits_equal(want, grads(other))
    y = other.kodkod()
    dy = torch.ones(1).expand(y.shape).bfloat16().t().contiguous().t()
    bits_equal(want, gradients(other, y, dy))


def fused(step: Step):
    return torch.cat(step.weights[:2], dim=1).detach().requires_grad_()


def storages(step: Step):
    """Gate, up, down as leaves in every storage, and how to read the gradients back."""
    gate, up, down = (w.detach() for w in step.weights)

    def leaves(tensor):
        return [t.clone().requires_grad_() for t in tensor.unbind()]

    both = torch.cat([gate, up], dim=1)
    return {
        "fused": (both.clone().requires_grad_(), None, down.clone().requires_grad_()),
        "lists": (leaves(gate), leaves(up), leaves(down)),
        "fused lists": (leaves(both), None, leaves(down)),
        "parameter lists": tuple(torch.nn.ParameterList(leaves(t)) for t in (gate, up, down)),
        "mixed": (leaves(gate), up.clone().requires_grad_(), down.clone().requires_grad_()),
    }


def flat(weight):
    if weight is None:
        return []
    return [weight] if isinstance(weight, torch.Tensor) else list(weight)


def one(values):
    return values[0] if values[0].dim() == 3 else torch.stack(values)


def gate_up_down(weights, value) -> dict[str, torch.Tensor]:
    """What ``value`` gives of each tensor, as if gate, up and down were three."""
    gate, up, down = ([value(t) for t in flat(w)] for w in weights)
    gate = one(gate)
    gate, up = gate.chunk(2, dim=1) if not up else (gate, one(up))
    return {"gate": gate, "up": up, "down": one(down)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("storage", ["fused", "lists", "fused lists", "parameter lists", "mixed"])
def test_storage_changes_no_bit(storage, dtype):
    step = everything(ids(90, 4, 2)).to(dtype)
    want = grads(step)
    weights = storages(step)[storage]
    y = kodkod.moe(step.x, step.ids, step.topk_weights, *weights, **step.options())
    y.backward(torch.ones_like(y))
    got = gate_up_down(weights, lambda t: t.grad)
    bits_equal({"y": want["y"], "x": want["d x"]}, {"y": y.detach(), "x": step.x.grad})
    bits_equal({k: want[f"d w_{k}"] for k in got}, got)


@pytest.mark.parametrize("main_grad", [False, True])
def test_one_expert(main_grad):
    step = make(torch.zeros(9, 1, dtype=torch.int64), experts=1).to(torch.float32)
    want = grads(step)
    weights = [w.detach()[0].clone().requires_grad_() for w in step.weights]
    for weight in weights if main_grad else ():
        weight.main_grad = torch.zeros(weight.shape)
    y = kodkod.moe(step.x, step.ids, step.topk_weights, *([weight] for weight in weights))
    y.backward(torch.ones_like(y))
    got = [w.main_grad if main_grad else w.grad for w in weights]
    assert main_grad == all(w.grad is None for w in weights)
    bits_equal({"y": want["y"]}, {"y": y.detach()})
    names = ("d w_gate", "d w_up", "d w_down")
    bits_equal({n: want[n][0] for n in names}, dict(zip(names, got, strict=True)))


def test_fused_biases_and_shared_experts():
    step = everything(ids(90, 4, 2)).to(torch.bfloat16)
    want = grads(step)
    bias = torch.cat(step.biases[:2], dim=1).detach().requires_grad_()
    shared = torch.cat(step.shared[:2]).detach().requires_grad_()
    shared.main_grad = torch.zeros(shared.shape)
    options = {
        **step.options(),
        "biases": kodkod.Biases(bias, None, step.biases[2]),
        "shared": kodkod.Shared(shared, None, *step.shared[2:]),
    }
    y = kodkod.moe(step.x, step.ids, step.topk_weights, *step.weights, **options)
    y.backward(torch.ones_like(y))
    bits_equal({"b": torch.cat([want["d b_gate"], want["d b_up"]], dim=1)}, {"b": bias.grad})
    s = torch.cat([want["d shared_gate"], want["d shared_up"]])
    assert shared.grad is None
    bits_equal({"s": s}, {"s": shared.main_grad.bfloat16()})


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("storage", ["separate", "fused", "lists"])
def test_main_grad(storage, backend):
    """Two accumulations in float32; one chain a weight, so storage and ranks change no bit."""
    step = everything(ids(90, 4, 2)).to(torch.bfloat16)
    weights = step.weights if storage == "separate" else storages(step)[storage]
    held = [*(t for w in weights for t in flat(w)), *step.biases, *step.shared]
    for tensor in held:
        tensor.main_grad = torch.zeros(tensor.shape)

    def layer(x):
        return kodkod.moe(x, step.ids, step.topk_weights, *weights, **step.options())

    run = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    for scale in (1.0, 0.5):
        y = run(step.x)
        y.backward(torch.full_like(y, scale))
    assert all(tensor.grad is None for tensor in held)
    got = gate_up_down(weights, lambda t: t.main_grad)

    wide = step.to(torch.float64)
    y = reference(wide)
    want = gradients(wide, y, torch.full_like(y, 1.5))
    compare(got, {name: want[f"d w_{name}"] for name in got}, 1e-2)
    rest = {n: t.main_grad for n, t in list(step.leaves().items())[5:]}
    compare(rest, {n: want[f"d {n}"] for n in rest}, 1e-2)

    again = everything(ids(90, 4, 2)).to(torch.bfloat16)
    for tensor in again.weights:
        tensor.main_grad = torch.zeros(tensor.shape)
    for scale in (1.0, 0.5):
        y = again.kodkod(group=kodkod.ExpertGroup.cpu(4))
        y.backward(torch.full_like(y, scale))
    bits_equal(got, dict(zip(got, (t.main_grad for t in again.weights), strict=True)))
    # A weight without a main_grad keeps its own gradient, of its own dtype, beside those that have one.
    assert all(b.grad is not None and b.grad.dtype == b.dtype for b in (*again.biases, *again.shared))


def test_precision_and_autocast():
    step = make(ids(90, 4, 2), experts=4, shared=40)
    f32, bf16 = step.to(torch.float32), step.to(torch.bfloat16)
    want = grads(bf16)
    y = f32.kodkod(precision="bf16")
    assert y.dtype == torch.float32
    bits_equal({"y": want["y"].float()}, {"y": y.detach()})
    y.backward(torch.ones_like(y))
    assert f32.weights[0].grad.dtype == torch.float32
    bits_equal({"d": want["d w_gate"].float()}, {"d": f32.weights[0].grad})
    with torch.autocast("cpu", torch.bfloat16):
        y = f32.kodkod()
    bits_equal({"y": want["y"]}, {"y": y.detach()})
    bits_equal({"y": step.to(torch.float32).kodkod().bfloat16()}, {"y": bf16.kodkod(precision=torch.float32)})


def test_bfloat16_router_weights_and_biases_keep_their_dtype():
    step = everything(ids(30, 4, 2)).to(torch.bfloat16)
    step.topk_weights = step.topk_weights.detach().bfloat16().requires_grad_()
    step.biases = [b.detach().bfloat16().requires_grad_() for b in step.biases]
    got = grads(step)
    assert {g.dtype for n, g in got.items() if n != "d shared_output_gate"} == {torch.bfloat16}
    wide = step.to(torch.float64)
    y = reference(wide)
    compare(got, gradients(wide, y, torch.ones_like(y)), 1e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_opcheck():
    """Of the operators themselves: schemas, fake kernels, autograd, and compilation with sizes that vary."""
    step = everything(ids(20, 4, 2), hidden=16, intermediate=8, shared=8).to(torch.float32)
    number = kodkod.ExpertGroup.cpu(2)._number
    weights = [*step.weights, *step.biases, *step.shared]
    config = (step.activation, step.limit, 1.702, number, [-1] * 5)
    for kept in (True, False):
        args = (step.x, step.ids, step.topk_weights, weights, [1] * 10, [], [], *config, kept)
        if not kept:
            args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
            args = (*args[:3], [w.detach() for w in weights], *args[4:])
        torch.library.opcheck(torch.ops.kodkod.moe.default, args)
    fused_list = [t.detach() for t in torch.cat(step.weights[:2], dim=1)] + [t.detach() for t in step.weights[2]]
    rows = (step.x.detach(), step.ids, step.topk_weights.detach())
    parts = [4, 0, 4, *[0] * 7]
    torch.library.opcheck(
        torch.ops.kodkod.moe.default, (*rows, fused_list, parts, [], [], "swiglu", None, 1.0, number, [-1] * 5, False)
    )
    plain = [w.detach() for w in weights]
    context = torch.zeros(1, dtype=torch.int64)  # no context: the forward runs again
    args = (torch.ones_like(rows[0]), context, *rows, plain, [1] * 10)
    tests = ("test_schema", "test_faketensor")  # a backward is not differentiated
    torch.library.opcheck(torch.ops.kodkod.moe_backward.default, (*args, *config), test_utils=tests)
    into = [torch.ones(w.shape) for w in plain]
    torch.library.opcheck(torch.ops.kodkod.moe_backward_into.default, (*args, into, *config), test_utils=tests)


class Block(torch.nn.Module):
    """A router, a layer and a residual connection."""

    def __init__(self, seed: int, hidden: int = 64, experts: int = 4) -> None:
        super().__init__()
        step = everything(ids(1, experts, 2), experts, hidden=hidden, seed=seed)
        self.router = torch.nn.Parameter(torch.randn(experts, hidden, generator=torch.Generator().manual_seed(seed)))
        self.weights = torch.nn.ParameterList(step.weights)
        self.biases = torch.nn.ParameterList(step.biases)
        self.shared = torch.nn.ParameterList(step.shared)
        self.group = kodkod.ExpertGroup.cpu(2)

    def forward(self, x):
        scores, chosen = (x @ self.router.t()).softmax(-1).topk(2, dim=-1)
        y = kodkod.moe(
            x,
            chosen,
            scores,
            *(self.weights[i] for i in range(3)),  # a compiler may not know how to unpack a ParameterList
            biases=kodkod.Biases(*(self.biases[i] for i in range(3))),
            shared=kodkod.Shared(*(self.shared[i] for i in range(4))),
            activation="swiglu_oai",
            limit=1.5,
            group=self.group,
        )
        return x + y


def model(blocks: int = 3) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(Block(seed) for seed in range(blocks)))


def step_of(net, run, x) -> dict[str, torch.Tensor]:
    net.zero_grad()
    y = run(x)
    y.square().mean().backward()
    return {"y": y.detach().clone(), **{n: p.grad.clone() for n, p in net.named_parameters()}}


def rows(*shape: int, seed: int = 9) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(backend):
    net, x = model(2), rows(2, 20, 64)
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    eager = step_of(net, net, x)
    got = step_of(net, compiled, x)
    compare(got, eager, 1e-4)  # the router is the compiler's, and may differ in its last bits
    compare(step_of(net, compiled, rows(2, 33, 64)), step_of(net, net, rows(2, 33, 64)), 1e-4)
    with torch.no_grad():
        compare({"y": compiled(x)}, {"y": net(x)}, 1e-4)


def test_compiled_layer_has_the_same_bits():
    step = everything(ids(50, 4, 2)).to(torch.bfloat16)
    want = grads(step)
    compiled = torch.compile(lambda: step.kodkod(), fullgraph=True)
    y = compiled()
    bits_equal(want, gradients(step, y, torch.ones_like(y)))


def test_compiled_checkpoints():
    net, x = model(2), rows(2, 20, 64).requires_grad_()

    def run(x):
        for block in net:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    compare(step_of(net, torch.compile(run, fullgraph=True, backend="aot_eager"), x), step_of(net, net, x), 1e-4)


def test_export():
    net, x = model(1), rows(2, 20, 64)
    with torch.no_grad():
        exported = torch.export.export(net, (x,)).module()
        compare({"y": exported(x)}, {"y": net(x)}, 1e-4)


def test_a_model_is_pickled_with_its_group(tmp_path):
    """Into a process that has made no group yet: numbers differ there."""
    block = kodkod.nn.MoE(64, 48, 4, 2, group=kodkod.ExpertGroup.cpu(4, threads=3))
    file = tmp_path / "block.pt"
    torch.save(block, file)
    code = f"import torch; b = torch.load({str(file)!r}, weights_only=False); print(b.group.ranks, b.group.threads)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "3"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_has_the_same_bits(reentrant):
    net, x = model(), rows(2, 20, 64).requires_grad_()
    want = step_of(net, net, x)

    def run(x):
        for block in net:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    bits_equal(want, step_of(net, run, x))


def test_checkpointing_keeps_nothing_between():
    group = kodkod.ExpertGroup.cpu(2, threads=2)
    step = make(ids(4000, 4, 2), experts=4).to(torch.float32)
    gc.collect()
    group.trim()

    def held(run):
        ys = [run() for _ in range(4)]
        group.trim()
        return group.memory()[0], ys

    before, ys = held(lambda: step.kodkod(group=group))
    del ys
    gc.collect()
    after, ys = held(lambda: checkpoint(lambda x: step.kodkod(group=group) + 0 * x, step.x, use_reentrant=False))
    print(f"bytes of 4 forwards: {before} kept, {after} with checkpoints")
    assert after < before / 2
    sum(ys).sum().backward()
    del ys
    gc.collect()
    group.trim()
    left = group.memory()[0]
    with torch.no_grad():
        kept, _ = held(lambda: step.kodkod(group=group))
    print(f"without gradients {kept}, of which the ring {left}")
    assert kept <= left + 4096


def test_interleaved_passes():
    """Forwards and backwards of several layers and inputs in any order have the bits of one after another."""
    nets = [model(2), copy.deepcopy(model(2))]
    inputs = [rows(30, 64, seed=s).requires_grad_() for s in range(3)]
    want = {
        (n, i): torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
        for n, net in enumerate(nets)
        for i, x in enumerate(inputs)
    }
    ys = {(n, i): net(x).square().sum() for n, net in enumerate(nets) for i, x in enumerate(inputs)}
    for key in [(1, 0), (0, 2), (0, 0), (1, 2), (1, 1), (0, 1)]:
        got = torch.autograd.grad(ys[key], [inputs[key[1]], *nets[key[0]].parameters()])
        bits_equal(dict(enumerate(want[key])), dict(enumerate(got)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    step = everything(ids(30, 4, 2)).to(torch.bfloat16)
    want = step.kodkod()
    with mode():
        y = step.kodkod()
    assert want.requires_grad
    assert not y.requires_grad
    assert torch.equal(want, y)


def test_backward_twice_through_a_retained_graph():
    step = everything(ids(30, 4, 2)).to(torch.bfloat16)
    y = step.kodkod()
    first = torch.autograd.grad(y, list(step.leaves().values()), torch.ones_like(y), retain_graph=True)
    second = torch.autograd.grad(y, list(step.leaves().values()), torch.ones_like(y))
    bits_equal(dict(enumerate(first)), dict(enumerate(second)))


def test_a_context_that_was_copied_is_made_again():
    """As where saved tensors are moved away and back."""
    step = everything(ids(30, 4, 2)).to(torch.bfloat16)
    want = grads(step)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        got = grads(step)
    bits_equal(want, got)


def test_a_saved_tensor_that_was_changed_is_an_error():
    step = make(ids(30, 4, 2), experts=4).to(torch.float32)
    y = step.kodkod()
    with torch.no_grad():
        step.weights[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_threads_of_python():
    steps = [everything(ids(60, 4, 2, seed), seed=seed).to(torch.bfloat16) for seed in range(4)]
    want = [grads(step) for step in steps]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for a, b in zip(want, pool.map(grads, steps), strict=True):
                bits_equal(a, b)


def test_a_forked_child_computes():
    step = everything(ids(60, 4, 2)).to(torch.float32)
    group = kodkod.ExpertGroup.cpu(2, threads=2)
    want = step.kodkod(group=group)
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            same = torch.equal(step.kodkod(group=group), want)
        os._exit(0 if same else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_only_what_needs_it_gets_a_gradient():
    step = everything(ids(30, 4, 2)).to(torch.float32)
    want = grads(step)
    for tensor in (step.topk_weights, *step.weights, *step.biases, *step.shared):
        tensor.requires_grad_(False)
    y = step.kodkod()
    y.backward(torch.ones_like(y))
    bits_equal({"x": want["d x"]}, {"x": step.x.grad})
    assert all(t.grad is None for n, t in step.leaves().items() if n != "x")
