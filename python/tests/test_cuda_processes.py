"""Each process a rank with a GPU: the bits of one GPU that has all tokens and experts. Skipped with fewer than two."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import data_parallel
import pytest
import torch
import torch.distributed as dist
from reference import Step, bits_equal, everything, gradients, random_ids
from torch.distributed.device_mesh import init_device_mesh

import kodkod

RANKS = 2
EXPERTS, TOP_K, TOKENS = 8, 2, 300
LIMIT = 150.0
"""Seconds that processes may take, kernels compiled."""

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
with_both = pytest.mark.parametrize("memory", ["symmetric", "ipc"])


def run(what: str, folder: Path, *arguments: str, codes: Sequence[int] = (0,) * RANKS) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=be_rank, args=(rank, what, folder, *arguments), daemon=True) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
    ended = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    for rank in range(RANKS):
        print(f"--- rank {rank}\n{(folder / f'rank {rank}').read_text()}")
    assert ended == list(codes), f"the processes ended with {ended}: None is one that hangs"


def be_rank(rank: int, what: str, folder: Path, *arguments: str) -> None:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # not used, and not every host can
    out = os.open(folder / f"rank {rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    code = 0
    try:
        globals()[f"rank_{what}"](rank, folder, *arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    print("done", flush=True)
    dist.barrier()
    sys.exit(code)


def whole(seed: int = 0, tokens: int = TOKENS) -> Step:
    ids = random_ids(tokens, EXPERTS, TOP_K, torch.Generator().manual_seed(seed))
    return everything(ids, EXPERTS, hidden=128, intermediate=64, shared=64, seed=seed).to(torch.bfloat16)


def tokens_of(rank: int) -> slice:
    return slice(0, 100) if rank == 0 else slice(100, TOKENS)


def part(step: Step, rank: int, tokens: slice | None = None) -> Step:
    """This rank's tokens and experts."""
    tokens, held = tokens or tokens_of(rank), EXPERTS // RANKS
    own = slice(rank * held, (rank + 1) * held)
    cut = Step(
        step.x[tokens],
        step.ids[tokens],
        step.topk_weights[tokens],
        [w[own] for w in step.weights],
        [b[own] for b in step.biases],
        step.shared,
        step.activation,
        step.limit,
        step.alpha,
    )
    return cut.to(torch.bfloat16, device="cuda")


def upstream(tokens: slice) -> torch.Tensor:
    dy = torch.randn(TOKENS, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    return dy[tokens].cuda()


def joined(memory: str, **options) -> kodkod.ExpertGroup:
    group = kodkod.ExpertGroup.processes(device="cuda", memory=memory, **options)
    print(group, flush=True)
    assert {"symmetric": "torch's symmetric memory", "ipc": "CUDA IPC"}[memory] in repr(group)
    return group


def many(rank: int) -> Step:
    """So many tokens that symmetric memory grows, one more on rank 1."""
    step = whole(2, tokens=20 * TOKENS + 1)
    return part(step, rank, slice(0, 20 * TOKENS + rank))


def rank_same_bits(rank: int, folder: Path, memory: str) -> None:
    group = joined(memory)
    assert (group.rank, group.ranks, group.device) == (rank, RANKS, torch.device("cuda", rank))
    steps = [part(whole(seed), rank) for seed in range(2)]
    ys = [step.kodkod(group=group) for step in steps]  # two forwards before their backwards
    dy = upstream(tokens_of(rank))
    got = [gradients(step, y, dy) for step, y in zip(steps, ys, strict=True)]
    for step, first in zip(steps, got, strict=True):
        for _ in range(5):
            bits_equal(first, gradients(step, step.kodkod(group=group), dy))
        with torch.no_grad():
            bits_equal({"y": first["y"]}, {"y": step.kodkod(group=group)})
    before = group.memory()[0]
    with torch.no_grad():
        many(rank).kodkod(group=group)  # more symmetric memory, in place of what there was
    print("bytes", before, group.memory(), flush=True)
    assert group.memory()[0] > before
    for step, first in zip(steps, got, strict=True):
        bits_equal(first, gradients(step, step.kodkod(group=group), dy))
        held = [*step.weights, *step.biases, *step.shared]
        for tensor in held:
            tensor.main_grad = torch.zeros(tensor.shape, device="cuda")
        step.kodkod(group=group).backward(dy)
        names = list(step.leaves())[2:]
        sums = {f"d {n}": t.main_grad.to(t.dtype) for n, t in zip(names, held, strict=True)}
        bits_equal({n: first[n] for n in sums}, sums)
    gate_up = torch.cat([w.detach() for w in steps[0].weights[:2]], dim=1).requires_grad_()
    step, first = steps[0], got[0]
    y = kodkod.moe(step.x, step.ids, step.topk_weights, gate_up, None, step.weights[2], group=group, **step.options())
    d_gate, d_up = torch.autograd.grad(y, gate_up, dy)[0].chunk(2, dim=1)
    bits_equal(
        {n: first[n] for n in ("y", "d w_gate", "d w_up")}, {"y": y.detach(), "d w_gate": d_gate, "d w_up": d_up}
    )
    kodkod.cuda.check()
    torch.save([{k: v.cpu() for k, v in g.items()} for g in got], folder / f"got {rank}")


@with_both
def test_the_bits_of_one_gpu(tmp_path, memory):
    run("same_bits", tmp_path, memory)
    parts = [torch.load(tmp_path / f"got {rank}") for rank in range(RANKS)]
    for seed in range(2):
        step = whole(seed).to(torch.bfloat16, device="cuda")
        want = gradients(step, step.kodkod(), upstream(slice(0, TOKENS)))
        want = {name: tensor.cpu() for name, tensor in want.items()}
        mine = [p[seed] for p in parts]
        for name in want:
            if "shared" in name:  # whole on every rank
                for got in mine:
                    bits_equal({name: want[name]}, {name: got[name]})
            else:
                bits_equal({name: want[name]}, {name: torch.cat([got[name] for got in mine])})


def rank_graphs(rank: int, folder: Path, memory: str) -> None:
    """Graphs of forward and backward, replayed on other rows and routes, among passes outside of them."""
    group = joined(memory, timeout=30.0)
    static, dy = part(whole(), rank), upstream(tokens_of(rank))
    fresh = torch.cuda.CUDAGraph()
    message = "run the same passes once before the capture"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(fresh):
        static.kodkod(group=group)
    torch.cuda.synchronize()
    for _ in range(2):  # compiles and allocates
        gradients(static, static.kodkod(group=group), dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gradients(static, static.kodkod(group=group), dy)
    other = part(whole(1), rank)
    y = other.kodkod(group=group)  # outstanding while graphs run

    def replays() -> None:
        for seed in range(3):
            step = part(whole(seed), rank)
            want = gradients(step, step.kodkod(group=group), dy)
            with torch.no_grad():
                for name, tensor in static.leaves().items():
                    tensor.copy_(step.leaves()[name])
                static.ids.copy_(step.ids)
            for _ in range(3):
                for tensor in results.values():
                    tensor.fill_(torch.nan)
                graph.replay()
                bits_equal(want, results)

    replays()
    late = gradients(other, y, dy)
    again = part(whole(1), rank)
    bits_equal(gradients(again, again.kodkod(group=group), dy), late)
    kodkod.cuda.check()
    before = group.memory()[0]
    with torch.no_grad():
        many(rank).kodkod(group=group)  # more symmetric memory, while the graph keeps what it has
    print("bytes", before, group.memory(), flush=True)
    assert group.memory()[0] > before
    replays()
    kodkod.cuda.check()
    graph.reset()
    kodkod.cuda.trim(captured=True)
    bits_equal(late, gradients(again, again.kodkod(group=group), dy))


@with_both
def test_graphs(tmp_path, memory):
    run("graphs", tmp_path, memory)


def rank_stalls(rank: int, folder: Path) -> None:
    """Rank 1 does not run its graph."""
    static, dy = part(whole(), rank), upstream(tokens_of(rank))
    gradients(static, static.kodkod(group=joined("ipc")), dy)  # compiles, which may take longer than the limit below
    group = joined("ipc", timeout=2.0)
    for _ in range(2):
        gradients(static, static.kodkod(group=group), dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients(static, static.kodkod(group=group), dy)
    graph.replay()
    kodkod.cuda.check()
    if rank == 0:
        graph.replay()
    else:
        time.sleep(5)
    with pytest.raises(kodkod.StalledError, match="rank 0") as error:
        kodkod.cuda.check()
    print(error.value, flush=True)
    with pytest.raises(RuntimeError, match="is broken"):
        static.kodkod(group=group)
    kodkod.cuda.check()  # told once


def test_a_graph_that_a_rank_does_not_run(tmp_path):
    run("stalls", tmp_path)


def rank_data_parallel(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cuda", (RANKS,))  # NCCL
    group = kodkod.ExpertGroup.processes(mesh)
    assert group.device == torch.device("cuda", rank)
    data_parallel.compare(mesh, group, torch.bfloat16, 1e-2)  # gradients are rounded to it
    kodkod.cuda.check()


def test_the_rest_of_the_model_in_ddp_and_fsdp2(tmp_path):
    run("data_parallel", tmp_path)


def rank_dies(rank: int, folder: Path, memory: str) -> None:
    group = joined(memory, timeout=30.0)
    step, dy = part(whole(), rank), upstream(tokens_of(rank))
    gradients(step, step.kodkod(group=group), dy)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def more() -> None:
        for _ in range(100):
            gradients(step, step.kodkod(group=group), dy)
        kodkod.cuda.check()

    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) has died") as error:
        more()
    print(f"{error.value}: after {time.monotonic() - begin:.2f} s", flush=True)
    assert time.monotonic() - begin < 10
    with pytest.raises(RuntimeError, match="is broken"):
        step.kodkod(group=group)
    os._exit(0)  # nothing waits for torch's own group


@with_both
def test_a_rank_that_dies_is_named(tmp_path, memory):
    run("dies", tmp_path, memory, codes=[0, -signal.SIGKILL])


def refused(kind: type[Exception], message: str, call) -> None:
    with pytest.raises(kind, match=message) as error:
        call()
    print(error.value, flush=True)


def rank_refused(rank: int, folder: Path, memory: str) -> None:
    group = joined(memory, timeout=20.0)
    good = part(whole(), rank)
    want = gradients(good, good.kodkod(group=group), upstream(tokens_of(rank)))

    bad = part(whole(), rank)
    if rank == 1:
        bad.topk_weights = bad.topk_weights[:, :1]
    refused(ValueError if rank == 1 else Exception, "topk_weights has shape", lambda: bad.kodkod(group=group))
    if rank == 0:
        refused(ValueError, "x is on cpu: cuda:0 is needed", lambda: cpu_call(good, group))
    else:
        refused(Exception, "x is on cpu", lambda: good.kodkod(group=group))
    limit = part(whole(), rank)
    limit.limit = 1.0 + rank
    refused(Exception, "limit", lambda: limit.kodkod(group=group))
    bits_equal(want, gradients(good, good.kodkod(group=group), upstream(tokens_of(rank))))
    current = torch.cuda.current_device()
    kodkod.cuda.check()
    kodkod.cuda.trim(group.device)
    assert torch.cuda.current_device() == current


def cpu_call(step: Step, group: kodkod.ExpertGroup) -> None:
    cpu = step.to(torch.bfloat16, device="cpu")
    cpu.kodkod(group=group)


@with_both
def test_what_is_refused_on_every_rank(tmp_path, memory):
    run("refused", tmp_path, memory)
