"""Every gradient and option against plain PyTorch autograd in float64."""

import pytest
import torch
from reference import TOLERANCE, both, compare, make, random_ids

DTYPES = [torch.float32, torch.bfloat16]


def ids(tokens, experts, top_k, seed=0):
    return random_ids(tokens, experts, top_k, torch.Generator().manual_seed(seed))


OPTIONS = {
    "plain": {},
    "biases": {"biases": True},
    "shared": {"shared": 40},
    "output gate": {"shared": 40, "output_gate": True},
    "limit": {"limit": 0.8},
    "gpt-oss": {"activation": "swiglu_oai", "biases": True, "limit": 1.0},
    "alpha without a limit": {"activation": "swiglu_oai", "alpha": 0.5},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options, dtype):
    step = make(ids(150, 4, 2), experts=4, **options)
    compare(*both(step, dtype), TOLERANCE[dtype])
