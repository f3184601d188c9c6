"""A router and a whole MoE block as ``torch.nn`` modules, with the names of Hugging Face checkpoints.

For a token's row ``x``, with the router's ``W_r`` [E, H]::

    l = x W_r^T                            s = softmax(l)  or  sigmoid(l)
    ids = the K largest of s (+ b)         among the best groups of experts, if limited; ties go to the lowest id
    w = s[ids]                             optionally divided by its sum, then times the scaling

The bias ``b`` moves the choice and not the weight, and follows the load rather than a gradient (DeepSeek-V3,
arXiv:2412.19437, section 2.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._functional import Biases, Knobs, Shared, moe, refuse
from ._group import ExpertGroup

__all__ = ["MoE", "Routed", "Router", "balance_loss", "expert_parameter_names"]


class Routed(NamedTuple):
    """A router's choice."""

    ids: Tensor
    """[..., K], int64, by descending score."""
    weights: Tensor
    """[..., K], float32, differentiable."""
    scores: Tensor
    """[..., E], float32, differentiable: of all experts, without the bias."""


def balance_loss(routed: Routed) -> Tensor:
    """The load-balancing loss of the Switch Transformer (arXiv:2101.03961, eq. 4 to 6), of all K routes: a scalar.

    ``E * sum over e of f_e P_e``, where ``f_e`` is the share of routes that went to expert e, and ``P_e`` the mean over
    tokens of its share of a token's scores. It is 1 at perfect balance, 0 without tokens; the gradient flows through
    ``P``.
    """
    experts = routed.scores.shape[-1]
    share = _load(routed.ids, experts).float() / max(routed.ids.numel(), 1)
    scores = routed.scores.reshape(-1, experts)
    p = scores / scores.sum(dim=-1, keepdim=True)
    return experts * (share * p.sum(dim=0)).sum() / max(scores.shape[0], 1)


def _load(ids: Tensor, experts: int) -> Tensor:
    """Routes to each expert, [E], int64."""
    flat = ids.reshape(-1)
    return torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))


class Router(nn.Module):
    """A linear router. It computes in float32.

    Args:
        hidden: H, width of a row.
        experts: E.
        top_k: K, routes a token.
        scoring: ``"softmax"`` or ``"sigmoid"``.
        renormalize: whether a token's weights are divided by their sum.
        scaling: what the weights are multiplied by, last.
        groups: the experts stand in this many groups of equal size; the K routes go to ``top_groups`` of them. A
            group's score is that of its best expert, or with a bias the sum of its best two (DeepSeek-V3).
        top_groups: see ``groups``.
        balance_bias: whether there is a bias for balancing, moved by :meth:`update_bias`.

    Parameters and buffers: ``weight`` [E, H]; ``bias`` [E], float32, a buffer.
    """

    bias: Tensor | None
    load: Tensor | None

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        renormalize: bool = True,
        scaling: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        balance_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _counts(hidden=hidden, experts=experts, top_k=top_k, groups=groups, top_groups=top_groups)
        if scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring is {scoring!r}: 'softmax' and 'sigmoid' are allowed")
        if groups < 1 or experts % groups:
            raise ValueError(f"groups is {groups}: a divisor of experts ({experts}) is needed")
        if not 1 <= top_groups <= groups:
            raise ValueError(f"top_groups is {top_groups}: 1 to groups ({groups}) are allowed")
        most = experts // groups * top_groups
        if not 1 <= top_k <= most:
            raise ValueError(f"top_k is {top_k}: 1 to {most} are allowed, the experts that can be chosen")
        self.top_k, self.scoring, self.renormalize, self.scaling = top_k, scoring, renormalize, scaling
        self.groups, self.top_groups = groups, top_groups
        self.weight = nn.Parameter(torch.empty(experts, hidden, device=device, dtype=dtype))
        self.register_buffer("bias", torch.zeros(experts, device=device, dtype=torch.float32) if balance_bias else None)
        load = torch.zeros(experts, device=device, dtype=torch.int64) if balance_bias else None
        self.register_buffer("load", load, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform, of standard deviation ``H^-0.5 / sqrt 3``, as :class:`torch.nn.Linear`."""
        _uniform(self.weight)

    def forward(self, x: Tensor) -> Routed:
        """The choice for ``x`` [..., H]. In training it also counts the load, where there is a bias."""
        logits = nn.functional.linear(x.float(), self.weight.float())
        scores = logits.softmax(dim=-1) if self.scoring == "softmax" else logits.sigmoid()
        with torch.no_grad():
            choice = scores.detach() if self.bias is None else scores.detach() + self.bias
            if self.top_groups < self.groups:
                grouped = choice.unflatten(-1, (self.groups, -1))
                best = min(1 if self.bias is None else 2, grouped.shape[-1])
                totals = grouped.topk(best, dim=-1).values.sum(dim=-1)
                taken = torch.zeros_like(totals, dtype=torch.bool).scatter_(-1, _best(totals, self.top_groups), True)
                choice = grouped.masked_fill(~taken.unsqueeze(-1), -math.inf).flatten(-2)
            ids = _best(choice, self.top_k)
            if self.training and self.load is not None:
                self.load += _load(ids, self.load.shape[0])
        weights = scores.gather(-1, ids)
        if self.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # sigmoids can all be tiny
        return Routed(ids, weights * self.scaling if self.scaling != 1.0 else weights, scores)

    @torch.no_grad()
    def update_bias(self, speed: float = 1e-3) -> None:
        """Moves the bias by ``speed`` towards balance, and begins to count anew.

        Up for experts that had less than the mean load since the last call, down for those that had more. DeepSeek-V3
        does so once a step.
        """
        if self.bias is None:
            raise ValueError("balance_bias is False: this router has no bias to move")
        load = self.load.double()
        self.bias += speed * torch.sign(load.mean() - load).to(self.bias.dtype)
        self.load.zero_()

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        return f"{hidden}, {experts}, {self.top_k}, scoring={self.scoring!r}"


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the largest, ties to the lowest index, which ``topk`` does not promise."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _counts(least: int = 1, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}: an int is needed")
        if value < least:
            raise ValueError(f"{name} is {value}: {least} or more is needed")


def _uniform(weight: Tensor) -> None:
    bound = weight.shape[-1] ** -0.5
    nn.init.uniform_(weight, -bound, bound)


class MoE(nn.Module):
    """A mixture-of-experts block: router, routed experts and, if wanted, shared experts.

    Args:
        hidden: H.
        intermediate: I, width inside a routed expert.
        experts: E.
        top_k: K, routes a token.
        shared: S, the total width of the shared experts; 0 for none.
        output_gate: whether the shared experts' output is multiplied by ``sigmoid(x . output_gate)`` (Qwen2-MoE).
        biases: whether the routed experts have biases (gpt-oss).
        activation, limit, alpha, group, knobs, precision: see :func:`kodkod.moe`. In a group of processes this block
            holds the experts of its own rank alone, E / ranks of them.
        device, dtype: of the parameters.
        router: further arguments of :class:`Router`.

    Parameters: ``w_gate``, ``w_up`` [E, I, H], ``w_down`` [E, H, I]; ``b_gate``, ``b_up`` [E, I], ``b_down`` [E, H];
    ``shared_gate``, ``shared_up`` [S, H], ``shared_down`` [H, S], ``shared_output_gate`` [1, H]; those of ``router``.
    In a group of processes E is ``held``, the experts ``first`` to ``first + held - 1``, except in the router. All
    ranks must have the same router and shared experts: begin with the same seed, or the same state.
    """

    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None
    shared_gate: Tensor | None
    shared_up: Tensor | None
    shared_down: Tensor | None
    shared_output_gate: Tensor | None

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        *,
        shared: int = 0,
        output_gate: bool = False,
        biases: bool = False,
        activation: str = "swiglu",
        limit: float | None = None,
        alpha: float | None = None,
        group: ExpertGroup | None = None,
        knobs: Knobs | None = None,
        precision: str | torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **router: Any,
    ) -> None:
        super().__init__()
        _counts(hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k)
        _counts(0, shared=shared)
        if output_gate and not shared:
            raise ValueError("output_gate is True: it needs shared experts, and shared is 0")
        self.router = Router(hidden, experts, top_k, device=device, dtype=dtype, **router)
        self.activation, self.limit, self.alpha = activation, limit, alpha
        self.group, self.knobs, self.precision = group, knobs, precision
        self.experts = self.held = experts
        self.first = 0
        if group is not None and group.of_processes:
            if experts % group.ranks:
                raise ValueError(f"experts is {experts}: a multiple of the {group.ranks} ranks is needed")
            self.held = experts // group.ranks
            self.first = group.rank * self.held
        shapes = {
            "w_gate": (self.held, intermediate, hidden),
            "w_up": (self.held, intermediate, hidden),
            "w_down": (self.held, hidden, intermediate),
            "b_gate": (self.held, intermediate) if biases else None,
            "b_up": (self.held, intermediate) if biases else None,
            "b_down": (self.held, hidden) if biases else None,
            "shared_gate": (shared, hidden) if shared else None,
            "shared_up": (shared, hidden) if shared else None,
            "shared_down": (hidden, shared) if shared else None,
            "shared_output_gate": (1, hidden) if output_gate else None,
        }
        for name, shape in shapes.items():
            tensor = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, tensor)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights uniform, of standard deviation ``fan_in^-0.5 / sqrt 3``; biases zero.

        From the same seed, the processes of a group begin with the weights of one process.
        """
        self.router.reset_parameters()
        for name, weight in self.named_parameters(recurse=False):
            if name.startswith("b_"):
                nn.init.zeros_(weight)
            elif not name.startswith("w_"):
                _uniform(weight)
            else:
                other = torch.empty_like(weight[0])
                for e in range(self.experts):  # other ranks' are drawn too, and thrown away
                    _uniform(weight[e - self.first] if 0 <= e - self.first < self.held else other)

    def forward(self, x: Tensor, routed: Routed | None = None) -> Tensor:
        """[..., H] for ``x`` [..., H]. Give ``routed``, from :attr:`router`, to use its scores elsewhere too."""
        if routed is None:
            self._check(x)
            routed = self.router(x)
        has_biases, has_shared = self.b_gate is not None, self.shared_gate is not None
        return moe(
            x,
            routed.ids,
            routed.weights,
            self.w_gate,
            self.w_up,
            self.w_down,
            biases=Biases(self.b_gate, self.b_up, self.b_down) if has_biases else None,
            shared=Shared(self.shared_gate, self.shared_up, self.shared_down, self.shared_output_gate)
            if has_shared
            else None,
            activation=self.activation,
            limit=self.limit,
            alpha=self.alpha,
            group=self.group,
            knobs=self.knobs,
            precision=self.precision,
        )

    def _check(self, x: Tensor) -> None:
        """What the router would say of in its own words, and to this process alone."""
        hidden = self.w_down.shape[1]
        if not isinstance(x, Tensor):
            error: Exception = TypeError(f"x is a {type(x).__name__}: a torch.Tensor is needed")
        elif x.is_nested:
            error = TypeError("x is nested: a tensor of layout torch.strided is needed")
        elif x.dim() == 0 or x.shape[-1] != hidden:
            error = ValueError(f"x has shape {list(x.shape)}: expected [..., H] with H = {hidden}")
        elif x.device != self.w_down.device:
            error = ValueError(f"x is on {x.device}: {self.w_down.device} is needed, where the weights are")
        else:
            return
        refuse(self.group, error)
        raise error

    def extra_repr(self) -> str:
        _, intermediate, hidden = self.w_gate.shape
        own = "" if self.held == self.experts else f", {self.first} to {self.first + self.held - 1} here"
        return f"hidden={hidden}, intermediate={intermediate}, experts={self.experts}{own}"

    # Hugging Face

    @classmethod
    def from_hf_config(cls, config: Any, **options: Any) -> MoE:
        """A block of the sizes and the routing of a transformers configuration, an object or its dictionary.

        ``options`` are further arguments of :class:`MoE`. The model types are those of :meth:`load_hf`.
        """
        return cls(**{**_hf_arguments(config), **options})

    def hf_state_dict(self, family: str, *, prefix: str = "", fused: bool = False) -> dict[str, Tensor]:
        """Copies of all weights under the names of a model family, each after ``prefix`` (``model.layers.3.mlp.``).

        ``fused`` gives the names of the modules of transformers 5, where all experts' gate and up are one tensor; else
        they are the names of checkpoint files, a tensor a matrix. In a group of processes they are those of this rank's
        experts, by their numbers among all, and of all else: the ranks' dictionaries together are the whole. There
        ``fused`` is an error.
        """
        if fused and self.held < self.experts:
            raise ValueError(f"fused is True: this rank holds {self.held} of {self.experts} experts, False is needed")
        views = self._hf_views(family, fused)
        return {
            prefix + key: torch.cat([v.detach() for v in parts], dim=-2)
            if len(parts) > 1
            else parts[0].detach().clone()
            for key, parts in views.items()
        }

    @torch.no_grad()
    def load_hf(self, state: Mapping[str, Tensor], family: str, *, prefix: str = "") -> None:
        """Copies the weights of a Hugging Face state dictionary into this block.

        In a group of processes each rank takes its own experts' from the state of all; keys of other ranks' experts may
        be missing.

        Args:
            state: whatever it has after ``prefix`` must be this block's; names of checkpoint files or, with
                ``experts.gate_up_proj``, of the modules of transformers 5.
            family: ``"mixtral"``, ``"qwen3_moe"``, ``"olmoe"``, ``"deepseek_v3"`` or ``"qwen2_moe"``.
            prefix: such as ``model.layers.3.mlp.``

        Raises:
            RuntimeError: a key is missing, or there is one more; nothing is copied.
            ValueError: a tensor has another shape, or this block has a part that the family has not.
        """
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        fused = "experts.gate_up_proj" in own
        views = self._hf_views(family, fused)
        others = set()
        if fused:
            for key in ("experts.gate_up_proj", "experts.down_proj"):
                if key in own and own[key].dim() == 3 and len(own[key]) == self.experts:
                    own[key] = own[key][self.first : self.first + self.held]
        else:
            others = {key for e in range(self.experts) for key in _matrices(family, e)}
        missing = [prefix + key for key in views if key not in own]
        extra = [prefix + key for key in own if key not in views and key not in others]
        if missing or extra:
            parts = [f"missing keys: {', '.join(missing)}"] if missing else []
            parts += [f"unexpected keys: {', '.join(extra)}"] if extra else []
            raise RuntimeError(f"the state dictionary is not of this {family} block: {'; '.join(parts)}")
        for key, parts in views.items():
            shape = list(parts[0].shape)
            if len(parts) > 1:
                shape[-2] = sum(part.shape[-2] for part in parts)
            if list(own[key].shape) != shape:
                raise ValueError(f"{prefix + key} has shape {list(own[key].shape)}: expected {shape}")
        for key, parts in views.items():
            at = 0
            for part in parts:
                if len(parts) == 1:
                    part.copy_(own[key])
                else:
                    part.copy_(own[key].narrow(-2, at, part.shape[-2]))
                    at += part.shape[-2]

    def _hf_views(self, family: str, fused: bool) -> dict[str, tuple[Tensor, ...]]:
        """The parameters that a key stands for, put together along the last but one dimension."""
        if family not in _FAMILIES:
            allowed = ", ".join(repr(name) for name in _FAMILIES)
            raise ValueError(f"family is {family!r}: {allowed} are allowed")
        names = _FAMILIES[family]
        for part, there, known in (
            ("shared experts", self.shared_gate is not None, names.shared is not None),
            ("an output gate", self.shared_output_gate is not None, names.output_gate is not None),
            ("a bias for balancing", self.router.bias is not None, names.bias is not None),
            ("biases", self.b_gate is not None, False),
        ):
            if there and not known:
                raise ValueError(f"family is {family!r}: its blocks do not have {part}, this one does")
        views = {"gate.weight": (self.router.weight,)}
        if self.router.bias is not None:
            views[names.bias] = (self.router.bias,)
        if fused:
            views["experts.gate_up_proj"] = (self.w_gate, self.w_up)
            views["experts.down_proj"] = (self.w_down,)
        else:
            for e in range(self.held):
                own = (self.w_gate[e], self.w_up[e], self.w_down[e])
                keys = _matrices(family, self.first + e)
                views |= {key: (weight,) for key, weight in zip(keys, own, strict=True)}
        if self.shared_gate is not None:
            views[f"{names.shared}.gate_proj.weight"] = (self.shared_gate,)
            views[f"{names.shared}.up_proj.weight"] = (self.shared_up,)
            views[f"{names.shared}.down_proj.weight"] = (self.shared_down,)
        if self.shared_output_gate is not None:
            views[names.output_gate] = (self.shared_output_gate,)
        return views


def expert_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters that this process alone holds: those of experts in blocks over a group of processes.

    Their gradients are sums over all ranks' tokens already. DistributedDataParallel must leave them alone.
    """
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, MoE) and module.group is not None and module.group.of_processes
        for name, _ in module.named_parameters(recurse=False)
        if name.startswith(("w_", "b_"))
    ]


class _Names(NamedTuple):
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str | None = None
    output_gate: str | None = None
    bias: str | None = None


_FAMILIES = {
    "mixtral": _Names(matrices=("w1", "w3", "w2")),
    "qwen3_moe": _Names(),
    "olmoe": _Names(),
    "deepseek_v3": _Names(shared="shared_experts", bias="gate.e_score_correction_bias"),
    "qwen2_moe": _Names(shared="shared_expert", output_gate="shared_expert_gate.weight"),
}


def _matrices(family: str, expert: int) -> list[str]:
    """The keys of an expert's gate, up and down."""
    return [f"experts.{expert}.{name}.weight" for name in _FAMILIES[family].matrices]


def _hf_arguments(config: Any) -> dict[str, Any]:
    values = config if isinstance(config, Mapping) else config.to_dict()
    family = values.get("model_type")
    if family not in _FAMILIES:
        allowed = ", ".join(repr(name) for name in _FAMILIES)
        raise ValueError(f"model_type is {family!r}: {allowed} are allowed")
    act = values.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {act!r}: 'silu' is needed")

    def first(*names: str) -> Any:
        for name in names:
            if values.get(name) is not None:
                return values[name]
        raise ValueError(f"{names[0]} is missing in the configuration of {family}")

    arguments = {
        "hidden": first("hidden_size"),
        "intermediate": first("intermediate_size" if family in ("mixtral", "olmoe") else "moe_intermediate_size"),
        "experts": first("num_experts", "num_local_experts", "n_routed_experts"),
        "top_k": first("num_experts_per_tok"),
        "renormalize": True if family == "mixtral" else first("norm_topk_prob"),
    }
    if family == "deepseek_v3":
        arguments |= {
            "scoring": "sigmoid",
            "scaling": first("routed_scaling_factor"),
            "groups": first("n_group"),
            "top_groups": first("topk_group"),
            "balance_bias": True,
            "shared": first("n_shared_experts") * arguments["intermediate"],
        }
    if family == "qwen2_moe":
        arguments |= {"shared": first("shared_expert_intermediate_size"), "output_gate": True}
    return arguments
