"""Where NeMo or megatron-core is missing or another version, the import says what to do."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from types import ModuleType

import pytest

from resiliency.errors import ConfigError

CASES: list[tuple[str, dict[str, str], str]] = [
    ("nemo", {}, "NeMo is not installed: CheckpointEngine needs nemo_toolkit 2.3 to 2.7"),
    ("nemo", {"nemo_toolkit": "3.0.0"}, r"NeMo 3\.0\.0 has no MegatronStrategy .* Megatron-Bridge, .*save_strategy"),
    ("nemo", {"nemo_toolkit": "2.7.3"}, r"NeMo 2\.7\.3 cannot be imported .*megatron-core is not installed"),
    ("megatron", {}, "megatron-core is not installed: pip install megatron-core psutil"),
    ("megatron", {"megatron-core": "0.9.0"}, r"megatron-core 0\.9\.0 cannot be used .*0\.13 or newer"),
]


@pytest.mark.parametrize(("plugin", "installed", "why"), CASES)
def test_the_import_says_what_to_do(
    plugin: str, installed: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    for package in ("nemo", "megatron"):  # as empty as NeMo 3 is of what is needed
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.delitem(sys.modules, f"resiliency.plugins.{plugin}", raising=False)
    with pytest.raises(ConfigError, match=why):
        importlib.import_module(f"resiliency.plugins.{plugin}")
