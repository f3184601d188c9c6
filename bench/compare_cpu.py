#!/usr/bin/env python3
"""Runs `kodkod bench` and the PyTorch peer in turn, several rounds, and prints the ratios of their medians.

    cargo build --release
    python bench/compare_cpu.py --rounds 3            # a Python with torch; see bench/README.md

The order of the two swaps from round to round, so that a machine whose speed drifts favours neither. Ratios above 1 mean
that kodkod is faster.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def lines(command):
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def cpu():
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kodkod", default=str(ROOT / "target/release/kodkod"), help="the kodkod binary")
    parser.add_argument("--python", default=sys.executable, help="a Python with torch")
    parser.add_argument("--shape", default="olmoe-1b-7b")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--grads", choices=["set", "add"], default="set", help="of the peer; see torch_moe_cpu.py")
    parser.add_argument("--json", action="store_true", help="one object a figure")
    args = parser.parse_args()

    common = ["--shape", args.shape, "--tokens", str(args.tokens), "--threads", str(args.threads)]
    common += ["--repeat", str(args.repeat), "--json"]
    commands = {
        "kodkod": [args.kodkod, "bench", "--ranks", "1", *common],
        "torch": [args.python, str(ROOT / "bench/torch_moe_cpu.py"), "--grads", args.grads, *common],
    }
    figures = {}  # (who, what) -> one value a round
    for number in range(args.rounds):
        for who in list(commands)[:: -1 if number % 2 else 1]:
            for row in lines(commands[who]):
                figures.setdefault((who, row["pass"]), []).append(row["ms"])
                if row["pass"] == "fwd":
                    figures.setdefault((who, "dense"), []).append(row["dense_tflops"])
                figures.setdefault((who, row["pass"], "share"), []).append(row["tflops"] / row["dense_tflops"])
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr)

    middle = {key: statistics.median(values) for key, values in figures.items()}
    ratio = {
        "dense": middle["kodkod", "dense"] / middle["torch", "dense"],
        "fwd": middle["torch", "fwd"] / middle["kodkod", "fwd"],
        "fwd+bwd": middle["torch", "fwd+bwd"] / middle["kodkod", "fwd+bwd"],
    }
    rows = [
        {
            "figure": name,
            "unit": unit,
            "kodkod": middle["kodkod", name],
            "torch": middle["torch", name],
            "kodkod_is_faster_by": ratio[name],
            "kodkod_of_its_dense": middle.get(("kodkod", name, "share")),
            "torch_of_its_dense": middle.get(("torch", name, "share")),
        }
        for name, unit in (("dense", "TFLOP/s"), ("fwd", "ms"), ("fwd+bwd", "ms"))
    ]
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"{cpu()}, {args.threads} threads, load {load}; {args.shape}, {args.tokens} tokens; {args.rounds} rounds")
    for row in rows:
        share = row["kodkod_of_its_dense"]
        dense = "" if share is None else f"; of its own dense: kodkod {share:.2f}, torch {row['torch_of_its_dense']:.2f}"
        print(
            f"{row['figure']:8} kodkod {row['kodkod']:9.3f} {row['unit']:8} torch {row['torch']:9.3f} {row['unit']:8} "
            f"ratio {row['kodkod_is_faster_by']:.2f}{dense}"
        )


if __name__ == "__main__":
    main()
