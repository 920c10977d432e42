"""Real NeMo with its checkpoints through the engine: NeMo's own ``ModelCheckpoint`` and ``AutoResume`` on top."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from resiliency.runtime.exit_codes import PREEMPTED
from tests.conftest import NEMO_PYTHON
from tests.ports import free_port

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("nemo_job.py")
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Run:
    """What the processes of a run told.

    Attributes:
        losses: global step -> its loss.
        resumed: folder that the run resumed; "": none.
        start: first global step.
    """

    losses: dict[int, float]
    resumed: str
    start: int
    said: str


def start(
    folder: Path, *, ranks: int = 1, env: dict[str, str] | None = None, **options: Any
) -> list[subprocess.Popen[str]]:
    """Starts the ranks of a run, each in a process group of its own."""
    placed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    common = {"GROUP_RANK": "0", "NODE_RANK": "0", "TORCHELASTIC_RUN_ID": "nemo", "TORCHELASTIC_RESTART_COUNT": "0"}
    command = [
        str(NEMO_PYTHON),
        "-W",
        "ignore",
        str(JOB),
        json.dumps({"out": str(folder), **options}),
    ]
    own = [
        {**placed, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)} for rank in range(ranks)
    ]
    return [started(command, {**common, **mine, **(env or {})}) for mine in own]


def started(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What the processes print until they end, or are ended."""
    try:
        return [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def fit(folder: Path, *, ranks: int = 1, **options: Any) -> Run:
    processes = start(folder, ranks=ranks, **options)
    said = finish(processes)
    assert [process.returncode for process in processes] == [0] * ranks, said[0][-6000:]
    lines = told(said[0])
    return Run(
        losses={line["step"]: line["loss"] for line in lines if "step" in line},
        resumed=next(line["resumes"] for line in lines if "resumes" in line),
        start=next(line["start"] for line in lines if "start" in line),
        said="\n".join(said),
    )


def checkpoints(folder: Path) -> dict[str, list[str]]:
    """Name of each checkpoint -> its files and folders; of other things in NeMo's folder the name alone."""
    return {
        path.name: sorted(os.listdir(path)) if path.is_dir() else []
        for path in (folder / "run" / "checkpoints").iterdir()
        if path.name != ".resiliency"
    }


def steps_kept(folder: Path) -> int:
    """Number of steps whose bytes are on the disk."""
    return len(list((folder / "run" / "checkpoints").glob(".resiliency/*/steps/*")))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, Run]:
    """NeMo alone: four steps, and four more."""
    folder = tmp_path_factory.mktemp("stock")
    return folder, fit(folder, ours=False), fit(folder, ours=False, steps=8)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_is_that_of_nemo_alone_and_so_is_its_resume(
    tmp_path: Path, stock: tuple[Path, Run, Run], asynchronous: bool
) -> None:
    folder, first, second = stock
    assert fit(tmp_path, asynchronous=asynchronous).losses == first.losses
    copy = tmp_path.with_name(tmp_path.name + "-copy")
    shutil.copytree(tmp_path, copy)
    resumed = fit(tmp_path, asynchronous=asynchronous, steps=8)
    assert resumed.resumed.endswith("-last/weights") and resumed.start == 4
    assert resumed.losses == second.losses
    assert checkpoints(tmp_path) == checkpoints(folder)
    assert steps_kept(tmp_path) == len(checkpoints(tmp_path)), "what NeMo deletes takes no space"
    # The same folder without this library.
    assert fit(copy, ours=False, steps=8).losses == second.losses


def test_what_nemo_alone_has_written_is_resumed(tmp_path: Path, stock: tuple[Path, Run, Run]) -> None:
    fit(tmp_path, ours=False)
    assert fit(tmp_path, steps=8).losses == stock[2].losses


SHAPES: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "tensor parallel": {"tensor_parallel": 2},
    "pipeline parallel": {"pipeline_parallel": 2},
    "distributed optimizer": {"distributed_optimizer": True, "overlap": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_resume_as_if_nothing_had_happened(tmp_path: Path, shape: str) -> None:
    straight = fit(tmp_path / "straight", ranks=2, steps=8, ours=False, **SHAPES[shape])
    first = fit(tmp_path / "ours", ranks=2, **SHAPES[shape])
    if shape != "pipeline parallel":
        shutil.copytree(tmp_path / "ours", tmp_path / "one")
    second = fit(tmp_path / "ours", ranks=2, steps=8, **SHAPES[shape])
    assert second.start == 4
    assert {**first.losses, **second.losses} == straight.losses
    if shape == "tensor parallel":
        one = fit(tmp_path / "one", steps=8)
        assert one.start == 4 and one.losses == pytest.approx(
            {step: straight.losses[step] for step in one.losses}, abs=1e-4
        )
    elif shape != "pipeline parallel":
        assert fit(tmp_path / "one", steps=8, **SHAPES[shape]).start == 4


def test_damage_is_named(tmp_path: Path) -> None:
    fit(tmp_path)
    (shard,) = (tmp_path / "run" / "checkpoints").glob("*-last/weights/__0_0.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0x21
    shard.write_bytes(data)
    (said,) = finish(start(tmp_path, steps=8))
    assert f"CorruptShard: {shard}: bytes" in said
    assert '"start"' not in said


def test_what_cannot_be_resumed_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    fit(tmp_path)
    (weights,) = (tmp_path / "run" / "checkpoints").glob("*-last/weights")
    (of_another_model,) = finish(start(tmp_path, steps=8, hidden=128))
    assert "Global shape mismatch" in of_another_model and "for key" in of_another_model, of_another_model[-3000:]
    for path in weights.iterdir():
        path.unlink()
    (of_nothing,) = finish(start(tmp_path, steps=8))
    assert f"{weights} is not a distributed checkpoint" in of_nothing, of_nothing[-3000:]
    assert '"start"' not in of_another_model + of_nothing


def test_a_rank_that_is_killed_is_started_again_and_the_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    straight = fit(tmp_path / "straight", ranks=2, steps=8, ours=False)
    launcher = [str(NEMO_PYTHON), "-W", "ignore", "-c", "from resiliency.cli.main import main; main()", "run"]
    flags = [
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--preload",
        "nemo.collections.llm,resiliency.plugins.nemo",
    ]
    options = {"out": str(tmp_path / "ours"), "steps": 8, "kill_at": 6, "finalizes": True}
    (said,) = finish([started([*launcher, *flags, str(JOB), json.dumps(options)], {})])
    assert "fresh interpreters" not in said, "the ranks are forked from a process that has imported NeMo"
    lines = told(said)
    assert [line["start"] for line in lines if line.get("rank") == 0 and "start" in line] in ([0, 4], [0, 6]), said[
        -3000:
    ]
    assert {line["step"]: line["loss"] for line in lines if "step" in line} == straight.losses
    assert any(line.get("ended") == 8 for line in lines)


def test_all_callbacks_take_part_in_a_run_whose_rank_is_killed(tmp_path: Path) -> None:
    shape = {**SHAPES["distributed optimizer"], "steps": 8}
    straight = fit(tmp_path / "straight", ranks=2, ours=False, **shape)
    ours = tmp_path / "ours"
    resiliency = [str(NEMO_PYTHON), "-W", "ignore", "-c", "from resiliency.cli.main import main; main()"]
    launched = [*resiliency, "run", "--nproc-per-node", "2", "--max-restarts", "1"]
    options = {"out": str(ours), "kill_at": 6, "finalizes": True, "callbacks": True, **shape}
    events = {"RESILIENCY_EVENTS_DIR": str(ours / "events")}
    (said,) = finish([started([*launched, str(JOB), json.dumps(options)], events)])
    lines = told(said)
    assert {line["step"]: line["loss"] for line in lines if "step" in line} == straight.losses, said[-3000:]
    starts = [line["start"] for line in lines if line.get("rank") == 0 and "start" in line]
    assert starts in ([0, 4], [0, 6])
    assert "nobody receives this job's heartbeats" not in said
    assert "there is no save to trace" in said, "ProfileCheckpointCallback knows only this library's ModelCheckpoint"
    report = [*resiliency, "goodput", "report", "--log", str(ours / "events"), "--json"]
    (reported,) = finish([started(report, {})])
    (run,) = json.loads(reported[reported.index("{\n") : reported.rindex("}") + 1])["runs"]
    assert len(run["attempts"]) == 2 and run["goodput"] > 0
    seconds = {one["bucket"]: one["wall_s"] for one in run["buckets"]}
    assert min(seconds["checkpoint_stall"], seconds["restore"], seconds["lost_work"]) > 0
    assert (run["steps"]["kept"], run["steps"]["thrown_away"]) == (8, 6 - starts[1]) and not run["quality"]


def test_a_job_that_is_to_go_saves_what_nemo_resumes(tmp_path: Path) -> None:
    straight = fit(tmp_path / "straight", ours=False, steps=8)
    ours = tmp_path / "ours"
    (process,) = start(ours, steps=8, callbacks=True, kill_at=5, kill_signal=int(signal.SIGTERM))
    (said,) = finish([process])
    assert process.returncode == PREEMPTED and "Preempted: step 6 is saved as" in said, said[-3000:]
    assert checkpoints(ours).keys() >= {"step=5-last"} and not list(ours.glob("run/checkpoints/*-unfinished"))
    resumed = fit(ours, steps=8, callbacks=True)
    assert resumed.start == 6 and resumed.resumed.endswith("step=5-last/weights")
    assert resumed.losses == {step: straight.losses[step] for step in (7, 8)}


def test_our_model_checkpoint_in_nemo_says_to_keep_nemos(tmp_path: Path) -> None:
    run = fit(tmp_path, ours=False, checkpoint_of="resiliency")
    assert run.said.count("Pass NeMo's own ModelCheckpoint in its place") == 1
    assert max(run.losses) == 4


def told(said: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r"^NEMO (\{.*?\})$", said, re.MULTILINE)]


@pytest.mark.parametrize("point", ["save.fill", "save.sealed"])
def test_a_run_that_is_killed_in_a_save_resumes_the_checkpoint_before(tmp_path: Path, point: str) -> None:
    options = {"save_last": "link", "finalizes": True}
    (said,) = finish(start(tmp_path, steps=8, **options, env={"RESILIENCY_FAULTS": f"{point}:kill@3"}))
    killed = {line["step"]: line["loss"] for line in told(said) if "step" in line}
    assert max(killed) == 6
    resumed = fit(tmp_path, steps=8, save_last="link")
    assert resumed.start == 4
    assert resumed.losses.items() >= {step: loss for step, loss in killed.items() if step > 4}.items()
    assert not list((tmp_path / "run" / "checkpoints").glob("*-unfinished"))


@pytest.mark.parametrize("point", ["agent.record.write", "agent.manifest.write", "agent.name.write"])
def test_training_goes_on_when_the_agent_is_killed_in_a_save(tmp_path: Path, point: str) -> None:
    (said,) = finish(start(tmp_path, steps=8, save_last="link", env={"RESILIENCY_FAULTS": f"{point}:kill@2"}))
    assert any(line.get("ended") == 8 for line in told(said)), said[-3000:]
    assert fit(tmp_path, steps=10, save_last="link").start == 8
