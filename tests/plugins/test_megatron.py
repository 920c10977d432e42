"""megatron-core's own checkpoints through the engine, with real ranks over gloo, read by stock megatron-core too."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from resiliency.testing.zygote import Zygote
from tests.plugins.ranks import Answers, run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed here")
pytestmark = pytest.mark.long


def run(
    zygote: Zygote, folder: Path, acts: list[dict[str, Any]], *, ranks: int = 2, env: Mapping[str, str] | None = None
) -> Answers:
    """The answers of each rank, one for each act."""
    return run_ranks(zygote, "tests.plugins.megatron_job:run_acts", {"acts": acts}, folder, ranks=ranks, env=env)


def flip(path: Path, *, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x21
    path.write_bytes(data)


def check(answers: Answers) -> None:
    errors = [answer["error"] for rank in answers for answer in rank if answer["error"]]
    assert not errors


def check_loaded(answer: dict[str, Any]) -> None:
    loaded, wanted = answer["loaded"], answer["wanted"]
    assert loaded and loaded == {**wanted, **{key: loaded[key] for key in loaded if key not in wanted}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def two(zygote: Zygote, folder: Path) -> Answers:
    """Two ranks, which leave behind steps 1 to 4 of ours and step 5 of the stock strategy."""
    at = {"folder": str(folder / "run")}
    answers = run(
        zygote,
        folder,
        [
            {"do": "save", **at, "step": 1},
            {"do": "save", **at, "step": 2, "wrapped": True},
            {"do": "save", **at, "step": 3, "queue": "ours"},
            {"do": "save", **at, "step": 4, "queue": "stock", "wrapped": True},
            {"do": "save", **at, "step": 5, "stock": True},
            {"do": "load", **at, "step": 1},
            {"do": "load", **at, "step": 1, "stock": True},
            {"do": "load", **at, "step": 2, "by": "columns"},
            {"do": "load", **at, "step": 3, "stock": True},
            {"do": "load", **at, "step": 4, "by": "columns", "stock": True},
            {"do": "load", **at, "step": 5},
        ],
    )
    check(answers)
    return answers


@pytest.mark.parametrize("act", range(5, 11))
def test_what_is_saved_is_loaded_by_ours_and_by_stock_megatron(two: Answers, act: int) -> None:
    for rank in two:
        check_loaded(rank[act])
        assert rank[act]["kind"] == {"kind": "rows"}


def test_megatron_calls_the_strategy(two: Answers) -> None:
    assert [answers[0]["calls"] for answers in two] == [1, 1]


def test_an_asynchronous_save_is_finalized_once_and_complete(two: Answers) -> None:
    for rank in two:
        for act in (2, 3):
            (files,) = rank[act]["finalized"]
            for file in (".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"):
                assert repr(file) in files


def test_one_rank_loads_what_two_saved(zygote: Zygote, two: Answers, folder: Path) -> None:
    at = {"folder": str(folder / "run"), "without": "rng"}  # of which each rank has its own
    acts: list[dict[str, Any]] = [{"do": "load", **at, "step": 1}, {"do": "load", **at, "step": 4, "by": "columns"}]
    (rank,) = run(zygote, folder, acts, ranks=1)
    check([rank])
    for answer in rank:
        check_loaded(answer)


def test_damage_is_named_on_all_ranks_before_anything_is_loaded(zygote: Zygote, two: Answers, folder: Path) -> None:
    at = {"folder": str(folder / "damaged")}
    acts: list[dict[str, Any]] = [{"do": "save", **at, "step": step} for step in (1, 2, 3)]
    check(run(zygote, folder, [*acts, {"do": "close", **at}]))
    shard = folder / "damaged" / "iter_0000001" / "__1_0.distcp"
    flip(shard, at=shard.stat().st_size // 2)
    flip(folder / "damaged" / "iter_0000002" / ".metadata", at=100)
    (folder / "damaged" / "iter_0000003" / "__0_0.distcp").unlink()
    for rank in run(zygote, folder, [{"do": "load", **at, "step": step} for step in (1, 2, 3)]):
        for answer, file in zip(rank, ("__1_0.distcp", ".metadata", "__0_0.distcp"), strict=True):
            assert answer["error"].startswith("CorruptShard") and file in answer["error"]


def test_a_checkpoint_that_somebody_deletes_takes_no_space(zygote: Zygote, folder: Path) -> None:
    at = {"folder": str(folder / "deleted")}
    check(
        run(zygote, folder, [{"do": "save", **at, "step": 1}, {"do": "save", **at, "step": 2}, {"do": "close", **at}])
    )
    shutil.rmtree(folder / "deleted" / "iter_0000001")
    check(
        run(zygote, folder, [{"do": "save", **at, "step": 3}, {"do": "save", **at, "step": 4}, {"do": "close", **at}])
    )
    steps = {int(path.name.partition("-")[0]) for path in (folder / "deleted").glob(".resiliency/*/steps/*")}
    assert steps == {2, 3, 4}


def test_a_state_that_does_not_fit_together_is_refused_on_all_ranks_and_the_next_is_saved(
    zygote: Zygote, folder: Path
) -> None:
    at = {"folder": str(folder / "odd")}
    acts = [
        {"do": "save_odd", **at, "step": 1},
        {"do": "save", **at, "step": 2},
        {"do": "load", **at, "step": 2},
        {"do": "save_flat", **at, "step": 3},
    ]
    for odd, saved, loaded, flat in run(zygote, folder, acts):
        assert "'flat' has a flattened_range" in flat["error"], (
            "rank 1 has a replica only, which is no part of its plan"
        )
        assert "odd" in odd["error"] and odd["error"].startswith("ConfigError")
        assert not saved["error"]
        check_loaded(loaded)


def test_a_save_that_fails_is_not_finished_and_the_next_one_is(zygote: Zygote, folder: Path) -> None:
    at = {"folder": str(folder / "failed"), "queue": "ours"}
    acts: list[dict[str, Any]] = [{"do": "save", **at, "step": step} for step in (1, 2, 3)]
    answers = run(zygote, folder, acts, env={"RESILIENCY_FAULTS": "agent.record.write:error@3"})  # two for each save
    check(answers)
    for rank in answers:
        assert [len(answer["finalized"]) for answer in rank] == [1, 0, 1], "what the second would replace is kept"
    assert not (folder / "failed" / "iter_0000002" / "metadata.json").exists()
