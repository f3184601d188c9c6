"""``dump_step``: the file, and what the command makes of it where ``KODKOD_BIN`` names one."""

import json
import os
import subprocess

import pytest
import torch
from reference import everything, gradients, make, random_ids

import kodkod


def ids(tokens=40):
    return random_ids(tokens, 4, 2, torch.Generator().manual_seed(0))


def read(path):
    """The header, and a reader of tensors."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}

    def tensor(name):
        entry = header[name]
        begin, end = entry["data_offsets"]
        raw = bytearray(data[8 + length + begin : 8 + length + end])
        if not raw:
            return torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]])
        return torch.frombuffer(raw, dtype=dtypes[entry["dtype"]]).reshape(entry["shape"])

    return header, tensor


def test_the_file_has_every_tensor(tmp_path):
    step = everything(ids().reshape(4, 10, 2)).to(torch.bfloat16)
    fused = torch.cat(step.weights[:2], dim=1)
    path = tmp_path / "step.safetensors"
    kodkod.dump_step(
        path, step.x, step.ids.int(), step.topk_weights, fused, None, list(step.weights[2]), dy=step.x, **step.options()
    )
    header, tensor = read(path)
    assert header["__metadata__"] == {"activation": "swiglu_oai", "limit": "1.5", "alpha": "1.702"}
    assert torch.equal(tensor("x"), step.x.detach().reshape(40, 64))
    assert torch.equal(tensor("dy"), tensor("x"))
    assert torch.equal(tensor("topk_ids"), step.ids.reshape(40, 2).int())
    for name, value in list(step.leaves().items())[1:]:
        assert torch.equal(tensor(name), value.detach().reshape(tensor(name).shape)), name
    assert tensor("shared_output_gate").shape == (1, 64)
    assert os.listdir(tmp_path) == ["step.safetensors"], "a temporary file was left"


def test_a_bad_argument_leaves_the_old_file(tmp_path):
    path = tmp_path / "step.safetensors"
    path.write_text("old")
    step = make(ids(), experts=4)
    with pytest.raises(ValueError, match="dy has shape"):
        kodkod.dump_step(path, step.x, step.ids, step.topk_weights, *step.weights, dy=step.x[1:])
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["step.safetensors"]


def test_other_dtypes_become_float32(tmp_path):
    step = make(ids(0), experts=4).to(torch.float64)
    kodkod.dump_step(tmp_path / "s", step.x, step.ids, step.topk_weights, *step.weights)
    header, _ = read(tmp_path / "s")
    assert {v["dtype"] for k, v in header.items() if k not in ("topk_ids", "__metadata__")} == {"F32"}


@pytest.mark.skipif("KODKOD_BIN" not in os.environ, reason="KODKOD_BIN names no kodkod command")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "everything"])
def test_replay_gives_the_same_bits(tmp_path, kind, dtype):
    step = (make(ids(), experts=4) if kind == "plain" else everything(ids())).to(dtype)
    dy = torch.randn(step.x.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    file, out = tmp_path / "step.safetensors", tmp_path / "out.safetensors"
    kodkod.dump_step(file, step.x, step.ids, step.topk_weights, *step.weights, dy=dy, **step.options())
    command = [os.environ["KODKOD_BIN"], "replay", str(file), "--check", "--ranks", "2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    header, tensor = read(out)
    got = gradients(step, step.kodkod(), dy)
    names = {"d x": "dx", "d topk_weights": "d_topk_weights"}
    names |= {f"d {w}": f"d{w}" for w in ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")}
    compared = 0
    for name, value in got.items():
        theirs = names.get(name, name.replace("d shared", "d_shared"))
        assert theirs in header, f"{theirs} is not among {list(header)}"
        mine = value.to(tensor(theirs).dtype).reshape(tensor(theirs).shape)
        assert torch.equal(mine, tensor(theirs).to(value.dtype).to(mine.dtype)), name
        compared += 1
    print(f"{compared} tensors have the same bits")
