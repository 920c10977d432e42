"""Traces of saves: each phase is there, in its place, and a trace harms nothing."""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest

from resiliency import spans
from resiliency.agent import core, uploader
from resiliency.callbacks import profile
from resiliency.checkpoint.arena import Arena
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.checkpoint.save_trace import SaveTrace
from resiliency.errors import ConfigError
from resiliency.testing.zygote import Zygote
from tests.callbacks.harness import EITHER, content, loader, make_net, make_trainer, ours, steps
from tests.ports import free_port

PL = "lightning.pytorch"
OF_THE_TRAINER = {
    "save",
    "state",
    "wait for the save before",
    "planning",
    "copying at once",
    "background copy",
    "wait at the fence",
    "waiting for agreement",
    "seal",
    "waiting for commit",
}
OF_THE_AGENT = {"record", "commit", "manifest", "fsync", "prune"}


def fit(
    folder: Path,
    traces: Path | str,
    interval: int = 1,
    *others: Any,
    namespace: str = PL,
    max_steps: int = 6,
    **arguments: Any,
) -> Any:
    """Saves each second step."""
    timeout = {"timeout": arguments.pop("timeout")} if "timeout" in arguments else {}
    callback = profile.build(namespace)(traces, interval, **timeout)
    given = {"every_n_train_steps": 2, "save_top_k": -1, **arguments}
    checkpoint = ours(namespace, folder, **given)
    trainer = make_trainer(namespace, [callback, *others, checkpoint], root=folder, max_steps=max_steps, max_epochs=-1)
    trainer.fit(make_net(namespace, width=20_000), loader())
    return trainer


def read(path: Path) -> dict[str, Any]:
    """A trace, checked against the format and for what holds of each."""
    document: dict[str, Any] = json.loads(path.read_text())
    events = document["traceEvents"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    for event in events:
        assert event["ph"] in ("X", "M", "i") and isinstance(event["name"], str)
        assert type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and event["args"]["name"]
            continue
        assert event["ts"] > 0 and (event["pid"], event["tid"]) in named and event["pid"] in processes
        if event["ph"] == "X":
            assert event["dur"] >= 0
        else:
            assert event["s"] == "p" and "dur" not in event
    wholes = [event for event in events if event["name"].startswith("checkpoint of step")]
    assert len(wholes) == len(document["otherData"]["saves"])
    begin, end = min(one["ts"] for one in wholes), max(one["ts"] + one["dur"] for one in wholes)
    for event in events:
        if event["ph"] != "M":
            assert begin <= event["ts"] and event["ts"] + event.get("dur", 0) <= end + 0.001, event
    check_nesting([event for event in events if event["ph"] == "X"])
    return document


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Two pieces of work of one thread are one within the other, or one after the other."""
    threads: dict[tuple[int, int], list[float]] = {}
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        open_ends = threads.setdefault((event["pid"], event["tid"]), [])
        while open_ends and open_ends[-1] <= event["ts"] + 0.001:
            open_ends.pop()
        end = event["ts"] + event["dur"]
        assert not open_ends or end <= open_ends[-1] + 0.001, f"{event['name']} ends after what it is in"
        open_ends.append(end)


def spans_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in document["traceEvents"] if event["ph"] == "X"}


def outcome(document: dict[str, Any]) -> str:
    [save] = document["otherData"]["saves"]
    said: str = save["outcome"]
    return said


@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.parametrize(("interval", "expected"), [(1, [2, 4, 6]), (2, [4]), (3, [6]), (4, [])])
def test_every_nth_save_is_traced(tmp_path: Path, namespace: str, interval: int, expected: list[int]) -> None:
    fit(tmp_path / "ckpts", tmp_path / "made/here", interval, namespace=namespace)
    files = sorted(path.name for path in (tmp_path / "made/here").iterdir())
    assert files == [f"ckpt_rank0_step{step}_trace.json" for step in expected]
    for name in files:
        assert outcome(read(tmp_path / "made/here" / name)) == "complete"


def test_trainer_and_agent_process_are_in_one_trace(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    checkpoint = {
        "options": CheckpointerOptions(),
        "local_dir": str(tmp_path / "fast"),
        "save_top_k": 1,
        "monitor": "step",
        "mode": "max",
    }
    fit(tmp_path / "ckpts", traces, **checkpoint)
    documents = [read(traces / f"ckpt_rank0_step{step}_trace.json") for step in (2, 4, 6)]
    prepared = False
    for document in documents:
        found = spans_of(document)
        upload = next((name for name in found if name.startswith("upload ")), "")
        if not upload:  # only the newest waits for a slow tier
            assert document is not documents[-1] and "is newer" in outcome(document)
            continue
        assert found.keys() >= OF_THE_TRAINER | OF_THE_AGENT
        trainer = {found[name]["pid"] for name in OF_THE_TRAINER}
        agent = {found[name]["pid"] for name in OF_THE_AGENT | {upload}}
        assert trainer == {os.getpid()} and len(agent) == 1 and agent != trainer
        names = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in document["traceEvents"]
            if event["name"] == "thread_name"
        }

        def thread(name: str, found: Any = found, names: Any = names) -> str:
            return str(names[found[name]["pid"], found[name]["tid"]])

        assert found["save"]["tid"] == threading.main_thread().native_id and thread("save") == "MainThread"
        assert thread("background copy") == thread("seal") == "resiliency-copy"
        assert thread("commit") == "resiliency-agent-commit" and thread("fsync") == "resiliency-agent-sync"
        assert thread(upload).startswith("resiliency-agent-upload-")
        order = ["planning", "copying at once", "seal", "record", "manifest", upload]
        begins = [found[name]["ts"] for name in order]
        assert begins == sorted(begins), "one clock"
        wait, manifest = found["waiting for commit"], found["manifest"]
        assert wait["ts"] <= manifest["ts"] and manifest["ts"] + manifest["dur"] <= wait["ts"] + wait["dur"]
        prepared = prepared or "prepare" in found
        moments = {(one["name"], one["args"]["tier"]) for one in document["traceEvents"] if one["ph"] == "i"}
        assert ("committed", "local") in moments and any(name == "durable" for name, _ in moments)
    assert prepared, "files for the saves to come"


def test_two_ranks_write_a_trace_each(zygote: Zygote, tmp_path: Path) -> None:
    run(zygote, tmp_path, ranks=2)
    pids = set()
    for rank in range(2):
        for step in (3, 6):
            document = read(tmp_path / f"traces/ckpt_rank{rank}_step{step}_trace.json")
            found = spans_of(document)
            assert found.keys() >= (OF_THE_TRAINER | OF_THE_AGENT) - {"wait at the fence"}
            pids.add(found["commit"]["pid"])
            process = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
            assert sorted(process) == ["checkpoint agent", f"rank {rank}"]
    assert len(pids) == 1, "both are served by one agent"


def run(zygote: Zygote, folder: Path, *, ranks: int, **arguments: Any) -> None:
    port = str(free_port())
    workers = [
        zygote.start(
            "tests.callbacks.profile_job:train",
            {"directory": str(folder / "ckpts"), "traces": str(folder / "traces"), "ranks": ranks, **arguments},
            env={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "NODE_RANK": "0",
            },
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + 60
    try:
        assert [worker.wait(timeout_s=max(0.1, deadline - time.monotonic())) for worker in workers] == [0] * ranks
    finally:
        for worker in workers:
            worker.kill()


def test_an_agent_that_is_killed_costs_no_trace_and_hangs_nobody(zygote: Zygote, tmp_path: Path) -> None:
    run(zygote, tmp_path, ranks=1, kills=True)
    assert steps(tmp_path / "ckpts") == [3, 6]
    for step in (3, 6):
        assert outcome(read(tmp_path / f"traces/ckpt_rank0_step{step}_trace.json"))


# -- saves that do not end well ----------------------------------------------------------------------------------------


def test_a_save_that_fails_in_the_agent_has_a_trace_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(core, "write_record", full)
    fit(tmp_path / "ckpts", tmp_path / "traces", max_steps=2)
    document = read(tmp_path / "traces/ckpt_rank0_step2_trace.json")
    assert "failed on local" in outcome(document) and "No space left" in outcome(document)
    found = spans_of(document)
    assert "No space left" in found["record"]["args"]["error"]
    assert "manifest" not in found and found["waiting for commit"]["dur"] > 0


def test_a_copy_that_fails_has_a_trace_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: Any, **more: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Arena, "open", none)
    fit(tmp_path / "ckpts", tmp_path / "traces", max_steps=2)
    document = read(tmp_path / "traces/ckpt_rank0_step2_trace.json")
    assert "the copy failed" in outcome(document) and "Input/output error" in outcome(document)
    assert "seal" not in spans_of(document)


def test_a_save_that_is_skipped_or_refused_has_a_trace_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "_wait_for_previous", lambda *arguments: "the last one is not recorded yet")
        fit(tmp_path / "a", tmp_path / "traces-a", max_steps=2)
    assert outcome(read(tmp_path / "traces-a/ckpt_rank0_step2_trace.json")).startswith("skipped")

    def refuse(*arguments: Any, **more: Any) -> None:
        raise ConfigError("it holds a socket")

    with monkeypatch.context() as patch:
        patch.setattr("resiliency.checkpoint.shard_plan.ShardPlanner.plan", refuse)
        fit(tmp_path / "b", tmp_path / "traces-b", max_steps=2)
    document = read(tmp_path / "traces-b/ckpt_rank0_step2_trace.json")
    assert outcome(document) == "ConfigError: it holds a socket"
    assert "it holds a socket" in spans_of(document)["planning"]["args"]["error"]


def test_a_tier_that_hangs_holds_up_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, written = threading.Event(), threading.Event()

    def hang(*arguments: Any, **more: Any) -> bool:
        assert released.wait(60)
        return True

    monkeypatch.setattr(uploader, "send_step", hang)
    files = profile.TraceFiles.write

    def write(self: Any, step: int, save: Any) -> str:
        path = files(self, step, save)
        written.set()
        released.set()
        return path

    monkeypatch.setattr(profile.TraceFiles, "write", write)
    began = time.monotonic()
    fit(
        tmp_path / "ckpts",
        tmp_path / "t",
        max_steps=2,
        local_dir=str(tmp_path / "fast"),
        timeout=timedelta(seconds=0.5),
    )
    assert written.is_set() and time.monotonic() - began < 30
    assert "within 0 s" in outcome(read(tmp_path / "t/ckpt_rank0_step2_trace.json"))


def test_saves_of_one_step_to_two_folders_are_in_one_file(tmp_path: Path) -> None:
    other = ours(PL, tmp_path / "other", every_n_train_steps=3, save_top_k=-1)
    fit(tmp_path / "ckpts", tmp_path / "traces", 1, other)
    traces = {path.name: json.loads(path.read_text()) for path in (tmp_path / "traces").iterdir()}
    counts = {name: len(document["otherData"]["saves"]) for name, document in traces.items()}
    assert counts == {f"ckpt_rank0_step{step}_trace.json": 2 if step == 6 else 1 for step in (2, 3, 4, 6)}


def test_each_folder_has_its_own_count(tmp_path: Path) -> None:
    other = ours(PL, tmp_path / "other", every_n_train_steps=2, save_top_k=-1, monitor="step", mode="max")
    fit(tmp_path / "ckpts", tmp_path / "traces", 2, other)
    [path] = (tmp_path / "traces").iterdir()
    assert path.name == "ckpt_rank0_step4_trace.json"
    assert len(json.loads(path.read_text())["otherData"]["saves"]) == 2


# -- what it must not do -----------------------------------------------------------------------------------------------


def test_saves_that_are_not_traced_read_no_clock_and_start_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def count(kind: type[Any]) -> Callable[..., Any]:
        def make(*arguments: Any, **more: Any) -> Any:
            made.append(kind.__name__)
            return kind(*arguments, **more)

        return make

    monkeypatch.setattr(spans, "_Running", count(spans._Running))
    monkeypatch.setattr(profile, "SaveTrace", count(SaveTrace))
    fit(tmp_path / "a", tmp_path / "traces-a", 100)
    assert made == [] and steps(tmp_path / "a") == [2, 4, 6]
    fit(tmp_path / "b", tmp_path / "traces-b", 3)
    assert made.count("SaveTrace") == 1 and made.count("_Running") > 8


def test_checkpoints_are_those_of_a_fit_without_it(tmp_path: Path) -> None:
    fit(tmp_path / "with", tmp_path / "traces", filename="{step}")
    checkpoint = ours(PL, tmp_path / "without", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = make_trainer(PL, [checkpoint], root=tmp_path, max_steps=6, max_epochs=-1)
    trainer.fit(make_net(PL, width=20_000), loader())
    found, expected = (content(tmp_path / name / "step=6.ckpt") for name in ("with", "without"))
    assert found["callbacks"].keys() == expected["callbacks"].keys()
    for key, value in expected["state_dict"].items():
        assert value.equal(found["state_dict"][key])


def test_a_folder_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trace_dir=.*file/traces: .*pass a folder that every rank can write to"):
        fit(tmp_path / "ckpts", tmp_path / "file/traces")


def test_a_folder_that_goes_away_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traces = tmp_path / "traces"
    callback = profile.build(PL)(traces, 1)
    checkpoint = ours(PL, tmp_path / "ckpts", every_n_train_steps=2, save_top_k=-1)

    class Blocks(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            traces.rmdir()
            traces.write_text("")

    trainer = make_trainer(PL, [callback, Blocks(), checkpoint], root=tmp_path, max_steps=6, max_epochs=-1)
    trainer.fit(make_net(PL), loader())
    assert caplog.text.count("is not written") == 1 and steps(tmp_path / "ckpts") == [2, 4, 6]


def test_without_a_checkpoint_callback_of_ours_it_says_that_there_is_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(PL, [profile.build(PL)(tmp_path, 1)], root=tmp_path, enable_checkpointing=False)
    trainer.fit(make_net(PL), loader())
    assert "there is no save to trace" in caplog.text
    assert "_resiliency_trainer_session" not in vars(trainer)


def test_where_a_trace_is_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(tmp_path / "ckpts", tmp_path / "traces", max_steps=2)
    assert f"is traced in {tmp_path}/traces/ckpt_rank0_step2_trace.json (complete)" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gs://bucket/traces", 1), "trace_dir='gs://bucket/traces'"),
        (("", 1), "trace_dir=''"),
        (("t", 0), "profile_checkpoint_interval=0"),
        (("t", True), "profile_checkpoint_interval=True"),
        (("t", 1.5), "profile_checkpoint_interval=1.5"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        profile.build(PL)(*arguments)


def test_other_refusals() -> None:
    with pytest.raises(ConfigError, match="timeout="):
        profile.build(PL)("t", 1, timeout=timedelta(0))
    with pytest.raises(ConfigError, match="the Trainer comes from"):
        profile.build("pytorch_lightning")("t", 1).setup(SimpleNamespace(), None, "fit")
    callback = profile.build(PL)("t", 1)
    assert type(pickle.loads(pickle.dumps(callback))) is type(callback)
