#!/usr/bin/env python3
"""Memory bandwidth in GB/s, the floor below anything that reads weights once: read (a sum), write (a fill), copy.

    python bench/bandwidth.py --threads 2
"""

import argparse
import statistics
import time

import torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--bytes", type=int, default=1 << 30)
parser.add_argument("--repeat", type=int, default=9)
args = parser.parse_args()

torch.set_num_threads(args.threads)
a = torch.ones(args.bytes // 4)
b = torch.ones(args.bytes // 4)
works = {"read": (a.sum, 1), "write": (lambda: a.fill_(1.0), 1), "copy": (lambda: b.copy_(a), 2)}
for name, (work, passes) in works.items():
    seconds = []
    for _ in range(args.repeat):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    print(f"{name:5} {passes * args.bytes / statistics.median(seconds) / 1e9:6.1f} GB/s")
