"""Stores a dict of tensors as one table of names in a shard's JSON. Pure; no torch.

Most dicts of a state contain only tensors. One table per dict is faster to write than one placeholder per tensor, and
the training thread waits for it at every save. In the JSON::

    {"!": "tensors", "at": "optimizer/state/0", "names": ["step", "exp_avg"]}
    {"!": "tensors", "at": "model", "names": ["weight", "tied"], "keys": {"tied": "model/weight"}}

``at`` is the key of the dict. A tensor's key is the key of its dict and its name joined by :func:`join_path`, unless
``keys`` has another key for it: a tied tensor is stored once, under the first key.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resiliency.errors import ConfigError

__all__ = ["TENSOR", "TENSOR_TABLE", "TensorTable", "join_path"]

#: Tag of the placeholder of a single tensor: ``{"!": "tensor", "key": "model/weight"}``.
TENSOR = "tensor"
#: Tag of a table.
TENSOR_TABLE = "tensors"


def join_path(parts: Sequence[str]) -> str:
    """Joins keys from the root. Different paths may give the same text; callers must make such keys unique."""
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)


@dataclass(frozen=True)
class TensorTable:
    """A dict that contains only tensors.

    Attributes:
        at: key of the dict; "" for the root.
        names: its keys.
        other_keys: name -> key, of the tensors stored under another key than their name gives.
    """

    at: str
    names: tuple[str, ...]
    other_keys: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def keys(self) -> list[str]:
        """The key of each tensor, in the order of ``names``."""
        prefix, other = f"{self.at}/" if self.at else "", self.other_keys
        return [other.get(name) or prefix + join_path((name,)) or "value" for name in self.names]

    def items(self) -> Iterator[tuple[str, str]]:
        """(name, key) of each tensor."""
        return zip(self.names, self.keys, strict=True)

    def with_keys(self, keys: Sequence[str]) -> TensorTable:
        """The same names, stored under these keys."""
        usual = TensorTable(self.at, self.names).keys
        changed = {name: key for name, key, is_ in zip(self.names, keys, usual, strict=True) if key != is_}
        return TensorTable(self.at, self.names, changed)

    def to_json(self) -> dict[str, Any]:
        """The JSON that represents the dict."""
        made: dict[str, Any] = {"!": TENSOR_TABLE, "at": self.at, "names": self.names}
        if self.other_keys:
            made["keys"] = self.other_keys
        return made

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> TensorTable:
        """The inverse of :meth:`to_json`.

        Raises:
            ConfigError: ``item`` is not a table of this version.
        """
        try:
            return cls(str(item["at"]), tuple(map(str, item["names"])), dict(item.get("keys", {})))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"a table of tensors lacks {error}: the checkpoint was written by another version of resiliency; load"
                " it with that version"
            ) from error
