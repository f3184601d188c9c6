"""A deterministic, fused mixture-of-experts (MoE) training layer with expert parallelism."""

from ._functional import Biases, Knobs, Shared, StalledError, moe
from ._group import ExpertGroup

__all__ = ["Biases", "ExpertGroup", "Knobs", "Shared", "StalledError", "moe"]
