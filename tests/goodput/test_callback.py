"""GoodputCallback on real fits of both Lightning packages."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.callbacks.goodput import build
from resiliency.goodput.ledger import account
from resiliency.goodput.taxonomy import Bucket
from resiliency.telemetry.reader import find_logs, read_logs
from resiliency.telemetry.sinks import PrometheusTextSink

NAMESPACES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.fixture(params=NAMESPACES)
def pl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a Trainer leaves it set
    return importlib.import_module(request.param)


def make_model(pl: Any, *, fail_at: int | None = None) -> Any:
    class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == fail_at:
                raise RuntimeError("planned by the test")
            return self.layer(batch).pow(2).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.layer(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Model()


def trainer(pl: Any, root: Path, callback: Any, **kwargs: Any) -> Any:
    options: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
        "callbacks": [callback],
        "num_sanity_val_steps": 1,
    }
    return pl.Trainer(**{**options, **kwargs})


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.randn(40, 8), batch_size=2)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
def test_a_fit_leaves_an_account_and_shows_its_goodput(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_IDENTIFIER", "fit-job")
    callback = build(pl.__name__)()
    assert isinstance(callback, pl.Callback)
    run = trainer(pl, tmp_path, callback, accumulate_grad_batches=2)
    run.fit(make_model(pl), loader(), loader())

    assert run.global_step == 20
    assert 0.0 < callback.goodput <= 1.0
    assert "goodput" in run.progress_bar_metrics
    assert 0.0 <= float(run.callback_metrics["goodput"]) <= 1.0
    (log,) = find_logs([tmp_path])
    assert log == tmp_path / ".resiliency" / "fit-job" / "events" / "rank-00000.jsonl"
    kinds = [json.loads(line)["event_type"] for line in log.read_text().splitlines()]
    assert kinds[:2] == ["job_started", "train_started"]
    assert kinds[-2:] == ["train_ended", "job_terminated"]
    ledger = account(read_logs([tmp_path]).collector.runs["fit-job"])
    assert sum(ledger.wall.values()) == ledger.wall_us
    (timing,) = ledger.timings
    assert (timing.position, timing.top, timing.outcome) == (0, 20, "finished")
    (part,) = ledger.splits[0, 0]
    assert part.steps == 20
    assert part.eval_s > 0
    assert ledger.gpu[Bucket.PRODUCTIVE] > 0


#: So much longer than what Lightning itself does between batches, on a busy machine, too.
SLOW_S = 0.1


class SlowItems(torch.utils.data.Dataset[torch.Tensor]):
    """In memory; each item may take its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(8)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
@pytest.mark.parametrize("slow", ["loader", "callback", "stream"])
def test_only_the_loader_makes_data_wait(tmp_path: Path, slow: str) -> None:
    pl: Any = importlib.import_module("lightning.pytorch")

    class Sleeps(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(SLOW_S if slow == "callback" else 0.0)

    items: Any = SlowItems(0.0 if slow == "callback" else SLOW_S)
    if slow == "stream":  # of unknown length, so that Lightning fetches one batch ahead

        class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
            def __iter__(self) -> Iterator[torch.Tensor]:
                return (SlowItems(SLOW_S)[index] for index in range(len(SlowItems(SLOW_S))))

        items = Stream()
    callbacks = [build(pl.__name__)(), Sleeps()]
    run = trainer(pl, tmp_path, None, callbacks=callbacks, max_epochs=1)
    run.fit(make_model(pl), torch.utils.data.DataLoader(items, batch_size=1))
    ledger = account(read_logs([tmp_path]).collector.runs["default"])
    train_s = sum(part.step_s for part in ledger.splits[0, 0])
    data_s, loop_s = (ledger.wall[bucket] / 1e6 for bucket in (Bucket.DATA_WAIT, Bucket.LOOP))
    if slow == "callback":
        assert data_s < 0.1 * train_s and loop_s >= (len(SlowItems(SLOW_S)) - 1) * SLOW_S
    else:
        assert loop_s < 0.2 * train_s and data_s >= (len(SlowItems(SLOW_S)) - 2) * SLOW_S
    pickle.dumps(copy.deepcopy(run.fit_loop.epoch_loop._on_before_fetch.__reduce__()[0]))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
def test_an_exception_is_told_and_the_next_attempt_is_seen(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="planned"):
        trainer(pl, tmp_path, build(pl.__name__)()).fit(make_model(pl, fail_at=15), loader())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    trainer(pl, tmp_path, build(pl.__name__)()).fit(make_model(pl), loader())
    ledger = account(read_logs([tmp_path]).collector.runs["default"])
    assert [timing.outcome for timing in ledger.timings] == ["failed", "finished"]
    # Nothing was saved, so all of the first attempt had to be run again.
    assert (ledger.timings[0].top, ledger.timings[0].lost_above) == (15, 0)
    assert ledger.gpu[Bucket.LOST_WORK] > 0


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
def test_a_log_that_cannot_be_written_does_not_stop_training(pl: Any, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    run = trainer(pl, tmp_path, build(pl.__name__)(events_dir=blocker / "below"), max_steps=5)
    run.fit(make_model(pl), loader())
    assert run.global_step == 5


def test_the_module_gives_the_class_of_the_imported_package() -> None:
    module = importlib.import_module("resiliency.callbacks.goodput")
    callback = importlib.import_module(f"{module.GoodputCallback.namespace}.callbacks").Callback
    assert issubclass(module.GoodputCallback, callback)
    assert build(NAMESPACES[0]) is build(NAMESPACES[0])
    assert build(NAMESPACES[0]) is not build(NAMESPACES[1])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
def test_with_a_checkpoint_callback_events_are_written_once(pl: Any, tmp_path: Path) -> None:
    checkpoints = importlib.import_module("resiliency.callbacks.model_checkpoint").build(pl.__name__)
    saver = checkpoints(dirpath=tmp_path / "ckpt", every_n_train_steps=10)
    gauges = tmp_path / "rank.prom"
    callback = build(pl.__name__)(sinks=(PrometheusTextSink(gauges),))
    run = trainer(pl, tmp_path / "root", callback, max_steps=20, enable_checkpointing=True, callbacks=[callback, saver])
    run.fit(make_model(pl), loader())
    counts = re.findall(r'resiliency_events_total\{.*event="(\w+)"\} (\d+)', gauges.read_text())
    assert {"job_started", "train_started", "checkpoint_started", "job_terminated"} <= dict(counts).keys(), (
        "as in the log"
    )
    assert re.search(r"resiliency_steps_total\{.*\} 20$", gauges.read_text(), re.MULTILINE)
    ranks = [log for log in find_logs([tmp_path]) if log.name == "rank-00000.jsonl"]
    assert len(ranks) == 1
    kinds = [json.loads(line)["event_type"] for line in ranks[0].read_text().splitlines()]
    assert [kinds.count(kind) for kind in ("job_started", "train_started", "train_ended", "job_terminated")] == [
        1,
        1,
        1,
        1,
    ]
    ledger = account(read_logs([tmp_path]).collector.runs["default"])
    (timing,) = ledger.timings
    assert (timing.top, timing.outcome) == (20, "finished")
    assert sum(part.steps for part in ledger.splits[0, 0]) == 20
