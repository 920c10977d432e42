"""``resiliency run`` when its ranks, or it, are told to go."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from resiliency.runtime.exit_codes import PREEMPTED
from resiliency.testing.zygote import Zygote
from tests.launch.launching import ROOT, wait_for
from tests.ports import free_port
from tests.rings import few
from tests.zygote import start_script

SCRIPT = """
import os, sys, warnings
warnings.filterwarnings("ignore")
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from resiliency.callbacks.autocheckpoint import AutoCheckpointCallback
from resiliency.callbacks.model_checkpoint import ModelCheckpoint
from resiliency.launch import restartable
folder, steps = sys.argv[1], int(sys.argv[2])

class Pid(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            open(f"{folder}/pid-{trainer.global_rank}", "w").write(str(os.getpid()))
    def on_train_start(self, trainer, *_):
        os.write(1, f"rank {trainer.global_rank} begins after {trainer.global_step}\\n".encode())

class Slow(BoringModel):
    def training_step(self, *arguments):
        import time
        if steps > 1000:
            time.sleep(0.01)
        return super().training_step(*arguments)

def main():
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), max_steps=steps, max_epochs=-1,
        callbacks=[Pid(), AutoCheckpointCallback(), ModelCheckpoint(folder, every_n_train_steps=5)], logger=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )
    trainer.fit(Slow())

(restartable(main) if STAYS else main)()
"""


@pytest.mark.parametrize("stays", few([False, True], [True]))
@pytest.mark.parametrize("whom", ["a rank", "the launcher"])
def test_ranks_that_are_told_to_go_are_not_restarted_and_the_next_start_goes_on(
    whom: str, stays: bool, launch: Any, tmp_path: Path
) -> None:
    script = SCRIPT.replace("STAYS", str(stays))
    job = launch(script, "--nproc-per-node", 2, "--max-restarts", 3, arguments=[tmp_path, 100000])
    pids = [int(wait_for(tmp_path / f"pid-{rank}")) for rank in range(2)]
    job.descendants()
    os.kill(pids[1] if whom == "a rank" else job.pid, signal.SIGTERM)
    assert job.wait() == PREEMPTED, job.text
    assert "have saved and ended" in job.text and "Traceback" not in job.text
    assert job.text.count("begins after 0") == 2, "they were started again"
    assert (tmp_path / "preempted.ckpt").exists() and job.left() == []
    import torch

    step = torch.load(tmp_path / "preempted.ckpt")["global_step"]
    again = launch(script, "--nproc-per-node", 2, arguments=[tmp_path, step + 7])
    assert again.wait() == 0, again.text
    assert again.text.count(f"begins after {step}") == 2
    assert not (tmp_path / "preempted.ckpt").exists()


SLOW_END = """
import time
from lightning.fabric.strategies.launchers import subprocess_script
class Observer(subprocess_script._ChildProcessObserver):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self._sleep_period = 0.1
subprocess_script._ChildProcessObserver = Observer
try:
    main()
finally:
    time.sleep(2 if os.environ.get("LOCAL_RANK", "0") == "0" else 0)
"""


@pytest.mark.long
def test_a_rank_that_has_started_the_others_ends_with_that_status_too(tmp_path: Path, zygote: Zygote) -> None:
    """Lightning's launcher kills it when one of them has ended with another status than 0."""
    code = SCRIPT.partition("(restartable")[0] + SLOW_END
    env = {"PYTHONPATH": str(ROOT), "MASTER_PORT": str(free_port())}
    job = start_script(zygote, code, tmp_path / "output", str(tmp_path), "100000", env=env)
    try:
        pids = [int(wait_for(tmp_path / f"pid-{rank}")) for rank in range(2)]
        assert pids[0] == job.pid
        os.kill(pids[1], signal.SIGTERM)
        assert job.wait(timeout_s=60) == PREEMPTED, (tmp_path / "output").read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait(timeout_s=10)
    assert (tmp_path / "preempted.ckpt").exists()
