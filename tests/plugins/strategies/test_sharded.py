"""``ModelParallelStrategy`` through the engine, with real ranks over gloo: what is saved, and what it resumes into.

Each run of several ranks goes through several fits, because the ranks' start takes most of the time.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.errors import CorruptShard
from resiliency.inspection.by_path import locate, locate_and_load
from resiliency.inspection.export import export
from resiliency.plugins.checkpoint_io import TieredCheckpointIO
from resiliency.testing.zygote import Zygote
from tests.plugins.ranks import Answers, run_ranks
from tests.plugins.strategies.sharded_job import Net

pytestmark = pytest.mark.long


def run(
    zygote: Zygote,
    folder: Path,
    fits: list[dict[str, Any]],
    *,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    hosts: Path | None = None,
) -> Answers:
    """The answers of each rank, one for each fit that it ended. ``hosts``: each rank has a host, and a ``local_dir`` below
    this folder, of its own."""
    of_host = [
        {} if hosts is None else {"RESILIENCY_NODE": f"host{rank}", "RESILIENCY_LOCAL_DIR": f"{hosts}/host{rank}"}
        for rank in range(ranks)
    ]
    target = "tests.plugins.strategies.sharded_job:run_fits"
    return run_ranks(zygote, target, {"fits": fits}, folder, ranks=ranks, env=env, of_rank=of_host)


def check(answers: Answers, fits: int) -> None:
    assert [[answer["error"] for answer in rank] for rank in answers] == [[""] * fits] * len(answers)


def state(at: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks. Batch statistics are not among it: each rank has its own."""
    return {key: at[key] for key in ("weights", "moments", "lr", "scheduler")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


WRAPPED = {"wraps": ["compiled", "checkpointed"]}


@pytest.fixture(scope="module")
def two(zygote: Zygote, folder: Path) -> Answers:
    """Two ranks, which leave behind "wrapped", steps 2, 4 and 6 of FSDP2, and "ddp", step 6 of DDP."""
    wrapped = str(folder / "wrapped")
    answers = run(
        zygote,
        folder,
        [
            {"directory": str(folder / "straight"), "max_steps": 7},
            {"directory": wrapped, "max_steps": 4, "net": WRAPPED, "ckpt_path": "last"},
            {"directory": wrapped, "max_steps": 7, "net": WRAPPED, "ckpt_path": "last"},
            {
                "directory": str(folder / "ddp"),
                "max_steps": 6,
                "kind": "ddp",
                "ckpt_path": f"{wrapped}/step=4.ckpt",
                "net": {"wraps": ["compiled"]},
            },
            {"directory": str(folder / "back"), "max_steps": 7, "ckpt_path": str(folder / "ddp" / "step=6.ckpt")},
            {"directory": str(folder / "tests"), "max_steps": 0, "test": True, "ckpt_path": f"{wrapped}/step=4.ckpt"},
        ],
    )
    check(answers, 6)
    return answers


def test_a_resumed_run_equals_the_undisturbed_one_also_with_wrapped_modules(two: Answers, folder: Path) -> None:
    for straight, saved, resumed, *_ in two:
        assert saved["started"]["step"] == 0, "there is nothing to resume yet"
        assert resumed["started"]["step"] == 4
        assert state(resumed["started"]) == state(saved["ended"])
        assert resumed["losses"][0] == straight["losses"][4] and len(resumed["losses"]) == 3
        assert state(resumed["ended"]) == state(straight["ended"])
    assert two[0][2]["losses"] == two[0][0]["losses"][4:]
    # of batch norm, which differ by rank: all resume with those of rank 0
    assert {answers[2]["started"]["statistics"] for answers in two} == {two[0][1]["ended"]["statistics"]}
    for name in ("step=2.ckpt", "step=6.ckpt", "last.ckpt"):
        located = locate(str(folder / "wrapped" / name))
        assert located is not None and located.is_checked and not located.replicated


def test_training_goes_from_fsdp_to_ddp_and_back_without_a_trace(two: Answers) -> None:
    for straight, saved, _, ddp, back, _ in two:
        assert state(ddp["started"]) == state(saved["ended"])
        assert state(back["started"]) == state(ddp["ended"])
        assert back["started"]["step"] == 6
        assert state(back["ended"]) == state(straight["ended"])


def test_the_weights_alone_are_loaded_for_a_test(two: Answers) -> None:
    for answers in two:
        assert answers[5]["weights"] == answers[1]["ended"]["weights"]


def test_a_folder_with_parts_of_two_steps_is_refused(two: Answers, folder: Path) -> None:
    torn = folder / "torn" / "step=4.ckpt"
    shutil.copytree(folder / "wrapped" / "step=4.ckpt", torn)
    part = max(torn.glob("*.distcp"))
    shutil.copy(folder / "wrapped" / "step=2.ckpt" / part.name, part)
    with pytest.raises(CorruptShard, match=part.name):
        locate_and_load(str(torn))


@pytest.fixture(scope="module")
def four(zygote: Zygote, folder: Path, two: Answers) -> Answers:
    """Four ranks, which leave behind "2d": step 2 of two by two ranks."""
    answers = run(
        zygote,
        folder,
        [
            {"directory": str(folder / "2d"), "max_steps": 2, "kind": "2d"},
            {"directory": str(folder / "x1"), "max_steps": 5, "ckpt_path": str(folder / "wrapped" / "step=4.ckpt")},
            {"directory": str(folder / "x2"), "max_steps": 4, "ckpt_path": str(folder / "2d" / "step=2.ckpt")},
            {
                "directory": str(folder / "x3"),
                "max_steps": 7,
                "kind": "2d",
                "ckpt_path": str(folder / "ddp" / "step=6.ckpt"),
            },
        ],
        ranks=4,
    )
    check(answers, 4)
    return answers


def test_two_ranks_resume_as_four_also_where_a_part_is_empty(two: Answers, four: Answers) -> None:
    for _, resumed, _, from_ddp in four:
        assert state(resumed["started"]) == state(two[0][1]["ended"])
        assert state(from_ddp["started"]) == state(two[0][3]["ended"])
        assert resumed["losses"] and from_ddp["losses"]


def test_two_by_two_ranks_resume_in_any_other_way(zygote: Zygote, folder: Path, two: Answers, four: Answers) -> None:
    saved = state(four[0][0]["ended"])
    assert all(state(answers[2]["started"]) == saved for answers in four), "as FSDP2 of four"
    step_2 = str(folder / "2d" / "step=2.ckpt")
    shutil.copytree(folder / "wrapped" / "last.ckpt", folder / "moved" / "last.ckpt")
    pair = run(
        zygote,
        folder,
        [
            {"directory": str(folder / "y1"), "max_steps": 3, "ckpt_path": step_2},
            {"directory": str(folder / "y2"), "max_steps": 4, "kind": "tp", "ckpt_path": step_2},
            {
                "directory": str(folder / "y4"),
                "max_steps": 5,
                "kind": "ddp",
                "ckpt_path": str(folder / "y2" / "step=4.ckpt"),
            },
            {
                "directory": str(folder / "y3"),
                "max_steps": 5,
                "kind": "tp",
                "ckpt_path": str(folder / "wrapped" / "step=4.ckpt"),
            },
            {"directory": str(folder / "moved"), "max_steps": 7, "ckpt_path": "last"},
            {"directory": str(folder / "stock"), "max_steps": 2, "stock": True},
            {"directory": str(folder / "stock"), "max_steps": 4, "ckpt_path": "last"},
        ],
    )
    check(pair, 7)
    for fsdp, tensor, from_tensor, from_fsdp, moved, stock, after_stock in pair:
        assert state(fsdp["started"]) == state(tensor["started"]) == saved
        assert state(from_fsdp["started"]) == state(two[0][1]["ended"])
        assert state(from_tensor["started"]) == state(tensor["ended"])
        assert moved["started"]["step"] == 6, "a folder by itself"
        assert state(after_stock["started"]) == state(stock["ended"]), "of Lightning"
    located = locate(str(folder / "stock" / "last.ckpt"))
    assert located is not None and located.id.step == 4
    (alone,) = run(
        zygote,
        folder,
        [{"directory": str(folder / "z"), "max_steps": 3, "kind": "single", "ckpt_path": step_2}],
        ranks=1,
    )
    check([alone], 1)
    assert state(alone[0]["started"]) == saved


def test_each_implementation_of_an_optimizer_resumes_exactly(zygote: Zygote, folder: Path) -> None:
    fits: list[dict[str, Any]] = []
    for name in ("foreach", "fused"):
        directory, net = str(folder / name), {"optimizer": name}
        fits.append({"directory": directory, "max_steps": 5, "net": net})
        fits.append(
            {"directory": f"{directory}-2", "max_steps": 5, "net": net, "ckpt_path": f"{directory}/step=2.ckpt"}
        )
    answers = run(zygote, folder, fits)
    check(answers, 4)
    for foreach, foreach_again, fused, fused_again in answers:
        for straight, again in ((foreach, foreach_again), (fused, fused_again)):
            assert again["started"]["step"] == 2
            assert state(again["ended"]) == state(straight["ended"])


def test_another_optimizer_gets_its_state_by_name_or_says_what_it_has_no_place_for(
    zygote: Zygote, folder: Path, two: Answers
) -> None:
    step_4 = str(folder / "wrapped" / "step=4.ckpt")
    ways: list[dict[str, Any]] = [{"optimizer": "reversed"}, {"freezes": True}, {"optimizer": "sgd"}]
    fits = [
        {"directory": str(folder / f"way-{number}"), "max_steps": 7, "ckpt_path": step_4, "net": net}
        for number, net in enumerate(ways)
    ]
    fits.append({"directory": str(folder / "way-3"), "max_steps": 7, "replaced": True})
    for steps in (4, 5):
        directory = str(folder / "without")
        fits.append({"directory": directory, "max_steps": steps, "save_optim_on_train_end": False, "ckpt_path": "last"})
    for rank, answers in enumerate(run(zygote, folder, fits)):
        backwards, frozen, other, replaced, without, again = answers
        assert state(backwards["started"]) == state(two[rank][1]["ended"])
        assert state(backwards["ended"]) == state(two[rank][0]["ended"])
        assert frozen["error"] == "" and len(frozen["losses"]) == 3
        assert (
            "'optimizer_0/state/first.bias/" in other["error"]
            and "the optimizer of this job has not made" in other["error"]
        )
        assert without["error"] == again["error"] == "" and again["started"]["step"] == 4
        assert again["started"]["weights"] == without["ended"]["weights"]
        assert again["started"]["moments"] == two[rank][0]["started"]["moments"], "it begins anew"
        assert replaced["error"] == "", "a replaced trainer.save_checkpoint saves a copy"
    located = locate(str(folder / "way-3" / "step=6.ckpt"))
    assert located is not None and located.is_checked


def test_one_file_of_it_is_a_checkpoint_for_lightning(folder: Path, two: Answers) -> None:
    step_4, target = folder / "wrapped" / "step=4.ckpt", folder / "one.ckpt"
    export(str(step_4), str(target))
    exported = torch.load(target, weights_only=True)
    export(str(step_4), str(folder / "exported"), format="dcp")
    files = {file.name: file.read_bytes() for file in (folder / "exported").iterdir()}
    assert files == {file.name: file.read_bytes() for file in step_4.iterdir()} and "meta.pt" in files
    loaded = TieredCheckpointIO().load_checkpoint(step_4)
    for checkpoint in (exported, loaded):
        assert checkpoint["global_step"] == 4 and checkpoint["state_dict"]["odd.weight"].shape == (5, 8)
        (optimizer,) = checkpoint["optimizer_states"]
        assert optimizer["state"].keys() == set(optimizer["param_groups"][0]["params"]) == set(range(11))
    model = Net(kind="single")
    model.load_state_dict(exported["state_dict"])


def test_a_state_that_cannot_be_stored_is_no_file_of_rank_0_alone(zygote: Zygote, folder: Path) -> None:
    job = {"directory": str(folder / "odd"), "max_steps": 5, "odd": 2}
    answers = run(zygote, folder, [job])
    check(answers, 1)
    assert all(any("no checkpoint at step 2" in line for line in answer["lines"]) for (answer,) in answers)
    assert not (folder / "odd" / "step=2.ckpt").exists()
    assert locate(str(folder / "odd" / "step=4.ckpt")) is not None


def test_one_file_for_all_ranks_is_left_to_lightning_which_one_rank_says_once(
    zygote: Zygote, folder: Path, two: Answers
) -> None:
    fits = [
        {"directory": str(folder / "full"), "max_steps": steps, "kind": "full", "ckpt_path": "last"} for steps in (4, 5)
    ]
    shutil.copytree(folder / "wrapped" / ".resiliency", folder / "beside" / ".resiliency")
    fits.append({"directory": str(folder / "beside"), "max_steps": 1, "kind": "full", "ckpt_path": "last"})
    answers = run(zygote, folder, fits)
    check(answers, 3)
    first, second, beside = answers[0]
    assert beside["started"]["step"] == 0, "Lightning cannot read the folder of the engine"
    assert len(first["lines"]) == 1 and "save_distributed_checkpoint=False" in first["lines"][0]
    assert [answer["lines"] for answer in answers[1]] == [[], [], []]
    assert second["started"]["step"] == 4, '"last" is the file of Lightning'
    assert not (folder / "full" / ".resiliency").exists()


@pytest.mark.kill
@pytest.mark.parametrize(
    ("fault", "step"), [("save.fill:kill@2,rank=1", 2), ("save.fill:kill@2", 2), ("save.sealed:kill@2,rank=0", 2)]
)
def test_after_a_kill_in_a_save_the_run_goes_on_from_the_last_whole_step(
    zygote: Zygote, folder: Path, two: Answers, fault: str, step: int, tmp_path: Path
) -> None:
    job = {"directory": str(tmp_path / "run"), "max_steps": 7}
    killed = run(zygote, folder, [job], env={"RESILIENCY_FAULTS": fault})
    assert [answers for answers in killed if answers and not answers[0]["error"]] == [], "no rank has ended its fit"
    again = run(zygote, folder, [job], env={"TORCHELASTIC_RESTART_COUNT": "1"})
    check(again, 1)
    for straight, resumed in zip(two, again, strict=True):
        assert resumed[0]["started"]["step"] == step
        assert state(resumed[0]["ended"]) == state(straight[0]["ended"])


@pytest.mark.kill
def test_hosts_with_folders_of_their_own_resume_after_a_kill_in_a_resume(
    zygote: Zygote, two: Answers, tmp_path: Path
) -> None:
    job, hosts = {"directory": str(tmp_path / "run"), "max_steps": 4}, tmp_path / "hosts"
    check(run(zygote, tmp_path, [job], hosts=hosts), 1)
    resumed = {**job, "max_steps": 7, "ckpt_path": "last"}
    killed = run(zygote, tmp_path, [resumed], hosts=hosts, env={"RESILIENCY_FAULTS": "restore.load:kill,rank=1"})
    assert not killed[1] and not [one for one in killed[0] if not one["error"]]
    again = run(zygote, tmp_path, [resumed], hosts=hosts, env={"TORCHELASTIC_RESTART_COUNT": "1"})
    check(again, 1)
    for straight, answers in zip(two, again, strict=True):
        assert answers[0]["started"]["step"] == 4
        assert state(answers[0]["ended"]) == state(straight[0]["ended"])
    for rank in (0, 1):
        parts = {path.name for path in (hosts / f"host{rank}").glob(".resiliency/*/steps/*/*.distcp")}
        assert parts <= {f"__{rank}_0.distcp"}, "the part of the other host was copied"


def test_lightning_itself_resumes_from_our_folder_and_we_from_that_of_lightning(
    zygote: Zygote, two: Answers, folder: Path
) -> None:
    ours, theirs, again = (str(folder / name) for name in ("straight", "theirs", "again"))
    answers = run(
        zygote,
        folder,
        [
            {"directory": theirs, "max_steps": 6, "stock": True, "ckpt_path": f"{ours}/step=4.ckpt"},
            {"directory": again, "max_steps": 7, "ckpt_path": f"{theirs}/step=6.ckpt"},
            {"directory": f"{again}-ddp", "max_steps": 7, "kind": "ddp", "ckpt_path": f"{theirs}/step=6.ckpt"},
        ],
    )
    check(answers, 3)
    for (stock, resumed, as_ddp), earlier in zip(answers, two, strict=True):
        assert stock["started"]["step"] == 4 and resumed["started"]["step"] == as_ddp["started"]["step"] == 6
        assert state(stock["started"]) == state(earlier[1]["ended"])
        assert state(resumed["started"]) == state(as_ddp["started"]) == state(stock["ended"])
        assert as_ddp["losses"] == resumed["losses"]
    torn = folder / "torn-stock" / "step=6.ckpt"
    shutil.copytree(f"{theirs}/step=6.ckpt", torn)
    shutil.copy(torn / "__0_0.distcp", torn / "__1_0.distcp")
    jobs = [
        {"directory": str(folder / "z1"), "max_steps": 7, "ckpt_path": str(torn), "kind": k} for k in ("fsdp", "ddp")
    ]
    for refused in run(zygote, folder, jobs):
        assert all("CorruptShard" in one["error"] and "__1_0.distcp" in one["error"] for one in refused)
    alone = {"directory": str(folder / "z2"), "max_steps": 7, "kind": "single", "ckpt_path": f"{theirs}/step=6.ckpt"}
    compiled = {**alone, "directory": str(folder / "z3"), "net": {"wraps": ["compiled"]}}
    (singles,) = run(zygote, folder, [alone, compiled], ranks=1)
    check([singles], 2)
    assert all(state(single["started"]) == state(answers[0][0]["ended"]) for single in singles)
    assert {path.name for path in (folder / "straight" / "step=4.ckpt").iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
        "meta.pt",
    }
