"""Each process a rank with a GPU: the bits of one GPU that has all tokens and experts. Skipped with fewer than two."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from reference import Step, bits_equal, everything, gradients, random_ids

import kodkod

RANKS = 2
EXPERTS, TOP_K, TOKENS = 8, 2, 300
LIMIT = 150.0
"""Seconds that processes may take, kernels compiled."""

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")


def run(what: str, folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=be_rank, args=(rank, what, folder), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    for rank in range(RANKS):
        print(f"--- rank {rank}\n{(folder / f'rank {rank}').read_text()}")
    assert codes == [0] * RANKS, f"the processes ended with {codes}: None is one that hangs"


def be_rank(rank: int, what: str, folder: Path) -> None:
    out = os.open(folder / f"rank {rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    code = 0
    try:
        globals()[f"rank_{what}"](rank, folder)
    except BaseException:
        traceback.print_exc()
        code = 1
    print("done", flush=True)
    dist.barrier()
    sys.exit(code)


def whole(seed: int = 0) -> Step:
    ids = random_ids(TOKENS, EXPERTS, TOP_K, torch.Generator().manual_seed(seed))
    return everything(ids, EXPERTS, hidden=128, intermediate=64, shared=64, seed=seed).to(torch.bfloat16)


def tokens_of(rank: int) -> slice:
    return slice(0, 100) if rank == 0 else slice(100, TOKENS)


def part(step: Step, rank: int) -> Step:
    """This rank's tokens and experts."""
    tokens, held = tokens_of(rank), EXPERTS // RANKS
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


def rank_same_bits(rank: int, folder: Path) -> None:
    group = kodkod.ExpertGroup.processes(device="cuda")
    print(group, flush=True)
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
    for step, first in zip(steps, got, strict=True):
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


def test_the_bits_of_one_gpu(tmp_path):
    run("same_bits", tmp_path)
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


def refused(kind: type[Exception], message: str, call) -> None:
    with pytest.raises(kind, match=message) as error:
        call()
    print(error.value, flush=True)


def rank_refused(rank: int, folder: Path) -> None:
    group = kodkod.ExpertGroup.processes(device="cuda", timeout=20.0)
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


def test_what_is_refused_on_every_rank(tmp_path):
    run("refused", tmp_path)
