"""``resiliency doctor`` as its user runs it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from resiliency.cli.doctor import parse_size
from resiliency.cli.main import main
from resiliency.errors import ConfigError
from tests.ports import free_port


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status, text = run(capsys, "--json", *words)
    return status, {row["check"]: row for row in json.loads(text)}


def test_one_table_says_what_works(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    port = str(free_port())
    status, text = run(capsys, "--dir", str(tmp_path), "--port", port)
    assert status == 0
    for word in ("check", "found", "what to do", "torch", "lightning", "clock", "/dev/shm", f"port {port}", "0 broken"):
        assert word in text, text


def test_each_option_has_its_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    port = free_port()
    status, found = rows(
        capsys,
        "--dir",
        f"{tmp_path}/a",
        "--ramdisk",
        str(tmp_path),
        "--remote",
        f"file://{tmp_path}/r",
        "--port",
        f"{port}",
    )
    assert status == 0
    assert found[f"folder {tmp_path}/a"]["verdict"] in ("ok", "note")
    assert "is no ramdisk" in found[f"ramdisk {tmp_path}"]["found"]
    assert found[f"tier file://{tmp_path}/r"]["verdict"] == "ok"
    assert found[f"port {port}"] == {"check": f"port {port}", "verdict": "ok", "found": "is free", "remedy": ""}


def test_a_directory_may_be_an_address(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Like ``dirpath=``. A folder of that name below this one says nothing about it."""
    status, found = rows(capsys, "--dir", "nothing://bucket/job", "--port", str(free_port()))
    assert status == 1 and found["tier nothing://bucket/job"]["verdict"] == "broken"
    assert not any(check.startswith("folder ") for check in found)
    status, found = rows(capsys, "--dir", f"file://{tmp_path}", "--port", str(free_port()))
    assert status == 0 and f"folder {tmp_path}" in found
    status, text = run(capsys, "--dir", "")
    assert status == 2 and "empty" in text


def test_what_is_broken_is_told_by_the_exit_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        status, found = rows(capsys, "--dir", str(tmp_path), "--port", str(port))
    assert status == 1 and found[f"port {port}"]["verdict"] == "broken"
    status, found = rows(capsys, "--dir", str(tmp_path), "--port", str(free_port()), "--state", "900TiB")
    assert status == 1 and "are needed" in found[f"folder {tmp_path}"]["remedy"]


def test_wrong_arguments_end_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--state", "big"], ["--port", "0"], ["--no-such"]):
        assert run(capsys, *words)[0] == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("1.5GiB", 3 * 2**29), ("10G", 10 * 2**30), ("512MB", 2**29), ("2kib", 2048), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "ten", "-1", "1X", "nan", "inf"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="no size"):
        parse_size(text)
