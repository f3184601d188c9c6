"""The PyTorch peer over two ranks gives what one process gives that knows no ranks: outputs and all gradients.

    python -m pytest -s bench/test_torch_moe_ranks.py        # torch, no GPU
"""

import multiprocessing
import pathlib
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import compare_two  # noqa: E402
import torch_moe_ranks as peer  # noqa: E402

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 48, 40, 6, 3, 37


def inputs(world, dtype, lonely):
    """Of all ranks, in f64 but exact in `dtype`: leaves by name, ids, dy. `lonely`: all rows go to one rank's experts."""
    generator = torch.Generator().manual_seed(5)

    def normal(*size, scale=1.0):
        return (torch.randn(*size, generator=generator) * scale).to(dtype).double()

    logits = torch.randn(world * TOKENS, EXPERTS, generator=generator)
    if lonely:
        logits[:, EXPERTS // 2 :] -= 100
    top, ids = logits.topk(TOP_K)
    leaves = {
        "x": normal(world * TOKENS, HIDDEN),
        "router_weights": top.softmax(-1).to(dtype).double(),
        "gate": normal(EXPERTS, INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
        "up": normal(EXPERTS, INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
        "down": normal(EXPERTS, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5),
        "shared_gate": normal(INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
        "shared_up": normal(INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
        "shared_down": normal(HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5),
    }
    return leaves, ids, normal(world * TOKENS, HIDDEN)


def reference(world, dtype, lonely):
    """A loop over tokens and their experts, in f64."""
    leaves, ids, dy = inputs(world, dtype, lonely)
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}

    def expert(x, gate, up, down):
        return down @ (F.silu(gate @ x) * (up @ x))

    rows = []
    for token, x in enumerate(leaves["x"]):
        y = expert(x, *(leaves[f"shared_{name}"] for name in ("gate", "up", "down")))
        for k, e in enumerate(ids[token].tolist()):
            weights = (leaves[name][e] for name in ("gate", "up", "down"))
            y = y + leaves["router_weights"][token, k] * expert(x, *weights)
        rows.append(y)
    y = torch.stack(rows)
    y.backward(dy)
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def rank_of(rank, world, dtype, lonely, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    leaves, ids, dy = inputs(world, dtype, lonely)
    tokens, experts = slice(rank * TOKENS, (rank + 1) * TOKENS), slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    part = {"x": tokens, "router_weights": tokens, "gate": experts, "up": experts, "down": experts}
    mine = {n: leaf[part.get(n, slice(None))].to(dtype).requires_grad_() for n, leaf in leaves.items()}
    names = ("gate", "up", "down")
    y = peer.moe(mine["x"], ids[tokens], mine["router_weights"], *(mine[n] for n in names), tuple(mine[f"shared_{n}"] for n in names))
    y.backward(dy[tokens].to(dtype))
    for name in names:
        dist.all_reduce(mine[f"shared_{name}"].grad)
    torch.save({"y": y.detach()} | {name: leaf.grad for name, leaf in mine.items()}, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.mark.parametrize("lonely", [False, True])
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_two_ranks_give_what_one_process_gives(dtype, allowed, lonely):
    world = 2
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=rank_of, args=(r, world, dtype, lonely, folder)) for r in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            process.kill()
        got = [torch.load(f"{folder}/{rank}") for rank in range(world)]
    for name, expected in reference(world, dtype, lonely).items():
        parts = [g[name].double() for g in got]
        if name.startswith("shared"):
            assert torch.equal(parts[0], parts[1]), f"{name} is summed over the ranks"
            actual = parts[0]
        else:
            actual = torch.cat(parts)
        error = ((actual - expected).norm() / expected.norm()).item()
        print(f"{dtype}, lonely {lonely}, {name} {tuple(actual.shape)}: relative error {error:.2e}, allowed {allowed}")
        assert actual.shape == expected.shape and error < allowed, name


def test_a_rank_that_fails_ends_the_measurement():
    with pytest.raises(RuntimeError, match="3 experts"), peer.Ranks(2, "cpu") as ranks:
        assert ranks.answers() == ["cpu", "cpu"]
        times = ranks.measure((64, 32, 4, 2, 1), 20, 2, 1)
        print(times)
        assert set(times) == {"fwd", "fwd+bwd"} and 0 < times["fwd"]
        ranks.measure((64, 32, 3, 2, 0), 20, 2, 1)


def test_ratios_of_a_table():
    ms = {("torch", "a", "fwd"): [3.0, 5.0, 4.0], ("kodkod", "a", "fwd"): [2.0], ("kodkod-1", "a", "fwd"): [1.9],
          ("torch", "a", "fwd+bwd"): [9.0], ("kodkod", "a", "fwd+bwd"): [10.0], ("kodkod", "b", "fwd"): [7.0]}
    rows = compare_two.table(ms, {"a": (64, 32, 4, 2, 0), "b": (64, 32, 4, 2, 0)}, 8)
    for row in rows:
        print(row)
    first, second, third = rows
    assert (first["kodkod_is_faster_by"], first["per_gpu_of_one"], first["met"]) == (2.0, 0.95, True)
    assert abs(first["kodkod_tflops_per_gpu"] - 6 * 8 * 2 * 64 * 32 / 2e9) < 1e-12
    assert (second["kodkod_is_faster_by"], second["per_gpu_of_one"], second["met"]) == (0.9, None, False)
    assert third["shape"] == "b" and third["kodkod_is_faster_by"] is None and third["met"] is None
