"""Save before delete: nothing goes, and nobody is told, before the newer checkpoint is committed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from resiliency import faultpoints
from resiliency.agent import core
from resiliency.agent.core import HostAgent
from resiliency.checkpoint.arena import Arena
from resiliency.errors import TierError
from resiliency.storage.stage import Stage
from tests.callbacks.harness import content, loader, make_net, make_trainer, names, ours, stock

PL = "lightning.pytorch"
NEWEST: dict[str, Any] = {
    "monitor": "step",
    "mode": "max",
    "save_top_k": 1,
    "every_n_train_steps": 1,
    "filename": "{step}",
}


class Log:
    """What a logger needs to be one, and a note of every checkpoint it hears of."""

    name, version, save_dir, root_dir, log_dir = "log", 0, None, None, None

    def __init__(self, directory: Path) -> None:
        self.directory, self.heard = directory, []

    def after_save_checkpoint(self, callback: Any) -> None:
        self.heard.append(names(self.directory))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class Held:
    """Holds commits back from a given one on, until let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
        self.go, self.seen, self.after = threading.Event(), 0, after
        self.before = threading.Event()  # the last that is not held back is done
        original = HostAgent._commit

        def commit(agent: HostAgent, *args: Any) -> None:
            self.seen += 1
            if self.seen > self.after:
                assert self.go.wait(60), "the test did not let the commit go"
            original(agent, *args)
            if self.seen == self.after:
                self.before.set()

        monkeypatch.setattr(HostAgent, "_commit", commit)


def at_batch_start(step: int, do: Callable[[], None]) -> Any:
    class At(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == step:
                do()

    return At()


@pytest.mark.parametrize("last", [None, True, "link"])
def test_nothing_is_deleted_or_repointed_before_the_newer_commit(
    last: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, after=1)
    seen: list[tuple[set[str], int]] = []
    callback = ours(PL, tmp_path, save_last=last, **NEWEST)
    log = Log(tmp_path)

    def look() -> None:
        assert held.before.wait(20), "the first save was not committed"
        seen.append((names(tmp_path), content(tmp_path / ("last.ckpt" if last else "step=1.ckpt"))["global_step"]))
        assert len(log.heard) <= 1
        held.go.set()

    trainer = make_trainer(
        PL, [at_batch_start(2, look), callback], root=tmp_path, max_steps=4, max_epochs=-1, logger=log
    )
    trainer.fit(make_net(PL), loader())
    extra = {"last.ckpt"} if last else set()
    # The second save has been asked for, and its removal of the first; the commit is held back.
    assert seen == [({"step=1.ckpt"} | extra, 1)]
    assert names(tmp_path) == {"step=4.ckpt"} | extra
    assert len(log.heard) == 4, "each commit is announced once"
    newest = [max(int(name[5:-5]) for name in there if name.startswith("step=")) for there in log.heard]
    assert all(there >= step for step, there in enumerate(newest, start=1)), (
        "announced only when it, or a newer one, exists"
    )


def test_a_kill_between_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process goes away while the newer commit is held: what is on disk then is taken for what is left."""
    held = Held(monkeypatch, after=1)
    left = tmp_path / "left"

    def copy() -> None:
        assert held.before.wait(20), "the first save was not committed"
        shutil.copytree(tmp_path / "run", left)
        held.go.set()

    callbacks = [at_batch_start(2, copy), ours(PL, tmp_path / "run", **NEWEST)]
    make_trainer(PL, callbacks, root=tmp_path, max_steps=3, max_epochs=-1).fit(make_net(PL), loader())
    run = tmp_path / "run"
    shutil.rmtree(run)
    left.rename(run)
    assert content(run / "step=1.ckpt")["global_step"] == 1
    trainer = make_trainer(PL, [ours(PL, run, auto_resume=True, **NEWEST)], root=tmp_path, max_steps=3, max_epochs=-1)
    net = make_net(PL)
    trainer.fit(net, loader())
    assert (net.ran, trainer.global_step) == (2, 3)
    assert names(run) == {"step=3.ckpt"}


def test_a_save_that_fails_deletes_nothing(tmp_path: Path) -> None:
    """Every second commit fails: the newest good one is always there, and no name is left over at the end."""
    seen: list[set[str]] = []
    callback = ours(PL, tmp_path, **NEWEST)
    faultpoints.arm("agent.manifest.write:error@2")

    def look() -> None:
        callback._saver.engine.flush(Stage.DURABLE, tier="local")
        seen.append(names(tmp_path))

    trainer = make_trainer(PL, [at_batch_start(2, look), callback], root=tmp_path, max_steps=4, max_epochs=-1)
    trainer.fit(make_net(PL), loader())
    assert seen == [{"step=1.ckpt"}]
    assert names(tmp_path) == {"step=4.ckpt"}


def test_a_save_that_is_skipped_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of before is owed to a checkpoint that was never taken: it stays until a later one is safe."""
    callback = ours(PL, tmp_path, **(NEWEST | {"save_top_k": 2}))
    seen: list[set[str]] = []
    open_file = Arena.open

    def full(arena: Arena, path: str, nbytes: int) -> None:
        raise TierError("no room", retryable=True)

    def fail_the_next() -> None:
        callback._saver.engine.flush(Stage.COMMITTED)
        monkeypatch.setattr(Arena, "open", full)

    def look() -> None:
        callback._saver.engine.flush(Stage.DURABLE, tier="local")
        seen.append(names(tmp_path))
        monkeypatch.setattr(Arena, "open", open_file)

    callbacks = [at_batch_start(2, fail_the_next), at_batch_start(3, look), callback]
    make_trainer(PL, callbacks, root=tmp_path, max_steps=5, max_epochs=-1).fit(make_net(PL), loader())
    assert seen == [{"step=1.ckpt", "step=2.ckpt"}]
    assert names(tmp_path) == {"step=4.ckpt", "step=5.ckpt"}


class HeldSync(Held):
    """Holds the fsync of every step back, until let go; notes that a step is committed when it begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.before = threading.Event(), threading.Event()

        def fsync_step(*args: Any) -> None:
            self.before.set()
            assert self.go.wait(60), "the test did not let the fsync go"
            fsync(*args)

        fsync = core.fsync_step
        monkeypatch.setattr(core, "fsync_step", fsync_step)


@pytest.mark.parametrize("until", ["committed", "durable"])
def test_stock_files_it_replaces_go_when_the_new_one_would_survive_a_power_loss(
    until: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its fsync the new step may be gone after one, and the file is the last good checkpoint."""
    make_trainer(PL, [stock(PL)(tmp_path, **NEWEST)], root=tmp_path, max_steps=2, max_epochs=-1).fit(
        make_net(PL), loader()
    )
    (tmp_path / "step=2.ckpt").rename(tmp_path / "first.ckpt")
    held = Held(monkeypatch, after=0) if until == "committed" else HeldSync(monkeypatch)
    callback = ours(PL, tmp_path, auto_resume=False, **NEWEST)
    seen: list[set[str]] = []

    def look() -> None:
        if until == "durable":
            assert held.before.wait(60)
            callback._wait_until_committed([callback.best_model_path])  # its outcome is there, and delivered
            callback._saver.session.deliver_outcomes()
        seen.append(names(tmp_path))
        held.go.set()

    net = make_net(PL)
    net.on_train_start = lambda: (
        callback.best_k_models.update({str(tmp_path / "first.ckpt"): callback.kth_value})
        or setattr(callback, "kth_best_model_path", str(tmp_path / "first.ckpt"))
    )
    trainer = make_trainer(PL, [at_batch_start(1, look), callback], root=tmp_path, max_steps=3, max_epochs=-1)
    trainer.fit(net, loader())
    assert seen == [{"first.ckpt"} if until == "committed" else {"first.ckpt", "step=1.ckpt"}]
    assert names(tmp_path) == {"step=3.ckpt"}


def test_loggers_hear_once_per_commit_of_each_callback(tmp_path: Path) -> None:
    heard: list[str] = []
    log = Log(tmp_path)
    log.after_save_checkpoint = lambda callback: heard.append(callback.filename)  # type: ignore[method-assign]
    callbacks = [
        ours(PL, tmp_path, every_n_train_steps=2, filename="a-{step}", save_last=True),
        ours(PL, tmp_path, every_n_train_steps=3, filename="b-{step}", save_top_k=-1),
        ours(PL, tmp_path / "c", every_n_train_steps=6, filename="c-{step}"),
    ]
    make_trainer(PL, callbacks, root=tmp_path, max_steps=6, max_epochs=-1, logger=log).fit(make_net(PL), loader())
    assert sorted(heard) == ["a-{step}"] * 3 + ["b-{step}"] * 2 + ["c-{step}"]


def test_files_of_other_runs_and_other_people_stay(tmp_path: Path) -> None:
    make_trainer(PL, [ours(PL, tmp_path, run="other", **NEWEST)], root=tmp_path, max_steps=2, max_epochs=-1).fit(
        make_net(PL), loader()
    )
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "theirs.ckpt").write_bytes(b"\x80not ours")
    make_trainer(PL, [ours(PL, tmp_path, **NEWEST)], root=tmp_path, max_steps=4, max_epochs=-1).fit(
        make_net(PL), loader()
    )
    assert names(tmp_path) == {"step=2.ckpt", "step=4.ckpt", "theirs.ckpt"}
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert content(tmp_path / "step=2.ckpt")["global_step"] == 2


def test_folders_in_names_stay_as_with_the_stock_class(tmp_path: Path) -> None:
    """A metric named ``val/loss`` makes them. They may be the user's own, with writers of their own."""
    trees = {}
    for kind, make in (("stock", stock(PL)), ("ours", ours)):
        directory = tmp_path / kind
        arguments = NEWEST | {"filename": "a/{step}/b", "auto_insert_metric_name": False}
        callback = make(str(directory), **arguments) if make is not ours else ours(PL, directory, **arguments)
        make_trainer(PL, [callback], root=tmp_path / f"{kind}-root").fit(make_net(PL), loader())
        trees[kind] = {str(path.relative_to(directory)) for path in directory.rglob("*")}
    assert trees["ours"] == trees["stock"] and len(trees["stock"]) > 3
