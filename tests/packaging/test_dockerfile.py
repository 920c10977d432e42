"""The Dockerfile, of which everything is tried here but the building of images."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from resiliency import __version__

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
BLOCKED = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "lightning", "numpy"):
            raise ImportError(name)
sys.meta_path.insert(0, NoTorch())
from resiliency.cli.main import main
main()
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the images have a Python with tomllib")
def test_images_get_all_requirements_but_torch() -> None:
    (command,) = re.findall(r'^RUN python -c "(.*)" > /wheels/requirements.txt$', TEXT, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    names = {re.split(r"[<>=]", line)[0] for line in done.stdout.split()}
    assert {"fsspec", "typer", "xxhash", "aiohttp", "pydantic", "pyyaml"} <= names
    assert "torch" not in names


def test_what_is_copied_is_there() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", TEXT, re.MULTILINE)
    assert all((ROOT / name).exists() for line in copied for name in line.split())


@pytest.mark.parametrize("verb", [["supervisor", "run"], ["supervisor", "status"], ["host-monitor"]])
def test_the_supervisors_image_needs_no_torch(verb: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *verb, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    imports = (
        "import resiliency.supervisor.server, resiliency.monitor.host_monitor, resiliency.monitor.watchdogs.registry"
    )
    lines = BLOCKED.replace("from resiliency.cli.main import main\nmain()", imports)
    done = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("chart", ["supervisor", "workload", "gcs-fuse"])
def test_charts_name_this_version(chart: str) -> None:
    assert yaml.safe_load((ROOT / "helm" / chart / "Chart.yaml").read_text())["appVersion"] == __version__
