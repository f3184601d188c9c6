"""The layer in plain PyTorch, with autograd: a loop over tokens' routes, expert by expert."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import kodkod


@dataclass
class Step:
    """Inputs of one layer. ``weights`` are gate, up, down; ``biases`` 0 or 3; ``shared`` 0, 3 or 4 tensors."""

    x: Tensor
    ids: Tensor
    topk_weights: Tensor
    weights: list[Tensor]
    biases: list[Tensor] = field(default_factory=list)
    shared: list[Tensor] = field(default_factory=list)
    activation: str = "swiglu"
    limit: float | None = None
    alpha: float | None = None

    def leaves(self) -> dict[str, Tensor]:
        names = ["w_gate", "w_up", "w_down"]
        names += ["b_gate", "b_up", "b_down"][: len(self.biases)]
        names += ["shared_gate", "shared_up", "shared_down", "shared_output_gate"][: len(self.shared)]
        tensors = [*self.weights, *self.biases, *self.shared]
        return {"x": self.x, "topk_weights": self.topk_weights, **dict(zip(names, tensors, strict=True))}

    def to(self, dtype: torch.dtype, wide: torch.dtype | None = None, device: str | None = None) -> Step:
        """Fresh leaves: rows and weights in ``dtype``, what is computed with in float32 in ``wide``."""
        wide = wide or (torch.float64 if dtype == torch.float64 else torch.float32)

        def leaf(tensor: Tensor, to: torch.dtype) -> Tensor:
            return tensor.detach().to(device, to, copy=True).requires_grad_()

        return replace(
            self,
            ids=self.ids.to(device),
            x=leaf(self.x, dtype),
            topk_weights=leaf(self.topk_weights, wide),
            weights=[leaf(w, dtype) for w in self.weights],
            biases=[leaf(b, wide) for b in self.biases],
            shared=[leaf(s, dtype if i < 3 else wide) for i, s in enumerate(self.shared)],
        )

    def options(self) -> dict:
        return {
            "biases": kodkod.Biases(*self.biases) if self.biases else None,
            "shared": kodkod.Shared(*self.shared) if self.shared else None,
            "activation": self.activation,
            "limit": self.limit,
            "alpha": self.alpha,
        }

    def kodkod(self, **options) -> Tensor:
        return kodkod.moe(self.x, self.ids, self.topk_weights, *self.weights, **{**self.options(), **options})


def act(g: Tensor, u: Tensor, activation: str, limit: float | None, alpha: float | None) -> Tensor:
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if activation == "swiglu":
        return torch.nn.functional.silu(g) * u
    return (u + 1) * g * torch.sigmoid((1.702 if alpha is None else alpha) * g)


def reference(step: Step) -> Tensor:
    hidden = step.x.shape[-1]
    x = step.x.reshape(-1, hidden)
    ids = step.ids.reshape(-1, step.ids.shape[-1])
    topk_weights = step.topk_weights.reshape(ids.shape)
    y = 0 * x  # a function of x, also where no token has a route
    options = (step.activation, step.limit, step.alpha)
    if step.shared:
        gate, up, down, *output_gate = step.shared
        out = act(x @ gate.T, x @ up.T, *options) @ down.T
        if output_gate:
            out = out * torch.sigmoid(x @ output_gate[0].reshape(-1, 1))
        y = y + out
    gate, up, down = step.weights
    for e in range(gate.shape[0]):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        rows = x[token]
        g, u = rows @ gate[e].T, rows @ up[e].T
        if step.biases:
            g, u = g + step.biases[0][e], u + step.biases[1][e]
        out = act(g, u, *options) @ down[e].T
        if step.biases:
            out = out + step.biases[2][e]
        y = y.index_add(0, token, out * topk_weights[token, slot, None])
    return y.reshape(step.x.shape)


def random_ids(tokens: int, experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].contiguous()


def make(
    ids: Tensor,
    *,
    experts: int,
    hidden: int = 64,
    intermediate: int = 48,
    biases: bool = False,
    shared: int = 0,
    output_gate: bool = False,
    activation: str = "swiglu",
    limit: float | None = None,
    alpha: float | None = None,
    seed: int = 0,
) -> Step:
    """Rows of variance 1, weights of variance 1 / fan-in, in float32 that bfloat16 holds exactly."""
    r = torch.Generator().manual_seed(seed)

    def normal(*shape: int, variance: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=r) * variance**0.5).bfloat16().float()

    over_h, over_i = 1 / hidden, 1 / intermediate
    step = Step(
        x=normal(*ids.shape[:-1], hidden),
        ids=ids,
        topk_weights=0.1 + 0.9 * torch.rand(ids.shape, generator=r),
        weights=[
            normal(experts, intermediate, hidden, variance=over_h),
            normal(experts, intermediate, hidden, variance=over_h),
            normal(experts, hidden, intermediate, variance=over_i),
        ],
        activation=activation,
        limit=limit,
        alpha=alpha,
    )
    if biases:
        sizes = (intermediate, intermediate, hidden)
        step.biases = [normal(experts, size, variance=0.25) for size in sizes]
    if shared:
        step.shared = [
            normal(shared, hidden, variance=over_h),
            normal(shared, hidden, variance=over_h),
            normal(hidden, shared, variance=1 / shared),
        ]
        if output_gate:
            step.shared.append(normal(1, hidden, variance=over_h))
    return step


def everything(ids: Tensor, experts: int = 4, **options) -> Step:
    options = {
        "biases": True,
        "shared": 80,
        "output_gate": True,
        "activation": "swiglu_oai",
        "limit": 1.5,
        **options,
    }
    return make(ids, experts=experts, **options)


def gradients(step: Step, y: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """``y`` and the gradient of every leaf, by name."""
    leaves = step.leaves()
    grads = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    zeros = (torch.zeros_like(v) if g is None else g for g, v in zip(grads, leaves.values(), strict=True))
    return {"y": y.detach(), **{f"d {n}": g for n, g in zip(leaves, zeros, strict=True)}}


def both(step: Step, dtype: torch.dtype, seed: int = 1, **options) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients of kodkod, and of the reference in float64 on the same rounded values."""
    dy = torch.randn(step.x.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    mine = step.to(dtype)
    got = gradients(mine, mine.kodkod(**options), dy.to(dtype))
    wide = step.to(torch.float64)
    return got, gradients(wide, reference(wide), dy.double())


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """The norm of each difference against that of what is wanted, over all of a tensor."""
    assert got.keys() == want.keys()
    for name in want:
        g, w = got[name].double(), want[name].double()
        assert g.shape == w.shape, name
        assert torch.isfinite(g).all(), f"{name} has numbers that are not finite"
        error = (g - w).norm().item()
        size = w.norm().item()
        print(f"{name:22} norm {size:9.3g}  error {error / max(size, 1e-30):.2e}")
        assert error <= tolerance * size, f"{name}: error {error} of {size}, {tolerance} is allowed"


def bits_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a[name].element_size()]
        differ = (a[name].contiguous().view(ints) != b[name].contiguous().view(ints)).sum().item()
        assert differ == 0, f"{name}: {differ} of {a[name].numel()} elements differ"
