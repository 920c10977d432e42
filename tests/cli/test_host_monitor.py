"""``resiliency host-monitor`` refuses what cannot work with a sentence, before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resiliency.cli.host_monitor import main
from resiliency.monitor.settings import launcher_command
from resiliency.monitor.state import StateFolder

URL = ["--supervisor", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--supervisor", "ftp://a", "--", "train.py"], "https://HOST:PORT"),
        ([*URL, "--token-file", "/nowhere", "--", "train.py"], "token file /nowhere cannot be read"),
        ([*URL, "--host", "a\nb", "--", "train.py"], "printable"),
        ([*URL, "--watchdog", "cat", "--", "train.py"], "there is no watchdog 'cat'"),
        ([*URL, "--state-dir", "/dev/null/x", "--", "train.py"], "cannot be used"),
    ],
)
def test_what_cannot_work_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_script_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(URL)
    assert "behind --" in capsys.readouterr().err


def test_a_second_monitor_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = StateFolder(str(tmp_path), "a")
    first.open()
    try:
        words = [*URL, "--host", "a", "--state-dir", str(tmp_path), "--watchdog", "none", "--", "train.py"]
        assert main(words) == 2
        assert "another host monitor" in capsys.readouterr().err
    finally:
        first.close()


def test_the_launcher_is_resiliency_run_with_the_script_and_its_arguments() -> None:
    command = launcher_command(
        ["train.py", "--lr", "1"], nproc_per_node="8", address="10.0.0.1", launcher_args=["--log-dir", "x"]
    )
    assert command[:4] == (sys.executable, "-m", "resiliency.cli", "run")
    assert command[-3:] == ("train.py", "--lr", "1")
    words = " ".join(command)
    for part in (
        "--rdzv-backend supervised --rdzv-endpoint {endpoint}",
        "--nproc-per-node 8",
        "--local-addr 10.0.0.1",
        "--log-dir x train.py",
    ):
        assert part in words
