#!/usr/bin/env python3
"""An MoE layer as a PyTorch user writes it for a GPU, to time beside `kodkod bench --device cuda`.

    python bench/torch_moe_cuda.py --shape olmoe-1b-7b,kimi-slice --tokens 8192 --json

Rows sorted by expert, three grouped GEMMs (`torch._grouped_mm`), silu(g) * u between them, rows put back in the tokens'
order and summed with the router's weights; bf16, autograd. Inputs are like those of `kodkod bench`: normal rows, weights of
variance 1 / fan-in, different experts a token chosen uniformly, softmax weights. FLOPs: 6 tokens top_k hidden intermediate
for a forward, three times that for forward and backward.

Every figure is the median of `--repeat` runs by CUDA events, after `--warmup` others. The forward runs without autograd; a
backward's gradients are dropped after each run, which is what an optimiser with set_to_none=True leaves. The first line is
the rate of cuBLAS for one dense bf16 product.
"""

import argparse
import json
import statistics

import torch
import torch.nn.functional as F

SHAPES = {  # hidden, intermediate, experts, top_k
    "olmoe-1b-7b": (2048, 1024, 64, 8),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "kimi-slice": (7168, 2048, 12, 8),
    "deepseek-v3-slice": (7168, 2048, 16, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
}


def parse_shape(name):
    if name in SHAPES:
        return SHAPES[name]
    try:
        hidden, intermediate, experts, top_k = map(int, name.split("x"))
        return hidden, intermediate, experts, top_k
    except ValueError:
        raise SystemExit(f"--shape {name}: allowed are HxIxExK and {', '.join(SHAPES)}") from None


class Layer:
    """Weights and inputs of one layer, and the two things that are timed."""

    def __init__(self, shape, tokens):
        self.hidden, self.intermediate, self.experts, self.top_k = shape
        self.tokens = tokens
        kind = dict(device="cuda", dtype=torch.bfloat16)

        def weight(rows, columns):
            return torch.randn(self.experts, rows, columns, **kind).mul_(columns**-0.5).requires_grad_()

        self.gate = weight(self.intermediate, self.hidden)
        self.up = weight(self.intermediate, self.hidden)
        self.down = weight(self.hidden, self.intermediate)
        self.x = torch.randn(tokens, self.hidden, **kind).requires_grad_()
        self.dy = torch.randn(tokens, self.hidden, **kind)
        logits, self.ids = torch.randn(tokens, self.experts, device="cuda").topk(self.top_k)
        self.router_weights = logits.softmax(-1).requires_grad_()
        self.leaves = (self.x, self.router_weights, self.gate, self.up, self.down)

    def __call__(self):
        """-> y [tokens, hidden]"""
        by_expert = self.ids.flatten().argsort(stable=True)  # [routes]
        ends = self.ids.flatten().bincount(minlength=self.experts).cumsum(0, dtype=torch.int32)  # [experts]
        rows = self.x[by_expert // self.top_k]  # [routes, hidden]
        g = torch._grouped_mm(rows, self.gate.transpose(1, 2), offs=ends)  # [routes, intermediate]
        u = torch._grouped_mm(rows, self.up.transpose(1, 2), offs=ends)
        out = torch._grouped_mm(F.silu(g) * u, self.down.transpose(1, 2), offs=ends)  # [routes, hidden]
        place = torch.empty_like(by_expert)
        place[by_expert] = torch.arange(len(by_expert), device="cuda")
        by_token = out[place].view(self.tokens, self.top_k, self.hidden)
        return (by_token * self.router_weights.to(out.dtype).unsqueeze(-1)).sum(1)

    def forward(self):
        with torch.no_grad():
            self()

    def step(self):
        self().backward(self.dy)
        for leaf in self.leaves:
            leaf.grad = None

    def flops(self):
        return 6 * self.tokens * self.top_k * self.hidden * self.intermediate


def milliseconds(work, repeat, warmup):
    times = []
    for number in range(warmup + repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if number >= warmup:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=",".join(SHAPES), help="names, or HxIxExK")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--dense-size", type=int, default=8192)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)

    def say(row, text):
        print(json.dumps(row) if args.json else text, flush=True)

    n = args.dense_size
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    dense = 2 * n**3 / milliseconds(lambda: a @ b.T, args.repeat, args.warmup) / 1e9
    peer = f"torch {torch.__version__}"
    gpu = torch.cuda.get_device_name()
    say(
        {"peer": peer, "gpu": gpu, "shape": None, "pass": "dense", "size": n, "tflops": dense},
        f"{gpu}, {peer}: cuBLAS {n} x {n} x {n} {dense:.0f} TFLOP/s",
    )
    del a, b
    for name in args.shape.split(","):
        layer = Layer(parse_shape(name), args.tokens)
        for what, work, passes in (("fwd", layer.forward, 1), ("fwd+bwd", layer.step, 3)):
            ms = milliseconds(work, args.repeat, args.warmup)
            tflops = passes * layer.flops() / ms / 1e9
            say(
                {"peer": peer, "gpu": gpu, "shape": name, "tokens": args.tokens, "pass": what, "ms": ms, "tflops": tflops},
                f"{name}, {args.tokens} tokens, {what}: {ms:.3f} ms, {tflops:.0f} TFLOP/s",
            )
        del layer, work
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
