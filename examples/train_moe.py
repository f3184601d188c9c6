"""Trains a small mixture-of-experts language model on bytes, with kodkod's experts or with plain PyTorch's.

The model is a transformer: RMSNorm, causal attention with rotary positions, and in place of a feed-forward network a
router and E experts, of which each byte is sent to K. ``--experts`` changes one call, that in ``Experts.forward``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BYTES = 256
TEXT = Path(__file__).resolve().parent.parent / "data" / "austen.txt"
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}

MORE_HELP = """\
The last 5 % of the text are held out: the model never trains on them, and the loss on them tells what it has learnt.
Losses are in bits per byte; 8 is a uniform guess, and a model of single bytes' frequencies has about 4.5 on the sample.

--out gets
  loss.svg        the loss curve
  metrics.json    options, the loss of every step, losses on held-out text, tokens per second

With torchrun the processes share each batch and average their gradients (data parallel: over gloo on the CPU, over
NCCL with a GPU each). Every process holds all experts, or with --expert-parallel its part of them: then rows go to
the process that holds their experts, and only the gradients of all else are averaged.

examples:
  python examples/train_moe.py                             # two minutes on two cores
  python examples/train_moe.py --experts torch             # the same model, plain PyTorch: compare the curves
  python examples/train_moe.py --layers 2 --hidden 64 --steps 50
  torchrun --nproc-per-node 2 examples/train_moe.py --out out/two
  torchrun --nproc-per-node 2 examples/train_moe.py --expert-parallel --out out/two_parallel
"""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small mixture-of-experts language model on the bytes of a text.",
        epilog=MORE_HELP,
        formatter_class=type(
            "Help",
            (
                argparse.ArgumentDefaultsHelpFormatter,
                argparse.RawDescriptionHelpFormatter,
            ),
            {},
        ),
    )
    add = parser.add_argument
    add(
        "--experts",
        choices=("kodkod", "torch"),
        default="kodkod",
        help="what computes the experts",
    )
    add(
        "--precision",
        choices=tuple(DTYPES),
        default="bf16",
        help="of the experts; all else is float32",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto is a GPU where each process has one",
    )
    add(
        "--expert-parallel",
        action="store_true",
        help="each process holds its part of the experts; with torchrun",
    )
    add(
        "--steps",
        type=int,
        default=300,
        metavar="N",
        help="steps of training; the learning rate falls to the last",
    )
    add(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="of the first weights and the batches",
    )
    add(
        "--text",
        type=Path,
        default=TEXT,
        metavar="FILE",
        help="what to train on, any bytes",
    )
    add(
        "--out",
        type=Path,
        default=Path("out/train_moe"),
        metavar="DIR",
        help="for the results; made if missing",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--layers",
        type=int,
        default=4,
        metavar="N",
        help="blocks of attention and experts",
    )
    model.add_argument(
        "--hidden",
        type=int,
        default=128,
        metavar="N",
        help="width of a byte's row: a multiple of 8",
    )
    model.add_argument(
        "--heads",
        type=int,
        default=4,
        metavar="N",
        help="attention heads: hidden / heads is even",
    )
    model.add_argument(
        "--experts-count", type=int, default=8, metavar="E", help="experts of a block"
    )
    model.add_argument(
        "--top-k",
        type=int,
        default=2,
        metavar="K",
        help="experts that a byte is sent to",
    )
    model.add_argument(
        "--intermediate",
        type=int,
        default=256,
        metavar="N",
        help="width inside an expert: a multiple of 8",
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--batch",
        type=int,
        default=8,
        metavar="N",
        help="sequences of a step, of all processes",
    )
    training.add_argument(
        "--context", type=int, default=128, metavar="N", help="bytes of a sequence"
    )
    training.add_argument(
        "--lr",
        type=float,
        default=3e-3,
        metavar="RATE",
        help="highest learning rate, of AdamW",
    )
    training.add_argument(
        "--balance",
        type=float,
        default=0.01,
        metavar="W",
        help="weight of the balancing loss",
    )
    training.add_argument(
        "--eval-every",
        type=int,
        default=50,
        metavar="N",
        help="steps between held-out losses",
    )
    training.add_argument(
        "--eval-windows",
        type=int,
        default=32,
        metavar="N",
        help="held-out sequences to score",
    )
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if type(value) is int and name != "seed" and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}: 1 or more is needed")
    for name, unit in (("hidden", 8), ("hidden", 2 * args.heads), ("intermediate", 8)):
        if getattr(args, name) % unit:
            parser.error(
                f"--{name} is {getattr(args, name)}: a multiple of {unit} is needed"
            )
    if args.expert_parallel and args.experts != "kodkod":
        parser.error(
            f"--expert-parallel with --experts {args.experts}: kodkod is needed"
        )
    if args.device == "auto":
        enough = torch.cuda.device_count() >= int(
            os.environ.get("LOCAL_WORLD_SIZE", "1")
        )
        args.device = "cuda" if torch.cuda.is_available() and enough else "cpu"
    elif args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; auto or cpu is needed")
    if args.device == "cuda" and args.experts == "kodkod" and args.precision != "bf16":
        parser.error(
            f"--precision {args.precision} with --device cuda: kodkod computes in bf16 on a GPU"
        )
    if args.top_k > args.experts_count:
        parser.error(
            f"--top-k is {args.top_k}: at most --experts-count, {args.experts_count}, is needed"
        )
    return args


def torch_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    dtype,
) -> Tensor:
    """[N, H] of x [N, H], ids and weights [N, K], gate and up [E, I, H], down [E, H, I]: a loop over experts."""
    y = torch.zeros_like(x)
    rows, gate, up, down = (t.to(dtype) for t in (x, gate, up, down))
    for e in range(len(gate)):
        token, k = (ids == e).nonzero(as_tuple=True)
        row = rows[token]
        h = F.silu(row @ gate[e].T) * (row @ up[e].T)
        y = y.index_add(0, token, (h @ down[e].T).to(x.dtype) * weights[token, k, None])
    return y


class Experts(nn.Module):
    """A router, and the experts that it sends rows to: with a group of processes, those of this rank."""

    def __init__(self, args: argparse.Namespace, group) -> None:
        super().__init__()
        self.top_k, self.dtype = args.top_k, DTYPES[args.precision]
        experts, hidden, inside = args.experts_count, args.hidden, args.intermediate
        self.router = nn.Linear(hidden, experts, bias=False)
        own = slice(None)
        if args.expert_parallel:
            held = experts // group.ranks
            own = slice(group.rank * held, (group.rank + 1) * held)
        # All are drawn, so that they begin the same in any number of processes.
        self.gate = nn.Parameter(
            (torch.randn(experts, inside, hidden) * hidden**-0.5)[own].clone()
        )
        self.up = nn.Parameter(
            (torch.randn(experts, inside, hidden) * hidden**-0.5)[own].clone()
        )
        self.down = nn.Parameter(
            (torch.randn(experts, hidden, inside) * inside**-0.5)[own].clone()
        )
        self.group, self.moe = group, None
        if args.experts == "kodkod":
            import kodkod

            self.moe = kodkod.moe

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, H] of [N, H], and the balancing loss, 1 where all experts get the same share."""
        shares = self.router(x).softmax(-1)
        weights, ids = shares.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.moe is not None:
            y = self.moe(
                x,
                ids,
                weights,
                self.gate,
                self.up,
                self.down,
                group=self.group,
                precision=self.dtype,
            )
        else:
            y = torch_experts(
                x, ids, weights, self.gate, self.up, self.down, self.dtype
            )
        load = F.one_hot(ids, shares.shape[-1]).sum(1).float().mean(0) / self.top_k
        return y, len(load) * (load * shares.mean(0)).sum()


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.heads = args.heads
        self.qkv = nn.Linear(args.hidden, 3 * args.hidden, bias=False)
        self.out = nn.Linear(args.hidden, args.hidden, bias=False)
        half = args.hidden // args.heads // 2
        angles = torch.arange(args.context)[:, None] * 10000.0 ** (
            -torch.arange(half) / half
        )
        self.register_buffer(
            "turn", torch.polar(torch.ones_like(angles), angles), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] of [B, T, H]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (self.rotate(t) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turn[: x.shape[-2]]).flatten(-2)


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, group) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(args.hidden), Attention(args)
        self.experts_norm, self.experts = nn.RMSNorm(args.hidden), Experts(args, group)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, balance = self.experts(self.experts_norm(x).flatten(0, 1))
        return x + y.view_as(x), balance


class Model(nn.Module):
    def __init__(self, args: argparse.Namespace, group) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, args.hidden)
        self.blocks = nn.ModuleList(Block(args, group) for _ in range(args.layers))
        self.norm, self.head = (
            nn.RMSNorm(args.hidden),
            nn.Linear(args.hidden, BYTES, bias=False),
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, 256] of bytes [B, T], and the balancing loss, summed over blocks."""
        x, balance = self.embedding(tokens), 0.0
        for block in self.blocks:
            x, b = block(x)
            balance = balance + b
        return self.head(self.norm(x)), balance


class Text:
    """The bytes of a file, and sequences of ``context`` bytes with the byte after each."""

    def __init__(self, path: Path, context: int) -> None:
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        split = len(data) * 95 // 100
        self.train, self.held_out, self.context = data[:split], data[split:], context
        if len(self.held_out) <= context:
            raise SystemExit(
                f"{path} has {len(data)} bytes: its last 5 % must be more than --context {context}"
            )

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """The same for every number of processes."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return self.windows(
            self.train,
            torch.randint(len(self.train) - self.context, (size,), generator=generator),
        )

    def windows(self, data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = data[starts[:, None] + torch.arange(self.context + 1)]
        return rows[:, :-1], rows[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Bits per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / math.log(2)


def mean_of_processes(value: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


@torch.no_grad()
def held_out_loss(
    model: nn.Module, text: Text, windows: int, batch: int, device: torch.device
) -> float:
    """Bits per byte over sequences spread evenly over the held-out text; every process scores all."""
    starts = torch.linspace(0, len(text.held_out) - text.context - 1, windows).long()
    losses = []
    for part in starts.split(batch):
        inputs, targets = (t.to(device) for t in text.windows(text.held_out, part))
        losses.append(loss_of(model(inputs)[0], targets) * len(part))
    return (torch.stack(losses).sum() / windows).item()


def learning_rate(highest: float, step: int, steps: int) -> float:
    """A rise over the first twentieth, then a cosine down to a twentieth."""
    rise = max(1, steps // 20)
    if step < rise:
        return highest * (step + 1) / rise
    return highest * (
        0.05 + 0.475 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
    )


class Progress:
    """A bar where there is tqdm and a terminal, otherwise about twenty lines."""

    def __init__(self, steps: int, quiet: bool) -> None:
        self.steps, self.quiet, self.bar = steps, quiet, None
        if not quiet and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self.bar = tqdm(total=steps, unit="step")

    def step(self, done: int, loss: float, rate: float, held_out: float) -> None:
        words = f"loss {loss:.3f}  held-out {held_out:.3f}  {rate:.0f} tokens/s"
        if self.bar is not None:
            self.bar.set_postfix_str(words, refresh=False)
            self.bar.update()
        elif not self.quiet and (
            done % max(1, self.steps // 20) == 0 or done == self.steps
        ):
            print(f"step {done:5} of {self.steps}  {words}", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def draw(
    path: Path, title: str, losses: list[float], held_out: list[tuple[int, float]]
) -> None:
    """The loss curve as SVG: the training loss as a mean over steps near by, and the held-out losses."""
    width, height, left, top = 640, 360, 48, 36
    steps, near = len(losses), max(1, len(losses) // 100)
    means = [
        sum(losses[max(0, i - near) : i + 1]) / len(losses[max(0, i - near) : i + 1])
        for i in range(steps)
    ]
    values = [*means, *(loss for _, loss in held_out)]
    low, high = math.floor(min(values)), math.ceil(max(values))

    def at(step: float, loss: float) -> str:
        x = left + (width - left - 16) * step / steps
        y = top + (height - top - 40) * (high - loss) / max(1, high - low)
        return f"{x:.1f},{y:.1f}"

    def text(
        step: float, loss: float, words: str, dx: int, dy: int, anchor: str
    ) -> str:
        x, y = at(step, loss).split(",")
        return f'<text x="{float(x) + dx:.1f}" y="{float(y) + dy:.1f}" text-anchor="{anchor}">{words}</text>'

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    ]
    lines += [
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<g font-size="12" fill="#444">',
    ]
    for loss in range(low, high + 1):
        lines.append(
            f'<polyline points="{at(0, loss)} {at(steps, loss)}" stroke="#ddd"/>'
        )
        lines.append(text(0, loss, str(loss), -8, 4, "end"))
    lines += [
        text(step, low, str(round(step)), 0, 18, "middle")
        for step in (0, steps / 2, steps)
    ]
    lines += [
        text(steps / 2, low, "step", 0, 34, "middle"),
        text(0, high, "bits per byte", -8, -12, "start"),
    ]
    lines.append(
        text(steps, high, f"{title}: training and held-out (dots) loss", 0, -12, "end")
    )
    trained = " ".join(at(i + 1, mean) for i, mean in enumerate(means))
    scored = " ".join(at(*point) for point in held_out)
    lines.append(f'</g><polyline points="{trained}" fill="none" stroke="#4477aa"/>')
    lines.append(
        f'<polyline points="{scored}" fill="none" stroke="#cc6633" stroke-width="2"/>'
    )
    for point in held_out:
        x, y = at(*point).split(",")
        lines.append(f'<circle cx="{x}" cy="{y}" r="3" fill="#cc6633"/>')
    path.write_text("\n".join([*lines, "</svg>"]) + "\n")


def expert_group(args: argparse.Namespace):
    """The ranks that kodkod computes the experts on; None for plain PyTorch, and for one GPU."""
    if args.experts != "kodkod" or (args.device == "cuda" and not args.expert_parallel):
        return None
    import kodkod

    threads = torch.get_num_threads()
    if not args.expert_parallel:
        return kodkod.ExpertGroup.cpu(threads=threads)
    if not dist.is_initialized():
        raise SystemExit(
            "--expert-parallel is for several processes: torchrun is needed"
        )
    group = kodkod.ExpertGroup.processes(device=args.device, threads=threads)
    if args.experts_count % group.ranks:
        raise SystemExit(
            f"--experts-count is {args.experts_count}: a multiple of the {group.ranks} processes is needed"
        )
    return group


def data_parallel(model: nn.Module, own: list[nn.Parameter]) -> nn.Module:
    """Averages gradients over processes, but of the parameters ``own`` that each process holds alone."""
    alone = {id(parameter) for parameter in own}
    names = [
        name for name, parameter in model.named_parameters() if id(parameter) in alone
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def clip_gradients(
    parameters: list[nn.Parameter], own: list[nn.Parameter], highest: float
) -> None:
    """Clips the norm over all processes, of which each holds the parameters ``own`` alone."""
    alone = {id(parameter) for parameter in own}
    norm = nn.utils.get_total_norm([p.grad for p in parameters if id(p) not in alone])
    if own:
        squares = nn.utils.get_total_norm([p.grad for p in own]).square()
        dist.all_reduce(squares)
        norm = (norm.square() + squares).sqrt()
    nn.utils.clip_grads_with_norm_(parameters, highest, norm)


def train(args: argparse.Namespace) -> dict:
    """The results that metrics.json has."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if args.batch % processes:
        raise SystemExit(
            f"--batch is {args.batch}: a multiple of the {processes} processes is needed"
        )
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    text, plain = (
        Text(args.text, args.context),
        Model(args, expert_group(args)).to(device),
    )
    own: list[nn.Parameter] = []
    if args.expert_parallel:
        own = [
            p
            for m in plain.modules()
            if isinstance(m, Experts)
            for p in (m.gate, m.up, m.down)
        ]
    parameters = sum(p.numel() for p in plain.parameters()) + (processes - 1) * sum(
        p.numel() for p in own
    )
    model = data_parallel(plain, own) if processes > 1 else plain
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.99), weight_decay=0.1
    )
    if rank == 0:
        print(
            f"{parameters:,} parameters, experts by {args.experts} in {args.precision} on {args.device}, "
            f"{processes} process(es)"
        )

    losses: list[float] = []
    held_out = [(0, held_out_loss(plain, text, args.eval_windows, args.batch, device))]
    seconds, progress = 0.0, Progress(args.steps, quiet=rank > 0)
    for step in range(args.steps):
        began = time.perf_counter()
        inputs, targets = (
            t[rank::processes].to(device)
            for t in text.batch(args.seed, step, args.batch)
        )
        logits, balance = model(inputs)
        loss = loss_of(logits, targets)
        optimizer.zero_grad()
        (loss + args.balance * balance).backward()
        for (
            parameter
        ) in own:  # the sum over all processes' bytes, where the others have the mean
            parameter.grad /= processes
        clip_gradients(list(model.parameters()), own, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args.lr, step, args.steps)
        optimizer.step()
        losses.append(mean_of_processes(loss.detach()))
        seconds += time.perf_counter() - began
        done = step + 1
        if done % args.eval_every == 0 or done == args.steps:
            held_out.append(
                (
                    done,
                    held_out_loss(plain, text, args.eval_windows, args.batch, device),
                )
            )
        progress.step(
            done,
            losses[-1],
            done * args.batch * args.context / seconds,
            held_out[-1][1],
        )
    progress.close()

    rate = args.steps * args.batch * args.context / seconds
    options = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
    }
    results = {
        "options": options,
        "processes": processes,
        "parameters": parameters,
        "tokens_per_second": rate,
        "held_out": held_out,
        "losses": losses,
    }
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "metrics.json").write_text(json.dumps(results, indent=1) + "\n")
        draw(args.out / "loss.svg", f"experts by {args.experts}", losses, held_out)
        print(
            f"held-out loss {held_out[-1][1]:.4f} bits per byte, {rate:.0f} tokens/s; wrote {args.out}"
        )
    return results


def main(argv: list[str] | None = None) -> dict:
    args = arguments(argv)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        return train(args)
    finally:
        if several:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
