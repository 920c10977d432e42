"""The console and the tables of all commands."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["console", "table"]


def console(*, err: bool = False, markup: bool = True, width: int = 120) -> Console:
    """Standard output or error; ``width`` columns when it is not a terminal, so that a table in a file is not squeezed.
    A character that the locale lacks becomes "?"."""
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    columns = None if stream.isatty() else width
    return Console(file=stream, highlight=False, markup=markup, emoji=False, width=columns)


def table(*names: str, right: Collection[str] = ()) -> Table:
    """An empty table whose columns ``right`` are aligned to the right; long cells are folded."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    empty = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in names:
        empty.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return empty
