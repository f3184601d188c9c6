#!/usr/bin/env python3
"""Runs `kodkod bench --device cuda` and the PyTorch peer in turn on one GPU, and prints rates, ratios and shares of cuBLAS.

    cargo build --release
    python bench/compare_cuda.py                       # a Python with torch for CUDA; see bench/README.md
    python bench/compare_cuda.py --shape qwen3-30b-a3b,kimi-slice --rounds 3 --json

The order of the two swaps from round to round, so that a GPU whose clock drifts favours neither; medians over the rounds are
compared. `dense` is cuBLAS's bf16 rate of one product of 8192 x 8192 x 8192 in the same run. Ratios above 1 mean that
kodkod is faster. The target of a shape is the lesser of a multiple of the peer's rate and a share of the dense rate; with
--check the exit status is 1 where one is missed.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPES = "olmoe-1b-7b,qwen3-30b-a3b,qwen3-235b-a22b,kimi-slice,deepseek-v3-slice,mixtral-8x7b"
# Pass -> at least this multiple of the peer's rate, or this share of the dense rate, whichever is less.
TARGETS = {"fwd": (1.25, 0.75), "fwd+bwd": (1.2, 0.70)}
# Shapes with a share of the dense rate of their own, peer or no peer.
SHARES = {("qwen3-30b-a3b", "fwd"): 0.50, ("qwen3-30b-a3b", "fwd+bwd"): 0.45}


def lines(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kodkod", default=str(ROOT / "target/release/kodkod"), help="the kodkod binary")
    parser.add_argument("--python", default=sys.executable, help="a Python with torch")
    parser.add_argument("--shape", default=SHAPES)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="exit status 1 where a target is missed")
    parser.add_argument("--json", action="store_true", help="one object a figure")
    parser.add_argument("rest", nargs="*", help="options of kodkod bench, after --")
    args = parser.parse_args()

    common = ["--shape", args.shape, "--tokens", str(args.tokens), "--repeat", str(args.repeat), "--json"]
    kodkod = [args.kodkod, "bench", "--device", "cuda", "--pass", "fwd,fwd+bwd", *common, *args.rest]
    torch = [args.python, str(ROOT / "bench/torch_moe_cuda.py"), *common]
    commands = {"torch": torch, "kodkod": kodkod}
    figures, gpu, peer = {}, "", ""
    for number in range(args.rounds):
        for who in list(commands)[:: -1 if number % 2 else 1]:
            for row in lines(commands[who]):
                figures.setdefault((who, row["shape"], row["pass"]), []).append(row["tflops"])
                gpu, peer = row.get("gpu", gpu), row.get("peer", peer)
                if row.get("schedule_ms") and row["pass"] == "fwd":
                    figures.setdefault(("schedule", row["shape"], "fwd"), []).append(row["schedule_ms"] / row["ms"])
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr)

    rate = {key: statistics.median(values) for key, values in figures.items()}
    dense = rate["torch", None, "dense"]
    rows = []
    for shape in args.shape.split(","):
        for what, (multiple, share) in TARGETS.items():
            ours, theirs = rate["kodkod", shape, what], rate["torch", shape, what]
            target = max(min(multiple * theirs, share * dense), SHARES.get((shape, what), 0) * dense)
            rows.append({
                "gpu": gpu, "peer": peer, "shape": shape, "tokens": args.tokens, "pass": what,
                "kodkod_tflops": ours, "torch_tflops": theirs, "dense_tflops": dense,
                "kodkod_is_faster_by": ours / theirs, "of_dense": ours / dense, "torch_of_dense": theirs / dense,
                "schedule_of_forward": rate.get(("schedule", shape, "fwd")) if what == "fwd" else None,
                "target_tflops": target, "met": ours >= target,
            })
    if args.json:
        for row in rows:
            print(json.dumps(row))
    else:
        print(f"{gpu}, {peer}, {args.tokens} tokens, {args.rounds} rounds; cuBLAS dense {dense:.0f} TFLOP/s")
        print(f"{'shape':18} {'pass':8} {'kodkod':>7} {'torch':>7} {'ratio':>6} {'of dense':>9} {'target':>7}      {'schedule':>8}")
        for row in rows:
            schedule = "" if row["schedule_of_forward"] is None else f"{100 * row['schedule_of_forward']:7.1f}%"
            print(
                f"{row['shape']:18} {row['pass']:8} {row['kodkod_tflops']:7.0f} {row['torch_tflops']:7.0f} "
                f"{row['kodkod_is_faster_by']:6.2f} {row['of_dense']:9.2f} {row['target_tflops']:7.0f} "
                f"{'met ' if row['met'] else 'MISS'} {schedule:>8}"
            )
    if args.check and not all(row["met"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
