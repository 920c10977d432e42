"""A script of the recipes starts by its path, as users of torchrun write it, and not only with ``-m``."""

from __future__ import annotations

from pathlib import Path

import pytest

from resiliency.testing.zygote import Zygote
from tests.zygote import start_script

ROOT = Path(__file__).parents[2]

#: As a fresh interpreter would: nothing of the recipes is imported, and only the script's own folder is searched for it.
START = """
import os, runpy, sys

root, script = sys.argv[1:]
for name in [name for name in sys.modules if name.split(".")[0] == "recipes"]:
    del sys.modules[name]
sys.path[:] = [os.path.dirname(script), *(entry for entry in sys.path if entry and os.path.realpath(entry) != root)]
sys.argv = [script, "--help"]
os.chdir("/")
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize(
    "script", ["pretrain/train.py", "benchmark/compare.py", "quickstart/train.py", "nemo_llama3_70b/train.py"]
)
def test_a_script_is_started_by_its_path_from_any_folder(script: str, zygote: Zygote, tmp_path: Path) -> None:
    output = tmp_path / "output"
    worker = start_script(zygote, START, output, str(ROOT), str(ROOT / "recipes" / script))
    status = worker.wait(timeout_s=60)
    assert status == 0 and "usage: " in output.read_text(), output.read_text()
