"""``experts_implementation="kodkod"`` in transformers: small models of several families against ``eager``."""

import pytest
import torch

import kodkod

transformers = pytest.importorskip("transformers", minversion="5.0")
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
MODELS = {
    "mixtral": {"intermediate_size": 24, "num_local_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 4, "head_dim": 8},
    "olmoe": {"intermediate_size": 24, "num_experts": 4},
    "gpt_oss": {"intermediate_size": 24, "num_local_experts": 4, "head_dim": 8},
}


def model(family, implementation):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **COMMON, **MODELS[family])
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)


def train(family, implementation, steps=4):
    net = model(family, implementation)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = net(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", MODELS)
def test_losses_are_those_of_eager(family):
    kodkod.hf.register()
    eager, mine = train(family, "eager"), train(family, "kodkod")
    print(f"eager {eager}\nkodkod {mine}")
    assert mine == pytest.approx(eager, rel=1e-4)
    assert mine == train(family, "kodkod"), "repeated, the losses have other bits"


def test_an_activation_that_is_not_served_names_its_class():
    kodkod.hf.register()
    config = transformers.AutoConfig.for_model("mixtral", **COMMON, **MODELS["mixtral"], hidden_act="gelu")
    net = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="kodkod")
    with pytest.raises(NotImplementedError, match="MixtralExperts: its activation"):
        net(input_ids=torch.zeros(1, 3, dtype=torch.int64))
