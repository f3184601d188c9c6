#!/usr/bin/env python3
"""Dense matmul rate of PyTorch on the CPU, C = A B^T: the peer of `kodkod bench`'s dense figure.

    python bench/torch_dense.py --size 2048 --threads 2 --dtype bf16

Prints one JSON object: the median over the repeats and the best repeat, in TFLOP/s (2 m n k flops).
"""

import argparse
import json
import statistics
import time

import torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--size", type=int, default=2048, help="m, n and k that are not given")
parser.add_argument("--m", type=int)
parser.add_argument("--n", type=int)
parser.add_argument("--k", type=int)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
parser.add_argument("--repeats", type=int, default=15)
parser.add_argument("--warmup", type=int, default=3)
args = parser.parse_args()

torch.set_num_threads(args.threads)
torch.manual_seed(0)
m, n, k = args.m or args.size, args.n or args.size, args.k or args.size
dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[args.dtype]
a = torch.randn(m, k).to(dtype)
b = torch.randn(n, k).to(dtype)

seconds = []
with torch.inference_mode():
    for repeat in range(args.warmup + args.repeats):
        start = time.perf_counter()
        c = a @ b.T
        end = time.perf_counter()
        if repeat >= args.warmup:
            seconds.append(end - start)

flops = 2 * m * n * k
print(
    json.dumps(
        {
            "torch": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "dtype": args.dtype,
            "m": m,
            "n": n,
            "k": k,
            "threads": torch.get_num_threads(),
            "repeats": args.repeats,
            "tflops": flops / statistics.median(seconds) / 1e12,
            "tflops_best": flops / min(seconds) / 1e12,
        }
    )
)
