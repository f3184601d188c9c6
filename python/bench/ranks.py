"""One MoE layer over processes with a GPU each, from PyTorch: kodkod, in a CUDA graph too, and NCCL's all-to-all with
torch._grouped_mm (`bench/torch_moe_ranks.py`).

torchrun --nproc-per-node 2 bench/ranks.py
torchrun --nproc-per-node 2 bench/ranks.py --shape olmoe-1b-7b --memory ipc
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import kodkod

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import torch_moe_ranks as peer


class Kodkod(peer.Layer):
    """The same weights and inputs, and gradients, as the peer's."""

    def __init__(self, group, *arguments):
        super().__init__(*arguments)
        self.options = {"group": group, "shared": kodkod.Shared(*self.shared) if self.shared else None}
        self.ids = self.ids.int()

    def __call__(self):
        return kodkod.moe(self.x, self.ids, self.router_weights, *self.experts, **self.options)

    def step(self):
        # Those of shared experts come out whole.
        torch.autograd.grad(self(), (self.x, self.router_weights, *self.experts, *self.shared), self.dy)


def replayed(work):
    """The same work, captured. It ran before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b,kimi-slice", help="names, or HxIxExK")
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--memory", choices=("symmetric", "ipc"), help="of the ranks: see kodkod.ExpertGroup.processes")
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("no LOCAL_RANK: torchrun starts it, as above")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = kodkod.ExpertGroup.processes(timeout=60.0, memory=args.memory)
    torch.manual_seed(1 + dist.get_rank())
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    gpu = torch.cuda.get_device_name()
    say(f"{gpu} x {group.ranks}, torch {torch.__version__}, {args.tokens} tokens a GPU; {group}")
    say(f"{'shape':18} {'pass':8} {'torch ms':>9} {'kodkod ms':>9} {'in a graph':>10} {'faster by':>9}")
    for name in args.shape.split(","):
        shape = peer.parse_shape(name)
        layers = peer.Layer(shape, args.tokens, device), Kodkod(group, shape, args.tokens, device)
        for what, pick in {"fwd": "forward", "fwd+bwd": "step"}.items():
            works = [getattr(layer, pick) for layer in layers]
            times = [peer.milliseconds(work, args.repeat, args.warmup, device) for work in works]
            times.append(peer.milliseconds(replayed(works[1]), args.repeat, args.warmup, device))
            cells = f"{times[0]:9.3f} {times[1]:9.3f} {times[2]:10.3f} {times[0] / times[1]:9.2f}"
            say(f"{name:18} {what:8} {cells}", flush=True)
        kodkod.cuda.check()
        del layers, works
        kodkod.cuda.trim(captured=True)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
