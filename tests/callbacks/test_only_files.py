"""After a fit the folder holds what the stock class would have left there, and nothing else; and nothing is lost by it."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.agent import file_pool
from resiliency.callbacks.goodput import build as build_goodput
from resiliency.callbacks.model_checkpoint import build
from resiliency.storage.manifest import META_DIR
from resiliency.storage.stage import Stage
from resiliency.testing.zygote import Zygote
from tests.callbacks.harness import (
    EITHER,
    content,
    differences,
    loader,
    make_net,
    make_trainer,
    ours,
    steps,
    stock,
    weights,
)
from tests.embedded import host_agent
from tests.rings import few
from tests.zygote import start_script

PL = "lightning.pytorch"


def everything(folder: Path) -> list[str]:
    return sorted(os.path.relpath(os.path.join(at, name), folder) for at, _, files in os.walk(folder) for name in files)


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "top 2 and last": {"monitor": "wave", "save_top_k": 2, "save_last": True, "every_n_train_steps": 2},
    "all": {"save_top_k": -1, "every_n_train_steps": 3},
    "last as a link": {"save_last": "link"},
    "weights only": {"save_weights_only": True, "save_top_k": -1},
    "none": {"save_top_k": 0},
}


@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.parametrize("case", CASES)
def test_a_folder_looks_as_stock_leaves_it(namespace: str, case: str, tmp_path: Path) -> None:
    for kind, made in (("stock", stock(namespace)), ("ours", build(namespace))):
        folder = tmp_path / kind
        callback = made(dirpath=folder / "ckpts", **CASES[case])
        make_trainer(namespace, [callback], root=folder).fit(make_net(namespace), loader())
    assert everything(tmp_path / "ours") == everything(tmp_path / "stock")


@pytest.mark.parametrize("read", few([False, True], [True]))
def test_saves_take_turns_in_the_same_files_until_somebody_reads_them(
    read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To fill a new file with zeros for each save took a third of a core in a training loop."""
    filled: list[str] = []
    real = file_pool.write_zeros

    def write_zeros(fd: int, start: int, end: int, **named: Any) -> None:
        filled.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd, start, end, **named)

    monkeypatch.setattr(file_pool, "write_zeros", write_zeros)
    net = make_net(PL)
    net.large = torch.nn.Parameter(torch.zeros(400_000))
    callback = ours(PL, tmp_path, every_n_train_steps=1, save_top_k=1, save_last=True)

    def wait(*_: Any) -> None:  # as in a real training, there is time between two saves
        engine = callback._saver.engine
        if engine is not None:
            assert engine.flush(Stage.DURABLE, timeout=timedelta(seconds=20))
            assert host_agent(engine)._files._worker.wait_idle(time.monotonic() + 20)
        if read and os.path.exists(tmp_path / "last.ckpt"):
            torch.load(tmp_path / "last.ckpt")

    net.on_train_batch_start = wait
    make_trainer(PL, [callback], root=tmp_path, max_epochs=4).fit(net, loader())
    assert len(steps(tmp_path)) >= 1 and callback.best_model_path
    assert (len(set(filled)) > 10) if read else (len(set(filled)) <= 5)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_also_after_an_exception(error: type[BaseException], tmp_path: Path) -> None:
    net = make_net(PL)

    def fail(*_: Any) -> None:
        if net.global_step == 5:
            raise error("enough")

    net.on_train_batch_start = fail
    callback = build(PL)(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1)
    with pytest.raises((error, SystemExit)):
        make_trainer(PL, [callback], root=tmp_path).fit(net, loader())
    assert everything(tmp_path) == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]


@pytest.mark.parametrize("agent", few(["process", "embedded"], ["process"]))
def test_the_next_fit_goes_on_from_the_files_bit_for_bit(agent: str, tmp_path: Path) -> None:
    def fit(folder: Path, epochs: int, **arguments: Any) -> Any:
        kind = build(PL) if agent == "process" else None
        given = {"dirpath": folder, "save_top_k": -1, **arguments}
        callback = kind(**given) if kind else ours(PL, given.pop("dirpath"), **given)
        net = make_net(PL, dropout=0.3)
        torch.manual_seed(7)
        make_trainer(PL, [callback], root=folder, max_epochs=epochs).fit(net, loader(shuffle=True))
        return net

    whole = fit(tmp_path / "whole", 3)
    fit(tmp_path / "cut", 2)
    assert everything(tmp_path / "cut") == ["epoch=0-step=6.ckpt", "epoch=1-step=12.ckpt"]
    resumed = fit(tmp_path / "cut", 3, auto_resume=True)
    assert resumed.ran == 6
    assert differences(weights(resumed), weights(whole)) == []
    assert everything(tmp_path / "cut") == everything(tmp_path / "whole")
    assert steps(tmp_path / "cut") == [6, 12, 18]


def test_last_resumes_from_the_newest_file(tmp_path: Path) -> None:
    def fit(epochs: int, **settings: Any) -> Any:
        net = make_net(PL)
        callback = ours(PL, tmp_path, save_last=True)
        make_trainer(PL, [callback], root=tmp_path, max_epochs=epochs).fit(net, loader(), **settings)
        return net

    fit(2)
    assert fit(3, ckpt_path="last").ran == 6


def test_a_script_that_writes_into_last_leaves_the_best_as_it_is(tmp_path: Path) -> None:
    """With stock Lightning they are two files, also when they are of one step."""
    callback = build(PL)(dirpath=tmp_path, save_last=True)
    make_trainer(PL, [callback], root=tmp_path).fit(make_net(PL), loader())
    best, last = Path(callback.best_model_path), Path(callback.last_model_path)
    before, of_last = best.read_bytes(), content(last)
    assert best != last and not best.samefile(last) and before == last.read_bytes()
    torch.save({"state_dict": of_last["state_dict"]}, last)
    assert best.read_bytes() == before and set(content(last)) == {"state_dict"}
    shutil.copy(best, last)
    assert last.read_bytes() == before


def test_a_script_that_writes_into_the_link_to_the_best_changes_the_best_as_with_stock(tmp_path: Path) -> None:
    found = []
    for kind, made in (("stock", stock(PL)), ("ours", build(PL))):
        callback = made(dirpath=tmp_path / kind, save_last="link")
        make_trainer(PL, [callback], root=tmp_path / kind).fit(make_net(PL), loader())
        last = tmp_path / kind / "last.ckpt"
        found.append((last.is_symlink(), os.readlink(last)))
    assert found == [(True, "epoch=1-step=12.ckpt")] * 2


def test_a_link_that_cannot_be_made_does_not_keep_the_engine_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(linkpath: str, path: str) -> None:
        raise PermissionError(13, "Permission denied", linkpath)

    monkeypatch.setattr("resiliency.callbacks.checkpointing.saver.link_symbolically", refused)
    callback = build(PL)(dirpath=tmp_path, save_last="link")
    make_trainer(PL, [callback], root=tmp_path).fit(make_net(PL), loader())
    assert everything(tmp_path) == ["epoch=1-step=12.ckpt", "last.ckpt"]
    assert "cannot be made a link" in caplog.text


def test_last_resumes_from_the_newest_file_also_when_that_is_not_called_last(tmp_path: Path) -> None:
    def fit(epochs: int, **settings: Any) -> Any:
        net = make_net(PL)
        given = {"save_last": settings.pop("save_last", True), "auto_resume": settings.pop("auto_resume", None)}
        callback = ours(PL, tmp_path, save_top_k=-1, **given)
        make_trainer(PL, [callback], root=tmp_path, max_epochs=epochs).fit(net, loader(), **settings)
        return net

    fit(2)
    fit(3, save_last=False, auto_resume=True)
    assert {"last.ckpt", "epoch=2-step=18.ckpt"} <= set(everything(tmp_path))
    assert content(tmp_path / "last.ckpt")["global_step"] == 12
    assert fit(4, ckpt_path="last").ran == 6


KEPT: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "a launcher's job, whose log is wanted": ({"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "0"}, {}),
    "a goodput callback": ({}, {"goodput": True}),
}


@pytest.mark.parametrize("case", KEPT)
def test_the_event_log_is_kept_where_somebody_reads_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, extra = KEPT[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    callbacks = [ours(PL, tmp_path / "ckpts"), *([build_goodput(PL)(log=False)] if extra else [])]
    make_trainer(PL, callbacks, root=tmp_path).fit(make_net(PL), loader())
    assert (tmp_path / "ckpts/.resiliency/default/events/rank-00000.jsonl").stat().st_size > 100


KILLED = """
import os, signal, sys
from pathlib import Path
from resiliency.callbacks.model_checkpoint import build
from tests.embedded import host_agent
from tests.callbacks.harness import loader, make_net, make_trainer
net, folder = make_net("lightning.pytorch"), Path(sys.argv[1])
callback = build("lightning.pytorch")(dirpath=folder, every_n_train_steps=2, save_top_k=-1)
def kill(*_):
    if net.global_step == 5:
        callback.best_model_path  # waits until it is there
        os.kill(os.getpid(), signal.SIGKILL)
net.on_train_batch_start = kill
make_trainer("lightning.pytorch", [callback], root=folder).fit(net, loader())
"""


@pytest.mark.parametrize("way", few(["auto", "last"], ["auto"]))
def test_a_killed_job_keeps_its_folder_and_the_next_one_tidies_up(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, zygote: Zygote, way: str
) -> None:
    output = tmp_path_factory.mktemp("output") / "killed"
    worker = start_script(zygote, KILLED, output, str(tmp_path))
    assert worker.wait(timeout_s=120) == -signal.SIGKILL, output.read_text()
    assert sorted(os.listdir(tmp_path)) == [META_DIR, "epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]
    net = make_net(PL)
    callback = build(PL)(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1, auto_resume=way == "auto")
    make_trainer(PL, [callback], root=tmp_path, max_epochs=1).fit(
        net, loader(), ckpt_path="last" if way == "last" else None
    )
    assert net.ran == 2
    assert everything(tmp_path) == [f"epoch=0-step={step}.ckpt" for step in (2, 4, 6)]
    assert content(tmp_path / "epoch=0-step=4.ckpt")["global_step"] == 4


# -- while it trains ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.parametrize("case", CASES)
def test_a_listing_in_any_hook_shows_the_checkpoints_that_it_shows_with_the_stock_class(
    namespace: str, case: str, tmp_path: Path
) -> None:
    def listings(made: type, folder: Path) -> list[list[str]]:
        class Listing(made):  # type: ignore[misc]
            def look(self, *_: Any) -> None:
                self.best_model_path, self.last_model_path  # noqa: B018  there once they have been read
                seen.append(sorted(set(os.listdir(folder)) - {META_DIR}) if folder.is_dir() else [])

        for hook in ("on_train_batch_start", "on_validation_end", "on_train_epoch_end", "on_train_end", "teardown"):

            def after(self: Any, *arguments: Any, _hook: str = hook, **named: Any) -> None:
                getattr(super(Listing, self), _hook)(*arguments, **named)
                self.look()

            setattr(Listing, hook, after)
        seen: list[list[str]] = []
        callback = Listing(dirpath=folder, **CASES[case])
        make_trainer(namespace, [callback], root=folder.parent).fit(make_net(namespace), loader())
        return seen

    ours_seen = listings(build(namespace), tmp_path / "ours" / "ckpts")
    assert not [name for seen in ours_seen for name in seen if not name.endswith(".ckpt")]
    stock_seen = listings(stock(namespace), tmp_path / "stock" / "ckpts")
    assert len(ours_seen) == len(stock_seen) > 12 and ours_seen[-1] == stock_seen[-1]
    # A checkpoint that was replaced may go a moment later than with the stock class; none is missing.
    assert [set(theirs) - set(own) for own, theirs in zip(ours_seen, stock_seen, strict=True)] == [set()] * len(
        stock_seen
    )


@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.parametrize("whose", ["the module's", "a callback's"])
def test_the_start_of_an_epoch_finds_what_the_end_of_the_one_before_has_saved(
    namespace: str, whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the stock class, and without asking for a path: a script that uploads what is new does so there."""
    seen: list[list[str]] = []

    def look(*_: Any) -> None:
        seen.append(sorted(path.name for path in (tmp_path / "ckpts").glob("*.ckpt")))

    net, callbacks = make_net(namespace), []
    if whose == "the module's":
        net.on_train_epoch_start = look
    else:
        looking = importlib.import_module(f"{namespace}.callbacks").Callback()
        looking.on_train_epoch_start = look
        callbacks.append(looking)
    callbacks.append(build(namespace)(dirpath=tmp_path / "ckpts", save_top_k=-1))
    monkeypatch.setenv("RESILIENCY_FAULTS", "agent.name.write:delay=0.3@*")  # in the agent's process
    make_trainer(namespace, callbacks, root=tmp_path, max_epochs=3).fit(net, loader())
    assert seen == [[], ["epoch=0-step=6.ckpt"], ["epoch=0-step=6.ckpt", "epoch=1-step=12.ckpt"]]
