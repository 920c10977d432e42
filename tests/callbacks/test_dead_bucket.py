"""A bucket that dies or hangs in the middle of a fit: the end of the fit waits for it once, whatever the number of
callbacks, and the local tier does not grow."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest

from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.testing.checkpoints import step_dirs
from resiliency.testing.gcs_server import FakeGcs
from resiliency.testing.http_faults import FaultProxy, HttpFault
from tests.callbacks.harness import loader, make_net, make_trainer, ours

PL = "lightning.pytorch"
FLUSH_S = 3.0
#: An agent process: what it cannot finish it goes on with, for a second.
OPTIONS = CheckpointerOptions(drain_timeout=timedelta(seconds=1))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FakeGcs() as gcs, FaultProxy(gcs.url) as proxy:
        gcs.create_bucket("bucket")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        monkeypatch.setenv("NO_GCE_CHECK", "true")  # nobody asks for credentials that the emulator does not need
        yield proxy


class Watch(pl.Callback):
    """Lets the bucket die at a step, and notes when the training had ended."""

    def __init__(self, proxy: FaultProxy, fault: HttpFault) -> None:
        self.proxy, self.fault, self.ended = proxy, fault, 0.0

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 4:
            self.proxy.fail(".", self.fault, times=10**9)

    def on_train_end(self, *args: Any) -> None:
        self.ended = time.monotonic()


@pytest.mark.parametrize("fault", [HttpFault.RESET, HttpFault.HANG], ids=lambda fault: fault.name)
def test_a_dead_bucket_costs_the_end_of_a_fit_its_timeout_once(
    bucket: FaultProxy, fault: HttpFault, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(psutil.Process().children())

    def callback(name: str, every: int) -> Any:
        return ours(
            PL,
            f"gs://bucket/{name}",
            local_dir=str(tmp_path / name),
            flush_timeout=timedelta(seconds=FLUSH_S),
            options=OPTIONS,
            every_n_train_steps=every,
            save_top_k=-1,
            filename="{step}",
        )

    watch = Watch(bucket, fault)
    trainer = make_trainer(PL, [watch, callback("a", 1), callback("b", 2)], root=tmp_path)
    trainer.fit(make_net(PL), loader())
    took = time.monotonic() - watch.ended
    assert trainer.global_step == 12
    assert took < FLUSH_S + 3.0, f"the end of the fit took {took:.1f} s"
    told = [
        entry.getMessage()
        for entry in caplog.records
        if entry.levelno >= logging.WARNING and "not every save was durable" in entry.getMessage()
    ]
    assert len(told) == 2, "not said that uploads were not finished"
    for name in ("a", "b"):
        local = step_dirs(tmp_path / name, "default")
        # The step that is being sent, the one that waits for it, and the newest; they may be the same.
        assert 12 in {step.step for step in local} and len(local) <= 3, f"the local tier grew: {sorted(local)}"
    # The agents go on for as long as they may, without the trainer.
    _, alive = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=20)
    assert not [agent for agent in alive if "resiliency" in " ".join(agent.cmdline())]
