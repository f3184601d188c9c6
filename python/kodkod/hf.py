"""kodkod as an experts implementation of Hugging Face transformers (5.0 or later).

::

    kodkod.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="kodkod")
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._functional import Biases, moe
from ._group import ExpertGroup

NAME = "kodkod"


def register(group: ExpertGroup | None = None) -> None:
    """Makes ``experts_implementation="kodkod"`` known to transformers, for this process.

    It serves experts with SwiGLU and gpt-oss's activation, as transformers stores them: Mixtral, Qwen2/3-MoE, OLMoE,
    DeepSeek-V2/V3, GLM-4, gpt-oss and others. Weights that are stored transposed or interleaved (gpt-oss) are copied in
    every call. Others get an error that names the class.

    Args:
        group: the ranks that share the experts; one rank on the CPU by default. Processes are not served: a module of
            transformers holds all experts, where a process has its own alone.
    """
    if group is not None and group.of_processes:
        raise ValueError(f"group is {group!r}: one of ExpertGroup.cpu is needed, or kodkod.nn.MoE for processes")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return _experts(self, hidden_states, top_k_index, top_k_weights, group)

    ALL_EXPERTS_FUNCTIONS.register(NAME, forward)


def _experts(experts: Any, x: Tensor, ids: Tensor, topk_weights: Tensor, group: ExpertGroup | None) -> Tensor:
    activation, limit, alpha = _activation(experts)
    gate_up, down = experts.gate_up_proj, experts.down_proj
    bias = experts.gate_up_proj_bias if experts.has_bias else None
    if experts.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if experts.is_concatenated:
        up, bias_up = None, None
    else:
        gate_up, up = gate_up[:, 0::2], gate_up[:, 1::2]
        bias, bias_up = (None, None) if bias is None else (bias[:, 0::2], bias[:, 1::2])
    if getattr(experts, "_is_expert_parallel", True):  # before 5.18 a module does not say
        # A route to another rank's expert has an id beyond this rank's.
        ids = ids.masked_fill(ids >= experts.num_experts, -1)
    return moe(
        x,
        ids,
        topk_weights,
        gate_up,
        up,
        down,
        biases=None if bias is None else Biases(bias, bias_up, experts.down_proj_bias),
        activation=activation,
        limit=limit,
        alpha=alpha,
        group=group,
    )


def _activation(experts: Any) -> tuple[str, float | None, float | None]:
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import _default_apply_gate

    kind = type(experts)
    if not experts.has_gate or getattr(experts, "has_post_expert_norm", False):
        raise NotImplementedError(f"{kind.__name__}: experts without a gate, or with a norm after them, are not served")
    if kind._apply_gate is _default_apply_gate and type(experts.act_fn) is type(ACT2FN["silu"]):
        return "swiglu", None, None
    if kind.__name__ == "GptOssExperts":
        return "swiglu_oai", float(experts.limit), float(experts.alpha)
    raise NotImplementedError(f"{kind.__name__}: its activation is not served, SwiGLU and gpt-oss's are")
