"""The guard in tests/conftest.py notices each kind of leftover, and counts what it does not run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import _long_ones_first

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LEAKS = {
    "environment variable LEAKED_NAME set": "import os; os.environ['LEAKED_NAME'] = '1'",
    "thread 'resiliency-x' is still running": (
        "import threading; threading.Thread(target=threading.Event().wait, args=(60,), name='resiliency-x', daemon=True).start()"
    ),
    "child process": "import subprocess; subprocess.Popen(['sleep', '60'])",
    "shm/resiliency-leak": "import os; open('shm/resiliency-leak' + os.environ['PYTEST_XDIST_WORKER'], 'w').close()",
}


def run_pytest(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """With a folder of its own in the place of /dev/shm, into which other runs of the tests write."""
    changes = {"GRACE_S = 3.0": "GRACE_S = 0.3", 'Path("/dev/shm")': 'Path("shm").absolute()'}
    text = CONFTEST.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "conftest.py").write_text(text)
    (folder / "shm").mkdir(exist_ok=True)
    (folder / "test_it.py").write_text(code)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  kill\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)]
    env = {"PYTEST_XDIST_WORKER": f"alone-{os.getpid()}", **os.environ, "PYTHONPATH": str(CONFTEST.parents[1])}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=150)


@pytest.mark.parametrize("expected", LEAKS)
def test_a_leak_fails_the_test_that_made_it(tmp_path: Path, expected: str) -> None:
    code = f"def test_leaks():\n    {LEAKS[expected]}\ndef test_after_it_is_clean():\n    pass\n"
    result = run_pytest(tmp_path, code)
    assert expected in result.stdout
    assert "2 passed, 1 error" in result.stdout


def test_what_may_be_of_a_job_of_the_user_is_reported_and_left(tmp_path: Path) -> None:
    left = tmp_path / "shm" / "resiliency-of-a-user"
    code = f"import os\ndef test_leaks():\n    del os.environ['PYTEST_XDIST_WORKER']\n    open({str(left)!r}, 'w').close()\n"
    assert f"{left} is still there" in run_pytest(tmp_path, code).stdout
    assert left.exists()


def test_a_clean_test_passes(tmp_path: Path) -> None:
    code = (
        "import subprocess, threading\n"
        "def test_clean():\n"
        "    subprocess.run(['true'], check=True)\n"
        "    threading.Thread(target=print).start()\n"
    )
    assert "1 passed" in run_pytest(tmp_path, code).stdout


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["serial", "xdist"])
def test_gpu_tests_are_counted_where_there_is_no_gpu(
    tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = "import pytest\n@pytest.mark.gpu\ndef test_a(): pass\n@pytest.mark.gpu\ndef test_b(): pass\ndef test_c(): pass\n"
    result = run_pytest(tmp_path, code, *options)
    assert "2 gpu tests need CUDA and were not run" in result.stdout
    assert "1 passed" in result.stdout


def test_files_without_kill_tests_are_not_imported_for_them(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("raise ImportError('this file was imported')")
    code = "import pytest\n@pytest.mark.kill\ndef test_a(): pass\ndef test_b(): pass\n"
    result = run_pytest(tmp_path, code, "-m", "kill")
    assert "1 passed, 1 deselected" in result.stdout
    assert "this file was imported" in run_pytest(tmp_path, code, "-m", "not kill").stdout


class _Item:
    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path

    def get_closest_marker(self, marker: str) -> object:
        marked = {"kill": self.name == "K", "long": self.name.isupper()}
        return marker if marked[marker] else None


@pytest.mark.parametrize(
    ("names", "workers", "expected"),
    [
        ("abCdEfGh", 1, "CEGabdfh"),
        ("abCdEfGh", 2, "CEabGdfh"),  # the second worker begins with the fifth
        ("abcD", 2, "Dabc"),
        ("abDcK", 1, "KDabc"),  # with kills before all others
        ("DaKbcKEd", 2, "KDabKEcd"),
        ("ABCDe", 2, "ABCDe"),
        ("A", 3, "A"),
        ("", 2, ""),
        ("abc", 2, "abc"),
    ],
)
def test_each_worker_begins_with_its_part_of_the_long_tests(names: str, workers: int, expected: str) -> None:
    ordered = _long_ones_first([_Item(name, path=str(at)) for at, name in enumerate(names)], workers=workers)  # type: ignore[misc]
    assert "".join(item.name for item in ordered) == expected


def test_long_tests_of_one_file_begin_in_one_worker() -> None:
    items = [_Item(name, path=path) for name, path in zip("AbBcCdDefg", "1122223333", strict=True)]
    ordered = _long_ones_first(items, workers=2)  # type: ignore[arg-type]
    assert "".join(item.name for item in ordered) == "ABCbc" + "Ddefg"
