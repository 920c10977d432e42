"""The launcher's lines in the event log, of a real job, and what the report makes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from resiliency.events import EventKind
from resiliency.goodput.ledger import account
from resiliency.goodput.start_parts import StartPart
from resiliency.goodput.taxonomy import Bucket
from resiliency.runtime import start_times
from resiliency.runtime.job_log import JobLog
from resiliency.telemetry.reader import read_logs
from tests.launch.launching import wait_for

pytestmark = pytest.mark.timeout(120)

TRAINING = """
    import os, sys, time
    from pathlib import Path
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader
    from resiliency import ModelCheckpoint

    folder = Path(sys.argv[1])

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)
        def training_step(self, batch, batch_idx):
            return self.layer(batch).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Waits(Callback):
        def on_train_batch_end(self, trainer, *_):
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and trainer.global_step == 12:
                (folder / f"pid-{trainer.global_rank}.new").write_text(str(os.getpid()))
                (folder / f"pid-{trainer.global_rank}.new").rename(folder / f"pid-{trainer.global_rank}")
                time.sleep(60)

    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=30, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder / "checkpoints", filename="{step}", every_n_train_steps=5), Waits()],
    )
    trainer.fit(Model(), DataLoader(torch.randn(256, 8), batch_size=4))
"""


def test_a_death_is_named_and_the_restart_is_split(launch: Any, tmp_path: Path) -> None:
    before = time.time()
    flags = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 1)
    job = launch(TRAINING, *flags, arguments=[tmp_path])
    pids = [int(wait_for(tmp_path / f"pid-{rank}")) for rank in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    assert job.wait() == 0, job.text

    folder = tmp_path / "checkpoints" / ".resiliency" / "default" / "events"
    (log,) = folder.glob("launcher-*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event_type"] for line in lines] == [
        EventKind.LAUNCHER_STARTED,
        EventKind.RANKS_STARTED,
        EventKind.WORKER_LOST,
        EventKind.RANKS_STARTED,
        EventKind.LAUNCHER_ENDED,
    ]
    assert (lines[2]["worker"], lines[2]["signal"], lines[2]["attempt"]) == (1, int(signal.SIGKILL), 1)
    assert (lines[4]["attempt"], lines[4]["job_name"]) == (2, "default")

    ledger = account(read_logs([str(folder)]).collector.runs["default"])
    began = datetime.fromisoformat(lines[0]["timestamp"]).timestamp() - lines[0]["since_process_s"]
    assert before - 1 < ledger.start == pytest.approx(began, abs=1e-3)  # with the launcher, before any rank
    assert ledger.timings[0].outcome == "failed" and ledger.timings[0].noticed is not None
    parts = ledger.start_parts(Bucket.RESTART)
    assert sum(wall for wall, _ in parts.values()) == ledger.wall[Bucket.RESTART]
    # One rank loads, both train; what is not split is less than a hundredth.
    assert set(StartPart) - {StartPart.OTHER, StartPart.SCRIPT} <= set(parts), parts  # imports and script are one
    assert sum(parts.get(StartPart.OTHER, (0, 0))) <= 0.01 * sum(map(sum, parts.values())), parts
    assert not any("was noticed" in note for note in ledger.notes), ledger.notes


def test_what_happens_before_a_rank_tells_where_the_log_is_is_kept(tmp_path: Path) -> None:
    log = JobLog()
    log.emit(EventKind.LAUNCHER_STARTED)
    log.emit(EventKind.RANKS_STARTED, count=2)
    log.is_at(str(tmp_path / "a"), run="mine", attempt=4)
    log.emit(EventKind.WORKER_LOST, worker=1)
    log.is_at(str(tmp_path / "b"), run="mine", attempt=5)
    log.emit(EventKind.LAUNCHER_ENDED)
    log.close()
    log.close()
    found = {
        name: [json.loads(line) for path in (tmp_path / name).iterdir() for line in path.read_text().splitlines()]
        for name in "ab"
    }
    assert [(line["event_type"], line["attempt"]) for line in found["a"]] == [
        (EventKind.LAUNCHER_STARTED, 4),
        (EventKind.RANKS_STARTED, 4),
        (EventKind.WORKER_LOST, 4),
    ]
    assert [(line["event_type"], line["attempt"]) for line in found["b"]] == [(EventKind.LAUNCHER_ENDED, 5)]
    assert all(line["job_name"] == "mine" and line["rank"] == -1 for lines in found.values() for line in lines)


LAUNCHER = """
import atexit, sys, time
atexit.register(time.sleep, 0.2)  # of torch, say: registered before
from resiliency.events import EventKind
from resiliency.runtime.job_log import JobLog

log = JobLog()
log.emit(EventKind.LAUNCHER_STARTED)
log.is_at(sys.argv[1], run="mine", attempt=1)
atexit.register(time.sleep, 0.2)  # registered later, so called before ours
log.emit(EventKind.LAUNCHER_ENDED)
log.close()
time.sleep(0.2)
"""


def test_the_launchers_last_line_is_as_late_as_python_allows(tmp_path: Path) -> None:
    began = time.time()
    subprocess.run([sys.executable, "-c", LAUNCHER, tmp_path], check=True, timeout=60)
    took = time.time() - began
    (log,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = [line["event_type"] for line in lines]
    assert kinds == [EventKind.LAUNCHER_STARTED, EventKind.LAUNCHER_ENDED, EventKind.PROCESS_ENDED]
    assert lines[2]["monotonic_s"] - lines[1]["monotonic_s"] >= 0.4
    ledger = account(read_logs([tmp_path]).collector.runs["mine"])
    # What is left is what was registered before, and the interpreter's own end.
    ended = datetime.fromisoformat(lines[1]["timestamp"]).timestamp()
    assert ended + 0.4 <= ledger.end < began + took


def test_times_are_told_once_an_attempt_and_only_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    start_times.script_begins()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert start_times.start_fields() == {}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    start_times.callback_made()
    told = start_times.start_fields()
    assert 0 <= told["since_callback_s"] <= told["since_process_s"] < 60
    assert start_times.start_fields() == {}, "a second fit of the same process is no start"
    start_times.script_begins()
    again = start_times.start_fields()
    assert "since_callback_s" not in again, "the callback is of the attempt before"
    assert again["since_process_s"] <= told["since_process_s"] + 60


def test_the_process_group_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    def init_process_group(backend: str) -> str:
        time.sleep(0.05)
        return backend

    torch = types.ModuleType("torch.distributed")
    torch.init_process_group = init_process_group  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed", torch)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    start_times.script_begins()
    start_times.callback_made()
    start_times.callback_made()
    assert torch.init_process_group("gloo") == "gloo"
    assert torch.init_process_group is init_process_group, "what the script has is torch's again"
    told = start_times.start_fields()
    assert 0.05 <= told["group_s"] <= told["since_group_s"] < told["since_process_s"]


def test_a_rank_tells_the_files_of_its_output(tmp_path: Path) -> None:
    script = "from resiliency.runtime import start_times; print(start_times.start_fields().get('logs'), flush=True)"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "job"}
    with open(tmp_path / "out.log", "w") as out:
        command = [sys.executable, "-c", script]
        subprocess.run(command, stdout=out, stderr=subprocess.PIPE, env=environment, check=True, timeout=60)
    assert (tmp_path / "out.log").read_text().strip() == f"['{tmp_path}/out.log']"


def test_a_new_process_tells_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr(start_times, "_times", start_times._Times(pid=os.getpid()))
    start_times.callback_made()
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    told = start_times.start_fields()
    assert 0 <= told["imports_s"] <= told["since_process_s"] < uptime
