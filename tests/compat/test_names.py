"""The names that scripts for the older library import are there, for both Lightning packages, without NeMo."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

CLASSES = {
    "resiliency.callbacks.autocheckpoint": ["AutoCheckpointCallback"],
    "resiliency.callbacks.comm_overlap": ["MegatronCommOverlapCallback"],
    "resiliency.callbacks.heartbeat": ["HeartbeatCallback"],
    "resiliency.callbacks.logging": [
        "MemoryLoggingCallback",
        "StepLoggingCallback",
        "TPSLoggingCallback",
        "TensorboardCallback",
    ],
    "resiliency.callbacks.model_checkpoint": ["ModelCheckpoint"],
    "resiliency.callbacks.profile": ["ProfileCheckpointCallback"],
    "resiliency.plugins.combined_functionality": ["CombinedCheckpointIO"],
    "resiliency.plugins.in_cluster_local_ckpt": ["InClusterLocalCheckpointIO"],
    "resiliency.plugins.min_ckpt_overhead": ["MinCkptOverheadCheckpointIO"],
    "resiliency.plugins.persistent_ckpt_proc": ["PersistentCheckpointProcessIO"],
}
FUNCTIONS = {"resiliency.plugins._ckpt_utils": ["find_latest_checkpoint_path", "get_is_checkpoint_file_handler"]}

STAGING = ["save_ckpt_format", "load_directly_on_device", "load_strictness", "async_save", "torch_dist_multiproc"]
SIGNATURES = {
    ("min_ckpt_overhead", "MinCkptOverheadCheckpointIO"): [
        *STAGING,
        *("assume_constant_structure", "parallel_save", "parallel_save_within_dp", "parallel_load"),
    ],
    **{
        place: [
            *(*STAGING, "assume_constant_structure"),
            *("persistent_parallel_save", "persistent_parallel_save_within_dp", "persistent_parallel_load"),
            *("local_parallel_save", "local_parallel_save_within_dp", "local_parallel_load"),
            *("use_ckpt_load_replication", "local_ckpt_dir"),
        ]
        for place in (
            ("in_cluster_local_ckpt", "InClusterLocalCheckpointIO"),
            ("combined_functionality", "CombinedCheckpointIO"),
        )
    },
    ("persistent_ckpt_proc", "PersistentCheckpointProcessIO"): ["checkpoint_io", "profile_dir"],
}


@pytest.mark.parametrize("module", [*CLASSES, *FUNCTIONS])
def test_names_are_there(module: str) -> None:
    loaded = pytest.importorskip(module) if module.split(".")[-1] in ("heartbeat", "logging", "profile") else None
    loaded = loaded or importlib.import_module(module)
    for name in CLASSES.get(module, []) + FUNCTIONS.get(module, []):
        assert callable(getattr(loaded, name))
        assert name in loaded.__all__
    if module in CLASSES:
        for namespace in ("lightning.pytorch", "pytorch_lightning"):
            assert loaded.build(namespace).namespace == namespace


def test_no_name_loads_nemo_or_megatron() -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print([name for name in ('nemo', 'megatron') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, *CLASSES, *FUNCTIONS]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout == "[]\n"


@pytest.mark.parametrize(("module", "name"), SIGNATURES)
def test_plugins_have_the_older_arguments_in_their_order(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(f"resiliency.plugins.{module}"), name)
    found = [
        parameter.name
        for parameter in inspect.signature(kind).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name != "self"
    ]
    assert found == SIGNATURES[module, name]
