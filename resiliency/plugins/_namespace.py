"""Which Lightning the user has: ``lightning.pytorch``, ``pytorch_lightning``, or both, which share no classes."""

from __future__ import annotations

import importlib.util
import sys

from resiliency.errors import ConfigError

__all__ = ["default_namespace", "namespaces"]

_KNOWN = ("lightning.pytorch", "pytorch_lightning")


def namespaces() -> list[str]:
    """Installed namespaces, ``lightning.pytorch`` first. Imports nothing of them."""
    return [name for name in _KNOWN if importlib.util.find_spec(name.split(".")[0]) is not None]


def default_namespace() -> str:
    """The namespace to build classes for: the one already imported if it is only one, else the first installed.

    Raises:
        ConfigError: neither is installed.
    """
    found = namespaces()
    if not found:
        raise ConfigError("neither lightning nor pytorch-lightning is installed; pip install 'resiliency[lightning]'")
    imported = [name for name in found if name in sys.modules]
    return imported[0] if len(imported) == 1 else found[0]
