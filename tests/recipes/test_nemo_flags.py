"""``recipes/nemo_llama3_70b`` without NeMo: what a save costs, and which flags are refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from recipes.nemo_llama3_70b.flags import make_parser, plan_of, problems, settle
from recipes.nemo_llama3_70b.parallelism import PARALLELISM
from recipes.nemo_llama3_70b.train import run
from recipes.pretrain.models import CONFIGURATIONS

CKPT = ["--ckpt-dir", "/c", "--checkpoint-interval", "10"]
LARGE = ["--model", "70B", "--num-nodes", "32", "--num-gpus", "8"]


def wrong(*arguments: str, launched_ranks: int | None = None) -> list[str]:
    args = settle(make_parser().parse_args(arguments), launched_ranks=launched_ranks)
    return problems(args, launched_ranks=launched_ranks)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    run([*arguments, "--plan"])
    rows = [re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    return {name: value for name, value in rows}


@pytest.mark.parametrize("model", PARALLELISM)
def test_every_model_can_be_planned_without_nemo(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hosts = max(1, PARALLELISM[model].ranks // 8)
    rows = printed(capsys, "--model", model, "--num-nodes", str(hosts), "--num-gpus", "8")
    assert {"parallelism", "of a rank", "of a host", "RAM disk of a host", "stall"} <= rows.keys()
    assert "measured here" in rows["copy of a save"]
    assert list(tmp_path.iterdir()) == [] and "nemo.lightning" not in sys.modules
    assert PARALLELISM.keys() == CONFIGURATIONS.keys()


def test_a_plan_of_70b_on_32_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, *LARGE, "--bandwidth", "100")
    assert rows["parallelism"] == "tensor 4, pipeline 4 (5 stages each), context 2, data 8"
    assert rows["a checkpoint"] == "988 GB, 14 bytes a parameter"
    assert (rows["of a rank"], rows["of a host"]) == ("3.86 GB", "30.9 GB")
    assert rows["RAM disk of a host"].startswith("92.6 GB")
    assert rows["copy of a save"] == "0.309 s at 100 GB/s a host (as you said)"
    half = printed(capsys, *LARGE[:2], "--num-nodes", "16", "--num-gpus", "8", "--bandwidth", "100")
    assert half["of a host"] == "61.7 GB"


def test_a_plan_on_the_cpu_is_of_float32() -> None:
    args = settle(make_parser().parse_args(["--model", "36M", "--layers", "2", "--cpu"]))
    plan = plan_of(args)
    assert plan.checkpoint_bytes == 16 * plan.parameters < 16 * plan.memory_of_rank
    assert plan.model.layers == 2


GOOD = {
    "one rank": CKPT,
    "70B": [*CKPT, *LARGE, "--global-bs", "1344", "--enable-optimized-async-ckpt"],
    "another parallelism": [*CKPT, *LARGE, "--tensor-parallel", "8", "--pipeline-parallel", "8"],
    "all that watches": [*CKPT, "--enable-fault-tolerance", "--enable-gc", "--sim-fault-desc", "random,120"],
}


@pytest.mark.parametrize("name", GOOD)
def test_combinations_that_work(name: str) -> None:
    assert wrong(*GOOD[name]) == []


WRONG: list[tuple[list[str], str]] = [
    ([], "no folder for checkpoints"),
    ([*CKPT, "--model", "70B"], "no multiple of the 32 ranks of a replica (tensor 4, pipeline 4 (5 stages each)"),
    ([*CKPT, *LARGE, "--pipeline-parallel", "3"], "80 layers cannot be divided evenly over its 3 stages"),
    ([*CKPT, *LARGE, "--tensor-parallel", "16"], "does not divide the 8 key and value heads"),
    ([*CKPT, "--virtual-pipeline", "2"], "without a pipeline"),
    ([*CKPT, "--tensor-parallel", "0"], "--tensor-parallel 0: pass 1 or more"),
    ([*CKPT, "--layers", "0"], "--layers 0: pass 1 or more"),
    ([*CKPT, "--bandwidth", "0"], "--bandwidth 0.0"),
    ([*CKPT, *LARGE, "--global-bs", "12"], "no multiple of 8 ranks"),
    ([*CKPT, *LARGE, "--seq-length", "1001"], "no multiple of twice --context-parallel 2"),
    ([*CKPT, "--local-ckpt-dir", "/l", "--local-ckpt-interval", "5"], "one folder that all hosts see"),
    ([*CKPT, "--num-gpus", "2", "--num-optimizer-replicas", "1"], "distributed optimizer divides the state"),
    ([*CKPT, "--enable-dist-ckpt"], "NeMo's own CheckpointIO stays"),
    ([*CKPT, "--profile-ckpt-interval", "10"], "only saves of this library's ModelCheckpoint can be traced"),
    (["--ckpt-dir", "gs://b/c", "--checkpoint-interval", "5"], "which AutoResume cannot list"),
]


@pytest.mark.parametrize(("arguments", "why"), WRONG, ids=[" ".join(row[0]) for row in WRONG])
def test_combinations_that_do_not_are_refused_with_the_reason(arguments: list[str], why: str) -> None:
    assert any(why in sentence for sentence in wrong(*arguments)), wrong(*arguments)


def test_the_number_of_hosts_is_that_of_the_launcher_unless_it_is_said() -> None:
    flags = [*CKPT, "--model", "70B", "--num-gpus", "8", "--global-bs", "1344"]
    assert wrong(*flags, launched_ranks=224) == []
    assert "has started 224 ranks" in wrong(*flags, "--num-nodes", "32", launched_ranks=224)[0]
