"""A bucket that dies or hangs in the middle of a fit: the end of the fit waits for it once, whatever the number of
callbacks, and the local tier does not grow."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest

from resiliency.callbacks.checkpointing.resume import Process
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.errors import TierError
from resiliency.storage.tiers import _glance, object_store
from resiliency.storage.tiers._retry import Retry
from resiliency.testing.checkpoints import step_dirs
from resiliency.testing.gcs_server import FakeGcs
from resiliency.testing.http_faults import FaultProxy, HttpFault
from tests.callbacks.harness import loader, make_net, make_trainer, ours
from tests.rings import few

PL = "lightning.pytorch"
FLUSH_S = 3.0
#: An agent process: what it cannot finish it goes on with, for a second.
OPTIONS = CheckpointerOptions(drain_timeout=timedelta(seconds=1))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    before = set(psutil.Process().children())
    with FakeGcs() as gcs, FaultProxy(gcs.url) as proxy:
        gcs.create_bucket("bucket")
        servers = set(psutil.Process().children()) - before
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        monkeypatch.setenv("NO_GCE_CHECK", "true")  # nobody asks for credentials that the emulator does not need
        yield proxy
        # The agents go on for as long as they may, without the trainer.
        _, alive = psutil.wait_procs(set(psutil.Process().children()) - before - servers, timeout=20)
        assert not [agent for agent in alive if "resiliency" in " ".join(agent.cmdline())]


class Watch(pl.Callback):
    """Lets the bucket die at a step, and notes when the training had ended."""

    def __init__(self, proxy: FaultProxy, fault: HttpFault) -> None:
        self.proxy, self.fault, self.ended = proxy, fault, 0.0

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 4:
            self.proxy.fail(".", self.fault, times=10**9)

    def on_train_end(self, *args: Any) -> None:
        self.ended = time.monotonic()


@pytest.mark.parametrize(
    "fault", few([HttpFault.RESET, HttpFault.HANG], [HttpFault.HANG]), ids=lambda fault: fault.name
)
def test_a_dead_bucket_costs_the_end_of_a_fit_its_timeout_once(
    bucket: FaultProxy, fault: HttpFault, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


class FirstBatch(pl.Callback):
    began = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self.began = self.began or time.monotonic()


class QuickRetry(Retry):
    """Does not pause long between two requests."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "first_s": 0.01})


def _callback(tmp_path: Path, **further: Any) -> Any:
    return ours(
        PL,
        "gs://bucket/job",
        local_dir=str(tmp_path / "local"),
        flush_timeout=timedelta(seconds=FLUSH_S),
        options=OPTIONS,
        every_n_train_steps=4,
        save_top_k=-1,
        filename="{step}",
        **further,
    )


@pytest.mark.parametrize(
    "fault",
    few([HttpFault.RESET, HttpFault.HANG, 403, 404], [HttpFault.HANG, 403]),
    ids=lambda fault: getattr(fault, "name", str(fault)),
)
def test_a_bucket_that_is_dead_from_the_start_is_asked_once_before_training_and_that_is_said(
    bucket: FaultProxy,
    fault: HttpFault | int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_glance, "_PATIENCE", timedelta(seconds=2))
    monkeypatch.setattr(_glance, "_silent", {})
    bucket.fail(".", fault, times=10**9)
    first, began = FirstBatch(), time.monotonic()
    trainer = make_trainer(PL, [first, _callback(tmp_path)], root=tmp_path)
    trainer.fit(make_net(PL), loader())
    assert trainer.global_step == 12
    assert first.began - began < 15, f"training began after {first.began - began:.1f} s"
    assert time.monotonic() - first.began < FLUSH_S + 15, "it was asked again while training"
    told = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert sum("whether there are checkpoints of run 'default' is not known" in text for text in told) == 1
    assert {step.step for step in step_dirs(tmp_path / "local", "default")} >= {12}, "nothing was kept locally"


def test_a_fit_that_is_to_resume_from_a_dead_bucket_does_not_start_from_scratch(
    bucket: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when the user asked for it nor as a restart; where the host has a copy, that is taken."""
    monkeypatch.setattr(_glance, "_silent", {})
    monkeypatch.setattr(object_store, "Retry", QuickRetry)
    trainer = make_trainer(PL, [_callback(tmp_path)], root=tmp_path, max_steps=8, max_epochs=-1)
    trainer.fit(make_net(PL), loader())
    bucket.fail(".", HttpFault.RESET, times=10**9)
    (tmp_path / "local").rename(tmp_path / "kept")
    for restart in (False, True):
        if restart:
            for name, value in {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setattr(Process, "_trained_in", None)
        net = make_net(PL)
        trainer = make_trainer(
            PL, [_callback(tmp_path, **({} if restart else {"auto_resume": True}))], root=tmp_path, max_steps=12
        )
        with pytest.raises(TierError, match="checkpoints cannot be listed"):
            trainer.fit(net, loader())
        assert trainer.global_step == 0
    shutil.rmtree(tmp_path / "local")
    (tmp_path / "kept").rename(tmp_path / "local")
    net = make_net(PL)
    trainer = make_trainer(PL, [_callback(tmp_path, auto_resume=True)], root=tmp_path, max_steps=12, max_epochs=-1)
    trainer.fit(net, loader())
    assert (net.ran, trainer.global_step) == (4, 12)


class Heals(pl.Callback):
    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy

    def on_train_batch_start(self, *args: Any) -> None:
        self.proxy.reset()


def test_what_a_job_saves_that_started_while_the_bucket_was_dead_is_newer_than_what_lies_there(
    bucket: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not see the earlier training, whose steps have larger numbers, and starts afresh, as said. Its restart
    went back to that one, or to the beginning."""
    monkeypatch.setattr(_glance, "_silent", {})
    monkeypatch.setattr(object_store, "Retry", QuickRetry)
    make_trainer(PL, [_callback(tmp_path)], root=tmp_path).fit(make_net(PL), loader())
    shutil.rmtree(tmp_path / "local")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    monkeypatch.setattr(Process, "_trained_in", None)
    bucket.fail(".", HttpFault.RESET, times=10**9)
    trainer = make_trainer(PL, [_callback(tmp_path), Heals(bucket)], root=tmp_path, max_steps=8, max_epochs=-1)
    trainer.fit(make_net(PL), loader())
    shutil.rmtree(tmp_path / "local")  # the host has lost its disk; the process stays
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(Process, "_trained_in", None)
    net = make_net(PL)
    trainer = make_trainer(PL, [_callback(tmp_path)], root=tmp_path, max_steps=12, max_epochs=-1)
    trainer.fit(net, loader())
    assert (net.ran, trainer.global_step) == (4, 12), "it did not go on from the second job's step 8"


@pytest.mark.parametrize(
    "answer", few([b"\xff not json", b"[]", b"null", b'{"items":"x"}'], [b"null", b'{"items":"x"}']), ids=repr
)
def test_a_server_that_answers_nonsense_does_not_end_a_fit_before_it_began(
    answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy's login page, say. A look that only warns raised in the stock class's code."""

    class Nonsense(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, *_: Any) -> None: ...

    monkeypatch.setattr(_glance, "_silent", {})
    with ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_address[1]}")
            monkeypatch.setenv("NO_GCE_CHECK", "true")
            before = set(psutil.Process().children())
            trainer = make_trainer(PL, [_callback(tmp_path)], root=tmp_path)
            trainer.fit(make_net(PL), loader())
            psutil.wait_procs(set(psutil.Process().children()) - before, timeout=20)
        finally:
            server.shutdown()
            thread.join(10)
    assert trainer.global_step == 12
