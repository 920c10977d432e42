"""A disk that fills beside files that are prepared for the next saves: no file system ends the trainer for it.

On Btrfs, and on an overlay above it, a store into a mapped file needs another block: with a full disk that was SIGBUS.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from resiliency.testing.zygote import Zygote

pytestmark = pytest.mark.mounts

#: XFS takes no less.
IMAGE_BYTES = 400 << 20
KINDS = ("ext4", "xfs", "btrfs", "overlay")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The root of a small file system of a kind; "overlay" lies above Btrfs."""
    kind, image, root = request.param, tmp_path / "image", tmp_path / "root"
    on_image = "btrfs" if kind == "overlay" else kind
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    run(f"mkfs.{on_image}", "-q", str(image))
    root.mkdir()
    with ExitStack() as mounted:
        run("mount", "-o", "loop", str(image), str(root))
        mounted.callback(run, "umount", str(root))
        if kind == "overlay":
            for name in ("lower", "upper", "work", "merged"):
                (root / name).mkdir()
            layers = f"lowerdir={root}/lower,upperdir={root}/upper,workdir={root}/work"
            run("mount", "-t", "overlay", "overlay", "-o", layers, str(root / "merged"))
            mounted.callback(run, "umount", str(root / "merged"))
            yield root / "merged"
        else:
            yield root


@pytest.mark.timeout(150)
def test_saves_fail_while_a_disk_is_full_and_the_trainer_lives(disk: Path, zygote: Zygote, tmp_path: Path) -> None:
    result = tmp_path / "result"
    worker = zygote.start("tests.checkpoint.full_disk_job:train", {"folder": str(disk), "result": str(result)})
    try:
        assert worker.wait(timeout_s=120) == 0
    finally:
        worker.kill()
    answer = json.loads(result.read_text())
    assert answer["committed"][:2] == [1, 2] and answer["same"]
    assert any(3 <= int(step) < 8 for step in answer["failed"]), "the disk was not full"
