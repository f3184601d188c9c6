"""A deterministic, fused mixture-of-experts (MoE) training layer with expert parallelism.

:func:`moe` is the layer as a function, :class:`nn.MoE` a module with its router, :func:`hf.register` the layer for
Hugging Face transformers, :func:`dump_step` a step as a file for ``kodkod replay``, :mod:`cuda` what is held on GPUs.
"""

from . import cuda, hf, nn
from ._functional import Biases, Knobs, Shared, StalledError, moe
from ._group import ExpertGroup
from ._step import dump_step

__all__ = ["Biases", "ExpertGroup", "Knobs", "Shared", "StalledError", "cuda", "dump_step", "hf", "moe", "nn"]
