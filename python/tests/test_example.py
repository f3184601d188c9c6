"""``examples/train_moe.py`` with a tiny model."""

import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_moe.py"
STEPS = 20
TINY = f"--steps {STEPS} --layers 2 --hidden 32 --heads 2 --experts-count 4 --intermediate 32 --batch 4 --context 32"
TINY = [*TINY.split(), "--eval-every", "10", "--eval-windows", "4"]


def load():
    spec = importlib.util.spec_from_file_location("train_moe", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train_moe = load()


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Such small operations gain nothing by several, and wait long for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The results of a run with these options; equal options are run once, ``again`` apart."""
    done = {}

    def run(*options: str, again: int = 0) -> dict:
        key = (options, again)
        if key not in done:
            out = tmp_path_factory.mktemp("run")
            done[key] = {**train_moe.main([*TINY, *options, "--out", str(out)]), "out": out}
        return done[key]

    return run


@pytest.mark.parametrize(("precision", "tolerance"), [("f32", 1e-4), ("bf16", 2e-2)])
def test_kodkod_and_torch_agree(run, precision, tolerance):
    kodkod = run("--experts", "kodkod", "--precision", precision)["losses"]
    plain = run("--experts", "torch", "--precision", precision)["losses"]
    assert len(kodkod) == len(plain) == STEPS
    differences = [abs(a - b) for a, b in zip(kodkod, plain, strict=True)]
    print(f"{precision}: largest difference {max(differences):.2e} of {max(kodkod):.2f} to {min(kodkod):.2f} bits")
    assert max(differences) < tolerance
    assert kodkod[-1] < kodkod[0] - 2


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_kodkods_losses_have_the_same_bits_again(run, precision):
    options = ("--experts", "kodkod", "--precision", precision)
    one, two = run(*options), run(*options, again=1)
    assert [x.hex() for x in one["losses"]] == [x.hex() for x in two["losses"]]
    assert one["held_out"] == two["held_out"]
    other = run(*options, "--seed", "2")
    assert one["losses"] != other["losses"]


def test_what_it_writes(run):
    results = run("--experts", "kodkod", "--precision", "bf16")
    metrics = json.loads((results["out"] / "metrics.json").read_text())
    assert metrics["losses"] == results["losses"]
    assert [step for step, _ in metrics["held_out"]] == [0, 10, STEPS]
    assert metrics["tokens_per_second"] > 0
    svg = ET.parse(results["out"] / "loss.svg").getroot()
    curves = [line for line in svg.iter("{http://www.w3.org/2000/svg}polyline") if line.get("fill") == "none"]
    assert [len(line.get("points").split()) for line in curves] == [STEPS, 3]


@pytest.mark.parametrize(("processes", "expert_parallel"), [(2, False), (2, True), (4, True)])
def test_torchrun(run, tmp_path, processes, expert_parallel):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command.append(str(EXAMPLE))
    # The balancing loss is not linear in the batch: its mean over parts is not that of the whole.
    options = ("--experts", "kodkod", "--precision", "f32", "--balance", "0")
    command += [*TINY, *options, *["--expert-parallel"][: int(expert_parallel)], "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["processes"] == processes
    assert metrics["parameters"] == run(*options)["parameters"]
    differences = [abs(a - b) for a, b in zip(metrics["losses"], run(*options)["losses"], strict=True)]
    print(f"{processes} processes: largest difference {max(differences):.1e}")
    assert max(differences) < 1e-4


def test_help_and_refused_options(capsys):
    with pytest.raises(SystemExit, match="0"):
        train_moe.arguments(["--help"])
    shown = capsys.readouterr().out
    for word in ("torchrun", "examples:", "--experts-count", "bits per byte"):
        assert word in shown
    for options, message in (
        (["--top-k", "9"], "--top-k is 9: at most --experts-count, 8, is needed"),
        (["--hidden", "60"], "--hidden is 60: a multiple of 8 is needed"),
        (["--steps", "0"], "--steps is 0: 1 or more is needed"),
        *[(["--device", "cuda"], "--device cuda: torch finds no GPU here")] * (not torch.cuda.is_available()),
        (["--expert-parallel", "--experts", "torch"], "--expert-parallel with --experts torch: kodkod is needed"),
    ):
        with pytest.raises(SystemExit, match="2"):
            train_moe.arguments(options)
        assert message in capsys.readouterr().err
