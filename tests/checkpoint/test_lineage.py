"""Which step is the newest: the one that descends from where the job was last told to go on, not the last attempt's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, Stage
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.lineage import Lineage
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.inspection.by_path import locate
from resiliency.storage.catalog import scan
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import flip_bits, run_ranks, step_dir, step_dirs

SOON = timedelta(seconds=30)
RUN = "r"
EMBEDDED = CheckpointerOptions(agent="embedded", agree_timeout=timedelta(seconds=30))


@contextmanager
def job(folder: Path, *, keep: int | None = None, bucket: Path | None = None) -> Iterator[Checkpointer]:
    """One start of a job."""
    remotes = [RemoteTierOptions(address=str(bucket), name="bucket", keep=keep)] if bucket else []
    made = Checkpointer(
        LocalTierOptions(directory=str(folder), keep=keep),
        remotes=remotes,
        run=RUN,
        rank=0,
        world_size=1,
        options=EMBEDDED,
    )
    with made:
        yield made


def save(checkpointer: Checkpointer, *steps: int, names: tuple[str, ...] = ()) -> None:
    for step in steps:
        ticket = checkpointer.save(step, {"w": torch.full((500,), float(step))}, names=names)
        assert ticket is not None
        ticket.wait(Stage.DURABLE, timeout=SOON)
    assert checkpointer.flush(timeout=SOON)


def load(checkpointer: Checkpointer, step: int | None = None) -> int:
    wanted = None if step is None else max(found for found, _ in checkpointer.steps() if found.step == step)
    restored = checkpointer.load(step=wanted)
    assert restored is not None and float(restored.state["w"][0]) == restored.step
    return restored.step


def steps(checkpointer: Checkpointer) -> list[int]:
    return [step.step for step, _ in checkpointer.steps()]


def test_a_rollback_in_one_process_is_not_undone_by_the_next_start(tmp_path: Path) -> None:
    with job(tmp_path) as first:
        save(first, 10, 20)
        save(first, 30, names=("last.ckpt", "30.ckpt"))
        assert load(first, 10) == 10
        save(first, 11)
        save(first, 12, names=("last.ckpt",))
        assert steps(first) == [12, 11, 30, 20, 10]
        assert load(first) == 12
    assert torch.load(tmp_path / "last.ckpt")["w"][0] == 12
    located = locate(str(tmp_path / ".resiliency" / RUN))
    assert located is not None and located.id.step == 12
    with job(tmp_path) as second:
        assert load(second) == 12


def test_what_is_kept_is_what_follows_the_rollback(tmp_path: Path) -> None:
    with job(tmp_path, keep=2) as first:
        save(first, 10, 20, 30)
        assert steps(first) == [30, 20]
        assert load(first, 20) == 20
        save(first, 21, 22)
        assert steps(first) == [22, 21]


def test_a_rollback_while_a_later_step_is_being_committed_is_not_undone_by_it(tmp_path: Path) -> None:
    """The listing does not show that step yet, but this process knows of it."""
    with job(tmp_path) as first:
        save(first, 10)
        ticket = first.save(20, {"w": torch.full((500,), 20.0)})
        assert ticket is not None
        wanted = StepId(10, ticket.id.attempt, ticket.id.token)
        assert first.load(step=wanted) is not None
        save(first, 11)
        ticket.wait(Stage.DURABLE, timeout=SOON)
        assert load(first) == 11


def test_a_job_that_ran_on_is_not_outranked_by_one_that_took_over_earlier(tmp_path: Path) -> None:
    """The first job was thought dead. Both save to one bucket; the folders are those of two hosts."""
    bucket = tmp_path / "bucket"
    with job(tmp_path / "a", bucket=bucket) as first:
        save(first, 290)
        with job(tmp_path / "b", bucket=bucket) as second:
            assert load(second) == 290
            save(second, 295)
            save(first, 300, 600)
            assert second.line == first.line == 1
            assert steps(second) == [600, 300, 295, 290]
    with job(tmp_path / "c", bucket=bucket) as third:
        assert load(third) == 600
        save(third, 605)
        assert steps(third)[0] == 605


def test_what_follows_an_older_step_is_newest_when_the_newest_was_damaged(tmp_path: Path) -> None:
    with job(tmp_path) as first:
        save(first, 10, 20, 30)
    flip_bits(step_dir(tmp_path, RUN, 30) / "shard-00000.shard", [(1100, 1200)])
    with job(tmp_path) as second:
        assert load(second) == 20
        save(second, 25)
    with job(tmp_path, keep=1) as third:
        assert load(third) == 25
        save(third, 26)
        assert steps(third) == [26], "retention keeps what is newest by descent"


@pytest.mark.parametrize("how", ["a file is gone", "the manifest is damaged"])
def test_also_when_its_damage_shows_before_anything_is_read(tmp_path: Path, how: str) -> None:
    with job(tmp_path) as first:
        save(first, 10, 20, 30)
    newest = step_dir(tmp_path, RUN, 30)
    if how == "a file is gone":
        (newest / "shard-00000.shard").unlink()
    else:
        (newest / "manifest.json").write_text("{")
        (newest / "shard-00000.json").write_text("{")
    with job(tmp_path, keep=1) as second:
        assert load(second) == 20
        save(second, 25)
        save(second, 26)
    with job(tmp_path) as third:
        assert load(third) == 26, "retention kept the damaged one as the newest"


def test_a_start_that_loads_nothing_is_a_line_of_its_own(tmp_path: Path) -> None:
    with job(tmp_path) as first:
        save(first, 10, 20)
    with job(tmp_path) as second:
        save(second, 1)
        assert steps(second) == [1, 20, 10]
    with job(tmp_path) as third:
        assert load(third) == 1


@pytest.mark.parametrize("resumes", [True, False])
def test_a_training_begun_while_the_bucket_cannot_be_listed_is_newer_than_what_is_there(
    tmp_path: Path, resumes: bool
) -> None:
    """Also where the bucket refuses (an expired login). One that goes on from an older copy is the same training: there
    the step that is further counts, and is not pruned for one that is behind it."""
    bucket, away = tmp_path / "bucket", tmp_path / "away"
    with job(tmp_path / "host 1", bucket=bucket) as first:
        save(first, 10)
    with job(tmp_path / "host 2", bucket=bucket) as second:
        assert load(second) == 10
        save(second, 20)
    bucket.rename(away)
    bucket.symlink_to("bucket")  # a loop
    with job(tmp_path / ("host 1" if resumes else "host 3"), bucket=bucket) as third:
        if resumes:
            assert load(third) == 10
        ticket = third.save(15, {"w": torch.full((500,), 15.0)})
        assert ticket is not None
        ticket.wait(Stage.COMMITTED, timeout=SOON)
    bucket.unlink()
    away.rename(bucket)
    with job(tmp_path / ("host 1" if resumes else "host 3"), bucket=bucket) as fourth:
        assert load(fourth) == (20 if resumes else 15)


def test_an_unfinished_save_of_a_killed_attempt_begins_no_line(tmp_path: Path) -> None:
    with job(tmp_path) as first:
        save(first, 10, 20)
    folder = step_dir(tmp_path, RUN, 20)
    unfinished = folder.with_name(folder.name.replace("0000000020", "0000000030"))
    unfinished.mkdir()
    shutil.copy(folder / "shard-00000.shard", unfinished)
    with job(tmp_path) as second:
        assert load(second) == 20 and second.line == 1
        save(second, 25)
        assert not unfinished.exists(), "it takes space for nothing"


def test_restarts_stay_on_the_line_and_folders_say_so(tmp_path: Path) -> None:
    for attempt, step in ((1, 10), (2, 20), (3, 30)):
        with job(tmp_path) as checkpointer:
            assert attempt == 1 or load(checkpointer) == step - 10
            save(checkpointer, step)
            assert (checkpointer.session.attempt, checkpointer.line) == (attempt, 1)
    ids = list(step_dirs(tmp_path, RUN))
    assert [(step.step, step.attempt, step.line) for step in ids] == [(10, 1, 1), (20, 2, 1), (30, 3, 1)]
    assert [step.dirname.endswith("-l0001") for step in ids] == [False, True, True]
    for listing in scan(LocalTier(str(tmp_path), durable=False), RUN):
        assert listing.committed and listing.manifest is not None and listing.manifest.id.line == 1


def test_all_ranks_agree_on_the_line(tmp_path: Path) -> None:
    """It is part of a step's identity: a step whose ranks disagree is never committed."""

    def work(rank: int, coordinator: Coordinator) -> list[tuple[int, int]]:
        with Checkpointer(
            tmp_path, run=RUN, rank=rank, world_size=2, coordinator=coordinator, options=EMBEDDED
        ) as made:
            for step in (10, 20):
                ticket = made.save(step, {"w": torch.full((500,), float(step))})
                assert ticket is not None
                ticket.wait(Stage.COMMITTED, timeout=SOON)
            assert load(made, 10) == 10
            ticket = made.save(11, {"w": torch.full((500,), 11.0)})
            assert ticket is not None
            ticket.wait(Stage.COMMITTED, timeout=SOON)
            return [(step.step, step.line) for step, _ in made.steps()]

    assert run_ranks(2, work) == [[(11, 2), (20, 1), (10, 1)]] * 2


def test_folders_that_name_no_line_load_and_go_on(tmp_path: Path) -> None:
    """A sample that was written before there were lines."""
    sample = Path(__file__).parents[1] / "storage" / "samples" / "format-3"
    shutil.copytree(sample, tmp_path / "c")

    def work(rank: int, coordinator: Coordinator) -> tuple[int, str]:
        with Checkpointer(
            tmp_path / "c", run="pretrain", rank=rank, world_size=2, coordinator=coordinator, options=EMBEDDED
        ) as made:
            restored = made.load()
            assert restored is not None
            ticket = made.save(30, {"w": torch.zeros(5)})
            assert ticket is not None
            ticket.wait(Stage.COMMITTED, timeout=SOON)
            return restored.step, made.steps()[0][0].dirname[-6:]

    assert run_ranks(2, work) == [(20, "-l0001")] * 2


def test_lines_are_drawn_above_all_that_were_seen() -> None:
    old, newest = StepId(5, 1, "0a0b0c"), StepId(9, 3, "0a0b0c", 0, 2)
    lineage = Lineage(4)
    assert lineage.line == lineage.line == 5
    assert lineage.loaded(newest, newest=newest, largest=4) == 2
    assert lineage.loaded(old, newest=newest, largest=4) == 6
    assert lineage.loaded(old, newest=newest, largest=9) == 10
    lineage.rise_to(8)
    assert lineage.line == 10
    lineage.rise_to(12)
    assert lineage.line == 12
    assert lineage.loaded(old, newest=newest, largest=2) == 13
