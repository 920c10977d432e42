"""After DDP on one host the folder holds what the stock class leaves, and each file alone is enough for all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.storage.manifest import META_DIR
from resiliency.storage.single_files import find_single_files
from resiliency.testing.zygote import Zygote
from tests.callbacks.harness import NAMESPACES, differences, names, rank_state
from tests.callbacks.test_ddp import run
from tests.ports import free_port
from tests.rings import few
from tests.zygote import start_script

PL = "lightning.pytorch"
FILES = ["last.ckpt", "step=3.ckpt", "step=6.ckpt"]


def fit(zygote: Zygote, directory: Path, **arguments: Any) -> list[dict[str, Any]]:
    """A fit that no launcher started, with an agent process."""
    return run(zygote, directory, launcher=False, **({"agent": "process", "max_steps": 7} | arguments))


def errors(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["error"] for answer in answers]


@pytest.fixture(scope="module", params=NAMESPACES)
def namespace(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cut(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory, namespace: str) -> Path:
    """A folder that a fit of two ranks has left after 7 of 11 steps. Copy it before changing it."""
    directory = tmp_path_factory.mktemp("cut") / "run"
    answers = fit(zygote, directory, namespace=namespace)
    assert errors(answers) == ["", ""]
    assert [answer["files"] for answer in answers] == [FILES, FILES], "as each rank finds it when its fit returns"
    return directory


def train_straight(zygote: Zygote, directory: Path, namespace: str) -> list[str]:
    """Weights of each rank after 11 steps in one go."""
    answers = fit(zygote, directory, namespace=namespace, max_steps=11)
    assert errors(answers) == ["", ""]
    return [answer["hash"] for answer in answers]


@pytest.fixture(scope="module")
def straight(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory, namespace: str) -> list[str]:
    return train_straight(zygote, tmp_path_factory.mktemp("straight") / "run", namespace)


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """As ``straight``, for tests that run with one package only."""
    return train_straight(zygote, tmp_path_factory.mktemp("undisturbed") / "run", PL)


@pytest.fixture(scope="module")
def of_stock(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory, namespace: str) -> Path:
    """As ``cut``, with the stock class."""
    directory = tmp_path_factory.mktemp("stock") / "run"
    answers = fit(zygote, directory, namespace=namespace, own=False)
    assert errors(answers) == ["", ""] and answers[0]["files"] == FILES
    return directory


def test_the_folder_looks_as_stock_leaves_it(cut: Path, of_stock: Path) -> None:
    assert sorted(path.name for path in cut.rglob("*")) == FILES
    for name in FILES:
        found = torch.load(cut / name, weights_only=True)
        assert found["global_step"] == torch.load(of_stock / name, weights_only=True)["global_step"]


def test_each_file_has_what_every_rank_had(cut: Path) -> None:
    for name in FILES:
        own = [rank_state(cut / name, rank=rank)["rank_state"] for rank in (0, 1)]
        assert [state["rank"] for state in own] == [0, 1]
        assert differences(own[0]["rng"], own[1]["rng"]) != []


@pytest.mark.parametrize(
    "place", few(["its folder", "last", "moved", "copied and renamed"], ["last", "copied and renamed"])
)
def test_two_ranks_go_on_from_the_file_alone_bit_for_bit(
    place: str, zygote: Zygote, tmp_path: Path, cut: Path, straight: list[str], namespace: str
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(cut, directory)
    path = "last" if place == "last" else str(directory / "step=6.ckpt")
    if place == "moved":
        (tmp_path / "elsewhere").mkdir()
        path = shutil.move(path, tmp_path / "elsewhere")
        shutil.rmtree(directory)
    elif place == "copied and renamed":
        path = shutil.copy(path, tmp_path / "mine.ckpt")
        shutil.rmtree(directory)
    answers = fit(zygote, directory, namespace=namespace, max_steps=11, ckpt_path=str(path))
    assert errors(answers) == ["", ""]
    assert [answer["hash"] for answer in answers] == straight
    assert META_DIR not in [path.name for path in directory.iterdir()]
    # What the fit began with is there, and what it has saved is enough for all ranks too.
    assert {"last.ckpt", "step=9.ckpt"} <= {path.name for path in directory.iterdir()}
    assert {file.manifest.world_size for file in find_single_files(str(directory))} == {2}


def test_one_rank_goes_on_from_a_file_of_two_as_with_stock(
    zygote: Zygote, tmp_path: Path, cut: Path, of_stock: Path, namespace: str
) -> None:
    directory, files = tmp_path / "run", []
    for own in (False, True):
        shutil.copytree(cut if own else of_stock, directory)
        (answer,) = fit(zygote, directory, namespace=namespace, own=own, ranks=1, max_steps=11, ckpt_path="last")
        assert (answer["error"], answer["step"]) == ("", 11)
        files.append(answer["files"])
        directory.rename(tmp_path / f"own-{own}")
    assert files[0] == files[1] and {"step=6.ckpt", "step=9.ckpt"} <= set(files[0])
    found = find_single_files(str(tmp_path / "own-True"))
    assert {(file.manifest.id.step, file.manifest.world_size) for file in found} >= {(6, 2), (9, 1)}


def test_a_launchers_job_keeps_its_folder(zygote: Zygote, tmp_path: Path) -> None:
    answers = run(zygote, tmp_path / "run", max_steps=4, agent="process")
    assert errors(answers) == ["", ""]
    assert (tmp_path / "run" / META_DIR / "default" / "events" / "rank-00001.jsonl").stat().st_size > 100
    # A copy of its files is enough for all ranks all the same.
    assert [step.manifest.id.step for step in find_single_files(str(tmp_path / "run"))] == [3]


@pytest.mark.kill
@pytest.mark.parametrize("victim", few([0, 1], [1]))
@pytest.mark.parametrize("hook", ["on_train_end", "teardown"])
def test_a_rank_killed_at_the_end_loses_nothing_and_the_next_fit_tidies_up(
    hook: str, victim: int, zygote: Zygote, tmp_path: Path, undisturbed: list[str]
) -> None:
    directory = tmp_path / "run"
    fit(zygote, directory, dies=(victim, hook))
    assert set(FILES) <= {path.name for path in directory.iterdir()}
    answers = fit(zygote, directory, max_steps=11, ckpt_path="last")
    assert [(answer["error"], answer["hash"]) for answer in answers] == [("", weights) for weights in undisturbed]
    assert answers[0]["files"] == answers[1]["files"] == ["last.ckpt", "step=6.ckpt", "step=9.ckpt"]


@pytest.mark.kill
@pytest.mark.parametrize(
    "point",
    few(
        ["agent.join.record", "agent.drop.begin", "agent.drop.renamed", "agent.drop.removed"],
        ["agent.join.record", "agent.drop.renamed"],
    ),
)
def test_an_agent_killed_at_the_end_loses_nothing_and_the_next_fit_tidies_up(
    point: str, zygote: Zygote, tmp_path: Path, undisturbed: list[str]
) -> None:
    directory = tmp_path / "run"
    times = 1 if "drop" in point else 2
    answers = fit(zygote, directory, env={"RESILIENCY_FAULTS": f"{point}:kill@{times}"})
    assert errors(answers) == ["", ""]
    assert set(FILES) <= {path.name for path in directory.iterdir()}
    answers = fit(zygote, directory, max_steps=11, ckpt_path="last")
    assert [(answer["error"], answer["hash"]) for answer in answers] == [("", weights) for weights in undisturbed]
    assert answers[0]["files"] == answers[1]["files"] == ["last.ckpt", "step=6.ckpt", "step=9.ckpt"]


@pytest.mark.parametrize("own", few([True, False], [False]))
def test_a_rank_that_fails_when_training_has_ended_fails_alone(own: bool, zygote: Zygote, tmp_path: Path) -> None:
    answers = fit(zygote, tmp_path / "run", own=own, leaves=(1, "on_train_end"))
    assert errors(answers) == ["", "this rank leaves"]
    assert names(tmp_path / "run") == set(FILES)


SPAWNED = """
import importlib, os, sys
namespace, strategy, folder, crashes = sys.argv[1:]
lightning = importlib.import_module(namespace)
boring = importlib.import_module(f"{namespace}.demos.boring_classes")
from resiliency.callbacks.model_checkpoint import build


class Model(boring.BoringModel):
    def on_train_epoch_start(self):
        if self.current_epoch == 1 and crashes == "all":
            raise RuntimeError("CRASH")


if __name__ == "__main__":
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, limit_train_batches=2, limit_val_batches=0,
        logger=False, callbacks=[build(namespace)(folder)], enable_progress_bar=False, enable_model_summary=False,
    )
    try:
        trainer.fit(Model())
    except Exception as error:
        assert "CRASH" in str(error), error
    print(sorted(os.listdir(folder)))
"""


@pytest.mark.long
@pytest.mark.parametrize("crashes", ["none", "all"])
@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.nightly)])
def test_processes_that_lightning_starts_leave_only_files_also_after_an_exception(
    strategy: str, crashes: str, zygote: Zygote, tmp_path: Path
) -> None:
    """In such a process an exception reaches no hook of a callback."""
    # Lightning's own choice of a port is listened on only when rank 0 has imported torch.
    env = {"MASTER_PORT": str(free_port())}
    arguments = (PL, strategy, str(tmp_path / "ckpts"), crashes)
    worker = start_script(zygote, SPAWNED, tmp_path / "output", *arguments, env=env)
    try:
        code = worker.wait(timeout_s=170)
    finally:
        worker.kill()
    output = (tmp_path / "output").read_text()
    assert code == 0, output
    step = 2 if crashes == "all" else 4
    assert output.splitlines()[-1] == str([f"epoch={step // 2 - 1}-step={step}.ckpt"])
