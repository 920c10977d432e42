"""The callbacks that log steps: each line and scalar is right, appears once, and each argument has its effect."""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import os
import pickle
import re
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch

from resiliency.callbacks import _log_directory, _memory_log, _scalars, _step_log
from resiliency.callbacks import logging as module
from resiliency.callbacks._remote_folder import RemoteFolder
from resiliency.errors import ConfigError
from resiliency.plugins.step_hooks import step_observer
from resiliency.telemetry.step_observer import StepObserver
from resiliency.testing.zygote import Zygote
from tests.callbacks.harness import EITHER, differences, loader, make_net, make_trainer, names, stock, weights
from tests.ports import free_port
from tests.rings import few

PL = "lightning.pytorch"
MODULES = module._MODULES


def build(name: str, namespace: str = PL) -> Any:
    return MODULES[name].build(namespace)


@pytest.fixture(autouse=True)
def shown(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger="resiliency"):
        yield


def fit(
    callbacks: list[Any], root: Path, namespace: str = PL, net: Any = None, batches: int = 6, **settings: Any
) -> Any:
    trainer = make_trainer(namespace, callbacks, root=root, **({"max_epochs": 1} | settings))
    validation = loader(batches=2) if settings.get("num_sanity_val_steps") or "val_check_interval" in settings else None
    trainer.fit(net or make_net(namespace), loader(batches=batches), validation)
    return trainer


def numbers(text: str, pattern: str) -> list[tuple[int, float]]:
    return [(int(step), float(value)) for step, value in re.findall(pattern, text)]


STEP = r"Step (\d+) time: (\d+\.\d{3})s"
TPS = r"TPS for step (\d+): (\d+\.\d{3})"
BETWEEN = r"Time between last step end and this step start: (\d+\.\d{3})s"


class Clock:
    """A clock in which time passes only in ``sleep``, so that a slow machine changes no time that is logged."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the steps of each fit."""
    made = Clock()
    monkeypatch.setitem(StepObserver.__init__.__kwdefaults__, "clock", made)
    return made


def sleepy(namespace: str, clock: Clock, *, step: float = 0.0, validation: float = 0.0) -> Any:
    net = make_net(namespace)
    trains, validates = net.training_step, net.validation_step

    def training_step(*arguments: Any) -> Any:
        clock.sleep(step)
        return trains(*arguments)

    def validation_step(*arguments: Any) -> Any:
        clock.sleep(validation)
        return validates(*arguments)

    net.training_step, net.validation_step = training_step, validation_step
    return net


# -- StepLoggingCallback --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", EITHER)
def test_each_step_has_a_line_with_its_time(
    namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    net = sleepy(namespace, clock, step=0.03, validation=0.2)
    fit(
        [build("StepLoggingCallback", namespace)()],
        tmp_path,
        namespace,
        net,
        num_sanity_val_steps=1,
        val_check_interval=3,
    )
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("resiliency")]
    assert lines[0] == "Training starts."
    found = numbers(caplog.text, STEP)
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
    assert all(seconds == 0.03 for _, seconds in found), "validations are not part of a step"
    between = [line for line in lines if line.startswith("Time between")]
    assert between == ["Time between last step end and this step start: 0.400s"], (
        "the validation after step 3; that after step 6 ends the fit"
    )
    assert lines.index(between[0]) == lines.index("Step 4 time: 0.030s") - 1


def test_nothing_is_said_between_steps_that_follow_at_once_or_before_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    callback = build("StepLoggingCallback")()
    slow_start = importlib.import_module(PL).Callback()
    slow_start.on_train_epoch_start = lambda *arguments: clock.sleep(0.3)
    trainer = fit([callback, slow_start], tmp_path, max_epochs=2)
    assert re.findall(BETWEEN, caplog.text) == ["0.300"], "between the two epochs"
    caplog.clear()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(make_net(PL), loader())
    assert re.findall(BETWEEN, caplog.text) == [], "what was between two fits"
    assert caplog.text.count("Training starts.") == 1


def test_with_accumulation_a_step_is_an_optimizer_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    net = sleepy(PL, clock, step=0.03)
    fit(
        [build("StepLoggingCallback")(), build("TPSLoggingCallback")(8, 16)],
        tmp_path,
        net=net,
        accumulate_grad_batches=3,
    )
    assert numbers(caplog.text, STEP) == [(1, 0.09), (2, 0.09)]
    assert [step for step, _ in numbers(caplog.text, TPS)] == [1, 2]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_resumed_run_goes_on_counting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves = stock(PL)(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    fit([saves], tmp_path)
    again = stock(PL)(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    trainer = make_trainer(PL, [build("StepLoggingCallback")(), again], root=tmp_path, max_epochs=1)
    trainer.fit(make_net(PL), loader(), ckpt_path=tmp_path / "step=4.ckpt")
    assert [step for step, _ in numbers(caplog.text, STEP)] == [5, 6]


def test_the_device_is_waited_for_where_that_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(_step_log.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        _step_log.torch.cuda, "is_current_stream_capturing", lambda: False
    )  # optimizers ask a GPU build
    monkeypatch.setattr(_step_log.torch.cuda, "synchronize", lambda: waits.append(1))
    trainer = fit([build("StepLoggingCallback")()], tmp_path)
    assert waits == []
    trainer = fit([build("StepLoggingCallback")(timer_kwargs={"sync_cuda": True})], tmp_path)
    assert len(waits) >= 12 and step_observer(trainer).synchronize is None, "it ends with the fit"
    fit([build("StepLoggingCallback")(timer_kwargs={"sync_cuda": False})], tmp_path)
    with pytest.raises(ConfigError, match="timer_kwargs has no sync_gpu; it has sync_cuda"):
        build("StepLoggingCallback")(timer_kwargs={"sync_gpu": True})


def test_lines_are_seen_where_nobody_has_set_up_logging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a script of a user's: Lightning's own messages are shown then, and so are these lines."""
    ours, said = logging.getLogger("resiliency"), []
    monkeypatch.setattr(importlib.import_module(f"{PL}.utilities.rank_zero"), "rank_zero_info", said.append)
    monkeypatch.setattr(ours, "propagate", False)
    fit([build("StepLoggingCallback")()], tmp_path)
    assert said[0] == "Training starts." and len([line for line in said if line.startswith("Step ")]) == 6


# -- TPSLoggingCallback ---------------------------------------------------------------------------------------------------


def test_throughput_is_tokens_of_a_step_over_its_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    fit(
        [build("StepLoggingCallback")(), build("TPSLoggingCallback")(gbs=4, seq_length=32)],
        tmp_path,
        net=sleepy(PL, clock, step=0.05),
    )
    assert numbers(caplog.text, STEP) == [(step, 0.05) for step in range(1, 7)]
    assert numbers(caplog.text, TPS) == [(step, 4 * 32 / 0.05) for step in range(1, 7)]


@pytest.mark.parametrize(
    "arguments", [{"gbs": 0, "seq_length": 1}, {"gbs": 1, "seq_length": 0}, {"gbs": 1.5, "seq_length": 1}]
)
def test_numbers_that_are_none_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="gbs" if arguments["gbs"] != 1 else "seq_length"):
        build("TPSLoggingCallback")(**arguments)


# -- TensorBoard ------------------------------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard reads in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    found: dict[str, dict[int, float]] = {}
    for tag in events.Tags()["scalars"]:
        entries = events.Scalars(tag)
        found[tag] = {one.step: one.value for one in entries}
        assert len(entries) == len(found[tag]), f"{tag} was written twice for a step"
    return found


def test_scalars_go_to_a_run_in_the_folder_and_callbacks_share_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    folder = tmp_path / "tb"
    callbacks = [
        build("TensorboardCallback")(folder),
        build("StepLoggingCallback")(folder),
        build("TPSLoggingCallback")(4, 32, folder),
        build("MemoryLoggingCallback")(every_n_steps=2, tb_dir=str(folder)),
    ]
    before = set(os.listdir("/"))
    fit(callbacks, tmp_path, net=sleepy(PL, clock, step=0.02))
    assert set(os.listdir("/")) == before, "the older library wrote there"
    (run,) = folder.iterdir()
    assert re.fullmatch(r"run-\d{8}-\d{6}", run.name)
    found = scalars(run)
    assert set(found) == {"train/step_time", "train/between_steps", "train/num_gpus", "train/tps", "memory/cpu_gib"}
    assert list(found["train/step_time"]) == [1, 2, 3, 4, 5, 6] and list(found["train/between_steps"]) == [
        2,
        3,
        4,
        5,
        6,
    ]
    assert set(found["train/num_gpus"].values()) == {1.0}
    for step, seconds in numbers(caplog.text, STEP):
        assert found["train/step_time"][step] == pytest.approx(seconds, abs=0.001)
        assert found["train/tps"][step] == pytest.approx(128 / found["train/step_time"][step], rel=0.01)


@pytest.mark.parametrize("name", ["TensorboardCallback", "StepLoggingCallback", "TPSLoggingCallback"])
def test_each_writes_by_itself(name: str, tmp_path: Path) -> None:
    arguments = (4, 32) if name == "TPSLoggingCallback" else ()
    fit([build(name)(*arguments, tb_dir=tmp_path / "tb")], tmp_path)
    found = scalars(next((tmp_path / "tb").iterdir()))
    assert set(found) == ({"train/tps"} if arguments else {"train/step_time", "train/between_steps", "train/num_gpus"})


@pytest.mark.parametrize("namespace", EITHER)
def test_without_a_folder_scalars_go_to_the_trainers_own_logger(namespace: str, tmp_path: Path) -> None:
    logger = importlib.import_module(f"{namespace}.loggers").TensorBoardLogger(tmp_path / "own", name="", version="")
    callbacks = [build("TensorboardCallback", namespace)(None), build("TPSLoggingCallback", namespace)(1, 1)]
    fit(callbacks, tmp_path, namespace, logger=logger, log_every_n_steps=1)
    found = scalars(Path(logger.log_dir))
    assert {"train/step_time", "train/tps", "train_loss"} <= set(found)


def test_without_a_folder_and_a_logger_the_lines_are_all_and_the_callback_that_has_none_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit([build("StepLoggingCallback")()], tmp_path, enable_checkpointing=False)
    assert numbers(caplog.text, STEP) and os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match="TensorBoardLogger, and there is none"):
        fit([build("TensorboardCallback")(None)], tmp_path)


def test_without_tensorboard_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    writer = SimpleNamespace(SummaryWriter="of tensorboardX")
    monkeypatch.setitem(sys.modules, "tensorboardX", writer)
    assert _scalars.summary_writer() == "of tensorboardX"
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"pip install 'resiliency\[tensorboard\]'"):
        fit([build("StepLoggingCallback")(tmp_path)], tmp_path)


def test_a_second_fit_and_one_that_failed_write_on(tmp_path: Path) -> None:
    callback = build("TensorboardCallback")(tmp_path / "tb")
    net = make_net(PL)
    trainer = make_trainer(PL, [callback], root=tmp_path, max_epochs=1)
    net.on_train_batch_end = lambda *arguments: (_ for _ in ()).throw(ValueError("once"))
    with pytest.raises(ValueError, match="once"):
        trainer.fit(net, loader())
    assert callback._scalars is None and callback._subscriber is None
    trainer = make_trainer(PL, [callback], root=tmp_path, max_epochs=1)
    trainer.fit(make_net(PL), loader())
    runs = sorted((tmp_path / "tb").iterdir())
    assert len(runs) == 2 and list(scalars(runs[1])["train/step_time"]) == [1, 2, 3, 4, 5, 6]


def test_a_writer_that_fails_is_said_once_and_ends_no_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("No space left on device")

    writer = SimpleNamespace(add_scalar=fail, flush=fail, close=fail)
    monkeypatch.setattr(_scalars, "summary_writer", lambda: lambda folder: writer)
    fit([build("StepLoggingCallback")(tmp_path / "tb")], tmp_path)
    assert caplog.text.count("scalars are not written for TensorBoard any more") == 1


def test_a_development_run_writes_nothing(tmp_path: Path) -> None:
    callbacks = [build("TensorboardCallback")(tmp_path / "tb"), build("TensorboardCallback")(None)]
    fit(callbacks, tmp_path, fast_dev_run=True)
    assert not (tmp_path / "tb").exists()


def test_scalars_reach_a_bucket(tmp_path: Path) -> None:
    address = f"memory://logs-{time.monotonic_ns()}"
    fit([build("TensorboardCallback")(address)], tmp_path)
    files = fsspec.filesystem("memory").find(address.partition("://")[2])
    assert len(files) == 1 and re.search(r"/run-\d{8}-\d{6}/events\.out\.tfevents", files[0]), files
    (tmp_path / "copy").write_bytes(fsspec.filesystem("memory").cat_file(files[0]))
    os.makedirs(tmp_path / "read")
    (tmp_path / "copy").rename(tmp_path / "read" / "events.out.tfevents.1.x")
    assert list(scalars(tmp_path / "read")["train/step_time"]) == [1, 2, 3, 4, 5, 6]


# -- MemoryLoggingCallback ------------------------------------------------------------------------------------------------


def test_memory_is_that_of_this_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit([build("MemoryLoggingCallback")(every_n_steps=2)], tmp_path)
    found = numbers(caplog.text, r"Memory after step (\d+): cpu (\d+\.\d{3}) GiB")
    assert [step for step, _ in found] == [1, 3, 5]
    status = Path("/proc/self/status").read_text()
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / (1 << 20)  # type: ignore[index]
    assert found[-1][1] == pytest.approx(resident, rel=0.5)
    caplog.clear()
    fit([build("MemoryLoggingCallback")()], tmp_path, log_every_n_steps=4)
    assert [step for step, _ in numbers(caplog.text, r"Memory after step (\d+): cpu (\d+\.\d{3})")] == [1, 5]
    for refused in (0, 1.5, True):
        with pytest.raises(ConfigError, match=f"every_n_steps={refused}"):
            build("MemoryLoggingCallback")(every_n_steps=refused)


def test_memory_of_a_gpu_is_there_where_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(_memory_log.memory_in_use()) == {"cpu"} or torch.cuda.is_initialized()
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        memory_allocated=lambda: 1,
        memory_reserved=lambda: 3,
        max_memory_allocated=lambda: 2,
    )
    monkeypatch.setattr(_memory_log, "torch", SimpleNamespace(cuda=cuda))
    found = _memory_log.memory_in_use()
    assert (found["cuda_allocated"], found["cuda_reserved"], found["cuda_peak"]) == (1, 3, 2)


# -- StragglerLoggingCallback -----------------------------------------------------------------------------------------------


def compare(zygote: Zygote, folder: Path, *, steps: int = 80, **arguments: Any) -> str:
    """What rank 0 logged."""
    port, result = str(free_port()), folder / f"log-{time.monotonic_ns()}"
    workers = [
        zygote.start(
            "tests.callbacks.straggler_job:train",
            {"result": str(result), **arguments},
            env={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "NODE_RANK": "0",
                "GROUP_RANK": "0",
                "RESILIENCY_NODE": f"host-{rank}",
                "TORCHELASTIC_RUN_ID": "stragglers",
            },
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + 90
    try:
        for worker in workers:
            worker.wait(timeout_s=max(0.1, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()
    assert Path(f"{result}.0.done").read_text() == Path(f"{result}.1.done").read_text() == str(steps)
    assert "holds up" not in Path(f"{result}.1").read_text()
    return Path(f"{result}.0").read_text()


@pytest.mark.parametrize("slow", few([0, 1], [1]))
def test_a_straggler_shows_up_by_name(zygote: Zygote, tmp_path: Path, slow: int) -> None:
    text = compare(zygote, tmp_path, slow_rank=slow, seconds=0.03, every_s=0.5, factor=1.5)
    assert re.search(rf"WARNING rank {slow} on host-{slow} holds up the others: its own work takes 0\.0[3-9]", text), (
        text
    )
    assert f"rank {1 - slow} on" not in "".join(line for line in text.splitlines() if "WARNING" in line)
    assert re.search(r"INFO Own work a step up to step \d+: 0\.\d{3} s \(rank \d on host-\d\) to", text)


def test_with_accumulation_the_rank_that_waits_between_batches_is_not_taken_for_slow(
    zygote: Zygote, tmp_path: Path
) -> None:
    text = compare(zygote, tmp_path, steps=20, slow_rank=1, seconds=0.05, every_s=0.7, factor=1.5, accumulate=4)
    found = [float(times) for times in re.findall(r"rank 1 on host-1 holds up .* (\d+\.\d) times the median", text)]
    assert found and max(found) > 4, text


def test_a_rank_within_the_factor_is_no_straggler(zygote: Zygote, tmp_path: Path) -> None:
    text = compare(zygote, tmp_path, slow_rank=1, seconds=0.03, every_s=0.5, factor=1e6)
    assert "Own work a step" in text and "holds up" not in text


def test_an_interval_longer_than_the_fit_says_nothing(zygote: Zygote, tmp_path: Path) -> None:
    assert "Own work" not in compare(zygote, tmp_path, slow_rank=1, seconds=0.0, every_s=600, factor=1.5)


def test_one_rank_is_compared_with_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = build("StragglerLoggingCallback")(every=timedelta(milliseconds=1))
    fit([callback], tmp_path)
    assert callback._times_on_store is None and "Own work" not in caplog.text
    for arguments in ({"every": timedelta(0)}, {"every": 3}, {"factor": 1.0}):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            build("StragglerLoggingCallback")(**arguments)


# -- LogDirectoryCallback -------------------------------------------------------------------------------------------------


def speaking(text: str) -> Any:
    net = make_net(PL)
    net.on_train_start = lambda: logging.getLogger("of.a.user").warning(text)
    return net


@pytest.mark.parametrize("namespace", EITHER)
def test_what_is_logged_is_in_a_file_of_the_rank(namespace: str, tmp_path: Path) -> None:
    handlers = list(logging.getLogger().handlers)
    callback = build("LogDirectoryCallback", namespace)(tmp_path / "logs")
    net = make_net(namespace)
    net.on_train_start = lambda: (
        logging.getLogger("of.a.user").warning("said by the user"),
        importlib.import_module(f"{namespace}.utilities.rank_zero").rank_zero_info("said by Lightning"),
    )
    fit([callback], tmp_path, namespace, net)
    (file,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(r"rank-00000-\d{8}T\d{6}-00\.log", file.name)
    text = file.read_text()
    assert text.count("WARNING of.a.user: said by the user") == 1 and text.count("said by Lightning") == 1
    assert logging.getLogger().handlers == handlers
    logging.getLogger("of.a.user").warning("later")
    assert "later" not in file.read_text()


def test_an_exception_is_the_last_line_of_the_file(tmp_path: Path) -> None:
    net = make_net(PL)
    net.training_step = lambda *arguments: (_ for _ in ()).throw(ValueError("in the step"))
    with pytest.raises(ValueError, match="in the step"):
        fit([build("LogDirectoryCallback")(tmp_path / "logs")], tmp_path, net=net)
    (file,) = (tmp_path / "logs").iterdir()
    assert file.read_text().rstrip().endswith("ValueError: in the step")


def test_a_full_file_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resiliency.callbacks._log_directory._PART_BYTES", 200)
    fit([build("LogDirectoryCallback")(tmp_path / "logs")], tmp_path, net=speaking("x" * 300))
    files = sorted((tmp_path / "logs").iterdir())
    assert len(files) >= 2 and files[0].name.endswith("-00.log") and files[1].name.endswith("-01.log")
    assert "x" * 300 in "".join(file.read_text() for file in files)


def test_a_full_disk_is_said_once_and_ends_no_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a log file, every line of anybody's would raise."""
    monkeypatch.setattr(_log_directory.PartFiles, "_open", lambda self: open("/dev/full", "ab", buffering=0))
    fit([build("LogDirectoryCallback")(tmp_path / "logs")], tmp_path, net=speaking("hello"))
    assert caplog.text.count("this rank's log is not written to") == 1 and "hello" in caplog.text


def test_warnings_are_shown_as_without_it_where_nobody_has_set_up_logging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of the root logger keeps Python from showing what has no other handler."""
    shown, root = logging.StreamHandler(io.StringIO()), logging.getLogger()
    monkeypatch.setattr(logging, "lastResort", shown)
    monkeypatch.setattr(root, "handlers", [])
    shown.setLevel(logging.WARNING)
    net = speaking("to be seen")
    net.on_train_end = lambda: [logging.getLogger("of.a.user").info("quiet"), root.warning("at the root")]
    fit([build("LogDirectoryCallback")(tmp_path / name) for name in ("a", "b")], tmp_path, net=net)
    text = shown.stream.getvalue()
    assert text.count("to be seen") == 1 and text.count("at the root") == 1 and "quiet" not in text
    net.training_step = lambda *arguments: (_ for _ in ()).throw(ValueError("in the step"))
    with pytest.raises(ValueError, match="in the step"):
        fit([build("LogDirectoryCallback")(tmp_path / "c")], tmp_path, net=net)
    assert "in the step" not in shown.stream.getvalue(), "Python shows it"
    root.addHandler(shown)
    assert _log_directory.is_shown("of.a.user")


def bucket(address: str) -> dict[str, bytes]:
    files = fsspec.filesystem("memory")
    return {path.rpartition("/")[2]: files.cat_file(path) for path in files.find(address.partition("://")[2])}


def test_log_files_reach_a_bucket_while_the_fit_goes_on_and_at_its_end(tmp_path: Path) -> None:
    address = f"memory://logs-{time.monotonic_ns()}"
    seen: list[bytes] = []
    net = speaking("at the start")

    def wait_until_sent(outputs: Any, batch: Any, batch_idx: int) -> None:
        deadline = time.monotonic() + (20 if batch_idx == 0 else 0)
        while not seen and time.monotonic() < deadline:
            seen.extend(data for data in bucket(address).values() if b"at the start" in data)
            time.sleep(0.01)

    net.on_train_batch_end = wait_until_sent
    net.on_train_end = lambda: logging.getLogger("of.a.user").warning("at the end")
    fit([build("LogDirectoryCallback")(address, every=timedelta(milliseconds=20))], tmp_path, net=net)
    assert seen and b"at the end" not in seen[0]
    (data,) = bucket(address).values()
    assert b"at the end" in data


def test_without_an_interval_that_has_passed_files_are_sent_at_the_end(tmp_path: Path) -> None:
    address = f"memory://logs-{time.monotonic_ns()}"
    net = speaking("at the start")
    early: list[int] = []
    net.on_train_end = lambda: (time.sleep(0.1), early.append(len(bucket(address))))
    fit([build("LogDirectoryCallback")(address, every=timedelta(hours=1))], tmp_path, net=net)
    assert early == [0] and b"at the start" in next(iter(bucket(address).values()))


def test_a_store_that_hangs_delays_the_end_by_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import threading

    released = threading.Event()
    files = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(files, "pipe_file", lambda self, *arguments, **more: released.wait(30))
    folder = RemoteFolder(
        f"memory://logs-{time.monotonic_ns()}", every=timedelta(hours=1), flush_timeout=timedelta(seconds=0.3)
    )
    (folder.path / "a").write_text("text")
    thread = folder._thread
    began = time.monotonic()
    folder.close()
    took = time.monotonic() - began
    released.set()
    assert thread is not None
    thread.join(10)
    assert 0.25 < took < 5 and "was sent to memory://" in caplog.text and (folder.path / "a").exists()
    (folder.path / "a").unlink()
    folder.path.rmdir()


def test_the_deadline_is_that_of_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    released = threading.Event()
    files = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(files, "pipe_file", lambda self, *arguments, **more: released.wait(30))
    callback = build("LogDirectoryCallback")(
        f"memory://logs-{time.monotonic_ns()}", every=timedelta(hours=1), flush_timeout=timedelta(seconds=0.2)
    )
    threads: list[Any] = []
    net = speaking("at the start")
    net.on_train_end = lambda: threads.append((callback._folder, callback._folder._thread, time.monotonic()))
    fit([callback], tmp_path, net=net)
    ((folder, thread, ended),) = threads
    took = time.monotonic() - ended
    released.set()
    thread.join(10)
    assert 0.15 < took < 6
    shutil.rmtree(folder.path)


def test_a_store_that_refuses_is_said_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"memory://logs-{time.monotonic_ns()}"
    files = type(fsspec.filesystem("memory"))
    original, tries = files.pipe_file, []

    def refuses(self: Any, *arguments: Any, **more: Any) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise PermissionError("not now")
        original(self, *arguments, **more)

    monkeypatch.setattr(files, "pipe_file", refuses)
    folder = RemoteFolder(address, every=timedelta(milliseconds=20), flush_timeout=timedelta(seconds=10))
    (folder.path / "a").write_text("text")
    deadline = time.monotonic() + 20
    while not bucket(address) and time.monotonic() < deadline:
        time.sleep(0.01)
    folder.close()
    folder.close()
    assert bucket(address) == {"a": b"text"} and len(tries) == 3, "sent once"
    assert caplog.text.count("cannot be sent to") == 1 and not folder.path.exists()


def test_values_and_folders_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for arguments in ({"every": timedelta(0)}, {"flush_timeout": timedelta(0)}, {"every": 30}):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            build("LogDirectoryCallback")(tmp_path, **arguments)
    with pytest.raises(ConfigError, match="tb_dir='': pass a folder"):
        build("TensorboardCallback")("")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="log_dir=.* cannot be written to"):
        fit([build("LogDirectoryCallback")(tmp_path / "file" / "below")], tmp_path)
    with pytest.raises(ConfigError, match="tb_dir=.* cannot be written to"):
        fit([build("TensorboardCallback")(tmp_path / "file" / "below")], tmp_path)


# -- all of them ----------------------------------------------------------------------------------------------------------


def everything(namespace: str, root: Path) -> list[Any]:
    return [
        build("MemoryLoggingCallback", namespace)(),
        build("TensorboardCallback", namespace)(root / "tb"),
        build("StepLoggingCallback", namespace)(),
        build("TPSLoggingCallback", namespace)(4, 8),
        build("StragglerLoggingCallback", namespace)(),
        build("LogDirectoryCallback", namespace)(root / "logs"),
    ]


@pytest.mark.parametrize("namespace", EITHER)
def test_metrics_files_and_states_are_those_of_a_fit_without_them(namespace: str, tmp_path: Path) -> None:
    results = []
    for with_them in (False, True):
        root = tmp_path / "ckpts" / str(with_them)
        saves = stock(namespace)(dirpath=root, monitor="val_loss", save_top_k=2, save_last=True)
        net = make_net(namespace)
        trainer = make_trainer(namespace, [*(everything(namespace, tmp_path) if with_them else []), saves], root=root)
        trainer.fit(net, loader(), loader(batches=2))
        states = trainer._checkpoint_connector.dump_checkpoint()["callbacks"]
        keys = sorted(str(key).replace(str(root), "") for key in states)
        results.append((weights(net), dict(trainer.callback_metrics), names(root), keys))
    first, second = results
    assert differences(list(first[:2]), list(second[:2])) == [] and first[2:] == second[2:]


def test_names_arguments_and_pickles_are_those_that_scripts_know(tmp_path: Path) -> None:
    expected = {
        "MemoryLoggingCallback": [],
        "TensorboardCallback": ["tb_dir"],
        "StepLoggingCallback": ["tb_dir", "timer_kwargs"],
        "TPSLoggingCallback": ["gbs", "seq_length", "tb_dir"],
    }
    for name, arguments in expected.items():
        made = getattr(module, name)
        parameters = inspect.signature(made).parameters.values()
        assert [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD] == arguments
    assert module.build(PL) is build("StepLoggingCallback")
    for callback in everything(PL, tmp_path):
        assert type(pickle.loads(pickle.dumps(callback))) is type(callback)
    for name in MODULES:
        arguments = {"TPSLoggingCallback": (1, 1), "TensorboardCallback": (None,), "LogDirectoryCallback": (tmp_path,)}
        callback = build(name, "pytorch_lightning")(*arguments.get(name, ()))
        with pytest.raises(ConfigError, match=f"this {name} is built for pytorch_lightning"):
            callback.setup(SimpleNamespace(), None, "fit")
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018
    assert logging.__name__ == "logging" and hasattr(logging, "getLogger"), "the standard library's is not shadowed"
