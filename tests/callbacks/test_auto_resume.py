"""A fit resumes by itself only in a restart of the job that wrote the checkpoints; otherwise it does what the stock class
does, and says what it found."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from resiliency.callbacks.checkpointing.resume import Process
from resiliency.errors import CorruptShard
from resiliency.storage.tiers.local import LocalTier
from tests.callbacks.harness import NAMESPACES, content, differences, loader, make_net, make_trainer, names, ours, stock

PL = "lightning.pytorch"
EVERY: dict[str, Any] = {"every_n_train_steps": 4, "save_top_k": -1, "filename": "{step}", "save_last": True}
VARIABLES = (
    "TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_ERROR_FILE SLURM_JOB_ID SLURM_RESTART_COUNT JOBSET_NAME"
    " JOBSET_UID JOBSET_RESTART_ATTEMPT RESILIENCY_ATTEMPT RESILIENCY_JOB RESILIENCY_RUN JOB_IDENTIFIER"
).split()


class Machine:
    """Starts processes, as a launcher would: each with its variables, and no fit before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def process(self, env: dict[str, str]) -> None:
        self._monkeypatch.setattr(Process, "_trained_in", None)
        for name in VARIABLES:
            self._monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            self._monkeypatch.setenv(name, value)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(monkeypatch)
    found.process({})
    return found


def batches_run(directory: Path, *, max_steps: int, namespace: str = PL, callback: Any = None, **arguments: Any) -> int:
    """Trains a fresh model in a fresh trainer; returns how many batches it was trained on."""
    callback = callback or ours(namespace, directory, **(EVERY | arguments))
    net = make_net(namespace)
    trainer = make_trainer(namespace, [callback], root=directory, max_steps=max_steps, max_epochs=-1)
    trainer.fit(net, loader())
    assert trainer.global_step == max_steps
    ran: int = net.ran
    return ran


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the user was told of checkpoints that were found."""
    return [text for text in caplog.messages if "holds checkpoints of" in text or text.startswith("Resuming from")]


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_second_fit_with_a_fresh_model_does_what_it_does_with_the_stock_class(
    namespace: str, tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Folds of a cross-validation, a sweep, a rerun by hand: all batches are trained, and older files are kept."""
    results = []
    caplog.set_level(logging.INFO)
    for make in (stock, ours):
        directory = tmp_path / "run"
        machine.process({})
        ran = []
        for fold in range(3):
            if fold == 2:
                machine.process({})
            caplog.clear()
            callback = stock(namespace)(directory, **EVERY) if make is stock else ours(namespace, directory, **EVERY)
            ran.append(batches_run(directory, max_steps=8 - 2 * fold, namespace=namespace, callback=callback))
            assert len(told(caplog)) == (make is ours and fold > 0)
        results.append((ran, {name: content(directory / name)["global_step"] for name in sorted(names(directory))}))
        directory.rename(tmp_path / f"run-{len(results)}")
    assert results[0][0] == [8, 6, 4]
    assert differences(*results) == []


def test_one_line_says_what_was_found_and_how_to_resume(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    batches_run(tmp_path, max_steps=8)
    assert told(caplog) == []
    machine.process({})
    batches_run(tmp_path, max_steps=3)
    (line,) = told(caplog)
    for words in (str(tmp_path), "step 8", "auto_resume=True", 'ckpt_path="last"', "afresh"):
        assert words in line
    # Where Lightning talks to users, whose loggers show INFO; a library's own logger does not.
    assert {record.name.split(".")[-1] for record in caplog.records if record.getMessage() == line} == {"rank_zero"}


LOG = "/tmp/torchelastic_a/none_b"
#: name -> variables of the process that wrote, of the one that starts, whether it resumes
LAUNCHES: dict[str, tuple[dict[str, str], dict[str, str], bool]] = {
    "torchrun restarts": (
        {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"},
        True,
    ),
    "torchrun starts again with the same id": (
        {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"},
        False,
    ),
    "another torchrun restarts": (
        {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_RESTART_COUNT": "2"},
        False,
    ),
    "torchrun without an id restarts": (
        {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": f"{LOG}/attempt_0/0/error.json"},
        {
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_ERROR_FILE": f"{LOG}/attempt_1/0/error.json",
            "TORCHELASTIC_RESTART_COUNT": "1",
        },
        True,
    ),
    "another torchrun without an id restarts": (
        {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": f"{LOG}/attempt_0/0/error.json"},
        {
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_ERROR_FILE": f"{LOG}x/attempt_1/0/error.json",
            "TORCHELASTIC_RESTART_COUNT": "1",
        },
        False,
    ),
    "torchrun restarts what was written by hand": (
        {},
        {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"},
        False,
    ),
    "slurm requeues": ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
    "a second srun of one job": ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, False),
    "slurm requeues another job": ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
    "jobset restarts": (
        {"JOBSET_NAME": "j", "JOBSET_RESTART_ATTEMPT": "0"},
        {"JOBSET_NAME": "j", "JOBSET_RESTART_ATTEMPT": "1"},
        True,
    ),
    "jobset starts again": (
        {"JOBSET_NAME": "j", "JOBSET_RESTART_ATTEMPT": "0"},
        {"JOBSET_NAME": "j", "JOBSET_RESTART_ATTEMPT": "0"},
        False,
    ),
    "a jobset of the same name restarts": (
        {"JOBSET_NAME": "j", "JOBSET_UID": "1", "JOBSET_RESTART_ATTEMPT": "0"},
        {"JOBSET_NAME": "j", "JOBSET_UID": "2", "JOBSET_RESTART_ATTEMPT": "1"},
        False,
    ),
    "our own attempt": ({"RESILIENCY_ATTEMPT": "1"}, {"RESILIENCY_ATTEMPT": "2"}, True),
    "our own first attempt": ({"RESILIENCY_ATTEMPT": "1"}, {"RESILIENCY_ATTEMPT": "1"}, False),
    "our own attempt of another job": (
        {"RESILIENCY_ATTEMPT": "1", "RESILIENCY_JOB": "a"},
        {"RESILIENCY_ATTEMPT": "2", "RESILIENCY_JOB": "b"},
        False,
    ),
    "the same identifier": ({"JOB_IDENTIFIER": "x"}, {"JOB_IDENTIFIER": "x"}, True),
    "the same identifier in another run": (
        {"JOB_IDENTIFIER": "x", "RESILIENCY_RUN": "r"},
        {"JOB_IDENTIFIER": "y", "RESILIENCY_RUN": "r"},
        False,
    ),
    "torchrun restarts within a slurm job": (
        {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "a"},
        {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"},
        True,
    ),
    "another torchrun restarts within the same slurm job": (
        {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "a"},
        {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_RESTART_COUNT": "1"},
        False,
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_fit_resumes_when_the_launcher_says_so(
    name: str, tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    writer, starter, resumes = LAUNCHES[name]
    machine.process(writer)
    assert batches_run(tmp_path, max_steps=4) == 4
    machine.process(starter)
    assert batches_run(tmp_path, max_steps=6) == (2 if resumes else 6)
    (line,) = told(caplog)
    assert line.startswith("Resuming from step 4") == resumes


RESTARTED = {"RESILIENCY_ATTEMPT": "2"}


def test_only_the_first_fit_of_a_restarted_process_resumes(tmp_path: Path, machine: Machine) -> None:
    machine.process({"RESILIENCY_ATTEMPT": "1"})
    batches_run(tmp_path, max_steps=4)
    machine.process(RESTARTED)
    assert batches_run(tmp_path, max_steps=6) == 2
    assert batches_run(tmp_path, max_steps=7) == 7


def test_a_fit_that_failed_before_training_does_not_count(tmp_path: Path, machine: Machine) -> None:
    machine.process({"RESILIENCY_ATTEMPT": "1"})
    batches_run(tmp_path, max_steps=4)
    machine.process(RESTARTED)
    trainer = make_trainer(PL, [ours(PL, tmp_path, **EVERY)], root=tmp_path)
    net = make_net(PL)
    net.configure_optimizers = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.fit(net, loader())
    assert batches_run(tmp_path, max_steps=6) == 2


@pytest.mark.parametrize("ckpt_path", [None, "last", "step=4.ckpt"])
def test_a_resume_lists_a_slower_tier_once(
    ckpt_path: str | None, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart from the start of the engine, which needs the number of the attempt. In a bucket a listing takes seconds."""
    far, near = tmp_path / "far", tmp_path / "near"
    machine.process({"RESILIENCY_ATTEMPT": "1"})
    batches_run(far, max_steps=4, local_dir=near)
    machine.process(RESTARTED)
    listed: list[str] = []
    at_start: list[tuple[int, int]] = []
    plain_list = LocalTier.list

    def note(tier: LocalTier, prefix: str) -> Any:
        listed.append(tier.root)
        return plain_list(tier, prefix)

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            at_start.append((trainer.global_step, listed.count(str(far))))

    callback = ours(PL, far, **EVERY, local_dir=near)
    trainer = make_trainer(PL, [callback, Watch()], root=tmp_path, max_steps=6, max_epochs=-1)
    monkeypatch.setattr(LocalTier, "list", note)
    trainer.fit(make_net(PL), loader(), ckpt_path=str(far / ckpt_path) if ckpt_path == "step=4.ckpt" else ckpt_path)
    assert at_start == [(4, 2)]


def test_a_restart_does_not_resume_from_what_another_job_wrote_last(tmp_path: Path, machine: Machine) -> None:
    machine.process({"RESILIENCY_ATTEMPT": "1"})
    batches_run(tmp_path, max_steps=8)
    machine.process({})
    batches_run(tmp_path, max_steps=4)  # by hand, in the same folder
    machine.process(RESTARTED)
    assert batches_run(tmp_path, max_steps=5) == 5


def test_true_resumes_always_and_false_never(tmp_path: Path, machine: Machine) -> None:
    batches_run(tmp_path, max_steps=4)
    assert batches_run(tmp_path, max_steps=6, auto_resume=True) == 2
    machine.process({"JOB_IDENTIFIER": "default"})
    batches_run(tmp_path, max_steps=4)
    machine.process({"JOB_IDENTIFIER": "default"})
    assert batches_run(tmp_path, max_steps=5, auto_resume=False) == 5


@pytest.mark.parametrize("how", ["true", "last", "restart"])
def test_a_resume_is_said_once(how: str, tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    machine.process({"RESILIENCY_ATTEMPT": "1"})
    batches_run(tmp_path, max_steps=4)
    machine.process(RESTARTED if how == "restart" else {})
    callback = ours(PL, tmp_path, auto_resume=True if how == "true" else None, **EVERY)
    trainer = make_trainer(PL, [callback], root=tmp_path, max_steps=5, max_epochs=-1)
    trainer.fit(make_net(PL), loader(), ckpt_path="last" if how == "last" else None)
    (line,) = told(caplog)
    assert line.startswith("Resuming from step 4")


def test_the_job_is_recorded_in_every_save(tmp_path: Path, machine: Machine) -> None:
    from resiliency.storage.catalog import scan
    from resiliency.storage.tiers.local import LocalTier

    machine.process({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "a"})
    batches_run(tmp_path, max_steps=4)
    (listing,) = scan(LocalTier(str(tmp_path), durable=False), "default")
    assert listing.manifest is not None
    assert listing.manifest.shards[0].job == {"slurm": "7", "torchrun": "a"}


def test_a_score_may_have_any_name(tmp_path: Path, machine: Machine) -> None:
    """One called "job" was lost, because the launcher's names stood under that key."""
    from resiliency.storage.catalog import scan
    from resiliency.storage.tiers.local import LocalTier

    machine.process({"TORCHELASTIC_RUN_ID": "a"})

    class Scored(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            module.log("job", 0.5)

    saver = ours(PL, tmp_path, monitor="job", every_n_train_steps=4, filename="{step}")
    trainer = make_trainer(PL, [Scored(), saver], root=tmp_path, max_steps=4, max_epochs=-1)
    trainer.fit(make_net(PL), loader())
    (listing,) = scan(LocalTier(str(tmp_path), durable=False), "default")
    assert listing.manifest is not None
    assert listing.manifest.info["job"] == 0.5 and listing.manifest.shards[0].job == {"torchrun": "a"}


# -- checkpoints of which none is whole -------------------------------------------------------------------------------


def to_resume_without(namespace: str, folder: Path, files: str) -> Any:
    """A trainer that is to go on from checkpoints, all of which lack these files."""
    settings = {"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"}
    make_trainer(namespace, [ours(namespace, folder, **settings)], root=folder, max_epochs=1).fit(
        make_net(namespace), loader()
    )
    for path in folder.rglob(f"steps/*/{files}"):
        path.unlink()
    return make_trainer(namespace, [ours(namespace, folder, auto_resume=True, **settings)], root=folder)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_fit_that_is_to_resume_does_not_begin_anew_beside_damaged_checkpoints(namespace: str, tmp_path: Path) -> None:
    trainer = to_resume_without(namespace, tmp_path, "shard-00000.shard")
    with pytest.raises(CorruptShard, match="nothing could be restored, although checkpoints exist"):
        trainer.fit(make_net(namespace), loader())
    assert trainer.global_step == 0


@pytest.mark.usefixtures("launched")
def test_a_fit_that_finds_shards_without_records_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    namespace = NAMESPACES[0]
    trainer = to_resume_without(namespace, tmp_path, "*.json")
    trainer.fit(make_net(namespace), loader())
    assert trainer.global_step == 12
    (said,) = [text for text in caplog.messages if "nothing is restored" in text]
    assert "2 steps lack records or shards; step 6 " in said and "/shard-00000.json is missing" in said


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("how", ["auto_resume", "last"])
@pytest.mark.parametrize("state", ["damaged", "unfinished"])
def test_a_newer_step_that_a_resume_passes_over_is_said_in_one_line(
    state: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}", "save_last": how == "last"}
    make_trainer(PL, [ours(PL, tmp_path, **settings)], root=tmp_path, max_epochs=1).fit(make_net(PL), loader())
    (folder,) = (path for path in tmp_path.rglob("steps/*") if path.name.startswith(f"{6:010d}-"))
    file = folder / ("shard-00000.shard" if state == "damaged" else "shard-00000.json")
    for path in [file] if state == "damaged" else folder.glob("*.json"):
        path.unlink()
    if (
        how == "last"
    ):  # as after a kill between a manifest and its names: the file that Lightning finds is the older step
        (tmp_path / "last.ckpt").unlink()
        os.link(tmp_path / "step=3.ckpt", tmp_path / "last.ckpt")
    again = ours(PL, tmp_path, **settings, auto_resume=True if how == "auto_resume" else None)
    trainer = make_trainer(PL, [again], root=tmp_path, max_epochs=1)
    trainer.fit(make_net(PL), loader(), ckpt_path="last" if how == "last" else None)
    (said,) = [text for text in caplog.messages if "is restored instead" in text]
    assert said.startswith("step 6 ") and f"is {state}: {file} is missing" in said and "; step 3 (" in said
