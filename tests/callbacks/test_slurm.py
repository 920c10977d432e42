"""Under SLURM Lightning saves a checkpoint of its own before a requeue, and takes it at every later start by itself. Here
the newest is taken, and what Lightning saves there is followed by a step of the run."""

from __future__ import annotations

import importlib
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.callbacks.checkpointing.resume import Process
from tests.callbacks.harness import EITHER, differences, loader, make_net, make_trainer, ours, stock, weights
from tests.callbacks.test_ddp import run
from tests.zygote import Zygote

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]
PL = "lightning.pytorch"
EVERY: dict[str, Any] = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "1",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "localhost",
}


class Cluster:
    """Starts a process, as SLURM would, and notes what is asked of ``scontrol``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch = monkeypatch
        self.asked = folder / "asked"
        scontrol = folder / "bin" / "scontrol"
        scontrol.parent.mkdir()
        scontrol.write_text(f'#!/bin/sh\necho "$@" >> {self.asked}\n')
        scontrol.chmod(0o755)
        self.env = SLURM | {"PATH": f"{scontrol.parent}:{os.environ['PATH']}"}

    def starts(self, **env: str) -> None:
        self._monkeypatch.setattr(Process, "_trained_in", None)
        self._monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
        for name, value in (self.env | env).items():
            self._monkeypatch.setenv(name, value)

    def requeues(self) -> None:
        self.starts(SLURM_RESTART_COUNT="1")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    found = Cluster(monkeypatch, tmp_path)
    found.starts()
    return found


def at_step(namespace: str, step: int, action: Any) -> Any:
    """A callback that calls ``action(trainer)`` in the batch after that step."""
    callback = importlib.import_module(namespace).Callback()

    def on_train_batch_start(trainer: Any, *args: Any) -> None:
        if trainer.global_step == step:
            action(trainer)

    callback.on_train_batch_start = on_train_batch_start
    return callback


def fit(
    namespace: str,
    root: Path,
    *callbacks: Any,
    max_steps: int,
    net: Any = None,
    checkpoint: Any = None,
    ckpt_path: Any = None,
    **arguments: Any,
) -> Any:
    """Trains with dropout; the checkpoints are in ``root/c``. Returns the module."""
    checkpoint = checkpoint or ours(namespace, root / "c", **(EVERY | arguments))
    trainer = make_trainer(namespace, [*callbacks, checkpoint], root=root, max_steps=max_steps, max_epochs=-1)
    net = net or make_net(namespace, dropout=0.3)
    torch.manual_seed(3)
    trainer.fit(net, loader(shuffle=True), ckpt_path=ckpt_path)
    return net


class Killed(Exception):
    pass


def kill(trainer: Any) -> None:
    raise Killed


def save_own(trainer: Any) -> None:
    """As Lightning does before a requeue."""
    trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "holds checkpoints of" in text or text.startswith("Resuming from")]


@pytest.mark.parametrize("auto_resume", [None, True])
@pytest.mark.parametrize("namespace", EITHER)
def test_a_later_step_of_the_run_wins_over_what_lightning_has_saved(
    namespace: str, auto_resume: bool | None, tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    straight = weights(fit(namespace, tmp_path / "straight", max_steps=8))
    fit(namespace, tmp_path, at_step(namespace, 3, save_own), max_steps=6)
    cluster.requeues()
    caplog.set_level(logging.INFO)
    net = fit(namespace, tmp_path, max_steps=8, auto_resume=auto_resume)
    assert net.ran == 2
    assert differences(straight, weights(net)) == []
    (line,) = told(caplog)
    assert line.startswith("Resuming from step 6") and "hpc_ckpt_1.ckpt" in line and "auto_resume=False" in line


@pytest.mark.parametrize("namespace", EITHER)
def test_what_lightning_has_saved_wins_when_it_is_newer(
    namespace: str, tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Killed):
        fit(namespace, tmp_path, at_step(namespace, 3, save_own), at_step(namespace, 3, kill), max_steps=4)
    cluster.requeues()
    caplog.set_level(logging.INFO)
    net = fit(namespace, tmp_path, max_steps=8)
    assert net.ran == 5
    (line,) = told(caplog)
    assert f"{tmp_path / 'hpc_ckpt_1.ckpt'} (step 3)" in line and "newer than step 2" in line
    cluster.requeues()  # and what follows it is the newest from then on
    assert fit(namespace, tmp_path, max_steps=9).ran == 1


@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.parametrize(
    ("how", "arguments"),
    [
        ("told not to resume", {"auto_resume": False}),
        ("another job", {}),
        ("the file is named", {"ckpt_path": "hpc_ckpt_1.ckpt"}),
        ("the word is named", {"ckpt_path": "hpc", "auto_resume": True}),
    ],
)
def test_otherwise_it_is_as_with_the_stock_class(
    namespace: str,
    how: str,
    arguments: dict[str, Any],
    tmp_path: Path,
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lightning takes its own file at each start, named or not."""
    fit(namespace, tmp_path, at_step(namespace, 3, save_own), max_steps=6)
    cluster.starts(SLURM_JOB_ID="8") if how == "another job" else cluster.requeues()
    if arguments.get("ckpt_path", "hpc") != "hpc":
        arguments = {"ckpt_path": tmp_path / arguments["ckpt_path"]}
    caplog.set_level(logging.INFO)
    assert fit(namespace, tmp_path, max_steps=7, **arguments).ran == 4
    lines = told(caplog)
    assert len(lines) == (how == "another job")
    assert all("up to step 6" in line and "this fit resumes from" in line and "hpc_ckpt" in line for line in lines)
    with_stock = stock(namespace)(tmp_path / "stock", **EVERY)
    assert fit(namespace, tmp_path, max_steps=7, checkpoint=with_stock, ckpt_path=arguments.get("ckpt_path")).ran == 4


def test_a_file_that_a_kill_has_cut_off_does_not_stand_in_the_way(
    tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    fit(PL, tmp_path, at_step(PL, 3, save_own), max_steps=4)
    os.truncate(tmp_path / "hpc_ckpt_1.ckpt", 1000)
    cluster.requeues()
    assert fit(PL, tmp_path, max_steps=6).ran == 2
    (said,) = [text for text in caplog.messages if "cannot be read" in text]
    assert "hpc_ckpt_1.ckpt" in said


@pytest.mark.parametrize("namespace", EITHER)
def test_the_signal_of_slurm_makes_the_next_step_one_of_the_run(
    namespace: str, tmp_path: Path, cluster: Cluster
) -> None:
    """So a restart is exact, which it is not from Lightning's own file. Lightning's save and requeue are unchanged."""
    rarely = {"every_n_train_steps": 100}
    straight = weights(fit(namespace, tmp_path / "straight", max_steps=9, **rarely))
    (tmp_path / "run").mkdir()
    signalled = at_step(namespace, 3, lambda _: os.kill(os.getpid(), signal.SIGUSR1))
    with pytest.raises(Killed):
        fit(namespace, tmp_path / "run", signalled, at_step(namespace, 6, kill), max_steps=9, **rarely)
    assert cluster.asked.read_text() == "requeue 7\n"
    assert torch.load(tmp_path / "run" / "hpc_ckpt_1.ckpt")["global_step"] == 3
    cluster.requeues()
    net = fit(namespace, tmp_path / "run", max_steps=9, **rarely)
    assert net.ran == 5, "from step 4"
    assert differences(straight, weights(net)) == []


def test_two_ranks_take_the_same_step(zygote: Zygote, tmp_path: Path, cluster: Cluster) -> None:
    env = {**cluster.env, "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    rarely = {"every_n_train_steps": 100, "save_top_k": 0, "save_last": False}
    how: dict[str, Any] = {"launcher": False, "arguments": rarely}
    straight = run(zygote, tmp_path / "straight", max_steps=9, **how)
    first = run(zygote, tmp_path / "run", max_steps=5, env=env, signalled_at=3, **how)
    assert [answer["error"] for answer in first] == ["", ""]
    assert cluster.asked.read_text() == "requeue 7\n"
    assert torch.load(tmp_path / "run" / "hpc_ckpt_1.ckpt")["global_step"] == 3
    again = run(zygote, tmp_path / "run", max_steps=9, env=env | {"SLURM_RESTART_COUNT": "1"}, **how)
    assert [answer["error"] for answer in again] == ["", ""]
    assert [answer["ran"] for answer in again] == [5, 5]
    assert [answer["hash"] for answer in again] == [answer["hash"] for answer in straight]
