"""The wheel holds all that the tree holds, asks for little, and works where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build/ or egg-info appears in the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "resiliency", source / "resiliency", ignore=IGNORED)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # --no-build-isolation: the setuptools that is here, so that no index is needed.
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    result = subprocess.run([*PIP, "wheel", *options, str(source)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_file_of_the_tree(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "resiliency").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert packed == {path.relative_to(ROOT).as_posix() for path in files}


def test_base_requirements_are_few_and_loose(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = Parser().parsestr(archive.read(metadata).decode())
    base = [text for text in fields.get_all("Requires-Dist", []) if "extra ==" not in text]
    names = sorted(re.split(r"[<>=!~ ]", text)[0] for text in base)
    assert names == ["fsspec", "psutil", "rich", "safetensors", "torch", "typer", "xxhash"]
    for text in base:
        assert re.fullmatch(r"[a-z]+>=[0-9.]+", text), f"{text!r}: one lower bound and nothing else"
    assert "torch>=2.6" in base
    extras = {"lightning", "gcs", "gcp", "goodput", "nvrx", "supervisor", "tensorboard", "dev"}
    assert set(fields.get_all("Provides-Extra")) == extras
    assert (archive.read(metadata.replace("METADATA", "entry_points.txt")).decode().split()) == [
        "[console_scripts]",
        "resiliency",
        "=",
        "resiliency.cli.main:main",
    ]


def test_installed_wheel_works(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment that sees this one's packages, as in a container that already has torch."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    install = [*PIP, "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(here) + "\n")

    def run(*command: str) -> str:
        return subprocess.run([*command], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120).stdout

    assert run(str(python), "-c", "import resiliency; print(resiliency.__file__)").strip().startswith(str(site))
    assert run(str(tmp_path / "venv" / "bin" / "resiliency"), "--version").startswith("resiliency ")
    # With its requirements, pip still finds all it needs and would fetch nothing, torch least of all.
    report = run(
        *PIP, "--python", str(python), "install", "--dry-run", "--no-index", "--report", "-", "--quiet", str(wheel)
    )
    assert [item["metadata"]["name"] for item in json.loads(report)["install"]] == []


def make_wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    """An empty package."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    fields = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    files = {
        f"{name.replace('-', '_')}/__init__.py": "",
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *fields, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path


def test_an_install_changes_no_version_that_is_there(wheel: Path, tmp_path: Path) -> None:
    """In a container with the oldest torch and Lightning that work, and an index that has newer ones."""
    index = tmp_path / "index"
    index.mkdir()
    there = {
        "torch": "2.6.0",
        "lightning": "2.4.0",
        "pytorch-lightning": "2.4.0",
        "numpy": "1.26.0",
        "fsspec": "2023.5.0",
    }
    for name, version in there.items():
        make_wheel(index, name, version, *(["fsspec>=2023", "numpy<3"] if name == "torch" else []))
        make_wheel(index, name, "9999.0")
    for name in ("psutil", "rich", "safetensors", "typer", "xxhash"):
        make_wheel(index, name, "9999.0", *(["numpy"] if name == "safetensors" else []))
    venv.create(tmp_path / "venv", with_pip=False)
    pip = [*PIP, "--python", str(tmp_path / "venv" / "bin" / "python")]

    def run(*words: str) -> list[str]:
        done = subprocess.run([*pip, *words], check=True, capture_output=True, text=True, timeout=120)
        return done.stdout.splitlines()

    offline = ["--quiet", "--no-index", "--find-links", str(index)]
    run("install", *offline, *(f"{name}=={version}" for name, version in there.items()))
    before = run("freeze")
    assert sorted(before) == sorted(f"{name}=={version}" for name, version in there.items())
    run("install", *offline, str(wheel), f"resiliency[lightning] @ {wheel.as_uri()}")
    after = run("freeze")
    assert set(before) <= set(after)
    assert {re.split("[= ]", line)[0] for line in set(after) - set(before)} == {
        "psutil",
        "resiliency",
        "rich",
        "safetensors",
        "typer",
        "xxhash",
    }
