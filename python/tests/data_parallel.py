"""A model whose experts are parallel, with the rest in DDP or FSDP2, for processes on the CPU and on GPUs."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import kodkod

EXPERTS, TOKENS = 8, 128


class Net(torch.nn.Module):
    """A block between two layers, the same in every process but for the experts that it holds."""

    def __init__(self, group: kodkod.ExpertGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.into = torch.nn.Linear(64, 128)
        self.block = kodkod.nn.MoE(128, 64, EXPERTS, 2, shared=64, group=group)
        self.out = torch.nn.Linear(128, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(self.into(x)))


def compare(mesh: DeviceMesh, group: kodkod.ExpertGroup, dtype: torch.dtype, tolerance: float) -> None:
    """The gradients of every rank, taken together as docs/python.md says, are those of one process with all tokens."""
    rank, ranks = group.rank, group.ranks
    x = torch.randn(TOKENS * ranks, 64, generator=torch.Generator().manual_seed(1)).to(group.device, dtype)
    whole = Net().to(group.device, dtype)
    whole(x).float().square().mean().backward()

    def ddp(net: Net, names: list[str]) -> torch.nn.Module:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
        return DistributedDataParallel(net, process_group=mesh.get_group())

    def fsdp(net: Net, names: list[str]) -> torch.nn.Module:
        ignored = {parameter for name, parameter in net.named_parameters() if name in names}
        return fully_shard(net, mesh=mesh, ignored_params=ignored)

    for wrap in (ddp, fsdp):
        net = Net(group).to(group.device, dtype)
        names = kodkod.nn.expert_parameter_names(net)
        wrapped = wrap(net, names)
        wrapped(x[TOKENS * rank : TOKENS * (rank + 1)]).float().square().mean().backward()
        held = EXPERTS // ranks
        for name, parameter in net.named_parameters():
            got, want = parameter.grad, whole.get_parameter(name).grad.float()
            got = (got.full_tensor() if hasattr(got, "full_tensor") else got).float()
            if name in names:
                want = want[rank * held : (rank + 1) * held]
            if name in names or ".shared_" in f".{name}":
                got = got / ranks
            error = ((got - want).norm() / want.norm()).item()
            print(f"{wrap.__name__}: {name:20} error {error:.1e}", flush=True)
            assert error < tolerance, name
