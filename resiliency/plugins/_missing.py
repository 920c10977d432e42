"""What to install when NeMo or megatron-core cannot be imported."""

from __future__ import annotations

from importlib import metadata

from resiliency.errors import ConfigError

__all__ = ["no_megatron", "no_nemo"]


def no_nemo(error: ImportError) -> ConfigError:
    """The error to raise when ``resiliency.plugins.nemo`` cannot import what it needs."""
    version = _version("nemo_toolkit")
    if version is None:
        return ConfigError(
            "NeMo is not installed: CheckpointEngine needs nemo_toolkit 2.3 to 2.7, as NeMo's containers have"
        )
    if not version.startswith("2."):
        return ConfigError(
            f"NeMo {version} has no MegatronStrategy (2.7 was the last): train with Megatron-Bridge, and give its"
            " save_checkpoint resiliency.plugins.megatron.MegatronSaveStrategy() as"
            " checkpointing_context['save_strategy'] (docs/nemo.md)"
        )
    return ConfigError(
        f"NeMo {version} cannot be imported ({error}): CheckpointEngine needs NeMo 2.3 to 2.7 with all that its"
        f" containers have; megatron-core is {_version('megatron-core') or 'not installed'}"
    )


def no_megatron(error: ImportError) -> ConfigError:
    """The error to raise when ``resiliency.plugins.megatron`` cannot import what it needs."""
    version = _version("megatron-core")
    if version is None:
        return ConfigError("megatron-core is not installed: pip install megatron-core psutil; 0.13 or newer")
    return ConfigError(f"megatron-core {version} cannot be used ({error}); install 0.13 or newer")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
