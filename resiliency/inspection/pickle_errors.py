"""Says of an object that was not unpickled how it could be."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from resiliency.errors import ConfigError

__all__ = ["pickle_errors"]


@contextmanager
def pickle_errors(allow_pickle: bool) -> Iterator[None]:
    """Turns an error about an object of the checkpoint into a ConfigError that says what to pass.

    Args:
        allow_pickle: whether objects of any class were allowed.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ConfigError(
            "the checkpoint holds objects of classes that must be unpickled, which can run code; if you trust it, say"
            f" --allow-pickle where those classes can be imported ({error})"
        ) from error
    except (AttributeError, ImportError) as error:
        if not allow_pickle:
            raise
        raise ConfigError(
            f"an object of the checkpoint cannot be unpickled: {error}; put its module on PYTHONPATH"
        ) from error
