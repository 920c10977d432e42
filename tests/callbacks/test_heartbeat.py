"""HeartbeatCallback in real fits: what is read from outside at each moment, and that nothing else changes."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resiliency.callbacks import heartbeat as module
from resiliency.callbacks.heartbeat import build
from resiliency.errors import ConfigError
from resiliency.plugins import rank_monitor
from resiliency.runtime import heartbeat
from resiliency.runtime.heartbeat_files import read_heartbeats
from resiliency.testing.rank_monitor import RankMonitorClientDouble
from tests.callbacks.harness import (
    EITHER,
    NAMESPACES,
    differences,
    loader,
    make_net,
    make_trainer,
    names,
    ours,
    stock,
    weights,
)

PL = "lightning.pytorch"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = Path(f"/dev/shm/heartbeats-of-test-{os.getpid()}-{time.monotonic_ns()}")
    monkeypatch.setattr(heartbeat, "_own", {})
    yield path
    made = heartbeat._own.get(os.getpid())
    for page in made._pages if made is not None else ():
        page.close()
    for one in path.iterdir() if path.exists() else ():
        one.unlink()
    if path.exists():
        path.rmdir()


def seen(folder: Path) -> tuple[str, int]:
    (one,) = read_heartbeats(folder)
    return str(one.page.phase), one.page.step


def probe(namespace: str, folder: Path, at: dict[str, list[tuple[str, int]]]) -> Any:
    """Reads the page in each of these hooks."""
    callback = importlib.import_module(namespace).Callback()

    def reads(hook: str) -> Any:
        return lambda *arguments, **more: at.setdefault(hook, []).append(seen(folder))

    for hook in (
        "on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end", "on_validation_batch_end",
        "on_test_batch_end", "on_predict_batch_end", "on_exception",
    ):  # fmt: skip
        setattr(callback, hook, reads(hook))
    return callback


class Io:
    """Reads the page while a checkpoint is written and read."""

    def __init__(self, namespace: str, folder: Path, at: dict[str, list[tuple[str, int]]]) -> None:
        base = importlib.import_module(f"{namespace}.plugins.io").TorchCheckpointIO

        class Reading(base):  # type: ignore[misc,valid-type]
            def save_checkpoint(self, *arguments: Any, **more: Any) -> None:
                at.setdefault("save", []).append(seen(folder))
                super().save_checkpoint(*arguments, **more)

            def load_checkpoint(self, *arguments: Any, **more: Any) -> Any:
                at.setdefault("load", []).append(seen(folder))
                return super().load_checkpoint(*arguments, **more)

        self.plugin = Reading()


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("namespace", EITHER)
def test_what_is_read_in_each_hook_of_a_fit(namespace: str, folder: Path, tmp_path: Path) -> None:
    at: dict[str, list[tuple[str, int]]] = {}
    saves = stock(namespace)(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    io = Io(namespace, folder, at).plugin
    settings = {"plugins": [io], "num_sanity_val_steps": 1, "max_epochs": 1}
    trainer = make_trainer(
        namespace, [build(namespace)(folder), probe(namespace, folder, at), saves], root=tmp_path, **settings
    )
    trainer.fit(make_net(namespace), loader(), loader(batches=2))
    assert at["on_fit_start"] == [("setup", -1)] and at["on_train_start"] == [("training", 0)]
    assert at["on_train_batch_start"] == [("training", step) for step in range(6)]
    # The observer ends the step in the hook of the first callback.
    assert at["on_train_batch_end"] == [("training", step) for step in range(1, 7)]
    assert at["on_validation_batch_end"] == [("setup", -1), ("validation", 6), ("validation", 6)], "sanity checks first"
    assert at["save"] == [("saving", 4)] and "load" not in at
    assert seen(folder) == ("ended", 6)

    callbacks = [build(namespace)(folder), probe(namespace, folder, at)]
    callbacks.append(stock(namespace)(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}"))
    again = make_trainer(namespace, callbacks, root=tmp_path, plugins=[io], max_epochs=2)
    assert "load_checkpoint" not in vars(again.strategy)
    again.fit(make_net(namespace), loader(), ckpt_path=tmp_path / "step=4.ckpt")
    assert at["load"] == [("loading", 6)], "of the fit before, in this process; nothing is known of this one yet"
    assert at["on_train_start"][1:] == [("training", 4)]
    assert "load_checkpoint" not in vars(again.strategy)
    again.test(make_net(namespace), loader(batches=1))
    assert at["on_test_batch_end"] == [("testing", 12)]
    again.predict(make_net(namespace), loader(batches=1))
    assert at["on_predict_batch_end"] == [("prediction", 12)]


@pytest.mark.parametrize("namespace", EITHER)
def test_saves_of_this_library_are_seen_and_end(namespace: str, folder: Path, tmp_path: Path) -> None:
    at: dict[str, list[tuple[str, int]]] = {}
    phases: list[str] = []
    original = heartbeat.enter

    def entered(phase: Any, step: int | None = None) -> None:
        phases.append(str(phase))
        original(phase, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat, "enter", entered)
        callbacks = [build(namespace)(folder), probe(namespace, folder, at)]
        callbacks.append(ours(namespace, tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}"))
        make_trainer(namespace, callbacks, root=tmp_path, max_epochs=1).fit(make_net(namespace), loader())
    assert phases == ["setup", "saving", "training", "saving", "training", "saving", "training", "ended"]
    assert at["on_train_batch_start"] == [("training", step) for step in range(6)]


def test_a_failed_fit_says_so(folder: Path, tmp_path: Path) -> None:
    net = make_net(PL)
    net.training_step = lambda *arguments: (_ for _ in ()).throw(ValueError("in the step"))
    trainer = make_trainer(PL, [build(PL)(folder)], root=tmp_path)
    with pytest.raises(ValueError, match="in the step"):
        trainer.fit(net, loader())
    assert seen(folder) == ("failed", 0)
    (one,) = read_heartbeats(folder)
    assert not one.page.watched


def test_the_variable_names_the_folder_and_the_argument_goes_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder.with_name(folder.name + "-other")
    monkeypatch.setenv("RESILIENCY_HEARTBEAT_DIR", str(other))
    try:
        make_trainer(PL, [build(PL)()], root=tmp_path, max_steps=2).fit(make_net(PL), loader())
        assert seen(other) == ("ended", 2) and not folder.exists()
        make_trainer(PL, [build(PL)(folder)], root=tmp_path, max_steps=3).fit(make_net(PL), loader())
        assert seen(other) == ("setup", 2) or seen(other) == ("ended", 2)
        assert seen(folder) == ("ended", 3)
    finally:
        for one in other.iterdir():
            one.unlink()
        other.rmdir()


def test_where_nobody_is_told_that_is_said_and_where_somebody_is_it_is_not(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(PL, [build(PL)()], root=tmp_path, max_steps=1).fit(make_net(PL), loader())
    assert caplog.text.count("nobody receives this job's heartbeats") == 1
    caplog.clear()
    make_trainer(PL, [build(PL)(folder)], root=tmp_path, max_steps=1).fit(make_net(PL), loader())
    assert "nobody is told" not in caplog.text


def test_a_folder_that_cannot_be_used_ends_the_fit_before_it_begins(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").touch()
    net = make_net(PL)
    with pytest.raises(ConfigError, match=r"directory='.*file/below' cannot hold heartbeats"):
        make_trainer(PL, [build(PL)(tmp_path / "file" / "below")], root=tmp_path).fit(net, loader())
    assert net.ran == 0


@pytest.mark.parametrize("namespace", EITHER)
def test_metrics_files_and_states_are_those_of_a_fit_without_it(namespace: str, folder: Path, tmp_path: Path) -> None:
    results = []
    for number, more in enumerate(([], [build(namespace)(folder)])):
        root = tmp_path / str(number)
        saves = stock(namespace)(dirpath=root, monitor="val_loss", save_top_k=2, save_last=True)
        net = make_net(namespace)
        trainer = make_trainer(namespace, [*more, saves], root=root)
        trainer.fit(net, loader(), loader(batches=2))
        states = trainer._checkpoint_connector.dump_checkpoint()["callbacks"]
        results.append((weights(net), dict(trainer.callback_metrics), names(root), sorted(map(str, states))))
    first, second = results
    assert differences(list(first[:2]), list(second[:2])) == [] and first[2] == second[2]
    assert [key.replace(str(tmp_path / "0"), "") for key in first[3]] == [
        key.replace(str(tmp_path / "1"), "") for key in second[3]
    ]


def test_it_can_be_pickled_and_is_refused_by_a_trainer_of_the_other_package(folder: Path) -> None:
    callback = build("pytorch_lightning")(folder)
    assert type(pickle.loads(pickle.dumps(callback))) is type(callback)
    with pytest.raises(ConfigError, match="the Trainer comes from"):
        callback.setup(SimpleNamespace(), None, "fit")
    assert module.HeartbeatCallback in [build(one) for one in NAMESPACES]


# -- with NVRx's launcher ------------------------------------------------------------------------------------------------


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[RankMonitorClientDouble]:
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", "/nowhere")
    config = SimpleNamespace(
        initial_rank_heartbeat_timeout=60.0,
        rank_heartbeat_timeout=0.2,
        rank_section_timeouts={"setup": 60.0, "step": 60.0, "checkpointing": 60.0},
        rank_out_of_section_timeout=60.0,
    )
    double = RankMonitorClientDouble(config)
    monkeypatch.setattr(rank_monitor, "_clients", {})
    monkeypatch.setattr(rank_monitor.RankMonitor.__init__, "__defaults__", (lambda: double,))
    yield double


def sections(client: RankMonitorClientDouble) -> list[str]:
    """In the order they were opened, without repetitions of one."""
    opened = [call[1] for call in client.calls if call[0] == "start_section"]
    return [name for number, name in enumerate(opened) if not number or opened[number - 1] != name]


def slow(namespace: str, seconds: float = 0.05) -> Any:
    """A callback that makes each step last, so that the thread that tells the monitor sees each section."""
    callback = importlib.import_module(namespace).Callback()
    callback.on_train_batch_start = lambda *arguments: time.sleep(seconds)
    callback.on_save_checkpoint = lambda *arguments: time.sleep(seconds)
    callback.on_fit_start = lambda *arguments: time.sleep(seconds)
    return callback


@pytest.mark.parametrize("namespace", EITHER)
def test_the_rank_monitor_hears_the_sections_of_a_fit(
    namespace: str, client: RankMonitorClientDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = stock(namespace)(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1)
    callbacks = [build(namespace)(), slow(namespace), saves]
    trainer = make_trainer(namespace, callbacks, root=tmp_path, max_epochs=1, num_sanity_val_steps=2)
    trainer.fit(make_net(namespace), loader(), loader(batches=2))
    assert sections(client)[:4] == ["setup", "step", "checkpointing", "step"]
    assert client.names[-1] == "shutdown_workload_monitoring" and "send_heartbeat" in client.names
    assert client.names.index("send_heartbeat") > client.calls.index(("start_section", "step")), (
        "none in the set-up and the sanity check"
    )
    assert client.errors == [] and client.open == []
    assert "nobody is told" not in caplog.text


def test_after_a_failure_the_monitor_goes_on_watching_the_process(
    client: RankMonitorClientDouble, tmp_path: Path
) -> None:
    net = make_net(PL)
    net.training_step = lambda *arguments: (_ for _ in ()).throw(ValueError("in the step"))
    with pytest.raises(ValueError, match="in the step"):
        make_trainer(PL, [build(PL)(), slow(PL)], root=tmp_path).fit(net, loader())
    assert client.open == [] and "shutdown_workload_monitoring" not in client.names and client.errors == []


def test_a_callback_of_nvrx_in_the_trainer_is_left_to_tell(
    client: RankMonitorClientDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = type("FaultToleranceCallback", (importlib.import_module(PL).Callback,), {})
    theirs.__module__ = "nvidia_resiliency_ext.ptl_resiliency.fault_tolerance_callback"
    with caplog.at_level(logging.INFO, logger="resiliency"):
        make_trainer(PL, [build(PL)(), theirs()], root=tmp_path, max_steps=1).fit(make_net(PL), loader())
    assert client.calls == [] and "FaultToleranceCallback tells NVRx's rank monitor" in caplog.text


def test_a_missing_package_is_said_and_training_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sys

    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", "/nowhere")
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    trainer = make_trainer(PL, [build(PL)(folder)], root=tmp_path, max_steps=1)
    trainer.fit(make_net(PL), loader())
    assert trainer.global_step == 1 and "pip install 'resiliency[nvrx]'" in caplog.text


def test_without_the_socket_nothing_of_nvrx_is_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RankMonitor", lambda: pytest.fail("there is no rank monitor"))
    make_trainer(PL, [build(PL)(folder)], root=tmp_path, max_steps=1).fit(make_net(PL), loader())
