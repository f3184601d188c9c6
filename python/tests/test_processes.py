"""Each process a rank: the same bits as one process, and no rank left waiting for another that fails.

A test runs one of the functions that are called ``rank_...`` in processes of its own, forked from one that has torch
imported; with ``torchrun`` in their place it is tested through ``examples/train_moe.py``.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import data_parallel
import pytest
import torch
import torch.distributed as dist
from reference import Step, bits_equal, everything, gradients, make, random_ids
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import kodkod
from kodkod import _group
from kodkod._symmetric import SymmetricMemory

EXPERTS = 8
LIMIT = 240.0
"""Seconds that processes may take: far more than they need."""


def run(ranks: int, what: str, folder: Path, killed: dict[int, int] | None = None) -> list[str]:
    """What each process wrote, after all have ended as they should; ``killed`` has the ranks that a signal ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.device_mesh", "torch._dynamo", "pytest", "kodkod"])
    processes: list[BaseProcess] = [
        context.Process(target=be_rank, args=(rank, ranks, what, folder), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    texts = [(folder / f"rank {rank}").read_text() for rank in range(ranks)]
    for rank, text in enumerate(texts):
        print(f"--- rank {rank} of {ranks}\n{text}")
    wanted = [(killed or {}).get(rank, 0) for rank in range(ranks)]
    assert codes == wanted, f"the processes ended with {codes} in place of {wanted}: None is one that hangs"
    return texts


def be_rank(rank: int, ranks: int, what: str, folder: Path) -> None:
    out = os.open(folder / f"rank {rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    code = 0
    try:
        globals()[f"rank_{what}"](rank, ranks)
    except BaseException:
        traceback.print_exc()
        code = 1
    print("done", flush=True)
    sys.exit(code)


def joined(ranks: int, **options) -> kodkod.ExpertGroup:
    group = kodkod.ExpertGroup.processes(threads=1, **options)
    assert (group.rank, group.ranks, group.threads) == (dist.get_rank(), ranks, 1)
    return group


def cut(tokens: int, ranks: int) -> list[int]:
    """Where each rank's tokens begin, and the end: ragged, and the last rank has none."""
    inner = [tokens * (r + 1) ** 2 // ranks**2 - r % 2 for r in range(ranks - 1)]
    return [0, *inner[:-1], tokens, tokens] if ranks > 2 else [0, tokens, tokens]


def own(step: Step, rank: int, ranks: int, at: list[int]) -> Step:
    """A rank's part: its tokens, its experts, all shared experts."""
    rows, held = slice(at[rank], at[rank + 1]), EXPERTS // ranks
    experts = slice(rank * held, (rank + 1) * held)
    part = copy.copy(step)
    part.x, part.ids, part.topk_weights = step.x[rows], step.ids[rows], step.topk_weights[rows]
    part.weights = [w[experts] for w in step.weights]
    part.biases = [b[experts] for b in step.biases]
    return part


def cases() -> dict[str, tuple[Step, torch.dtype]]:
    generator = torch.Generator().manual_seed(7)
    ids = random_ids(61, EXPERTS, 3, generator)
    ids[5, 1] = -1
    ids[ids == 2] = -1  # an expert without a route
    plain = make(random_ids(200, EXPERTS, 2, generator), experts=EXPERTS)
    return {
        "all options, f32": (everything(ids, experts=EXPERTS), torch.float32),
        "all options, bf16": (everything(ids.int(), experts=EXPERTS), torch.bfloat16),
        "plain, bf16": (plain, torch.bfloat16),
    }


def want_and_got(step: Step, dtype: torch.dtype, group: kodkod.ExpertGroup, at: list[int], **options):
    """This rank's part of one process's results, and its own."""
    rank, ranks = group.rank, group.ranks
    whole = step.to(dtype)
    dy = torch.randn(step.x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    one = gradients(whole, whole.kodkod(group=kodkod.ExpertGroup.cpu(threads=1), **options), dy)
    rows, held = slice(at[rank], at[rank + 1]), EXPERTS // ranks
    experts = slice(rank * held, (rank + 1) * held)
    want = {
        name: tensor[rows]
        if name in ("y", "d x", "d topk_weights")
        else (tensor if "shared" in name else tensor[experts])
        for name, tensor in one.items()
    }
    part = own(step, rank, ranks, at).to(dtype)
    return want, gradients(part, part.kodkod(group=group, **options), dy[rows])


def rank_bits(rank: int, ranks: int) -> None:
    group = joined(ranks)
    for name, (step, dtype) in cases().items():
        tokens = len(step.ids)
        even = [tokens * r // ranks for r in range(ranks + 1)]
        for at in (even, cut(tokens, ranks)):
            for knobs in (None, kodkod.Knobs(minibatch_rows=128, ring_rows=128, saved_rows=0)):
                want, got = want_and_got(step, dtype, group, at, knobs=knobs)
                bits_equal(got, want)
                print(
                    f"{name}, tokens {at[rank]} to {at[rank + 1]}, knobs {knobs is not None}: {len(got)} tensors equal"
                )


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bits_are_those_of_one_process(ranks, tmp_path):
    run(ranks, "bits", tmp_path)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def rank_autograd(rank: int, ranks: int) -> None:
    """Layers in any order, checkpoints, a lost context, main_grad, fused and listed weights, the compiler."""
    group = joined(ranks)
    step, dtype = cases()["all options, f32"]
    at = [0, 40, len(step.ids)]
    want, _ = want_and_got(step, dtype, group, at)
    dy = torch.randn(step.x.shape, generator=torch.Generator().manual_seed(1))[at[rank] : at[rank + 1]]

    def part() -> Step:
        return own(step, rank, ranks, at).to(dtype)

    # Two forwards, their backwards in the same order.
    a, b = part(), part()
    ya, yb = a.kodkod(group=group), b.kodkod(group=group)
    bits_equal(gradients(a, ya, dy), want)
    with torch.no_grad():
        assert torch.equal(part().kodkod(group=group), want["y"])
    bits_equal(gradients(b, yb, dy), want)

    c = part()
    y = torch.utils.checkpoint.checkpoint(lambda _: c.kodkod(group=group), c.x, use_reentrant=False)
    bits_equal(gradients(c, y, dy), want)

    # Saved tensors that are copied lose the context: every rank runs the forward again.
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        d = part()
        y = d.kodkod(group=group)
    bits_equal(gradients(d, y, dy), want)

    e = part()
    for tensor in [*e.weights, *e.biases, *e.shared]:
        tensor.main_grad = torch.zeros_like(tensor)
    e.kodkod(group=group).backward(dy)
    names = [name for name in e.leaves() if name not in ("x", "topk_weights")]
    bits_equal({f"d {n}": e.leaves()[n].main_grad for n in names}, {f"d {n}": want[f"d {n}"] for n in names})

    f = part()
    gate, up, down = f.weights
    lists = kodkod.moe(f.x, f.ids, f.topk_weights, *(list(w.unbind()) for w in f.weights), group=group, **f.options())
    bits_equal(gradients(f, lists, dy), want)
    fused = kodkod.moe(f.x, f.ids, f.topk_weights, torch.cat([gate, up], 1), None, down, group=group, **f.options())
    bits_equal(gradients(f, fused, dy), want)

    g = part()
    compiled = torch.compile(lambda: g.kodkod(group=group), fullgraph=True, backend="aot_eager")
    bits_equal(gradients(g, compiled(), dy), want)

    # A rank whose rows have no gradient makes the call all the same.
    h = part()
    y = h.kodkod(group=group)
    (y if rank == 0 else NoGradient.apply(y)).backward(dy)
    assert torch.equal(h.x.grad, want["d x"] if rank == 0 else torch.zeros_like(h.x))

    child = os.fork()
    if child == 0:
        with pytest.raises(RuntimeError, match="a fork of the process that joined the group cannot use it"):
            a.kodkod(group=group)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

    assert copy.deepcopy(group) is group
    assert copy.copy(group) is group
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(group)


def test_autograd_in_every_way(tmp_path):
    run(2, "autograd", tmp_path)


def refused_ids(part: Step) -> None:
    part.ids[3, 1] = 99


def refused_dtype(part: Step) -> None:
    part.weights[1] = part.weights[1].double()


def refused_shape(part: Step) -> None:
    part.topk_weights = part.topk_weights[:, :1]


def refused_experts(part: Step) -> None:
    part.weights = [w[:1] for w in part.weights]
    part.ids.zero_()


def refused_limit(part: Step) -> None:
    part.limit = -1.0


def refused_activation(part: Step) -> None:
    part.activation = "gelu"


REFUSED = [
    (refused_ids, r"topk_ids\[3, 1\] is 99: allowed are 0 to 7"),
    (refused_dtype, "w_up is torch.float64"),
    (refused_shape, r"topk_weights has shape \[10, 1\]"),
    (refused_experts, "experts of rank 1 is 2: rank 0 has 8, and all ranks must have the same"),
    (refused_limit, "limit is -1"),
    (refused_activation, "activation is 'gelu'"),
]


def rank_refused(rank: int, ranks: int) -> None:
    for options, message in (
        ({"threads": -1}, "threads is -1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": 1e-12}, "timeout is 1e-12: 0.001 seconds or more"),
        ({"memory": "nccl"}, "memory is 'nccl': 'symmetric', 'ipc' and None are allowed"),
        ({"memory": "ipc"}, "memory is 'ipc': only ranks on GPUs have the choice, and device is cpu"),
    ):
        others = f"ExpertGroup.processes of rank 1 is refused: {message}"
        with pytest.raises(ValueError, match=message if rank == 1 else others):
            kodkod.ExpertGroup.processes(**(options if rank == 1 else {}))

    group = joined(ranks)
    step = make(random_ids(10 * ranks, EXPERTS, 2, torch.Generator().manual_seed(3)), experts=EXPERTS)
    at = [10 * r for r in range(ranks + 1)]
    for change, message in REFUSED:
        part = own(step, rank, ranks, at)
        if rank == 1:
            part.ids = part.ids.clone()
            change(part)
        with pytest.raises((TypeError, ValueError), match=message) as error:
            part.kodkod(group=group)
        print(f"rank {rank}: {type(error.value).__name__}: {error.value}")
        assert rank == 1 or "rank 1" in str(error.value)
        # The next call is a right one.
        want, got = want_and_got(step, torch.float32, group, at)
        bits_equal(got, want)

    block = kodkod.nn.MoE(64, 32, experts=EXPERTS, top_k=2, group=group)
    with pytest.raises(ValueError, match=r"x has shape \[5, 56\]: expected \[..., H\] with H = 64"):
        block(torch.zeros(5, 64 - 8 * rank))
    assert block(torch.zeros(5, 64)).isfinite().all()

    # What a compiler finds.
    part = own(step, rank, ranks, at)
    part.topk_weights = part.topk_weights[:, : 2 - rank]
    compiled = torch.compile(lambda: part.kodkod(group=group), fullgraph=True, backend="aot_eager")
    message = r"rank 1 .*topk_weights has shape \[10, 1\]"
    with pytest.raises(Exception, match=message if rank == 0 else "Observed exception"):
        compiled()

    # Ranks that disagree.
    other = make(step.ids[:10], experts=EXPERTS // ranks, hidden=64 + 64 * rank)
    with pytest.raises(ValueError, match="hidden of rank 1 is 128: rank 0 has 64, and all ranks must have the same"):
        other.kodkod(group=group)
    part = own(step, rank, ranks, at).to(torch.float32)
    y = part.kodkod(group=group)
    with pytest.raises(ValueError, match="pass of rank 1 is forward: rank 0 has backward of call"):
        y.sum().backward() if rank == 0 else part.kodkod(group=group)
    y.sum().backward()

    # A backward that one rank refuses.
    part = own(step, rank, ranks, at).to(torch.float32)
    for weight in part.weights:
        weight.main_grad = torch.zeros_like(weight)
    if rank == 1:
        part.weights[0].main_grad = part.weights[1].main_grad
    y = part.kodkod(group=group)
    with pytest.raises(ValueError, match="main_grad of two weights is one tensor"):
        y.sum().backward()

    # What fails before a rank's call, in a backward and in a forward.
    part = own(step, rank, ranks, at).to(torch.float32)
    y = part.kodkod(group=group)
    if rank == 1:
        with torch.no_grad():
            part.weights[0].zero_()
    with pytest.raises((RuntimeError, ValueError), match="modified by an inplace operation"):
        y.sum().backward()
    part, fails = own(step, rank, ranks, at), []

    def block(x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise RuntimeError("nothing left for a norm")
        part.x = x
        return part.kodkod(group=group)

    # A checkpoint makes the forward's call in the backward, which hears of what rank 1 said: once.
    y = checkpoint(block, part.x.detach().requires_grad_(), use_reentrant=False)
    fails += [rank] * (rank == 1)
    with pytest.raises((RuntimeError, ValueError), match="nothing left for a norm"):
        y.sum().backward()
    want, got = want_and_got(step, torch.float32, group, at)
    bits_equal(got, want)
    part = own(step, rank, ranks, at)
    with forward_ad.dual_level():
        if rank == 1:
            part.x = forward_ad.make_dual(part.x, torch.ones_like(part.x))
        with pytest.raises((NotImplementedError, ValueError), match="no forward-mode derivative"):
            part.kodkod(group=group)
    want, got = want_and_got(step, torch.float32, group, at)
    bits_equal(got, want)

    # No memory for results, in a forward and in a backward.
    part = own(step, rank, ranks, at).to(torch.float32)
    with without_memory(rank == 1), pytest.raises((ValueError, torch.OutOfMemoryError), match="no memory") as error:
        part.kodkod(group=group)
    print(f"a forward: {type(error.value).__name__}: {error.value}")
    y = part.kodkod(group=group)
    with without_memory(rank == 1), pytest.raises((ValueError, torch.OutOfMemoryError), match="no memory") as error:
        y.sum().backward()
    print(f"a backward: {type(error.value).__name__}: {error.value}")

    # An operator that is called directly.
    call = [part.x, part.ids, part.topk_weights.double() if rank == 1 else part.topk_weights, part.weights]
    options = ("swiglu", None, 1.0, group._number, [-1] * 5)
    with torch.no_grad(), pytest.raises((TypeError, ValueError), match="topk_weights is torch") as error:
        torch.ops.kodkod.moe(*call, [1, 1, 1, *[0] * 7], [], [], *options, False)
    print(f"an operator: {type(error.value).__name__}: {error.value}")
    want, got = want_and_got(step, torch.float32, group, at)
    bits_equal(got, want)


@contextlib.contextmanager
def without_memory(here: bool):
    def empty_like(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(torch, "empty_like", empty_like)
        yield


def test_bad_input_is_an_error_on_every_rank(tmp_path):
    for text in run(2, "refused", tmp_path):
        assert len(re.findall(r"^rank \d: ", text, re.MULTILINE)) == len(REFUSED)


def rank_killed(rank: int, ranks: int) -> None:
    group = joined(ranks)
    step = make(random_ids(10 * ranks, EXPERTS, 2, torch.Generator().manual_seed(3)), experts=EXPERTS)
    at = [10 * r for r in range(ranks + 1)]
    want, got = want_and_got(step, torch.float32, group, at)
    bits_equal(got, want)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1") as error:
            own(step, rank, ranks, at).kodkod(group=group)
        print(f"rank {rank}: {error.value}")


def test_a_dead_rank_is_named(tmp_path):
    run(4, "killed", tmp_path, {1: -signal.SIGKILL})


def rank_hosts(rank: int, ranks: int) -> None:
    _group._host = lambda: [("alpha", "1"), ("beta", "2"), ("alpha", "1"), ("beta", "2")][rank]
    with pytest.raises(RuntimeError, match="ranks 0, 2 on alpha; ranks 1, 3 on beta"):
        kodkod.ExpertGroup.processes()

    # Groups of some of the processes, also from a mesh.
    _group._host = lambda: [("alpha", "1"), ("beta", "2")][rank // 2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    with pytest.raises(ValueError, match="DeviceMesh of 2 dimensions: 1 is needed, such as mesh\\['experts'\\]"):
        kodkod.ExpertGroup.processes(mesh)
    with pytest.raises(TypeError, match="process_group is a int"):
        kodkod.ExpertGroup.processes(3)
    for process_group in (mesh["experts"], mesh.get_group("experts")):
        group = kodkod.ExpertGroup.processes(process_group, threads=1)
        assert (group.rank, group.ranks) == (rank % 2, 2)
        step, dtype = cases()["plain, bf16"]
        bits_equal(*want_and_got(step, dtype, group, [0, 70, 200]))


def test_hosts_and_meshes(tmp_path):
    run(4, "hosts", tmp_path)


def rank_symmetric(rank: int, ranks: int) -> None:
    """What ranks on GPUs would take, where they all have symmetric memory and where one has none."""
    made: list[SymmetricMemory | None] = []

    def choose(memory: str | None) -> str:
        kodkod.ExpertGroup.processes(device="cuda", timeout=5.0, memory=memory)
        return "ipc" if made[-1] is None else "symmetric"

    def refused(kind: type[Exception], message: str, memory: str | None) -> None:
        with pytest.raises(kind, match=message) as error:
            choose(memory)
        print(f"rank {rank}: {error.value}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "init", lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: rank)
        patch.setattr(_group._kodkod, "group_cuda", lambda *arguments: made.append(arguments[-1]) or 0)
        if torch.cuda.device_count() == 0:
            assert choose(None) == "ipc"  # as it really is
            refused(RuntimeError, "rank 0 has no symmetric memory of torch: .", "symmetric")

        patch.setattr(SymmetricMemory, "problem", lambda _: None)
        patch.setattr(SymmetricMemory, "trial", lambda _: None)
        assert [choose(memory) for memory in (None, "symmetric", "ipc")] == ["symmetric", "symmetric", "ipc"]
        allowed = "rank 0 has symmetric, and all must have the same"
        refused(ValueError, f"memory of rank 1 is ipc: {allowed}", "ipc" if rank == 1 else "symmetric")
        for step in ("trial", "problem"):
            patch.setattr(SymmetricMemory, step, lambda _, step=step: f"no {step}" if rank == 1 else None)
            assert [choose(memory) for memory in (None, "ipc")] == ["ipc", "ipc"]
            refused(RuntimeError, f"rank 1 has no symmetric memory of torch: no {step}", "symmetric")
        patch.setattr(SymmetricMemory, "problem", lambda _: None)
        patch.setattr(_group, "meeting_place", lambda: ("/tmp", rank))
        assert choose(None) == "ipc"
        refused(RuntimeError, "rank 1 has no symmetric memory of torch: torch meets in /tmp on rank 0", "symmetric")


def test_who_has_symmetric_memory(tmp_path):
    run(2, "symmetric", tmp_path)


def rank_rendezvous(rank: int, ranks: int) -> None:
    """A rank that does not come is waited for no longer than the limit, and the store is as it was."""
    import torch.distributed._symmetric_memory as symm_mem

    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    before = store.timeout

    def meet(tensor: torch.Tensor, group: str) -> object:
        store.set(f"{len(tensor)} {rank}", "here")
        addresses = [store.get(f"{len(tensor)} {other}") and other for other in range(ranks)]
        return SimpleNamespace(buffer_ptrs=addresses)

    memory = SymmetricMemory(None, 0, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device", contextlib.nullcontext)
        patch.setattr(symm_mem, "rendezvous", meet)
        assert memory.rendezvous(torch.zeros(1))[1] == [0, 1]
        start = time.monotonic()
        if rank == 0:
            memory._first = torch.zeros(2)
            why = memory.trial()
            print(f"rank 0: {why}")
            assert why is not None
            assert 0.5 < time.monotonic() - start < 10
        patch.setattr(symm_mem, "rendezvous", lambda *_: None)
        with pytest.raises(RuntimeError, match="torch does not know the tensor"):
            memory.rendezvous(torch.zeros(1))
    assert store.timeout == before


def test_a_rendezvous_has_a_limit(tmp_path):
    run(2, "rendezvous", tmp_path)


def rank_module(rank: int, ranks: int) -> None:
    """The module holds its own experts, begins with the weights of one process, and loads a whole state."""
    from kodkod.nn import MoE

    group = joined(ranks)

    def block(seed: int, group=None) -> MoE:
        torch.manual_seed(seed)
        options = {"shared": 24, "scoring": "sigmoid", "groups": 4, "top_groups": 2, "balance_bias": True}
        return MoE(64, 48, EXPERTS, 2, group=group, **options)

    whole, mine = block(1), block(1, group)
    held = EXPERTS // ranks
    experts = slice(rank * held, (rank + 1) * held)

    def same() -> None:
        for name, tensor in mine.state_dict().items():
            other = whole.state_dict()[name]
            assert torch.equal(tensor, other[experts] if name.startswith("w_") else other), name

    same()
    assert kodkod.nn.expert_parameter_names(torch.nn.Sequential(mine)) == ["0.w_gate", "0.w_up", "0.w_down"]
    assert kodkod.nn.expert_parameter_names(whole) == []
    for fused in (False, True):
        whole = block(2 + fused)
        mine.load_hf(whole.hf_state_dict("deepseek_v3", prefix="mlp.", fused=fused), "deepseek_v3", prefix="mlp.")
        same()
    state = mine.hf_state_dict("deepseek_v3")
    assert {int(k.split(".")[1]) for k in state if k.startswith("experts.")} == set(range(EXPERTS)[experts])
    mine.load_hf(state, "deepseek_v3")
    del state[f"experts.{rank * held}.up_proj.weight"]
    with pytest.raises(RuntimeError, match=f"missing keys: experts.{rank * held}.up_proj.weight"):
        mine.load_hf(state, "deepseek_v3")
    with pytest.raises(RuntimeError, match=r"unexpected keys: experts\.8\.up_proj\.weight"):
        mine.load_hf(
            {**whole.hf_state_dict("deepseek_v3"), "experts.8.up_proj.weight": state["gate.weight"]}, "deepseek_v3"
        )
    with pytest.raises(ValueError, match="fused is True"):
        mine.hf_state_dict("deepseek_v3", fused=True)
    with pytest.raises(ValueError, match="group is ExpertGroup"):
        kodkod.hf.register(group)
    with pytest.raises(ValueError, match="experts is 7"):
        MoE(64, 48, 7, 2, group=group)

    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(9))
    want, got = whole(x), mine(x[rank * 40 // ranks : (rank + 1) * 40 // ranks])
    assert torch.equal(got, want[rank * 40 // ranks : (rank + 1) * 40 // ranks])
    want.square().sum().backward()
    got.square().sum().backward()
    assert torch.equal(mine.w_down.grad, whole.w_down.grad[experts])
    assert torch.equal(mine.shared_up.grad, whole.shared_up.grad)


def test_the_module_holds_its_own_experts(tmp_path):
    run(2, "module", tmp_path)


def rank_data_parallel(rank: int, ranks: int) -> None:
    data_parallel.compare(init_device_mesh("cpu", (ranks,)), joined(ranks), torch.float32, 1e-6)


def test_the_rest_of_the_model_in_ddp_and_fsdp2(tmp_path):
    run(2, "data_parallel", tmp_path)


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        kodkod.ExpertGroup.processes()
