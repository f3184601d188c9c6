"""Router, module and Hugging Face names, against transformers' own modules where that is there."""

import pytest
import torch
from reference import bits_equal

import kodkod
from kodkod.nn import MoE, Router, balance_loss


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_ties_go_to_the_lowest_id():
    router = Router(8, 6, 3)
    with torch.no_grad():
        router.weight.zero_()
    assert router(rows(5, 8)).ids.tolist() == [[0, 1, 2]] * 5


def test_weights_are_what_the_formula_says():
    x = rows(7, 16)
    for scoring in ("softmax", "sigmoid"):
        for renormalize in (True, False):
            router = Router(16, 8, 3, scoring=scoring, renormalize=renormalize, scaling=2.5)
            routed = router(x)
            logits = x.double() @ router.weight.double().t()
            scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
            best = scores.topk(3, dim=-1)
            assert torch.equal(routed.ids, best.indices)
            weights = best.values / best.values.sum(-1, keepdim=True) if renormalize else best.values
            torch.testing.assert_close(routed.weights.double(), 2.5 * weights, rtol=1e-5, atol=0)


def test_groups_limit_the_choice():
    router = Router(16, 12, 3, groups=4, top_groups=2, scoring="sigmoid", balance_bias=True)
    routed = router(rows(200, 16))
    chosen = routed.ids // 3
    assert max(len(set(token)) for token in chosen.tolist()) == 2
    totals = routed.scores.detach().unflatten(-1, (4, 3)).topk(2, dim=-1).values.sum(-1)
    allowed = totals.topk(2, dim=-1).indices
    assert all(set(c) <= set(a) for c, a in zip(chosen.tolist(), allowed.tolist(), strict=True))


def test_the_bias_brings_balance():
    torch.manual_seed(0)
    router = Router(16, 8, 2, scoring="sigmoid", balance_bias=True)
    with torch.no_grad():
        router.weight[3] += 0.3
    x = rows(2000, 16).abs()

    def worst():
        load = torch.bincount(router(x).ids.flatten(), minlength=8)
        return (load.max() / load.double().mean()).item()

    first = worst()
    router.load.zero_()
    for _ in range(300):
        router(x)
        router.update_bias(0.01)
    last = worst()
    print(f"most loaded expert over the mean: {first:.2f}, then {last:.2f}")
    assert first > 2.0
    assert last < 1.2
    before = router.load.clone()
    router.eval()(x)
    assert torch.equal(router.load, before)
    with pytest.raises(ValueError, match="balance_bias is False"):
        Router(16, 8, 2).update_bias()


def test_balance_loss():
    router = Router(16, 8, 2)
    with torch.no_grad():
        router.weight.zero_()
    routed = router(rows(50, 16))  # even scores, and all routes to experts 0 and 1
    loss = balance_loss(routed)
    assert loss.item() == pytest.approx(1.0)
    loss.backward()
    assert router.weight.grad[0].norm() > 0
    assert balance_loss(router(rows(0, 16))).item() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "relu"}, "scoring is 'relu'"),
        ({"groups": 3}, "groups is 3"),
        ({"groups": 4, "top_groups": 5}, "top_groups is 5"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "top_k is 3: 1 to 2"),
        ({"output_gate": True}, "output_gate is True"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MoE(**{"hidden": 16, "intermediate": 8, "experts": 8, "top_k": 2, **options})


def test_training_learns_and_repeats_its_bits():
    """A block fits a random function of its input; parameters after 20 steps have the same bits for 1 and 4 ranks."""

    def train(ranks):
        torch.manual_seed(0)
        block = MoE(32, 48, 8, 2, shared=16, output_gate=True, biases=True, group=kodkod.ExpertGroup.cpu(ranks))
        optimizer = torch.optim.AdamW(block.parameters(), 1e-2)
        x, target = rows(256, 32), torch.tanh(rows(256, 32) @ rows(32, 32, seed=1))
        losses = []
        for _ in range(20):
            routed = block.router(x)
            loss = (block(x, routed) - target).square().mean()
            optimizer.zero_grad()
            (loss + 0.01 * balance_loss(routed)).backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {n: p.detach() for n, p in block.named_parameters()}

    losses, parameters = train(1)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    assert losses[-1] < 0.7 * losses[0]
    bits_equal(parameters, train(4)[1])


SIZES = {"hidden_size": 32, "num_experts_per_tok": 2, "hidden_act": "silu"}
CONFIGS = {
    "mixtral": {"intermediate_size": 24, "num_local_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 4, "norm_topk_prob": True},
    "olmoe": {"intermediate_size": 24, "num_experts": 4, "norm_topk_prob": False},
    "deepseek_v3": {
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 2,
    },
    "qwen2_moe": {
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 40,
    },
}


def block_of(family, **options):
    return MoE.from_hf_config({"model_type": family, **SIZES, **CONFIGS[family]}, **options)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_state_dictionaries_go_there_and_back(family, fused):
    prefix = "model.layers.3.mlp."
    first, second = block_of(family), block_of(family)
    state = first.hf_state_dict(family, prefix=prefix, fused=fused)
    second.load_hf({**state, "model.layers.4.mlp.gate.weight": rows(1)}, family, prefix=prefix)
    bits_equal(dict(first.state_dict()), dict(second.state_dict()))
    copies = second.hf_state_dict(family, prefix=prefix, fused=fused)
    bits_equal(state, copies)
    copies[prefix + "gate.weight"].zero_()
    assert second.router.weight.count_nonzero() > 0

    untouched = {n: p.clone() for n, p in second.state_dict().items()}
    name = next(iter(reversed(state)))
    with pytest.raises(RuntimeError, match=f"missing keys: {name}"):
        second.load_hf({k: v * 0 for k, v in state.items() if k != name}, family, prefix=prefix)
    with pytest.raises(RuntimeError, match=f"unexpected keys: {prefix}gate.extra"):
        second.load_hf({**state, prefix + "gate.extra": rows(1)}, family, prefix=prefix)
    with pytest.raises(ValueError, match=rf"{name} has shape \[3\]: expected"):
        second.load_hf({**{k: v * 0 for k, v in state.items()}, name: rows(3)}, family, prefix=prefix)
    bits_equal(untouched, dict(second.state_dict()))


def test_a_family_without_a_part_is_named():
    with pytest.raises(ValueError, match="'mixtral': its blocks do not have shared experts"):
        block_of("deepseek_v3").hf_state_dict("mixtral")
    with pytest.raises(ValueError, match="family is 'llama'"):
        block_of("mixtral").hf_state_dict("llama")
    with pytest.raises(ValueError, match="model_type is 'llama'"):
        MoE.from_hf_config({"model_type": "llama"})
    with pytest.raises(ValueError, match="hidden_act is 'gelu'"):
        MoE.from_hf_config({"model_type": "mixtral", "hidden_act": "gelu"})


def theirs(family):
    """transformers' block of the same sizes, with random weights."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.AutoConfig.for_model(family, **SIZES, **CONFIGS[family])
    config._experts_implementation = "eager"
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=["x"])
    name = {"deepseek_v3": "DeepseekV3MoE"}.get(family)
    name = name or next(n for n in vars(module) if n.endswith("SparseMoeBlock"))
    block = getattr(module, name)(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5)
    return config, block


@pytest.mark.parametrize("family", CONFIGS)
def test_same_as_transformers(family):
    config, block = theirs(family)
    mine = MoE.from_hf_config(config)
    mine.load_hf(block.state_dict(), family)
    bits_equal(dict(block.state_dict()), mine.hf_state_dict(family, fused=True))
    x, y = rows(2, 30, 32).requires_grad_(), rows(2, 30, 32, seed=1).requires_grad_()
    with torch.no_grad():
        y.copy_(x)
    want, got = block(x), mine(y)
    want = want[0] if isinstance(want, tuple) else want
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    dy = rows(2, 30, 32, seed=2)
    want.backward(dy)
    got.backward(dy)
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-4, atol=1e-4)
    wanted = {n: p.grad for n, p in block.named_parameters()}
    for key, parts in mine._hf_views(family, True).items():
        if key in wanted:
            gate = torch.cat([dict_grad(mine, part) for part in parts], dim=-2)
            torch.testing.assert_close(gate, wanted[key], rtol=1e-4, atol=1e-4, msg=key)


def dict_grad(module, parameter):
    return next(p.grad for p in module.parameters() if p is parameter)
