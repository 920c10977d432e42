"""``resiliency ckpt`` on good, damaged, unfinished and merged checkpoints."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from typer.testing import CliRunner, Result

from resiliency.agent.config import agent_address
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.cli.ckpt import app
from resiliency.events import EventKind, EventWriter, JsonlSink
from resiliency.inspection.liveness import evidence_of_use
from resiliency.inspection.pruning import Deletion, delete, plan_pruning
from resiliency.settings import environment
from resiliency.storage.catalog import scan
from resiliency.storage.manifest import EVENTS_DIR, record_file, shard_file
from resiliency.storage.stage import Stage
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import (
    QUICK,
    RUN,
    copy_folder,
    copy_to_memory,
    differences,
    flip_bits,
    make_flat_state,
    make_lightning_state,
    save_steps,
    step_dir,
    step_dirs,
)
from resiliency.testing.tier_doubles import RecordingTier
from tests.storage.joining import save_joined
from tests.tidying import drop_folders

RUNNER = CliRunner()
ROOT = Path(__file__).parents[2]


def run(*words: object, status: int = 0) -> Result:
    result = RUNNER.invoke(app, [str(word) for word in words])
    assert result.exit_code == status, f"status {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


def data(*words: object, status: int = 0) -> Any:
    return json.loads(run(*words, "--json", status=status).stdout)


def told(*words: object, status: int) -> str:
    """The one line on standard error."""
    result = run(*words, status=status)
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("ckpt: ")
    return result.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs in one folder: solo with steps 10, 20, 30; duo, of two ranks with a part each, with steps 1, 2."""
    folder = tmp_path_factory.mktemp("made")
    save_steps(folder, 10, 20, 30, run="solo")
    save_steps(folder, 1, 2, run="duo", world_size=2, name="duo={step}.ckpt", sharded=True)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 that two ranks of one host wrote together into one file."""
    folder = tmp_path_factory.mktemp("pair")
    save_steps(folder, 1, 2, run="pair", world_size=2)
    return folder


@pytest.fixture
def ck(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    copy_folder(made, tmp_path / "ck")
    return tmp_path / "ck"


def shard(ck: Path, name: str, step: int, rank: int = 0) -> Path:
    return step_dir(ck, name, step) / shard_file(rank, replicated=name != "duo")


def numbers(listing: Any) -> dict[str, list[int]]:
    """Run -> its steps, of what ``ls --json`` prints."""
    return {name: [step["step"] for step in steps] for name, steps in listing["runs"].items()}


# ---- ls


def test_ls_shows_all_steps_of_all_runs(made: Path) -> None:
    found = data("ls", made)
    assert found["tiers"] == {"local": str(made)}
    assert numbers(found) == {"duo": [1, 2], "solo": [10, 20, 30]}
    step = found["runs"]["duo"][1]
    assert (step["committed"], step["shards_present"], step["shards_needed"], step["names"]) == (
        True,
        2,
        2,
        ["duo=2.ckpt"],
    )
    assert step["nbytes"] == sum(path.stat().st_size for path in step_dir(made, "duo", 2).glob("*.distcp"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", step["created"])
    text = run("ls", made).stdout
    assert re.search(r"^ *2 +1 +duo=2\.ckpt +\d{4}-.* MiB +2/2 +committed", text, re.M)
    assert "run solo: 3 steps, 3 committed" in text


@pytest.mark.parametrize(("columns", "dates"), [(80, False), (160, True)])
def test_ls_fits_the_terminal(made: Path, monkeypatch: pytest.MonkeyPatch, columns: int, dates: bool) -> None:
    from rich.console import Console

    monkeypatch.setattr(
        "resiliency.cli.ckpt.console", lambda **_: Console(width=columns, file=sys.stdout, highlight=False)
    )
    lines = run("ls", made, "--run", "solo").stdout.splitlines()[1:]  # the first names the folder, whatever its length
    assert max(map(len, lines)) <= columns
    assert ("created (UTC)" in "\n".join(lines)) is dates


@pytest.mark.parametrize("what", ["name", "step", "run", "shard"])
def test_ls_of_a_name_step_or_run_shows_only_that(made: Path, what: str) -> None:
    folder = step_dir(made, "solo", 20)
    path = {"name": made / "step=20.ckpt", "step": folder, "run": folder.parents[1], "shard": folder / "manifest.json"}[
        what
    ]
    steps = [10, 20, 30] if what == "run" else [20]
    assert numbers(data("ls", path)) == {"solo": steps}


def test_ls_tells_what_is_wrong(ck: Path) -> None:
    shard(ck, "duo", 1, 1).unlink()
    with open(shard(ck, "duo", 2), "ab") as file:
        file.write(b"x")
    for path in step_dir(ck, "solo", 10).glob("*.json"):
        path.unlink()
    (step_dir(ck, "solo", 20) / "manifest.json").unlink()
    (step_dir(ck, "solo", 30) / "manifest.json").write_text("{")
    found = {step["step"]: step for steps in data("ls", ck)["runs"].values() for step in steps}
    assert {step: facts["state"] for step, facts in found.items()} == {
        1: "damaged",
        2: "damaged",
        10: "unfinished",
        20: "committed",
        30: "committed",
    }
    assert found[1]["notes"] == [f"{shard(ck, 'duo', 1, 1)} is missing"]
    assert re.fullmatch(r".*/__0_0\.distcp has [\d,]+ bytes instead of [\d,]+", found[2]["notes"][0])
    assert (found[10]["shards_present"], found[10]["shards_needed"]) == (0, None)
    assert found[10]["notes"][0].startswith(f"{step_dir(ck, 'solo', 10) / 'shard-00000.json'} is missing")
    assert found[20]["notes"][0].startswith(f"{step_dir(ck, 'solo', 20) / 'manifest.json'} is missing; the records")
    assert found[30]["notes"][0].startswith(f"{step_dir(ck, 'solo', 30) / 'manifest.json'}: not a manifest")
    text = run("ls", ck).stdout
    assert f"step 1 (attempt 1): {shard(ck, 'duo', 1, 1)} is missing" in text


@pytest.mark.parametrize("longer", [False, True])
def test_without_a_manifest_a_shard_that_is_short_is_damage_and_one_that_is_long_is_not(ck: Path, longer: bool) -> None:
    """A record is written once its shard is whole; after that an agent may be killed that was making the shard longer."""
    folder = step_dir(ck, "duo", 2)
    (folder / "manifest.json").unlink()
    file = folder / "__0_0.distcp"
    os.truncate(file, file.stat().st_size + (100 if longer else -100))
    found = data("ls", ck)["runs"]["duo"][1]
    assert (found["state"], found["shards_present"]) == ("unfinished" if longer else "damaged", 1)
    assert found["notes"][0].startswith(f"{file} has ")
    assert ("skip step 2" in run("verify", ck, status=not longer).stdout) is longer
    assert data("inspect", ck, "--run", "duo")["step"] == 1


def test_ls_merges_places_as_tiers(ck: Path) -> None:
    """Each half of a step is elsewhere: together it is committed."""
    address = copy_to_memory(ck)
    shard(ck, "duo", 2, 1).unlink()
    assert [step["state"] for step in data("ls", ck)["runs"]["duo"]] == ["committed", "damaged"]
    found = data("ls", ck, address)
    assert found["tiers"] == {"local": str(ck), "memory": address}
    step = found["runs"]["duo"][1]
    assert (step["state"], step["tiers"], step["notes"]) == (
        "committed",
        ["local", "memory"],
        [f"{shard(ck, 'duo', 2, 1)} is missing"],
    )


def test_ls_counts_the_parts_of_several_hosts(ck: Path, tmp_path: Path) -> None:
    """Folders of two hosts, each with its own shard and no manifest."""
    other = tmp_path / "other"
    copy_folder(ck, other)
    for place, rank in ((ck, 1), (other, 0)):
        (step_dir(place, "duo", 2) / "manifest.json").unlink()
        shard(place, "duo", 2, rank).unlink()
        shard(place, "duo", 2).with_name(record_file(rank)).unlink()
    assert data("ls", ck)["runs"]["duo"][1]["state"] == "unfinished"
    found = data("ls", ck, other)
    assert (found["runs"]["duo"][1]["state"], list(found["tiers"])) == ("committed", ["local-1", "local-2"])


@pytest.fixture
def hosts(ck: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Folders of two hosts that share none: each has a copy of shard 0, and the mark that the step is committed."""
    other = tmp_path / "other"
    copy_folder(ck, other)
    for place in (ck, other):
        for step in (1, 2):
            (step_dir(place, "duo", step) / "manifest.json").unlink()
            (step_dir(place, "duo", step) / "committed.json").write_text("{}")
    for step in (1, 2):
        shard(ck, "duo", step, 1).unlink()
        shard(ck, "duo", step).with_name(record_file(1)).unlink()
    return ck, other


def test_one_hosts_part_of_a_committed_step_is_no_unfinished_step(hosts: tuple[Path, Path]) -> None:
    shown = run("ls", "--run", "duo", hosts[0]).stdout
    assert "0 committed, 2 committed in part" in shown and "part: the other shards" in shown
    assert "in part" not in run("ls", "--run", "solo", hosts[0]).stdout
    steps = data("ls", hosts[0])["runs"]["duo"]
    assert [(step["state"], step["shards_present"], bool(step["names"])) for step in steps] == [("part", 1, True)] * 2
    assert [step["state"] for step in data("ls", *hosts)["runs"]["duo"]] == ["committed"] * 2
    checked = run("verify", "--run", "duo", hosts[0]).stdout
    assert "part 2 steps: the other shards" in checked and "all good: 2 steps" in checked


def test_verify_compares_what_torchs_own_readers_go_by(ck: Path) -> None:
    assert data("verify", "--run", "duo", ck)["findings"] == []
    beside = step_dir(ck, "duo", 2) / ".metadata"
    right = beside.read_bytes()
    beside.unlink()
    finding = data("verify", "--run", "duo", ck)["findings"][0]
    assert (finding["bad"], finding["path"]) == (False, str(beside)) and "is missing" in finding["text"]
    beside.write_bytes(right[:-1] + b"?")
    shown = run("verify", "--run", "duo", ck, status=1).stdout
    assert f"bad  step 2: {beside} differs from the one in __0_0.distcp" in shown
    beside.write_bytes(right)
    named = ck / "duo=1.ckpt" / ".metadata"
    named.unlink()
    named.write_bytes(right[:-1] + b"?")
    shown = run("verify", "--run", "duo", ck, status=1).stdout
    assert f"bad  step 1: {named} differs" in shown and "1 of 2 steps is bad" in shown


def test_healthy_parts_of_several_hosts_are_good_and_damaged_ones_are_bad(hosts: tuple[Path, Path]) -> None:
    assert data("verify", "--run", "duo", *hosts)["good"]
    record = shard(hosts[1], "duo", 2).with_name(record_file(1))
    kept = record.read_bytes()
    record.unlink()
    lost = run("verify", "--run", "duo", *hosts, status=1).stdout
    assert "shard-00001.json is missing, so its shard cannot be checked" in lost
    record.write_bytes(kept)
    (first,), (second, *_) = (step["names"] for step in data("ls", hosts[0])["runs"]["duo"])
    shutil.rmtree(hosts[0] / second)
    shutil.copytree(hosts[0] / first, hosts[0] / second)
    assert "says that it is step 1" in run("verify", "--run", "duo", hosts[0], status=1).stdout
    flip_bits(shard(hosts[0], "duo", 1, 0), [(100, 101)])
    os.truncate(shard(hosts[0], "duo", 2, 0), 1000)
    found = data("verify", "--run", "duo", hosts[0], status=1)
    assert [(step["state"], step["good"]) for step in found["steps"]] == [("part", False), ("damaged", False)]
    (step_dir(hosts[0], "duo", 2) / "__0_0.distcp").unlink()
    assert data("ls", hosts[0])["runs"]["duo"][1]["notes"] == [f"{shard(hosts[0], 'duo', 2)} is missing"]


def test_ls_says_when_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert run("ls", tmp_path).stdout == f"no checkpoints in {tmp_path}\n"
    assert "no such checkpoint" in told("ls", tmp_path / "none", status=2)
    assert "no such checkpoint" in told("ls", "memory://nobody", status=2)
    assert "no object store this library knows" in told("ls", "ftp://x/y", status=2)
    assert run("ls", status=2)


def test_ls_needs_no_torch(made: Path) -> None:
    code = "import sys\nfrom resiliency.cli.main import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    for words in ("ls", "inspect --run duo", "inspect --run solo", "verify", "prune --keep 1 --run duo --dry-run"):
        command = [sys.executable, "-c", code, "ckpt", *words.split(), str(made)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "False"), result.stderr


def test_a_name_means_its_step_without_its_file_and_with_slashes(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, run="r", rank=0, world_size=1, options=QUICK) as checkpointer:
        ticket = checkpointer.save(4, make_lightning_state(4), names=["epoch=1-val/loss=0.5.ckpt"])
        assert ticket is not None
        ticket.wait(Stage.DURABLE)
    name = tmp_path / "epoch=1-val" / "loss=0.5.ckpt"
    assert name.exists()
    assert data("ls", name)["runs"]["r"][0]["step"] == 4
    name.unlink()
    assert data("ls", name)["runs"]["r"][0]["step"] == 4
    assert data("ls", f"{copy_to_memory(tmp_path)}/epoch=1-val/loss=0.5.ckpt")["runs"]["r"][0]["step"] == 4


# ---- inspect


def test_inspect_shows_shards_tensors_and_objects(made: Path) -> None:
    found = data("inspect", made / "duo=2.ckpt")
    assert (found["run"], found["step"], found["attempt"]) == ("duo", 2, 1)
    assert [(row["rank"], row["file"], row["present"]) for row in found["shards"]] == [
        (0, "__0_0.distcp", True),
        (1, "__1_0.distcp", True),
    ]
    rows = {(row["key"], tuple(row["shards"])): row for row in found["tensors"]}
    big = rows["state_dict/big", (0, 1)]
    assert (big["dtype"], big["shape"], big["nbytes"], big["per_rank"]) == (
        "float32",
        [2100, 1024],
        4 * 2100 * 1024,
        False,
    )
    assert big["boxes"] == 2
    assert rows["rng", (1,)]["per_rank"] is True
    tree = {entry["path"]: entry for entry in found["tree"]}
    assert (tree["state_dict/big"]["tensors"], tree["epoch"]["text"]) == (1, "3")
    text = run("inspect", made / "duo=2.ckpt").stdout
    assert re.search(r"state_dict/big +float32 +2100x1024 +8\.2 MiB +0-1", text)
    assert "epoch 3, val_loss 0.25" in run("inspect", made / "step=30.ckpt").stdout


def test_inspect_shows_one_file_of_several_ranks(pair: Path) -> None:
    found = data("inspect", pair / "step=2.ckpt")
    assert (found["tree"][0]["path"], found["shards_needed"]) == ("epoch", 2)
    rows = {(row["key"], tuple(row["shards"])): row for row in found["tensors"]}
    big = rows["state_dict/big", (0,)]
    assert (big["shape"], big["nbytes"], big["boxes"]) == ([2100, 1024], 4 * 2100 * 1024, 1)
    assert rows["rng", (0,)]["per_rank"] is rows["rng", (1,)]["per_rank"] is True
    assert ("state_dict/head.weight", (0,)) not in rows  # tied: stored once
    tree = {entry["path"]: entry for entry in found["tree"]}
    assert (tree["state_dict"]["tensors"], tree["epoch"]["text"], tree["optimizer_states"]["kind"]) == (3, "3", "list")
    assert tree["state_dict"]["text"] == "net.weight, head.weight, big"


@pytest.mark.parametrize("world_size", [1, 2])
def test_inspect_and_verify_look_into_a_folder_that_holds_only_files(tmp_path: Path, world_size: int) -> None:
    save_joined(tmp_path, 1, 2, world_size=world_size)
    before = data("inspect", tmp_path / "step=2.ckpt")
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    found = data("inspect", tmp_path / "step=2.ckpt")
    assert (found["tensors"], found["tree"], found["shards_needed"]) == (before["tensors"], before["tree"], world_size)
    assert [row["per_rank"] for row in found["tensors"] if row["key"] == "rng"] == [True] * world_size
    run("verify", tmp_path)
    flip_bits(tmp_path / "step=2.ckpt", [(1100, 1101)])
    run("verify", tmp_path, status=1)


class Settings:
    """Of the user's own."""

    def __init__(self, width: int) -> None:
        self.width = width


def ran(code: str) -> str:
    """What unpickling would call."""
    raise AssertionError(f"this ran: {code}")


class Bomb:
    def __reduce__(self) -> Any:
        return ran, ("rm",)


def test_inspect_names_objects_of_any_class_and_makes_none(tmp_path: Path) -> None:
    state = {
        "state_dict": {"w": torch.zeros(2)},
        "own": {"settings": Settings(3), "bomb": Bomb(), "path": Path("/data")},
        "settings": Settings(4),
        "bomb": Bomb(),
        "numpy": numpy.arange(3),
        "set": {1, 2},
        "number": 1.5,
        "many": [1, 2, 3],
        "none": None,
        "nothing": {},
        "sparse": torch.eye(2).to_sparse(),
        "parameter": torch.nn.Parameter(torch.zeros(2, 3)),
        "float8": torch.zeros(4).to(torch.float8_e4m3fn),
        "strided": torch.zeros(4, 6).t(),
    }
    save_steps(tmp_path, 1, what=state)
    found = data("inspect", tmp_path)
    tree = {entry["path"]: entry for entry in found["tree"]}
    assert list(tree) == list(state)
    assert (tree["own"]["kind"], tree["own"]["tensors"], tree["own"]["text"]) == ("dict", 0, "settings, bomb, path")
    assert (tree["settings"]["kind"], tree["settings"]["values"], tree["settings"]["text"]) == ("Settings", 1, "width")
    assert (tree["bomb"]["kind"], tree["bomb"]["values"]) == ("ran", 1) and "ran('rm')" in tree["bomb"]["text"]
    assert (tree["number"]["text"], tree["many"]["text"], tree["nothing"]["text"]) == ("1.5", "3 items", "empty")
    assert (tree["none"]["kind"], tree["set"]["kind"], tree["set"]["text"]) == ("none", "set", "2 items")
    for name in ("sparse", "parameter", "float8", "strided"):
        assert (tree[name]["kind"], tree[name]["tensors"]) == ("tensor", 1), name
    rows = {row["key"]: (row["dtype"], row["shape"]) for row in found["tensors"]}
    assert rows["parameter"] == ("float32", [2, 3]) and rows["float8"] == ("float8_e4m3fn", [4])
    assert rows["strided"] == ("float32", [6, 4])


def test_inspect_lists_twenty_tensors_or_all(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, what={"state_dict": {f"layer{i:02d}": torch.zeros(1 + i) for i in range(25)}}, run="solo")
    some, every = run("inspect", tmp_path).stdout, run("inspect", tmp_path, "--tensors").stdout
    assert (some.count("state_dict/layer"), every.count("state_dict/layer")) == (20, 25)
    assert "5 more; --tensors lists all" in some
    assert "state_dict/layer24" in some


def test_inspect_takes_the_newest_committed_step_of_one_run(ck: Path) -> None:
    assert "several runs (duo, solo)" in told("inspect", ck, status=2)
    (step_dir(ck, "solo", 30) / "shard-00000.shard").unlink()
    assert data("inspect", ck, "--run", "solo")["step"] == 20
    assert "no run 'none'" in told("inspect", ck, "--run", "none", status=2)


def test_inspect_names_a_broken_shard_and_shows_the_rest(ck: Path) -> None:
    shard(ck, "duo", 2, 1).write_bytes(b"not a shard")
    found = data("inspect", step_dir(ck, "duo", 2), status=1)
    assert any("__1_0.distcp" in note for note in found["notes"])
    assert any(row["key"] == "state_dict/net.weight" for row in found["tensors"])


def test_inspect_of_a_step_without_anything_readable_fails(ck: Path) -> None:
    for path in step_dir(ck, "solo", 30).glob("*.json"):
        path.write_text("{")
    shown = run("inspect", step_dir(ck, "solo", 30), status=1).stdout
    assert f"note {step_dir(ck, 'solo', 30)}/manifest.json: not a manifest" in shown and "next copy the files" in shown


def test_inspect_names_a_damaged_structure(ck: Path) -> None:
    flip_bits(shard(ck, "solo", 30), [(-2000, -1999)])
    found = data("inspect", step_dir(ck, "solo", 30), status=1)
    assert any("shard-00000.shard: bytes" in note for note in found["notes"]) and found["tree"] == []


# ---- verify


@pytest.mark.parametrize("remote", [False, True])
def test_verify_passes_good_steps(made: Path, remote: bool) -> None:
    found = data("verify", copy_to_memory(made) if remote else made)
    assert (found["good"], [step["good"] for step in found["steps"]], found["findings"]) == (True, [True] * 5, [])
    # A name is the same file in a folder, and a second object in a bucket.
    places = [".resiliency/*/steps/*/*", *(["*.ckpt/*"] if remote else [])]
    files = [file for place in places for end in ("shard", "distcp") for file in made.glob(f"{place}.{end}")]
    files += made.glob("*.ckpt") if remote else ()
    assert found["checked_bytes"] == sum(path.stat().st_size for path in files if path.is_file())
    assert run("verify", made).stdout.startswith("all good: 5 steps, ")


@pytest.mark.parametrize(("remote", "blocks"), [(False, 1), (True, 2), (True, 8)])
def test_verify_names_the_shard_and_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool, blocks: int
) -> None:
    monkeypatch.setattr("resiliency.inspection.verify._TASK_BLOCKS", blocks)  # ranges are joined over tasks, too
    save_steps(tmp_path, 1, 2, what={"state_dict": {"w": torch.zeros(5, 1024, 1024)}}, run="solo")
    size = shard(tmp_path, "solo", 2).stat().st_size
    (record,) = scan(open_tier(str(tmp_path)), "solo")[1].records.values()
    first = record.blocks.index_at(8 * 1024 * 1024)
    wanted = [[record.blocks.bounds(first)[0], record.blocks.bounds(first + 1)[1]], [record.sections[-1], size]]
    flip_bits(shard(tmp_path, "solo", 2), [(at, at + 1) for at in (wanted[0][0], wanted[0][1] - 1, size - 1)])
    place = copy_to_memory(tmp_path) if remote else str(tmp_path)
    found = data("verify", place, status=1)
    assert [(step["step"], step["good"]) for step in found["steps"]] == [(1, True), (2, False)]
    finding, *of_name = found["findings"]
    assert finding["path"].endswith(f"{step_dir(tmp_path, 'solo', 2).name}/shard-00000.shard")
    assert finding["ranges"] == wanted
    # In a folder the name is the same file, in a bucket it is an object of its own.
    assert [one["path"] for one in of_name] == ([f"{place}/step=2.ckpt"] if remote else [])
    text = run("verify", place, status=1).stdout
    assert f"bytes {wanted[0][0]:,} to {wanted[0][1]:,}" in text
    assert "(step 1 is good)" in text
    run("verify", f"{place}/step=1.ckpt")
    run("verify", f"{place}/step=2.ckpt", status=1)


def test_verify_reads_the_files_that_bear_the_names(ck: Path) -> None:
    """A name that is no link any more: a copy that was damaged, one that claims to be another step, none at all."""
    data_of_20 = (ck / "step=20.ckpt").read_bytes()
    for step in (10, 20, 30):
        (ck / f"step={step}.ckpt").unlink()
    (ck / "step=20.ckpt").write_bytes(data_of_20[:70_000] + b"!" + data_of_20[70_001:])
    (ck / "step=30.ckpt").write_bytes(data_of_20)
    found = data("verify", ck, "--run", "solo", status=1)
    assert [step["good"] for step in found["steps"]] == [True, False, False]
    bad = {Path(one["path"]).name: one["text"] for one in found["findings"] if one["bad"]}
    assert bad["step=20.ckpt"].startswith("differs from its digests in bytes ") and len(bad) == 2
    texts = [one["text"] for one in found["findings"] if one["path"] == str(ck / "step=30.ckpt")]
    assert texts[0].startswith("says that it is step 20 ") and texts[1].startswith("differs from its digests")
    notes = {Path(one["path"]).name: one["text"] for one in found["findings"] if not one["bad"]}
    assert notes["step=10.ckpt"].startswith("is missing")
    shutil.copy(ck / "step=20.ckpt", ck / "mine.ckpt")
    found = data("verify", ck / "mine.ckpt", status=1)
    assert str(ck / "mine.ckpt") in {one["path"] for one in found["findings"] if one["bad"]}


def test_verify_tells_what_is_missing(ck: Path) -> None:
    shard(ck, "duo", 2, 1).unlink()
    shard(ck, "duo", 1).with_name(record_file(1)).unlink()
    (step_dir(ck, "solo", 10) / "manifest.json").unlink()
    (step_dir(ck, "solo", 20) / "manifest.json").write_text("{}")
    for path in step_dir(ck, "solo", 30).glob("*.json"):
        path.unlink()
    found = data("verify", ck, status=1)
    texts = {
        (finding["step"], Path(finding["path"]).name): (finding["bad"], finding["text"])
        for finding in found["findings"]
    }
    assert texts[2, "__1_0.distcp"] == (True, "is missing")
    assert texts[1, "shard-00001.json"] == (False, "is missing; the manifest's copy stands in for it")
    assert texts[10, "manifest.json"] == (False, "is missing; the shards' records stand in for it")
    bad, text = texts[20, "manifest.json"]
    assert bad and text.startswith("cannot be used: not a manifest")
    assert len(texts) == 4
    assert [step["step"] for step in found["skipped"]] == [30]
    assert "skip step 30 (attempt 1) of run solo: unfinished" in run("verify", ck, status=1).stdout


def test_verify_names_the_missing_record_of_an_unfinished_step(ck: Path) -> None:
    (step_dir(ck, "duo", 2) / "manifest.json").unlink()
    shard(ck, "duo", 2).with_name(record_file(1)).unlink()
    found = data("verify", step_dir(ck, "duo", 2), status=1)
    assert [(Path(f["path"]).name, f["bad"]) for f in found["findings"]] == [("shard-00001.json", True)]


def test_verify_needs_the_manifest_on_a_remote_tier(ck: Path) -> None:
    """As restore does: there, records may be there before their shards' neighbours."""
    folder = step_dir(ck, "duo", 2)
    (folder / "manifest.json").unlink()
    run("verify", ck)
    address = copy_to_memory(ck)
    assert [step["state"] for step in data("ls", address)["runs"]["duo"]] == ["committed", "unfinished"]
    skipped = run("verify", address).stdout
    assert (
        f"unfinished, nothing resumes from it: {address}/{folder.relative_to(ck)}/manifest.json is missing" in skipped
    )
    found = data("verify", f"{address}/{folder.relative_to(ck)}", status=1)
    assert [(Path(f["path"]).name, f["bad"]) for f in found["findings"]] == [("manifest.json", True)]
    out = ck.parent / "out.ckpt"
    assert "is not committed" in told("export", f"{address}/{folder.relative_to(ck)}", out, status=2)
    assert data("inspect", address, "--run", "duo")["step"] == 1


def test_verify_refuses_a_folder_without_committed_steps(tmp_path: Path) -> None:
    assert "no committed checkpoint to verify" in told("verify", tmp_path, status=2)
    assert "no such checkpoint" in told("verify", tmp_path / "x.ckpt", status=2)


def test_verify_shows_progress_on_a_terminal_only(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    shown: list[Console] = []

    def console(*, err: bool = False) -> Console:
        shown.append(Console(file=sys.stderr if err else sys.stdout, force_terminal=err, width=120, color_system=None))
        return shown[-1]

    assert run("verify", made).stderr == ""
    monkeypatch.setattr("resiliency.cli._ckpt_common.console", console)
    result = run("verify", made)
    assert "solo step 30" in result.stderr and "MB" in result.stderr
    assert result.stdout.startswith("all good")
    assert run("verify", made, "--json").stderr == ""


# ---- export


def test_export_writes_a_file_that_torch_load_reads(made: Path, tmp_path: Path) -> None:
    text = run("export", made / "duo=2.ckpt", tmp_path / "out.ckpt").stdout
    assert "step 2 of run duo, 3 tensors" in text and "weights_only=True" in text
    assert not differences(torch.load(tmp_path / "out.ckpt", weights_only=True), make_flat_state(2, world_size=2))
    assert "exists; choose another name or say --force" in told(
        "export", made / "duo=2.ckpt", tmp_path / "out.ckpt", status=2
    )
    text = run("export", made / "step=20.ckpt", tmp_path / "out.ckpt", "--force").stdout
    assert "step 20 of run solo, 4 tensors" in text and "weights_only=True" in text
    assert not differences(torch.load(tmp_path / "out.ckpt", weights_only=True), make_lightning_state(20))
    found = data("export", made, tmp_path / "weights", "--format", "safetensors", "--run", "solo")
    assert (found["step"], found["tensors"], found["tied"]) == (30, 3, {"head.weight": "net.weight"})
    assert "choose one with --run" in told("export", made, tmp_path / "x.ckpt", status=2)


def test_export_of_bad_bytes_fails(ck: Path, tmp_path: Path) -> None:
    flip_bits(shard(ck, "duo", 2, 1), [(2_000_000, 2_000_001)])
    assert "__1_0.distcp" in told("export", ck / "duo=2.ckpt", tmp_path / "out.ckpt", status=1)
    assert not (tmp_path / "out.ckpt").exists()


# ---- prune


def left(ck: Path, name: str) -> list[int]:
    return [step.step for step in step_dirs(ck, name)]


def everything(ck: Path) -> dict[str, bytes]:
    """All files but event logs: a trainer at work writes its own in the background."""
    return {str(path): path.read_bytes() for path in ck.rglob("*") if path.is_file() and EVENTS_DIR not in path.parts}


def test_prune_keeps_the_newest_and_no_other_run_is_touched(ck: Path) -> None:
    others = {path: content for path, content in everything(ck).items() if "duo" in path}
    freed = sum(path.stat().st_size for step in (10, 20) for path in step_dir(ck, "solo", step).iterdir())
    text = run("prune", ck, "--keep", "1", "--run", "solo", "--yes").stdout
    assert f"({freed:,} bytes) to delete" in text and f"freed {freed / 1024:.1f} KiB ({freed:,} bytes)" in text
    assert "deleted step 10 (attempt 1)" in text and "step=10.ckpt" in text
    assert left(ck, "solo") == [30]
    assert sorted(path.name for path in ck.glob("*.ckpt")) == ["duo=1.ckpt", "duo=2.ckpt", "step=30.ckpt"]
    assert {path: content for path, content in everything(ck).items() if "duo" in path} == others
    run("verify", ck)


def test_prune_asks_and_can_be_tried_dry(ck: Path) -> None:
    before = everything(ck)
    words = ("prune", ck, "--keep", "1", "--run", "solo")
    found = data(*words, "--dry-run")
    assert ([step["step"] for step in found["delete"]], found["deleted"], found["newest"]["step"]) == ([10, 20], [], 30)
    assert "no terminal to ask on" in told(*words, status=2)
    assert "say --dry-run or --yes" in told(*words, "--json", status=2)
    assert "say what to delete" in told("prune", ck, status=2)
    assert "several runs (duo, solo)" in told("prune", ck, "--keep", "1", status=2)
    assert "no run 'none'" in told("prune", ck, "--keep", "1", "--run", "none", status=2)
    assert "prune takes the folder" in told("prune", ck / "step=10.ckpt", "--keep", "1", status=2)
    run("prune", ck, "--keep", "0", status=2)
    assert everything(ck) == before


def test_prune_keeps_the_newest_committed_step_not_the_newest_folder(ck: Path) -> None:
    shard(ck, "solo", 30).unlink()
    found = data("prune", ck, "--keep", "1", "--unfinished", "--run", "solo", "--yes")
    assert [step["folder"] for step in found["deleted"]] == [step_dir(ck, "solo", 20).name.replace("20-a", "10-a")]
    assert left(ck, "solo") == [20, 30]
    assert "newer than every committed step" in found["kept"][0]["why"]


def test_prune_deletes_unfinished_steps_only_when_they_are_older(ck: Path) -> None:
    (step_dir(ck, "solo", 10) / "manifest.json").unlink()
    (step_dir(ck, "solo", 10) / "shard-00000.json").unlink()
    (step_dir(ck, "solo", 10) / f".resiliency-{'0' * 32}.partial").write_text("half of something")
    assert run("prune", ck, "--keep", "9", "--run", "solo", "--yes").stdout.startswith("run solo: nothing to delete")
    run("prune", ck, "--unfinished", "--run", "solo", "--yes")
    assert left(ck, "solo") == [20, 30]
    assert not list(ck.rglob("*.partial"))
    for step in (20, 30):
        (step_dir(ck, "solo", step) / "manifest.json").unlink()
        (step_dir(ck, "solo", step) / "shard-00000.json").unlink()
    assert data("prune", ck, "--unfinished", "--run", "solo", "--yes")["delete"] == []
    assert left(ck, "solo") == [20, 30]


def test_prune_keeps_one_hosts_part_of_a_committed_step(ck: Path) -> None:
    """Its folder has the mark instead of a manifest, and not the shards of other hosts."""
    for rank_file in ("manifest.json", "shard-00001.json", "__1_0.distcp"):
        (step_dir(ck, "duo", 1) / rank_file).unlink()
    (step_dir(ck, "duo", 1) / "committed.json").write_text("{}")
    found = data("prune", ck, "--unfinished", "--run", "duo", "--yes")
    assert (
        found["delete"] == [] and found["kept"][0]["why"] == "it is committed, and its other shards are on other hosts"
    )
    (step_dir(ck, "duo", 1) / "committed.json").unlink()
    assert len(data("prune", ck, "--unfinished", "--run", "duo", "--yes")["deleted"]) == 1


def test_prune_keeps_steps_it_cannot_read(ck: Path) -> None:
    """The manifest of a newer version, say."""
    for path in step_dir(ck, "solo", 10).glob("*.json"):
        path.write_text(path.read_text().replace('"version": 5', '"version": 99'))
    found = data("prune", ck, "--keep", "1", "--unfinished", "--run", "solo", "--yes")
    assert left(ck, "solo") == [10, 30]
    assert "has checkpoint format 99, this version reads 3, 4 and 5: upgrade" in found["kept"][0]["why"]


def test_prune_is_refused_when_the_newest_step_is_damaged(ck: Path) -> None:
    flip_bits(shard(ck, "solo", 30), [(100_000, 100_001)])
    assert "the newest step, 30, is not good" in told(
        "prune", ck, "--keep", "1", "--run", "solo", "--yes", "--json", status=1
    )
    assert left(ck, "solo") == [10, 20, 30]


def test_prune_keeps_a_name_that_means_a_later_step(ck: Path) -> None:
    (ck / "step=10.ckpt").unlink()
    shutil.copy(ck / "step=30.ckpt", ck / "step=10.ckpt")
    found = data("prune", ck, "--keep", "1", "--run", "solo", "--yes")
    assert [step["names"] for step in found["deleted"]] == [[], ["step=20.ckpt"]]
    assert (ck / "step=10.ckpt").read_bytes() == (ck / "step=30.ckpt").read_bytes()


def test_prune_of_a_remote_tier_needs_assume_ended(ck: Path) -> None:
    address = copy_to_memory(ck)
    words = ("prune", address, "--keep", "1", "--run", "duo", "--yes")
    assert "say --assume-ended" in told(*words, "--json", status=1)
    data(*words, "--assume-ended")
    assert [step["step"] for step in data("ls", address)["runs"]["duo"]] == [2]
    assert len(data("ls", address)["runs"]["solo"]) == 3
    assert "no such checkpoint" not in run("verify", f"{address}/duo=2.ckpt").output


def test_delete_goes_manifest_first_then_names_records_and_shards(ck: Path) -> None:
    tier = RecordingTier(LocalTier(str(ck)))
    listing = scan(tier, "duo")[0]
    assert delete(tier, "duo", Deletion(listing, "older")) == ["duo=1.ckpt"]
    deleted = [call.key.removeprefix(f".resiliency/duo/steps/{listing.id.dirname}/") for call in tier.calls("delete")]
    assert deleted == [
        ".metadata",
        "manifest.json",
        "duo=1.ckpt/.metadata",
        "duo=1.ckpt/manifest.json",
        "duo=1.ckpt/__0_0.distcp",
        "duo=1.ckpt/__1_0.distcp",
        "shard-00000.json",
        "shard-00001.json",
        "__0_0.distcp",
        "__1_0.distcp",
    ]


def test_the_plan_never_deletes_the_newest_step(ck: Path) -> None:
    listings = scan(open_tier(str(ck)), "solo")
    assert [d.listing.id.step for d in plan_pruning(listings, keep=1, unfinished=True).deletions] == [10, 20]
    assert [d.listing.id.step for d in plan_pruning(listings, keep=2, unfinished=True).deletions] == [10]
    assert plan_pruning(listings, keep=None, unfinished=True).deletions == ()
    assert plan_pruning([], keep=1, unfinished=True).deletions == ()
    without = [replace(listing, manifest=None, records={}) for listing in listings]
    assert plan_pruning(without, keep=1, unfinished=True).deletions == ()


# ---- prune while somebody is at work


def prune_is_refused(ck: Path, *more: str) -> str:
    before = everything(ck)
    text = told("prune", ck, "--keep", "1", "--run", "solo", "--yes", "--json", *more, status=1)
    assert everything(ck) == before
    return text


def test_prune_is_refused_while_an_agent_listens(ck: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.bind(agent_address(str(ck), "solo", environment().node))
        agent.listen()
        assert "its checkpoint agent" in prune_is_refused(ck, "--assume-ended")
    data("prune", ck, "--keep", "1", "--run", "solo", "--yes")


def test_prune_sees_agents_of_hosts_with_other_names(ck: Path) -> None:
    (ck / ".resiliency" / "solo" / "logs").mkdir()
    (ck / ".resiliency" / "solo" / "logs" / "agent-pod-7.log").touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.bind(agent_address(str(ck / ".." / "ck"), "solo", "pod-7"))
        agent.listen()
        assert "host pod-7" in prune_is_refused(ck)


def test_a_real_agent_is_seen(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, run="solo", rank=0, world_size=1):
        seen = [one.text for one in evidence_of_use(str(tmp_path), "solo")]
        assert any("its checkpoint agent" in text for text in seen), seen
        assert evidence_of_use(str(tmp_path), "another") == []
    assert not any(
        "is running" in one.text for one in evidence_of_use(str(tmp_path), "solo") if "agent" not in one.text
    )


def test_prune_is_refused_while_a_trainer_with_an_embedded_agent_runs(ck: Path) -> None:
    with Checkpointer(ck, run="solo", rank=0, world_size=1, options=QUICK):
        assert "rank 0 of attempt 2" in prune_is_refused(ck, "--assume-ended")
    data("prune", ck, "--keep", "1", "--run", "solo", "--yes")


Log = Callable[..., None]


@pytest.fixture
def log(ck: Path) -> Log:
    def write(*kinds: str, host: str, rank: int = 5, **fields: Any) -> None:
        sink = JsonlSink(ck / ".resiliency" / "solo" / "events" / f"rank-{rank:05d}.jsonl")
        writer = EventWriter(run="solo", attempt=7, rank=rank, host=host, sinks=(sink,))
        for kind in kinds:
            writer.emit(kind, **fields)
        writer.close()

    return write


def test_prune_is_refused_while_another_host_may_be_at_work(ck: Path, log: Log) -> None:
    log(EventKind.JOB_STARTED, EventKind.STEP, host="elsewhere", pid=1)
    assert "rank 5 of attempt 7 on elsewhere wrote an event" in prune_is_refused(ck)
    assert evidence_of_use(str(ck), "solo", now=time.time() + 25 * 3600) == []
    data("prune", ck, "--keep", "1", "--run", "solo", "--yes", "--assume-ended")


def test_ranks_that_ended_or_died_here_are_no_evidence_of_use(ck: Path, log: Log) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, timeout=60
    )
    log(EventKind.JOB_STARTED, EventKind.JOB_TERMINATED, host="elsewhere", pid=1, rank=5)
    log(EventKind.JOB_STARTED, EventKind.STEP, host=environment().node, pid=int(ended.stdout), rank=6)
    log(EventKind.STEP, host="elsewhere", rank=7)
    with open(ck / ".resiliency" / "solo" / "events" / "rank-00008.jsonl", "w") as torn:
        torn.write('{"event_type":"job_started","job_name":"so')
    assert evidence_of_use(str(ck), "solo") == []
    data("prune", ck, "--keep", "1", "--run", "solo", "--yes")


def test_a_reused_process_id_is_no_evidence_of_use(ck: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr("time.time", lambda: 1_000_000.0)  # written long before this process began
    log(EventKind.JOB_STARTED, EventKind.STEP, host=environment().node, pid=os.getpid())
    monkeypatch.undo()
    assert evidence_of_use(str(ck), "solo") == []
