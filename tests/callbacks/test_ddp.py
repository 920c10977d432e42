"""Two ranks with gloo: both write, both resume, and one that raises alone ends by itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from resiliency.testing.zygote import Zygote
from tests.callbacks.harness import content, differences, names, rank_state
from tests.ports import free_port


def run(
    zygote: Zygote,
    directory: Path,
    *,
    deadline_s: float = 60,
    restart: int = 0,
    ranks: int = 2,
    launcher: bool = True,
    env: dict[str, str] | None = None,
    **arguments: Any,
) -> list[dict[str, Any]]:
    """What each rank wrote at its end, nothing for one that was killed; fails when one is not done in time.

    Args:
        launcher: one has started the ranks that may restart them.
    """
    launched = {"TORCHELASTIC_RUN_ID": "callbacks", "TORCHELASTIC_RESTART_COUNT": str(restart), "GROUP_RANK": "0"}
    port, result = str(free_port()), directory.parent / f"{directory.name}-{time.monotonic_ns()}"
    workers = [
        zygote.start(
            "tests.callbacks.ddp_job:train",
            {"directory": str(directory), "result": str(result), **arguments},
            env={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "NODE_RANK": "0",
                **(launched if launcher else {}),
                **(env or {}),
            },
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + deadline_s
    try:
        for worker in workers:
            worker.wait(timeout_s=max(0.1, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()
    results = [Path(f"{result}.{rank}") for rank in range(ranks)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in results]


def test_each_rank_writes_a_shard_and_both_resume_exactly(zygote: Zygote, tmp_path: Path) -> None:
    straight = run(zygote, tmp_path / "straight", max_steps=11)
    assert [answer["error"] for answer in straight] == ["", ""]

    directory = tmp_path / "run"
    first = run(zygote, directory, max_steps=7, uneven=True)
    assert [answer["error"] for answer in first] == ["", ""]
    assert names(directory) == {"step=3.ckpt", "step=6.ckpt", "last.ckpt"}
    assert first[0]["best"] == first[1]["best"] == str(directory / "step=6.ckpt")
    assert first[0]["best_k"] == first[1]["best_k"]
    for folder in (directory / ".resiliency/default/steps").iterdir():
        assert {path.name for path in folder.iterdir()} >= {
            "shard-00000.shard",
            "shard-00001.shard",
            "manifest.json",
        }
    uneven = next(value for key, value in content(directory / "last.ckpt")["callbacks"].items() if "Uneven" in key)
    assert list(uneven) == ["0"] and uneven["0"].tolist() == [0.0], "of rank 0, as the stock class saves it"
    own = [rank_state(directory / "last.ckpt", rank=rank)["rank_state"] for rank in (0, 1)]
    assert [state["rank"] for state in own] == [0, 1]
    assert differences(own[0]["rng"], own[1]["rng"]) != []

    second = run(zygote, directory, max_steps=11, uneven=True, restart=1)
    # Batch statistics differ between ranks, so each rank has a digest of its own.
    assert [answer["hash"] for answer in second] == [answer["hash"] for answer in straight]
    assert second[0]["names"] == ["last.ckpt", "step=6.ckpt", "step=9.ckpt"]


def test_two_ranks_save_what_the_stock_callback_saves(zygote: Zygote, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    answers = []
    for own in (False, True):
        arguments = {"exact_resume": False} if own else {}
        answers.append(run(zygote, directory, max_steps=7, own=own, arguments=arguments))
        directory.rename(tmp_path / f"own-{own}")
    for answer in (*answers[0], *answers[1]):
        del answer["files"]  # of a launcher's job the run's folder stays
    assert answers[0] == answers[1]
    expected, found = (content(tmp_path / f"own-{own}" / "last.ckpt") for own in (False, True))
    assert differences(expected, found) == []


def test_one_rank_that_raises_alone_does_not_wait_for_the_other(zygote: Zygote, tmp_path: Path) -> None:
    began = time.monotonic()
    answers = run(zygote, tmp_path / "run", max_steps=20, raising=1, arguments={"save_on_exception": True})
    assert time.monotonic() - began < 55
    assert answers[1]["error"] == "one rank only"
    assert answers[0]["error"], "the other one loses its connection"
    assert {"step=3.ckpt", "last.ckpt"} <= names(tmp_path / "run")
    again = run(zygote, tmp_path / "run", max_steps=8, restart=1)
    assert [answer["step"] for answer in again] == [8, 8]


def test_what_a_rank_other_than_0_cannot_store_is_no_reason_not_to_save(zygote: Zygote, tmp_path: Path) -> None:
    """The stock class writes what rank 0 has, and so does the engine."""
    answers = run(zygote, tmp_path / "run", max_steps=7, odd=1)
    assert [answer["error"] for answer in answers] == ["", ""]
    assert names(tmp_path / "run") == {"step=3.ckpt", "step=6.ckpt", "last.ckpt"}
    assert [rank_state(tmp_path / "run" / "last.ckpt", rank=rank)["rank_state"]["rank"] for rank in (0, 1)] == [0, 1]


def test_what_trains_is_the_same_on_all_ranks_after_a_resume_with_any_number_of_them(
    zygote: Zygote, tmp_path: Path
) -> None:
    how = {"eval_at": 1, "arguments": {"every_n_train_steps": 1}}
    straight = run(zygote, tmp_path / "run", max_steps=9, **how)
    assert [answer["training"] for answer in straight] == [[True, False, False, False]] * 2
    run(zygote, tmp_path / "again", max_steps=5, **how)  # within epoch 1
    again = run(zygote, tmp_path / "again", max_steps=9, restart=1, **how)
    assert [answer["hash"] for answer in again] == [answer["hash"] for answer in straight]
    run(zygote, tmp_path / "fewer", max_steps=6, **how)  # after epoch 1
    (alone,) = run(zygote, tmp_path / "fewer", max_steps=7, restart=1, ranks=1, **how)
    assert (alone["error"], alone["ran"], alone["training"]) == ("", 1, [True, False, False, False])
