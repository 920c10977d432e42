"""Training outlives checkpointing: a full disk, a folder that cannot be written, a dead agent; and nothing is left behind."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from resiliency import faultpoints
from resiliency.agent.client import AgentClient
from resiliency.callbacks.checkpointing.saver import CheckpointSaver
from resiliency.checkpoint import session
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.checkpoint.save_tracker import SaveTracker
from resiliency.storage.manifest import META_DIR
from resiliency.storage.stage import Stage
from tests.agent_forks import VARIABLE
from tests.callbacks.harness import content, loader, make_net, make_trainer, names, ours, steps, stock
from tests.rings import few

PL = "lightning.pytorch"
EVERY: dict[str, Any] = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}


def events(directory: Path, kind: str, run: str = "default") -> list[dict[str, Any]]:
    lines = [
        line
        for path in (directory / f".resiliency/{run}/events").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return [event for event in map(json.loads, lines) if event["event_type"] == kind]


class At(pl.Callback):
    """Does something at the start of the batch after ``step`` steps."""

    def __init__(self, step: int, do: Any) -> None:
        self.step, self.do = step, do

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.do()


def warnings_of_ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("resiliency")
    ]


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("point", ["agent.record.write", "agent.manifest.write"])
def test_training_and_saves_go_on_after_a_full_disk(
    point: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = ours(PL, tmp_path, **EVERY)

    def the_disk_has_room_again() -> None:
        deadline = time.monotonic() + 20
        while not events(tmp_path, "checkpoint_failed"):  # the agent may not have come to these saves yet
            assert time.monotonic() < deadline
            time.sleep(0.01)
        faultpoints.arm("")

    callbacks = [At(2, lambda: faultpoints.arm(f"{point}:full@*")), At(6, the_disk_has_room_again), callback]
    trainer = make_trainer(PL, callbacks, root=tmp_path)
    trainer.fit(make_net(PL), loader())
    assert trainer.global_step == 12
    assert {"step=8.ckpt", "step=10.ckpt", "step=12.ckpt"} <= names(tmp_path)
    assert content(tmp_path / "step=12.ckpt")["global_step"] == 12
    assert len([text for text in warnings_of_ours(caplog) if "training goes on" in text]) <= 2
    assert events(tmp_path, "checkpoint_failed")


def test_saves_go_on_when_there_is_room_for_shard_files_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = threading.Event()
    full.set()
    original = os.posix_fallocate

    def fallocate(fd: int, offset: int, length: int) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        original(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    log = CheckpointerOptions(agent="embedded", events_dir=str(tmp_path / "log"))
    callbacks = [At(5, full.clear), ours(PL, tmp_path, options=log, **EVERY)]
    trainer = make_trainer(PL, callbacks, root=tmp_path)
    trainer.fit(make_net(PL), loader())
    assert trainer.global_step == 12
    assert {"step=6.ckpt", "step=12.ckpt"} <= names(tmp_path)
    assert "checkpoint_failed" in (tmp_path / "log" / "rank-00000.jsonl").read_text()
    assert warnings_of_ours(caplog)


def test_saves_begin_once_the_directory_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a network mount that comes back. Where no folder can be, the fit ends: see test_odd_paths.py."""
    make, directory = session._make_run_folder, tmp_path / "mount" / "ckpts"

    def gone(*arguments: Any) -> str:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(directory))

    monkeypatch.setattr(session, "_make_run_folder", gone)
    callbacks = [
        At(5, lambda: monkeypatch.setattr(session, "_make_run_folder", make)),
        ours(PL, directory, **EVERY),
    ]
    trainer = make_trainer(PL, callbacks, root=tmp_path)
    trainer.fit(make_net(PL), loader())
    assert trainer.global_step == 12
    assert len(warnings_of_ours(caplog)) == 1, "one warning"
    assert names(directory) == {
        "step=6.ckpt",
        "step=8.ckpt",
        "step=10.ckpt",
        "step=12.ckpt",
    }  # tried at saves 1, 2, 3, 5


def _no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def _no_agent_thread(self: threading.Thread, start: Any = threading.Thread.start) -> None:
    if self.name.startswith("resiliency-agent-"):
        raise RuntimeError("can't start new thread")
    start(self)


def _no_copy_thread(self: threading.Thread, start: Any = threading.Thread.start) -> None:
    if self.name == "resiliency-copy":
        raise RuntimeError("can't start new thread")
    start(self)


class _NoSocket(socket.socket):
    """As pytest-socket puts it in place of sockets."""

    def __new__(cls, *arguments: Any, **further: Any) -> Any:
        raise RuntimeError("can't use sockets")


class _RefusedSocket(socket.socket):
    """As seccomp refuses them."""

    def __new__(cls, *arguments: Any, **further: Any) -> Any:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("agent", few(["embedded", "process"], ["process"]))
@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (threading.Thread, "start", _no_agent_thread, "can't start new thread"),
        (threading.Thread, "start", _no_copy_thread, "can't start new thread"),
        (threading.Thread, "start", _no_thread, "can't start new thread"),
        (socket, "socket", _NoSocket, "can't use sockets"),
        (socket, "socket", _RefusedSocket, "Operation not permitted"),
        (sys, "executable", None, ""),
    ],
    ids=["agent's threads", "copy thread", "threads", "sockets", "refused sockets", "interpreter"],
)
def test_where_the_engine_cannot_start_the_stock_class_saves(
    agent: Any,
    owner: Any,
    name: str,
    value: Any,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)  # the tests' own way to start agents
    made = []
    for make in (stock, ours):
        directory = tmp_path / make.__name__
        if make is stock:
            callback: Any = stock(PL)(directory, **EVERY)
        else:
            callback = ours(PL, directory, options=CheckpointerOptions(agent=agent), **EVERY)
        trainer = make_trainer(PL, [callback], root=tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            trainer.fit(make_net(PL), loader())
        assert trainer.global_step == 12
        made.append({path: torch.load(directory / path)["global_step"] for path in names(directory)})
    assert made[0] == made[1] and len(made[0]) == 6
    warned = [text for text in warnings_of_ours(caplog) if "Lightning's own code saves" in text]
    runs = agent == "embedded" and value is None
    assert len(warned) == (0 if runs else 1) and all(said in text for text in warned)
    stacks = [record.exc_info for record in caplog.records if "Lightning's own code saves" in record.getMessage()]
    if warned:
        assert stacks[0] or "pids.max" in warned[0], "nobody could find out why"
    if value is _no_agent_thread and agent == "embedded":
        assert "pids.max" in warned[0]


@pytest.mark.parametrize("error", [TimeoutError, RuntimeError, KeyError])
def test_what_a_signals_handler_raises_in_a_save_ends_the_fit(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the stock class; it is no error of the save."""

    def handler(*_: Any) -> None:
        raise error("of the handler")

    real = Checkpointer.save

    def save(*arguments: Any, **further: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return real(*arguments, **further)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        monkeypatch.setattr(Checkpointer, "save", save)
        trainer = make_trainer(PL, [ours(PL, tmp_path, **EVERY)], root=tmp_path)
        with pytest.raises(error, match="of the handler"):
            trainer.fit(make_net(PL), loader())
        assert trainer.global_step == 2
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_error_of_a_save_that_nobody_has_foreseen_ends_no_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A state may hold anything. What the engine cannot save is written as the stock class does."""

    def save(*arguments: Any, **further: Any) -> Any:
        raise RecursionError("of the state")

    monkeypatch.setattr(Checkpointer, "save", save)
    trainer = make_trainer(PL, [ours(PL, tmp_path, **EVERY)], root=tmp_path)
    trainer.fit(make_net(PL), loader())
    assert trainer.global_step == 12 and "of the state" in caplog.text
    (newest,) = tmp_path.glob("*step=12.ckpt")
    assert torch.load(newest, weights_only=False)["global_step"] == 12


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (AgentClient, "open", 1),
        (SaveTracker, "wait", 1),
        (AgentClient, "flush", 1),
        (AgentClient, "flush", 2),
        (AgentClient, "close", 1),
    ],
    ids=["the engine starts", "a path is read", "the last save begins", "the fit ends", "the engine closes"],
)
@pytest.mark.parametrize("error", few([TimeoutError, RuntimeError], [TimeoutError]))
def test_what_a_signals_handler_raises_in_a_wait_ends_the_fit(
    error: type[Exception], owner: Any, name: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``signal.alarm`` around a fit does. It was taken for an error of the agent, and the fit went on."""

    def handler(*_: Any) -> None:
        raise error("of the handler")

    real, sent = getattr(owner, name), []

    def waits(*arguments: Any, **further: Any) -> Any:
        sent.append(1)
        if len(sent) == at:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        return real(*arguments, **further)

    class Reader(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            assert isinstance(trainer.checkpoint_callback.best_model_path, str)

    before = signal.signal(signal.SIGALRM, handler)
    faultpoints.arm("agent.manifest.write:delay=0.05@*")
    try:
        monkeypatch.setattr(owner, name, waits)
        trainer = make_trainer(PL, [Reader(), ours(PL, tmp_path, **EVERY)], root=tmp_path)
        with pytest.raises(error, match="of the handler"):
            trainer.fit(make_net(PL), loader())
        assert len(sent) >= at and signal.getsignal(signal.SIGALRM) is handler
    finally:
        faultpoints.arm("")
        signal.signal(signal.SIGALRM, before)
    made = make_trainer(PL, [ours(PL, tmp_path, **EVERY)], root=tmp_path)
    began = time.monotonic()
    made.fit(make_net(PL), loader())
    assert made.global_step == 12 and time.monotonic() - began < 15, "an engine that is refused the folder waits 20 s"


_FORKS = """
import os, sys
from pathlib import Path
import lightning.pytorch as pl
import torch
from tests.callbacks.harness import loader, make_net, make_trainer, ours

torch.set_num_threads(1)  # those of torch's kernels are lost in a fork
children, parent, root = [], os.getpid(), Path(sys.argv[1])

class Forks(pl.Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 5:
            children.append(os.fork())

callback = ours("lightning.pytorch", root / "run", save_last=True, every_n_train_steps=2, filename="{step}")
trainer = make_trainer("lightning.pytorch", [Forks(), callback], root=root)
trainer.fit(make_net("lightning.pytorch"), loader())
if os.getpid() != parent:
    (root / "child").write_text(str(trainer.global_step))
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
"""


def test_a_forked_child_that_trains_on_writes_as_the_stock_class(tmp_path: Path) -> None:
    """It has neither the threads of the engine nor its connection; its fit ended with an error."""
    code = [sys.executable, "-c", _FORKS, str(tmp_path)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "child").read_text() == "12"
    assert torch.load(tmp_path / "run" / "last.ckpt")["global_step"] == 12


def test_a_directory_that_can_be_read_but_not_written_is_still_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(PL, [ours(PL, tmp_path, **EVERY)], root=tmp_path, max_steps=8, max_epochs=-1).fit(
        make_net(PL), loader()
    )

    def refuse(path: Any, mode: str = "r", **more: Any) -> Any:
        if "w" in mode:
            raise OSError(30, "Read-only file system", path)
        return open(path, mode, **more)

    monkeypatch.setattr(session, "open", refuse, raising=False)
    for path in (None, "last"):
        callback = ours(PL, tmp_path, auto_resume=path is None, **EVERY)
        trainer = make_trainer(PL, [callback], root=tmp_path, max_steps=10, max_epochs=-1)
        net = make_net(PL)
        trainer.fit(net, loader(), ckpt_path=path)
        assert (net.ran, trainer.global_step) == (2, 10)
    assert names(tmp_path) == {f"step={step}.ckpt" for step in (2, 4, 6, 8)}
    assert "Read-only file system" in caplog.text


@pytest.mark.usefixtures("launched")
def test_training_and_saves_go_on_after_the_agent_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def kill() -> None:
        (started,) = events(tmp_path, "agent_started")
        os.kill(started["pid"], signal.SIGKILL)

    callbacks = [At(5, kill), ours(PL, tmp_path, options=CheckpointerOptions(), **EVERY)]
    trainer = make_trainer(PL, callbacks, root=tmp_path)
    trainer.fit(make_net(PL), loader())
    assert trainer.global_step == 12
    assert {"step=8.ckpt", "step=10.ckpt", "step=12.ckpt"} <= names(tmp_path)
    assert len(warnings_of_ours(caplog)) == 1
    assert events(tmp_path, "agent_lost")


# -- exceptions -----------------------------------------------------------------------------------------------------------


class Oops(RuntimeError):
    pass


def failing(error: type[BaseException], at: int) -> Any:
    net = make_net(PL, dropout=0.2)
    step = net.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if net.trainer.global_step == at:
            raise error("on purpose")
        return step(batch, batch_idx)

    net.training_step = training_step
    return net


def test_a_save_on_exception_is_resumed_from(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "save_on_exception": True,
        "every_n_train_steps": 4,
        "filename": "{step}",
        "save_last": True,
        "auto_resume": True,
    }
    trainer = make_trainer(PL, [ours(PL, tmp_path, **arguments)], root=tmp_path)
    with pytest.raises(Oops, match="on purpose"):
        trainer.fit(failing(Oops, at=7), loader())
    assert {"step=7.ckpt", "last.ckpt"} <= names(tmp_path)
    assert content(tmp_path / "last.ckpt")["global_step"] == 7
    trainer = make_trainer(PL, [ours(PL, tmp_path, **arguments)], root=tmp_path)
    net = make_net(PL, dropout=0.2)
    trainer.fit(net, loader())
    assert (net.ran, trainer.global_step) == (5, 12)


def test_what_ended_the_training_is_what_the_user_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = ours(PL, tmp_path, save_on_exception=True, every_n_train_steps=4)
    monkeypatch.setattr(CheckpointSaver, "_take_checkpoint", lambda *args: 1 / 0)
    with pytest.raises(Oops):
        make_trainer(PL, [callback], root=tmp_path).fit(failing(Oops, at=3), loader())


def hooks() -> int:
    return len(torch_optimizer._global_optimizer_pre_hooks)


@pytest.mark.parametrize("how", ["finished", "exception", "interrupt", "setup", "step"])
@pytest.mark.parametrize("agent", few(["embedded", "process"], ["process"]))
def test_nothing_is_left_behind(how: str, agent: Any, tmp_path: Path) -> None:
    """Threads, processes, /dev/shm: the fixture of all tests looks for these. Here: hooks, sockets, patches, and the trainer."""
    before, descriptors = hooks(), len(os.listdir("/proc/self/fd"))
    handler = signal.getsignal(signal.SIGINT)
    options = CheckpointerOptions(agent=agent)
    callbacks: list[Any] = [
        ours(PL, tmp_path / str(n), options=options, every_n_train_steps=n, save_top_k=-1) for n in (1, 2)
    ]
    trainer = make_trainer(PL, callbacks, root=tmp_path)
    connector, epoch_loop = trainer._checkpoint_connector, trainer.fit_loop.epoch_loop
    net = {"exception": lambda: failing(Oops, 5), "interrupt": lambda: failing(KeyboardInterrupt, 5)}.get(
        how, lambda: make_net(PL)
    )()
    if how == "setup":  # Lightning calls the module's after those of callbacks
        net.setup = lambda stage: (_ for _ in ()).throw(Oops("on purpose"))
    if how == "step":
        # The optimizer raises after the fence of its hook, with a save in flight.
        net.on_before_optimizer_step = lambda optimizer, module=net: (
            module.trainer.global_step == 3 and (_ for _ in ()).throw(Oops("on purpose"))
        )
    try:
        trainer.fit(net, loader())
    except (Oops, SystemExit):
        assert how != "finished"
    finally:
        signal.signal(signal.SIGINT, handler)
    assert hooks() == before
    assert "resume_start" not in connector.__dict__
    assert "reset" not in epoch_loop.__dict__
    assert not any(name.startswith("_resiliency") for name in trainer.__dict__)
    assert all(callback._saver is None for callback in trainer.checkpoint_callbacks)
    # torch may open one of its own; embedded agents keep the file of their log (an engine matter)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + (3 if agent == "embedded" else 1)
    gone = weakref.ref(trainer)
    del trainer, connector, epoch_loop, callbacks, net
    gc.collect()
    assert gone() is None or how == "setup", "the trainer can be collected"  # after "setup" Lightning itself keeps it


def test_a_trainer_used_only_to_evaluate_can_be_collected(tmp_path: Path) -> None:
    trainer = make_trainer(PL, [ours(PL, tmp_path)], root=tmp_path)
    trainer.test(make_net(PL), loader(batches=1), verbose=False)
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
    assert not (tmp_path / META_DIR).exists()


# -- the last save, and accumulation ----------------------------------------------------------------------------------------


def test_the_last_save_waits_for_the_one_before(tmp_path: Path) -> None:
    """Others are skipped when the disk is slow; the last one would be lost for good."""
    faultpoints.arm("agent.record.write:delay=0.6@*")
    options = CheckpointerOptions(agent="embedded", previous_save_timeout=timedelta(milliseconds=1))
    callback = ours(PL, tmp_path, options=options, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    make_trainer(PL, [callback], root=tmp_path, max_steps=3, max_epochs=-1).fit(make_net(PL), loader())
    assert "step=3.ckpt" in names(tmp_path)
    assert "step=2.ckpt" not in names(tmp_path), "the save in between was not skipped: the test proves nothing"


class AtBatch(pl.Callback):
    def __init__(self, number: int) -> None:
        self.left = number

    def on_train_batch_start(self, *args: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise Oops("on purpose")


def test_no_save_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    """The stock class saves there after a resume: with the weights of a step and the batches of half of the next."""
    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "max_epochs": 2}
    whole = make_net(PL, dropout=0.2)
    torch.manual_seed(2)
    make_trainer(PL, [], root=tmp_path, enable_checkpointing=False, **settings).fit(whole, loader(shuffle=True))

    arguments: dict[str, Any] = {
        "every_n_train_steps": 1,
        "save_top_k": -1,
        "filename": "{step}",
        "auto_resume": True,
    }
    for batch in (5, 2, 5):  # the last of them: all batches but one of a step are done again and again
        net = make_net(PL, dropout=0.2)
        torch.manual_seed(2)
        trainer = make_trainer(PL, [AtBatch(batch), ours(PL, tmp_path, **arguments)], root=tmp_path, **settings)
        with pytest.raises(Oops):
            trainer.fit(net, loader(shuffle=True))
    assert steps(tmp_path) == [1, 2]
    net = make_net(PL, dropout=0.2)
    make_trainer(PL, [ours(PL, tmp_path, **arguments)], root=tmp_path, **settings).fit(net, loader(shuffle=True))
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), net.state_dict().values(), strict=True))


# -- events of steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", few(["lightning.pytorch", "pytorch_lightning"], ["lightning.pytorch"]))
def test_steps_are_in_the_log_once_whatever_the_number_of_callbacks(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESILIENCY_ATTEMPT", "1")  # a launcher's job: its log begins with the fit
    callbacks = [ours(namespace, tmp_path / "a", **EVERY), ours(namespace, tmp_path / "b", every_n_train_steps=3)]
    trainer = make_trainer(namespace, callbacks, root=tmp_path, max_epochs=1)
    net = make_net(namespace)
    trainer.fit(net, loader(), loader(batches=1))
    for directory, count in (("a", 6), ("b", 0)):
        assert [event["step"] for event in events(tmp_path / directory, "step")] == list(range(1, count + 1))
        assert (
            len(events(tmp_path / directory, "train_started"))
            == len(events(tmp_path / directory, "train_ended"))
            == (count > 0)
        )
    assert any(event["stall_s"] > 0 for event in events(tmp_path / "a", "step"))

    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, loader(), loader(batches=1))
    assert [event["step"] for event in events(tmp_path / "a", "train_started")] == [0, 6]
    assert [event["step"] for event in events(tmp_path / "a", "step")] == list(range(1, 13))


def test_the_end_of_a_fit_waits_for_a_tier_that_hangs_once_and_no_longer_than_the_user_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for the commit at the end of training, once for the slower tiers at the end of the fit."""
    allowed = timedelta(seconds=0.5)
    waited: list[float] = []

    def hangs(self: Checkpointer, stage: Stage = Stage.DURABLE, *, tier: Any = None, timeout: timedelta) -> bool:
        if timeout <= allowed:  # not the wait before the last save
            waited.append(timeout.total_seconds())
            threading.Event().wait(timeout.total_seconds())
        return False

    monkeypatch.setattr(Checkpointer, "flush", hangs)
    callback = ours(PL, tmp_path, flush_timeout=allowed, **EVERY)
    make_trainer(PL, [callback], root=tmp_path, max_steps=2, max_epochs=-1).fit(make_net(PL), loader())
    assert len(waited) >= 3 and sum(waited) <= 2 * allowed.total_seconds()
