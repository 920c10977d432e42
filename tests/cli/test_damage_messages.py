"""Every message about damage names the file, whatever is damaged and whoever says it; no parser's words stand alone.

Each file of a step is damaged in every way, and then a load and each command is asked.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from resiliency.cli.ckpt import app
from resiliency.errors import ResiliencyError
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import (
    RUN,
    copy_folder,
    copy_to_memory,
    flip_bits,
    make_checkpointer,
    save_steps,
    step_dir,
)
from tests.rings import few
from tests.storage.joining import save_joined
from tests.tidying import drop_folders

RUNNER = CliRunner()

#: Of one that is too short, of one with other bytes, of one that is gone, and of one that can be no file.
SOME = ("truncated", "garbage", "missing", "fifo")
DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: os.truncate(path, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "garbage": lambda path: flip_bits(path, [(0, 1 << 40)]),
    "list": lambda path: path.write_text("[1, 2]"),
    "object": lambda path: path.write_text("{}"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "missing": lambda path: path.unlink(),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "loop": lambda path: (path.unlink(), path.symlink_to(path.name)),
}
MANIFEST, RECORD, SHARD = "manifest.json", "shard-00000.json", "shard-00000.shard"
#: What exceptions of Python and of parsers say, and a message of ours alone never does.
_BARE = re.compile(
    r"Expecting|codec can't|recursion|JSONDecodeError|KeyError|TypeError|ValueError|indices must|no attribute|Errno"
    r"|symbolic links"
)
#: Commands: "{folder}" is the tier's root, "{step}" the folder or file of the newest step, "{out}" a file to write.
COMMANDS = [
    "ls {folder}",
    "ls {step}",
    "verify {folder}",
    "verify {step}",
    "inspect {folder}",
    "inspect {step}",
    "export {folder} {out}",
    "export {step} {out}",
    "prune {folder} --keep 1 --dry-run",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with steps 10 and 20, and one with step 20 alone: of one rank, sharded, and one file for each step."""
    root = tmp_path_factory.mktemp("made")
    save_steps(root / "alone", 20, what={"epoch": 1})
    save_steps(root / "solo", 10, 20, what={"epoch": 1})
    save_steps(root / "duo", 10, 20, world_size=2, sharded=True)
    save_joined(root / "files", 10, 20)
    assert drop_folders(LocalTier(root / "files"), RUN) == ""
    return root


class Said:
    """What a load and the commands have said, text by text."""

    def __init__(self, folder: Path, step: Path | str, caplog: pytest.LogCaptureFixture) -> None:
        self.folder, self.step, self._caplog = folder, step, caplog

    def load(self) -> list[str]:
        self._caplog.clear()
        with make_checkpointer(self.folder) as checkpointer:
            try:
                checkpointer.load()
            except ResiliencyError as error:
                return [*self._logged(), str(error)]
            return self._logged()

    def command(self, words: str) -> list[str]:
        self._caplog.clear()
        out = self.folder.parent / "out.ckpt"
        out.unlink(missing_ok=True)
        asked = [word.format(folder=self.folder, step=self.step, out=out) for word in words.split()]
        result = RUNNER.invoke(app, asked)
        assert result.exception is None or isinstance(result.exception, SystemExit), f"{words}: {result.exception!r}"
        return [*self._logged(), *result.output.splitlines()]

    def _logged(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.levelno >= logging.WARNING]


def copied(made: Path, which: str, tmp_path: Path) -> Path:
    copy_folder(made / which, tmp_path / "ck")
    return tmp_path / "ck"


def assert_named(texts: list[str], targets: list[Path], *, told: bool, who: str = "load") -> None:
    """No text has a parser's words and not the path; and if it must be ``told``, a text has the path."""
    with_path = [any(str(target) in text for target in targets) for text in texts]
    assert [text for text, named in zip(texts, with_path, strict=True) if _BARE.search(text) and not named] == [], who
    assert any(with_path) or not told, f"{who}: {texts}"


@pytest.mark.parametrize("damage", few(DAMAGE, SOME))
@pytest.mark.parametrize("files", [[MANIFEST], [RECORD], [MANIFEST, RECORD], [SHARD]], ids=" and ".join)
@pytest.mark.parametrize("which", few(["solo", "duo"], ["duo"]))
def test_damage_of_a_step_in_a_folder_is_said_with_the_file(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str, files: list[str], damage: str
) -> None:
    place = copied(made, which, tmp_path)
    step = step_dir(place, RUN, 20)
    targets = [step / ("__0_0.distcp" if (which, file) == ("duo", SHARD) else file) for file in files]
    for target in targets:
        DAMAGE[damage](target)
    said = Said(place, step, caplog)
    costs_the_step = files in ([SHARD], [MANIFEST, RECORD]) or damage == "loop"  # a loop hides the folder
    is_not_read = files == [SHARD] and damage == "garbage"
    for words in COMMANDS:
        told = words.startswith("verify") or (costs_the_step and words[:2] in ("ls", "in") and not is_not_read)
        assert_named(said.command(words), targets, told=told, who=words)
    assert_named(said.load(), targets, told=costs_the_step)


@pytest.mark.parametrize("damage", few(DAMAGE, SOME))
@pytest.mark.parametrize("files", [[MANIFEST, RECORD], [SHARD]], ids=" and ".join)
def test_damage_of_the_only_step_is_said_with_the_file(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, files: list[str], damage: str
) -> None:
    place = copied(made, "alone", tmp_path)
    targets = [step_dir(place, RUN, 20) / file for file in files]
    for target in targets:
        DAMAGE[damage](target)
    said = Said(place, targets[0].parent, caplog)
    for words in ("inspect {folder}", "verify {folder}"):
        assert_named(said.command(words), targets, told=True, who=words)
    assert_named(said.load(), targets, told=True)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_of_a_step_that_is_one_file_is_said_with_the_file(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    place = copied(made, "files", tmp_path)
    target = place / "step=20.ckpt"
    DAMAGE[damage](target)
    said = Said(place, target, caplog)
    is_ours = damage in ("empty", "truncated")  # anything else is not told from a file of the user's
    for words in COMMANDS:
        assert_named(said.command(words), [target], told=is_ours or "{step}" in words, who=words)
    assert_named(said.load(), [target], told=is_ours)


@pytest.mark.parametrize("where", ["identity", "own record", "end"])
def test_a_damaged_part_of_a_file_makes_verify_fail_and_name_it(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    place = copied(made, "files", tmp_path)
    target = place / "step=20.ckpt"
    at = {"identity": 100, "own record": target.read_bytes().rindex(b'"rest"'), "end": -1}[where]
    flip_bits(target, [(at, at + 1 or 1 << 40)])
    result = RUNNER.invoke(app, ["verify", str(place)])
    assert result.exit_code == 1 and f"bad  {target} " in result.output, result.output
    assert RUNNER.invoke(app, ["verify", str(place), "--json"]).exit_code == 1
    for words in ("ls", "verify", "inspect"):  # not: it is a stock checkpoint, or a copy of a step of elsewhere
        result = RUNNER.invoke(app, [words, str(target)])
        assert result.exit_code == 1 and str(target) in result.output, words
    said = Said(place, target, caplog)
    for words in COMMANDS:
        assert_named(said.command(words), [target], told=True, who=words)
    (place / "step=10.ckpt").unlink()
    assert f"bad  {target} " in RUNNER.invoke(app, ["verify", str(place)]).output


@pytest.mark.parametrize("file", [MANIFEST, RECORD, SHARD])
def test_damage_in_an_object_store_is_said_with_the_address(made: Path, tmp_path: Path, file: str) -> None:
    place = copied(made, "solo", tmp_path)
    target = step_dir(place, RUN, 20) / file
    DAMAGE["empty"](target)
    address = copy_to_memory(place)
    object_address = f"{address}/{target.relative_to(place)}"
    for words in ("ls", "verify") if file != RECORD else ("verify",):
        assert object_address in RUNNER.invoke(app, [words, address]).output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything; tests/checkpoint/test_other_users.py")
@pytest.mark.parametrize("file", [MANIFEST, RECORD, SHARD])
def test_a_file_that_may_not_be_read_is_named(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    place = copied(made, "solo", tmp_path)
    target = step_dir(place, RUN, 20) / file
    target.chmod(0)
    said = Said(place, target.parent, caplog)
    targets = [target, place / "step=20.ckpt"]  # the shard has this name, too
    for words in COMMANDS:
        assert_named(said.command(words), targets, told=words.startswith("verify"), who=words)
    assert_named(said.load(), targets, told=file == SHARD)


def test_a_good_copy_of_the_file_that_is_named_mends_the_step(made: Path, tmp_path: Path) -> None:
    place = copied(made, "solo", tmp_path)
    target = step_dir(place, RUN, 20) / SHARD
    good = shutil.copy(target, tmp_path / "good")
    DAMAGE["truncated"](target)
    shown = RUNNER.invoke(app, ["ls", str(place)]).output
    assert f"{target} has " in shown and "next: copy the files named above" in shown
    shutil.copy(good, target)
    assert RUNNER.invoke(app, ["verify", str(place)]).exit_code == 0
