#!/usr/bin/env python3
"""Runs kodkod on two GPUs, the PyTorch peer on the same two and kodkod on one of them in turn, and prints ratios.

    cargo build --release
    python bench/compare_two.py                        # a Python with torch for CUDA, two Hopper GPUs; see bench/README.md
    python bench/compare_two.py --shape kimi-slice --rounds 3 --json -- --gradients bf16

The peer is `torch_moe_ranks.py`: NCCL all-to-all and torch._grouped_mm. Its processes end before kodkod runs; the order swaps
from round to round. Medians over the rounds are compared; all have --tokens tokens a GPU.
`ratio` above 1 means that kodkod is faster than the peer. `of one` is kodkod's rate a GPU on two GPUs, of its rate on one
that holds all experts: 1 where communication hides wholly. Shapes of --large are timed on two GPUs only, by kodkod alone. The
kernels are compiled first, those of all shapes at once, first.

With --check the exit status is 1 where a target is missed. Nothing is begun after --limit seconds: what was not run is said.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch_moe_ranks as peer

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPES = "kimi-slice,deepseek-v3-slice,qwen3-30b-a3b,olmoe-1b-7b"
LARGE = "kimi-k2,deepseek-v4-pro"
PASSES = ("fwd", "fwd+bwd")
# At least this many times the peer's rate.
TARGETS = {
    ("kimi-slice", "fwd"): 1.5, ("kimi-slice", "fwd+bwd"): 1.4,
    ("deepseek-v3-slice", "fwd"): 1.5, ("deepseek-v3-slice", "fwd+bwd"): 1.4,
    ("qwen3-30b-a3b", "fwd"): 2.0, ("qwen3-30b-a3b", "fwd+bwd"): 1.7,
    ("olmoe-1b-7b", "fwd"): 2.0, ("olmoe-1b-7b", "fwd+bwd"): 1.7,
}
# And at least this share of kodkod's rate on one GPU.
OF_ONE = 0.9


def table(ms, shapes, tokens):
    """{(who, shape, pass): [milliseconds]} -> a row for each shape and pass that kodkod ran on two GPUs"""
    ms = {key: statistics.median(values) for key, values in ms.items()}
    rows = []
    for name, shape in shapes.items():
        for number, what in enumerate(PASSES):
            if ("kodkod", name, what) not in ms:
                continue
            ours, theirs, one = (ms.get((who, name, what)) for who in ("kodkod", "torch", "kodkod-1"))
            ratio, of_one = theirs and theirs / ours, one and one / ours
            target = TARGETS.get((name, what), 1.0)
            flops = (1, 3)[number] * peer.forward_flops(shape, tokens)
            rows.append({
                "shape": name, "tokens_per_gpu": tokens, "pass": what, "kodkod_ms": ours, "torch_ms": theirs,
                "kodkod_one_gpu_ms": one, "kodkod_tflops_per_gpu": flops / ours / 1e9,
                "torch_tflops_per_gpu": theirs and flops / theirs / 1e9, "kodkod_is_faster_by": ratio,
                "per_gpu_of_one": of_one, "target": target if theirs else None,
                "met": ratio >= target and (of_one is None or of_one >= OF_ONE) if theirs else None,
            })
    return rows


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(command, ms, who, limit):
    """Adds kodkod's milliseconds; says what went wrong, if it did."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit)
        status, lines = done.returncode, done.stdout.splitlines()
    except subprocess.TimeoutExpired as late:
        status, lines = f"none within {limit:.0f} s", (late.stdout or b"").decode().splitlines()
    for row in map(json.loads, (line for line in lines if line.startswith("{"))):
        ms.setdefault((who, row["shape"], row["pass"]), []).append(row["ms"])
    if status:
        say(f"{' '.join(command)}: exit status {status}")
    return not status


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kodkod", default=str(ROOT / "target/release/kodkod"), help="the kodkod binary")
    parser.add_argument("--devices", default="0,1", help="GPUs of kodkod; the peer takes as many, the first ones")
    parser.add_argument("--shape", default=SHAPES)
    parser.add_argument("--large", default=LARGE, help="shapes that kodkod alone runs, once; an empty text: none")
    parser.add_argument("--tokens", type=int, default=8192, help="of each GPU")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--limit", type=float, default=140, help="seconds after which nothing more is begun")
    parser.add_argument("--no-compile", action="store_true", help="do not compile first: the kernels are in the cache")
    parser.add_argument("--peer-device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the script")
    parser.add_argument("--check", action="store_true", help="exit status 1 where a target is missed")
    parser.add_argument("--json", action="store_true", help="one object a shape and pass")
    parser.add_argument("rest", nargs="*", help="options of kodkod bench, after --")
    args = parser.parse_args()
    start = time.monotonic()
    names, large = args.shape.split(","), [name for name in args.large.split(",") if name]
    shapes = {name: peer.parse_shape(name) for name in names + large}

    common = ["--tokens", str(args.tokens), "--pass", ",".join(PASSES), "--json", *args.rest]
    gpus = args.devices.split(",")
    one = [args.kodkod, "bench", "--device", f"cuda:{gpus[0]}", "--ranks", "1", *common]
    two = [args.kodkod, "bench", "--device", f"cuda:{args.devices}", "--ranks", str(len(gpus)), *common]
    timed = ["--repeat", str(args.repeat), "--warmup", str(args.warmup)]
    ms, missing = {}, []

    def peers():
        # They end before kodkod runs, which has the GPUs and their memory for itself.
        with peer.Ranks(len(gpus), args.peer_device) as ranks:
            found.append(ranks.answers()[0])
            for name in names:
                for what, value in ranks.measure(shapes[name], args.tokens, args.repeat, args.warmup).items():
                    ms.setdefault(("torch", name, what), []).append(value)
        return True

    found = []
    if not args.no_compile:
        jobs = [[*command, "--shape", name, "--compile-only"] for name in names for command in (two, one)]
        jobs += [[*two, "--shape", name, "--compile-only"] for name in large]
        cores = max(2, (os.cpu_count() or 2) - 2)
        running = []
        while jobs or running:
            running = [process for process in running if process.poll() is None]
            while jobs and len(running) < cores:
                running.append(subprocess.Popen(jobs.pop(0), stdout=subprocess.DEVNULL))
            time.sleep(0.1)
        say(f"{time.monotonic() - start:.0f} s: kernels compiled")

    def kodkod(who, command, shapes, options=timed):
        return all([run([*command, *options, "--shape", name], ms, who, limit=60) for name in shapes.split(",")])

    steps = []
    for number in range(args.rounds):
        turn = [
            (f"round {number + 1}, torch", peers),
            (f"round {number + 1}, kodkod", lambda: kodkod("kodkod", two, args.shape)),
            (f"round {number + 1}, kodkod on one GPU", lambda: kodkod("kodkod-1", one, args.shape)),
        ]
        steps += turn[:: -1 if number % 2 else 1]
    few = ["--repeat", "5", "--warmup", "2"]
    # The large ones come after the first round, so that a limit takes rounds away rather than these.
    steps[3:3] = [(name, lambda name=name: kodkod("kodkod", two, name, few)) for name in large]
    for what, step in steps:
        if time.monotonic() - start > args.limit or not step():
            missing.append(what)
            say(f"NOT RUN: {what}")
        else:
            say(f"{time.monotonic() - start:.0f} s: {what} done")

    rows, gpu = table(ms, shapes, args.tokens), found[0] if found else "no GPU"
    if args.json:
        for row in rows:
            print(json.dumps({"gpu": gpu, "peer": f"torch {peer.torch.__version__}", **row}))
    else:
        print(f"{gpu} x {len(gpus)}, torch {peer.torch.__version__}, {args.tokens} tokens a GPU, {args.rounds} rounds; TFLOP/s a GPU")
        print(f"{'shape':18} {'pass':8} {'kodkod ms':>9} {'TFLOP/s':>8} {'torch ms':>9} {'TFLOP/s':>8} {'ratio':>6} {'one GPU ms':>10} {'of one':>7} {'target':>7}")
        for row in rows:
            def cell(key, width, digits):
                return " " * (width - 1) + "-" if row[key] is None else f"{row[key]:{width}.{digits}f}"
            verdict = {True: "met", False: "MISS", None: ""}[row["met"]]
            print(
                f"{row['shape']:18} {row['pass']:8} {cell('kodkod_ms', 9, 3)} {cell('kodkod_tflops_per_gpu', 8, 0)} "
                f"{cell('torch_ms', 9, 3)} {cell('torch_tflops_per_gpu', 8, 0)} {cell('kodkod_is_faster_by', 6, 2)} "
                f"{cell('kodkod_one_gpu_ms', 10, 3)} {cell('per_gpu_of_one', 7, 3)} {cell('target', 7, 1)} {verdict}"
            )
        if missing:
            print(f"not run: {', '.join(missing)}")
    if missing or args.check and not all(row["met"] in (True, None) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
