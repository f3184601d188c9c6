"""A few layers of real MoE models of transformers, trained for some steps with each experts implementation.

Prints the losses side by side, whether kodkod's are the same bits when repeated, and tokens per second of whole steps.
The widths are those of the models; layers and vocabulary are few, weights and tokens random.

python bench/transformers_step.py
python bench/transformers_step.py --models olmoe --layers 2 --optimizer sgd --json out.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA begins: for the runs that are repeated

import torch
import transformers

import kodkod

MODELS = {
    "qwen3_moe": {
        "title": "Qwen3-30B-A3B",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "norm_topk_prob": True,
    },
    "olmoe": {
        "title": "OLMoE-1B-7B",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "norm_topk_prob": False,
    },
}
WARMUP = 4
BATCHES = 2  # that come again and again, so that there is something to learn


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    add("--implementations", nargs="+", default=["eager", "grouped_mm", "kodkod"])
    add("--layers", type=int, default=4, metavar="N")
    add("--vocabulary", type=int, default=8192, metavar="N")
    add("--batch", type=int, default=4, metavar="N", help="sequences of a step (default 4)")
    add("--context", type=int, default=2048, metavar="N", help="tokens of a sequence (default 2048)")
    add("--steps", type=int, default=20, metavar="N", help=f"steps (default 20); the first {WARMUP} are not timed")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw")
    add("--lr", type=float, default=None, metavar="RATE", help="default 3e-4 for adamw, 0.1 for sgd")
    add("--scale", type=int, default=1, metavar="N", help="divides widths and experts: to try it on a CPU")
    add("--tolerance", type=float, default=0.02, metavar="X", help="of losses against the first implementation's")
    add("--no-repeat", action="store_true", help="leave out the runs that compare bits")
    add("--json", metavar="FILE", help="also writes the results there")
    args = parser.parse_args(argv)
    if args.steps <= WARMUP:
        parser.error(f"--steps is {args.steps}: more than {WARMUP} are needed")
    return args


def config_of(name, args):
    fields = dict(MODELS[name])
    del fields["title"]
    for field in ("hidden_size", "moe_intermediate_size", "intermediate_size", "num_experts", "head_dim"):
        if field in fields:
            fields[field] //= args.scale
    return transformers.AutoConfig.for_model(
        name,
        **fields,
        num_hidden_layers=args.layers,
        vocab_size=args.vocabulary,
        max_position_embeddings=args.context,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


class Bar:
    """Steps of all runs, on a terminal."""

    def __init__(self, total):
        self.done, self.total, self.begin = 0, total, time.perf_counter()

    def step(self, text):
        self.done += 1
        if sys.stderr.isatty():
            filled = 30 * self.done // self.total
            seconds = time.perf_counter() - self.begin
            left = seconds / self.done * (self.total - self.done)
            sys.stderr.write(f"\r[{'#' * filled}{'.' * (30 - filled)}] {text:32} {seconds:4.0f} s, {left:4.0f} s left ")
            if self.done == self.total:
                sys.stderr.write("\r" + " " * 90 + "\r")
            sys.stderr.flush()


def train(name, implementation, args, device, bar):
    """Losses, seconds of a step, and the most bytes of memory."""
    torch.manual_seed(0)
    gc.collect()
    if device.type == "cuda":
        kodkod.cuda.trim()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with device:
        net = transformers.AutoModelForCausalLM.from_config(
            config_of(name, args), dtype=torch.bfloat16, experts_implementation=implementation
        )
        generator = torch.Generator(device).manual_seed(1)
        shape = (BATCHES, args.batch, args.context)
        tokens = torch.randint(3, args.vocabulary, shape, generator=generator, device=device)
    net.train()
    if args.optimizer == "adamw":
        lr, fused = args.lr or 3e-4, device.type == "cuda"
        optimizer = torch.optim.AdamW(net.parameters(), lr, betas=(0.9, 0.95), fused=fused)
    else:
        optimizer = torch.optim.SGD(net.parameters(), args.lr or 0.1, fused=device.type == "cuda")
    losses = []
    for step in range(args.steps):
        if step == WARMUP:
            wait(device)
            begin = time.perf_counter()
        batch = tokens[step % BATCHES]
        loss = net(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        bar.step(f"{name} {implementation}")
    wait(device)
    seconds = (time.perf_counter() - begin) / (args.steps - WARMUP)
    most = 0
    if device.type == "cuda":
        kodkod.cuda.check()
        most = torch.cuda.max_memory_allocated() + kodkod.cuda.memory().bytes
        if implementation == "kodkod":
            print(f"{name}: {kodkod.cuda.memory()}")
    return torch.stack(losses).float().tolist(), seconds, most


def main(argv=None):
    args = arguments(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    kodkod.hf.register()
    transformers.logging.set_verbosity_error()
    repeats = 0 if args.no_repeat or "kodkod" not in args.implementations else 2
    bar = Bar(len(args.models) * (len(args.implementations) + repeats) * args.steps)
    results, wrong = {}, []
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}")
    for name in args.models:
        tokens = args.batch * args.context
        print(
            f"{MODELS[name]['title']}: {args.layers} layers, {tokens} tokens a step, bf16, {args.optimizer}", flush=True
        )
        runs = {}
        for implementation in args.implementations:
            losses, seconds, most = train(name, implementation, args, device, bar)
            runs[implementation] = {"losses": losses, "tokens_per_second": tokens / seconds, "bytes": most}
        print("step  " + "".join(f"{i:>12}" for i in runs))
        for step in range(args.steps):
            print(f"{step:4}  " + "".join(f"{run['losses'][step]:12.5f}" for run in runs.values()))
        first = next(iter(runs))
        for implementation, run in runs.items():
            pairs = zip(run["losses"], runs[first]["losses"], strict=True)
            run["difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
            if not run["difference"] <= args.tolerance:
                wrong.append(f"{name}: losses of {implementation} differ by {run['difference']:.1%} from {first}")
        slowest = runs.get("grouped_mm", runs[first])["tokens_per_second"]
        for implementation, run in runs.items():
            speed = run["tokens_per_second"]
            print(
                f"{implementation:12} {speed:10.0f} tokens/s  {speed / slowest:5.2f} x"
                f"  {run['bytes'] / 2**30:6.1f} GiB  losses within {run['difference']:.2%} of {first}"
            )
        if repeats:
            # All else in the model must be deterministic too, which makes it slower.
            torch.use_deterministic_algorithms(True, warn_only=True)
            one, two = (train(name, "kodkod", args, device, bar)[0] for _ in range(2))
            torch.use_deterministic_algorithms(False)
            runs["kodkod"]["repeats"] = one == two
            print(f"kodkod, repeated: {'same bits' if one == two else 'OTHER BITS'} in all {args.steps} losses")
            if one != two:
                wrong.append(f"{name}: kodkod's losses are other bits when repeated")
        results[name] = {"options": vars(args), "device": where, "runs": runs}
        sys.stdout.flush()
    if args.json:
        with open(args.json, "w") as out:
            json.dump(results, out, indent=1)
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
