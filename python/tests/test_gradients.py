"""Every gradient and option against plain PyTorch autograd in float64."""

import pytest
import torch
from reference import TOLERANCE, bits_equal, both, compare, everything, make, random_ids

import kodkod

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


def test_values_that_are_stored_negated():
    x, routes, topk_weights = torch.randn(9, 64), ids(9, 4, 2), torch.rand(9, 2)
    gate, up, down = torch.randn(4, 32, 64), torch.randn(4, 32, 64), torch.randn(4, 64, 32)
    y = kodkod.moe(torch._neg_view(x), routes, topk_weights, torch._neg_view(gate), up, down)
    assert torch.equal(y, kodkod.moe(-x, routes, topk_weights, -gate, up, down))


def grouped(*rows):
    """Experts with these numbers of rows, one route a token, in random order."""
    flat = torch.tensor([e for e, n in enumerate(rows) for _ in range(n)])
    return flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(1))].reshape(-1, 1)


def without(routes, share, seed=3):
    gone = torch.rand(routes.shape, generator=torch.Generator().manual_seed(seed)) < share
    return routes.masked_fill(gone, -1)


def twice():
    routes = ids(60, 4, 2)
    routes[:20] = 3
    step = make(routes, experts=4)
    step.topk_weights[:20] = torch.tensor([0.4, 0.6])
    return step


def odd_router_weights():
    step = make(ids(120, 4, 3), experts=4, biases=True)
    values = torch.tensor([0.0, -0.0, -0.7, 1e-40, -1e-45, 0.5, 1.5])
    choice = torch.randint(7, step.topk_weights.shape, generator=torch.Generator().manual_seed(2))
    step.topk_weights = values[choice]
    return step


def some_tokens_without_routes():
    routes = ids(200, 8, 3)
    routes[::3] = -1
    return make(routes, experts=8)


# Inputs that broke MoE layers elsewhere.
HARD = {
    "rows 162,0,2577,446,0,83": lambda: make(grouped(162, 0, 2577, 446, 0, 83), experts=6),
    "rows 162,0,2577,446,0,83 with all options": lambda: everything(grouped(162, 0, 2577, 446, 0, 83), 6),
    "all rows in one expert": lambda: make(torch.full((700, 1), 5), experts=8),
    "all routes in one expert, twice": lambda: everything(torch.zeros(300, 2, dtype=torch.int64)),
    "36 tokens": lambda: everything(ids(36, 4, 2)),
    "4095 tokens": lambda: make(ids(4095, 8, 2), experts=8, hidden=32, intermediate=32, shared=24),
    "an expert twice in a token": twice,
    "-1 in some routes": lambda: everything(without(ids(200, 8, 3), 0.3), 8),
    "-1 in all routes of some tokens": some_tokens_without_routes,
    "-1 everywhere": lambda: make(torch.full((50, 2), -1), experts=4),
    "-1 everywhere, shared experts remain": lambda: everything(torch.full((100, 2), -1)),
    "router weights 0, negative, subnormal": odd_router_weights,
    "hidden 2688, intermediate 1408": lambda: make(
        ids(24, 2, 1), experts=2, hidden=2688, intermediate=1408, shared=136
    ),
    "hidden 2880, intermediate 768": lambda: make(
        ids(24, 2, 1), experts=2, hidden=2880, intermediate=768, biases=True, activation="swiglu_oai", limit=7.0
    ),
    "hidden 136, intermediate 1856": lambda: make(ids(24, 2, 1), experts=2, hidden=136, intermediate=1856),
    "group sizes 128,130,65,1": lambda: make(grouped(128, 130, 65, 1), experts=4, biases=True),
    "top-32": lambda: make(ids(50, 64, 32), experts=64, hidden=32, intermediate=24),
    "no tokens": lambda: everything(torch.zeros(0, 2, dtype=torch.int64)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", HARD.values(), ids=HARD.keys())
def test_hard_inputs(case, dtype):
    step = case()
    got, want = both(step, dtype)
    compare(got, want, TOLERANCE[dtype])
    idle = set(range(step.weights[0].shape[0])) - set(step.ids.flatten().tolist())
    for e in idle:
        for name in ("d w_gate", "d w_up", "d w_down"):
            assert got[name][e].count_nonzero() == 0, f"{name} of expert {e}, which has no rows"
    no_route = step.ids < 0
    assert got["d topk_weights"][no_route].count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_on_neither_ranks_nor_knobs_nor_threads(dtype):
    step = everything(without(ids(401, 8, 3), 0.1), 8)
    first, _ = both(step, dtype)
    for ranks in (1, 2, 4, 8):
        for knobs in (None, kodkod.Knobs(minibatch_rows=128, ring_rows=256, saved_rows=128), kodkod.Knobs(2, 2)):
            group = kodkod.ExpertGroup.cpu(ranks, threads=1 + ranks % 3)
            bits_equal(first, both(step, dtype, group=group, knobs=knobs)[0])


def test_same_bits_100_times():
    step = everything(ids(40, 4, 2))
    first = both(step, torch.bfloat16)[0]
    for _ in range(100):
        bits_equal(first, both(step, torch.bfloat16)[0])


def test_every_element_is_written():
    """In torch's deterministic mode, memory that is not yet written holds NaN."""
    step = everything(without(ids(60, 8, 2), 0.5), 8)
    want = both(step, torch.bfloat16)[0]
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()
        bits_equal(want, both(step, torch.bfloat16)[0])
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_token_that_is_not_finite_stays_alone():
    step = make(ids(150, 8, 2), experts=8, shared=40, output_gate=True)
    clean = both(step, torch.float32)[0]
    step.x[17, 3], step.x[140, 0] = float("nan"), float("inf")
    mine = step.to(torch.float32)
    y = mine.kodkod()
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    (dx,) = torch.autograd.grad(y, [mine.x], dy)
    others = torch.ones(150, dtype=torch.bool)
    others[[17, 140]] = False
    bits_equal({"y": clean["y"][others], "dx": clean["d x"][others]}, {"y": y.detach()[others], "dx": dx[others]})
    assert not torch.isfinite(y[[17, 140]]).all(dim=1).any()


def test_gradcheck():
    """Differences of f32 outputs: a step of 2^-5 is far above their rounding; the tolerance allows for curvature."""
    step = make(ids(6, 4, 2), experts=4, hidden=8, intermediate=8, biases=True, shared=8, output_gate=True)
    step = step.to(torch.float32)
    leaves = list(step.leaves().values())

    def layer(x, topk_weights, *rest):
        biases, shared = kodkod.Biases(*rest[3:6]), kodkod.Shared(*rest[6:])
        return kodkod.moe(x, step.ids, topk_weights, *rest[:3], biases=biases, shared=shared)

    assert torch.autograd.gradcheck(layer, leaves, eps=2**-5, atol=2e-2, rtol=2e-2, nondet_tol=0.0)


def test_a_second_derivative_is_refused():
    step = make(ids(6, 4, 2), experts=4).to(torch.float32)
    (dx,) = torch.autograd.grad(step.kodkod().square().sum(), [step.x], create_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        torch.autograd.grad(dx.sum(), [step.x])
