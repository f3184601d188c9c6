#!/usr/bin/env python3
"""An MoE layer over several GPUs as a PyTorch user writes it: NCCL all-to-all and `torch._grouped_mm`, bf16, autograd.

    python bench/torch_moe_ranks.py --shape kimi-slice,olmoe-1b-7b --tokens 8192 --json

One process a GPU, started here; each holds its part of the experts and `--tokens` tokens. Rows sorted by expert go to the
experts' ranks, after their counts; they are sorted again there, go through three grouped GEMMs with silu(g) * u between
them, come back, and are summed with the router's weights. Shared experts are dense, and their gradients are summed over
the ranks. Inputs are like those of `kodkod bench`: normal rows, weights of variance 1 / fan-in, different experts a token
chosen uniformly, softmax weights. FLOPs of a GPU: 6 tokens (top_k + shared) hidden intermediate for a forward, three times
that for forward and backward.

Every figure is the median of `--repeat` runs by CUDA events, after `--warmup` others, the slowest rank's each time. The
forward runs without autograd; a backward's gradients are dropped after each run.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import statistics
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F

SHAPES = {  # hidden, intermediate, experts, top_k, shared experts
    "olmoe-1b-7b": (2048, 1024, 64, 8, 0),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 0),
    "qwen3-235b-a22b": (4096, 1536, 128, 8, 0),
    "kimi-slice": (7168, 2048, 12, 8, 0),
    "deepseek-v3-slice": (7168, 2048, 16, 8, 0),
    "mixtral-8x7b": (4096, 14336, 8, 2, 0),
    "deepseek-v2-lite": (2048, 1408, 64, 6, 2),
    "glm-4.5-air": (4096, 1408, 128, 8, 1),
    "kimi-k2": (7168, 2048, 384, 8, 1),
    "deepseek-v4-pro": (7168, 3072, 384, 6, 1),
}


def parse_shape(name):
    if name in SHAPES:
        return SHAPES[name]
    try:
        hidden, intermediate, experts, top_k = map(int, name.split("x"))
        return hidden, intermediate, experts, top_k, 0
    except ValueError:
        raise SystemExit(f"--shape {name}: allowed are HxIxExK and {', '.join(SHAPES)}") from None


def forward_flops(shape, tokens):
    hidden, intermediate, _, top_k, shared = shape
    return 6 * tokens * (top_k + shared) * hidden * intermediate


class AllToAll(torch.autograd.Function):
    """Rows to the ranks, so many to each and so many from each; gradients the other way."""

    @staticmethod
    def forward(ctx, rows, to, of):
        ctx.to, ctx.of = to, of
        out = rows.new_empty(sum(of), rows.shape[1])
        dist.all_to_all_single(out, rows, of, to)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.to), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.to, ctx.of)
        return out, None, None


def grouped_mm(rows, weights, ends):
    """rows [R, A], of which those up to ends[e] belong to e; weights [E, A, B] -> [R, B]"""
    if rows.is_cuda:
        return torch._grouped_mm(rows, weights, offs=ends)
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()  # The CPU has not what the GPU has.
    return torch.cat([part @ weight for part, weight in zip(rows.split(counts), weights)])


def inverse(order):
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


def moe(x, ids, router_weights, gate, up, down, shared=None):
    """x [T, H], ids [T, K] of experts of all ranks, router_weights [T, K]; gate and up [E, I, H], down [E, H, I] of this
    rank's experts; shared: the same three without E, or None -> y [T, H]"""
    (tokens, top_k), world, local = ids.shape, dist.get_world_size(), len(gate)
    order = ids.flatten().argsort(stable=True)  # [routes], by expert and so by rank
    counts = ids.flatten().bincount(minlength=world * local)  # [experts]
    arriving = torch.empty_like(counts)  # [ranks that send, local experts]
    dist.all_to_all_single(arriving, counts)
    per_rank = torch.stack([counts, arriving]).view(2, world, local).sum(2)
    to, of = per_rank.tolist()  # The host waits for the GPU here, since NCCL wants sizes from the host.
    rows = AllToAll.apply(x[order // top_k], to, of)
    expert = torch.arange(local, device=x.device).repeat(world).repeat_interleave(arriving, output_size=sum(of))
    by_expert = expert.argsort(stable=True)
    ends = arriving.view(world, local).sum(0).cumsum(0, dtype=torch.int32)
    rows = rows[by_expert]
    g = grouped_mm(rows, gate.transpose(1, 2), ends)
    u = grouped_mm(rows, up.transpose(1, 2), ends)
    out = grouped_mm(F.silu(g) * u, down.transpose(1, 2), ends)
    out = AllToAll.apply(out[inverse(by_expert)], of, to)
    by_token = out[inverse(order)].view(tokens, top_k, -1)
    y = (by_token * router_weights.to(out.dtype).unsqueeze(-1)).sum(1)
    if shared:
        y = y + F.linear(F.silu(F.linear(x, shared[0])) * F.linear(x, shared[1]), shared[2])
    return y


class Layer:
    """A rank's weights and inputs of one layer, and the two things that are timed."""

    def __init__(self, shape, tokens, device):
        hidden, intermediate, experts, top_k, shared = shape
        kind = dict(device=device, dtype=torch.bfloat16)
        if experts % dist.get_world_size():
            raise ValueError(f"{experts} experts cannot be dealt evenly to {dist.get_world_size()} ranks")

        def weight(*size):
            return torch.randn(*size, **kind).mul_(size[-1] ** -0.5).requires_grad_()

        def expert(*count, width):
            return weight(*count, width, hidden), weight(*count, width, hidden), weight(*count, hidden, width)

        self.experts = expert(experts // dist.get_world_size(), width=intermediate)
        self.shared = expert(width=shared * intermediate) if shared else ()
        self.x = torch.randn(tokens, hidden, **kind).requires_grad_()
        self.dy = torch.randn(tokens, hidden, **kind)
        logits, self.ids = torch.randn(tokens, experts, device=device).topk(top_k)
        self.router_weights = logits.softmax(-1).requires_grad_()

    def __call__(self):
        return moe(self.x, self.ids, self.router_weights, *self.experts, self.shared)

    def forward(self):
        with torch.no_grad():
            self()

    def step(self):
        self().backward(self.dy)
        for weight in self.shared:
            dist.all_reduce(weight.grad)
        for leaf in (self.x, self.router_weights, *self.experts, *self.shared):
            leaf.grad = None


def milliseconds(work, repeat, warmup, device):
    """Of the slowest rank, the median of the repeats."""
    times = []
    for number in range(warmup + repeat):
        dist.barrier()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            took = start.elapsed_time(end)
        else:
            start = time.perf_counter()
            work()
            took = 1e3 * (time.perf_counter() - start)
        slowest = torch.tensor([took], device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if number >= warmup:
            times.append(slowest.item())
    return statistics.median(times)


def measure(shape, tokens, repeat, warmup, device):
    """-> {pass: milliseconds}"""
    layer = Layer(shape, tokens, device)
    return {
        "fwd": milliseconds(layer.forward, repeat, warmup, device),
        "fwd+bwd": milliseconds(layer.step, repeat, warmup, device),
    }


def serve(rank, world, kind, meeting, pipe):
    """A rank: answers what `Ranks` asks until it is told to end."""
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    try:
        if kind == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if kind == "cuda" else "gloo"
        options = {"device_id": device} if kind == "cuda" else {}
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world, **options)
        torch.manual_seed(1 + rank)
        dist.barrier()
        pipe.send(torch.cuda.get_device_name(device) if kind == "cuda" else "cpu")
        while (request := pipe.recv()) is not None:
            pipe.send(measure(*request, device))
            if kind == "cuda":
                torch.cuda.empty_cache()
        dist.destroy_process_group()
    except Exception:
        pipe.send(RuntimeError(f"rank {rank}: {traceback.format_exc()}"))


class Ranks:
    """Processes, one a GPU, that stay for many measurements. `with` ends them."""

    def __init__(self, world, kind="cuda", limit=120):
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self.limit = limit
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            arguments = (rank, world, kind, f"{self.folder.name}/meeting", there)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def answers(self):
        """One answer of each rank.

        Raises RuntimeError where a rank fails, ends or says nothing within the limit."""
        answers, end = {}, time.monotonic() + self.limit
        while len(answers) < len(self.pipes):
            waiting = [pipe for pipe in self.pipes if pipe not in answers]
            ready = multiprocessing.connection.wait(waiting, max(0, end - time.monotonic()))
            if not ready:
                raise RuntimeError(f"a rank did not answer within {self.limit} s")
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    raise RuntimeError("a rank has ended") from None
                if isinstance(answers[pipe], Exception):
                    raise answers[pipe]
        return [answers[pipe] for pipe in self.pipes]

    def measure(self, shape, tokens, repeat, warmup):
        """-> {pass: milliseconds}"""
        for pipe in self.pipes:
            pipe.send((shape, tokens, repeat, warmup))
        return self.answers()[0]

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        for pipe in self.pipes if kind is None else []:
            pipe.send(None)
        for process in self.processes:
            process.join(20 if kind is None else 0)
            process.kill()
            process.join()
        self.folder.cleanup()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="olmoe-1b-7b,qwen3-30b-a3b,kimi-slice,deepseek-v3-slice", help="names, or HxIxExK")
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: gloo, to try it without a GPU")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shapes = {name: parse_shape(name) for name in args.shape.split(",")}
    with Ranks(args.ranks, args.device) as ranks:
        gpu = ranks.answers()[0]
        for name, shape in shapes.items():
            for what, ms in ranks.measure(shape, args.tokens, args.repeat, args.warmup).items():
                tflops = (3 if what == "fwd+bwd" else 1) * forward_flops(shape, args.tokens) / ms / 1e9
                row = {"peer": f"torch {torch.__version__}", "gpu": gpu, "ranks": args.ranks, "shape": name,
                       "tokens": args.tokens, "pass": what, "ms": ms, "tflops_per_gpu": tflops}
                text = f"{name}, {args.tokens} tokens on each of {args.ranks} ranks, {what}: {ms:.3f} ms, {tflops:.0f} TFLOP/s a GPU"
                print(json.dumps(row) if args.json else text, flush=True)


if __name__ == "__main__":
    main()
