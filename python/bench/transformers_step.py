"""A few layers of real MoE models of transformers, trained for some steps with each experts implementation.

Prints the losses side by side, whether kodkod's are the same bits when repeated, tokens per second of whole steps, and
what their time goes to. The widths are those of the models; layers are few, and the vocabulary is as much smaller, so
that embedding and head have their share of a step; weights are random. Every step has other tokens, of a chain in which
half of them follow from the one before: there is something to learn, and nothing to learn by heart.

python bench/transformers_step.py
python bench/transformers_step.py --models olmoe --layers 4 --optimizer sgd --json out.json
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
from torch.nn.attention import SDPBackend, sdpa_kernel

import kodkod

MODELS = {
    "qwen3_moe": {
        "title": "Qwen3-30B-A3B",
        "vocabulary": 151936 // 48,
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
        "vocabulary": 50304 // 16,
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
LOOKED_AT = 4
"""Steps more, of which the parts are timed."""


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    add("--implementations", nargs="+", default=["eager", "grouped_mm", "kodkod"])
    add("--layers", type=int, default=2, metavar="N", help="default 2")
    add("--vocabulary", type=int, metavar="N", help="default: the model's, by its layers, times --layers")
    add("--batch", type=int, default=4, metavar="N", help="sequences of a step (default 4)")
    add("--context", type=int, default=2048, metavar="N", help="tokens of a sequence (default 2048)")
    add("--steps", type=int, default=20, metavar="N", help=f"steps (default 20); the first {WARMUP} are not timed")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw", help="default adamw, fused on a GPU")
    add("--lr", type=float, default=None, metavar="RATE", help="default 3e-4 for adamw, 0.1 for sgd")
    add("--scale", type=int, default=1, metavar="N", help="divides widths and experts: to try it on a CPU")
    add("--tolerance", type=float, default=0.02, metavar="X", help="of losses against the first implementation's")
    add("--no-repeat", action="store_true", help="leave out the runs that compare bits")
    add("--json", metavar="FILE", help="also writes the results there")
    args = parser.parse_args(argv)
    if args.steps <= WARMUP:
        parser.error(f"--steps is {args.steps}: more than {WARMUP} are needed")
    most = min(MODELS[name]["num_experts"] // MODELS[name]["num_experts_per_tok"] for name in args.models)
    if not 1 <= args.scale <= most:
        parser.error(f"--scale is {args.scale}: 1 to {most} are allowed, so that a token has its experts")
    return args


def config_of(name, args):
    fields = dict(MODELS[name])
    del fields["title"], fields["vocabulary"]
    for field in ("hidden_size", "moe_intermediate_size", "intermediate_size", "num_experts", "head_dim"):
        if field in fields:
            fields[field] //= args.scale
    return transformers.AutoConfig.for_model(
        name,
        **fields,
        num_hidden_layers=args.layers,
        vocab_size=vocabulary_of(name, args),
        max_position_embeddings=args.context,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )


def vocabulary_of(name, args):
    return args.vocabulary or MODELS[name]["vocabulary"] * args.layers // 64 * 64


def batches(vocabulary, args, device, count):
    """Tokens ``[count, batch, context]``: each follows from the one before by a fixed map, or as often is random."""
    generator = torch.Generator(device).manual_seed(1)
    after = torch.randperm(vocabulary - 3, generator=generator, device=device)
    shape = (count, args.batch, args.context)
    tokens = torch.randint(vocabulary - 3, shape, generator=generator, device=device)
    follows = torch.rand(shape, generator=generator, device=device) < 0.5
    for at in range(1, args.context):
        tokens[..., at] = torch.where(follows[..., at], after[tokens[..., at - 1]], tokens[..., at])
    return tokens + 3


class Clock:
    """Times of what a device does, by name, without waiting for it."""

    def __init__(self, device):
        self.gpu, self.marks = device.type == "cuda", {}

    def mark(self, name):
        """Begins a time, or ends the one that was begun."""
        if self.gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.marks.setdefault(name, []).append(now)

    def milliseconds(self, name):
        """All times of a name."""
        if self.gpu:
            torch.cuda.synchronize()
        marks = self.marks.get(name, [])
        return [
            begin.elapsed_time(end) if self.gpu else 1e3 * (end - begin)
            for begin, end in zip(marks[::2], marks[1::2], strict=True)
        ]

    def watch(self, module):
        """Times passes of a module."""
        module.register_forward_pre_hook(lambda *_: self.mark("forward"))
        module.register_forward_hook(lambda *_: self.mark("forward"))
        module.register_full_backward_pre_hook(lambda *_: self.mark("backward"))
        module.register_full_backward_hook(lambda *_: self.mark("backward"))


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


def train(name, implementation, args, device, bar, look=False):
    """Losses and, as far as asked for, milliseconds of a step and of its parts, and the most bytes of memory."""
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
    tokens = batches(vocabulary_of(name, args), args, device, args.steps + LOOKED_AT)
    net.train()
    fused = device.type == "cuda"
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(net.parameters(), args.lr or 3e-4, betas=(0.9, 0.95), fused=fused)
    else:
        optimizer = torch.optim.SGD(net.parameters(), args.lr or 0.1, fused=fused)
    clock, losses = Clock(device), []
    for step in range(args.steps + look * LOOKED_AT):
        if step == args.steps:
            for path, module in net.named_modules():
                if path.endswith(".experts"):
                    clock.watch(module)
        looked_at = step >= args.steps
        if step in (WARMUP, args.steps):
            clock.mark("looked at" if looked_at else "timed")
        batch = tokens[step]
        loss = net(input_ids=batch, labels=batch).loss
        loss.backward()
        if looked_at:
            clock.mark("optimizer")
        optimizer.step()
        if looked_at:
            clock.mark("optimizer")
        optimizer.zero_grad()
        if not looked_at:
            losses.append(loss.detach())
            bar.step(f"{name} {implementation}")
            if step == args.steps - 1:
                clock.mark("timed")
    if look:
        clock.mark("looked at")
    if device.type == "cuda":
        kodkod.cuda.check()
    run = {"losses": torch.stack(losses).float().tolist()}
    if look:
        whole = clock.milliseconds("timed")[0] / (args.steps - WARMUP)
        names = ("forward", "backward", "optimizer", "looked at")
        parts = {part: sum(clock.milliseconds(part)) / LOOKED_AT for part in names}
        parts["else"] = 2 * parts["looked at"] - sum(parts.values())
        run |= {"milliseconds": whole, "parts": parts, "tokens_per_second": 1e3 * batch.numel() / whole}
        gpu = device.type == "cuda"
        run["bytes"] = torch.cuda.max_memory_allocated() + kodkod.cuda.memory().bytes if gpu else 0
    return run


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
        what = f"{args.layers} layers, vocabulary {vocabulary_of(name, args)}, {tokens} tokens a step"
        print(f"{MODELS[name]['title']}: {what}, bf16, {args.optimizer}", flush=True)
        runs = {i: train(name, i, args, device, bar, look=True) for i in args.implementations}
        print("step  " + "".join(f"{i:>12}" for i in runs))
        for step in sorted({*range(0, args.steps, 4), args.steps - 1}):
            print(f"{step:4}  " + "".join(f"{run['losses'][step]:12.5f}" for run in runs.values()))
        first = next(iter(runs))
        for implementation, run in runs.items():
            pairs = zip(run["losses"], runs[first]["losses"], strict=True)
            run["difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
            if not run["difference"] <= args.tolerance:
                wrong.append(f"{name}: losses of {implementation} differ by {run['difference']:.1%} from {first}")
        other = runs.get("grouped_mm", runs[first])
        for implementation, run in runs.items():
            times = other["milliseconds"] / run["milliseconds"]
            parts, alone = run["parts"], [r["milliseconds"] - r["parts"]["optimizer"] for r in (other, run)]
            print(
                f"{implementation:10} {run['tokens_per_second']:8.0f} tokens/s {times:5.2f} x, without the optimizer "
                f"{alone[0] / alone[1]:.2f} x; {run['milliseconds']:.1f} ms: experts {parts['forward']:.1f} + "
                f"{parts['backward']:.1f}, optimizer {parts['optimizer']:.1f}, else {parts['else']:.1f}; "
                f"{run['bytes'] / 2**30:.1f} GiB; losses within {run['difference']:.2%} of {first}"
            )
        if repeats:
            # All else in the model must be deterministic too, which makes it slower.
            torch.use_deterministic_algorithms(True)
            attention = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # others stay non-deterministic
            with sdpa_kernel(attention):
                one, two = (train(name, "kodkod", args, device, bar)["losses"] for _ in range(2))
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
