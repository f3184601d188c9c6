#!/usr/bin/env python3
"""An MoE layer as a PyTorch user writes it for the CPU, to time beside `kodkod bench`.

    python bench/torch_moe_cpu.py --shape olmoe-1b-7b --tokens 512 --threads 2 --json

A loop over the experts: select the tokens' rows, two GEMMs, silu(g) * u, a third GEMM, scale by the router weight, add
to the output. bf16, autograd. Inputs are like those of `kodkod bench`: normal rows, weights of variance 1 / fan-in,
different experts a token chosen uniformly, softmax weights. FLOPs: 6 tokens top_k hidden intermediate for a forward,
three times that for forward and backward. Each repeat times a dense product, a forward without autograd, and a forward
with the backward, in turn; medians are printed. About gradients:

    --grads set   .grad is dropped before the backward, which is what an optimiser with set_to_none=True leaves
    --grads add   .grad is kept and added to
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

SHAPES = {  # hidden, intermediate, experts, top_k
    "olmoe-1b-7b": (2048, 1024, 64, 8),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "kimi-slice": (7168, 2048, 12, 8),
    "deepseek-v3-slice": (7168, 2048, 16, 8),
}


def parse_shape(name):
    if name in SHAPES:
        return SHAPES[name]
    try:
        hidden, intermediate, experts, top_k = map(int, name.split("x"))
        return hidden, intermediate, experts, top_k
    except ValueError:
        raise SystemExit(f"--shape {name}: allowed are HxIxExK and {', '.join(SHAPES)}") from None


def moe(x, ids, weights, w_gate, w_up, w_down):
    """x [T, H], ids [T, K], weights [T, K], w_gate and w_up: E of [I, H], w_down: E of [H, I] -> y [T, H]"""
    y = torch.zeros_like(x)
    for expert in range(len(w_gate)):
        token, slot = torch.where(ids == expert)
        if token.numel() == 0:
            continue
        rows = x.index_select(0, token)  # [rows, H]
        h = F.silu(F.linear(rows, w_gate[expert])) * F.linear(rows, w_up[expert])  # [rows, I]
        out = F.linear(h, w_down[expert]) * weights[token, slot].unsqueeze(1).to(x.dtype)  # [rows, H]
        y = y.index_add(0, token, out)
    return y


def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="olmoe-1b-7b", help="a name, or HxIxExK")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--dense-size", type=int, default=2048)
    parser.add_argument("--grads", choices=["set", "add"], default="set")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    hidden, intermediate, experts, top_k = parse_shape(args.shape)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    bf16 = dict(dtype=torch.bfloat16)

    def weight(rows, columns):
        # One parameter an expert, as in an nn.ModuleList of experts.
        return [(torch.randn(rows, columns) * columns**-0.5).to(**bf16).requires_grad_() for _ in range(experts)]

    w_gate, w_up = weight(intermediate, hidden), weight(intermediate, hidden)
    w_down = weight(hidden, intermediate)
    x = torch.randn(args.tokens, hidden).to(**bf16).requires_grad_()
    dy = torch.randn(args.tokens, hidden).to(**bf16)
    ids = torch.rand(args.tokens, experts).topk(top_k).indices
    router_weights = torch.randn(args.tokens, top_k).softmax(-1).requires_grad_()
    leaves = [x, router_weights, *w_gate, *w_up, *w_down]
    n = args.dense_size
    a, b = torch.randn(n, n).to(**bf16), torch.randn(n, n).to(**bf16)

    def forward():
        with torch.no_grad():
            moe(x, ids, router_weights, w_gate, w_up, w_down)

    def step():
        moe(x, ids, router_weights, w_gate, w_up, w_down).backward(dy)

    times = {"dense": [], "fwd": [], "fwd+bwd": []}
    for repeat in range(args.warmup + args.repeat):
        taken = {"dense": seconds(lambda: a @ b.T), "fwd": seconds(forward)}
        if args.grads == "set":
            for leaf in leaves:
                leaf.grad = None
        taken["fwd+bwd"] = seconds(step)
        if repeat >= args.warmup:
            for name, value in taken.items():
                times[name].append(value)

    median = {name: statistics.median(values) for name, values in times.items()}
    dense_tflops = 2 * n**3 / median["dense"] / 1e12
    flops = 6 * args.tokens * top_k * hidden * intermediate
    for name, passes in (("fwd", 1), ("fwd+bwd", 3)):
        row = {
            "peer": f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}, a loop over experts",
            "shape": args.shape,
            "tokens": args.tokens,
            "threads": torch.get_num_threads(),
            "pass": name,
            "ms": median[name] * 1e3,
            "tflops": passes * flops / median[name] / 1e12,
            "dense_tflops": dense_tflops,
        }
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{row['peer']}: {args.shape}, {args.tokens} tokens, {name}: {row['ms']:.1f} ms, "
                f"{row['tflops']:.4f} TFLOP/s; dense {dense_tflops:.4f} TFLOP/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
