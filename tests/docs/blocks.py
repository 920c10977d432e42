"""Code blocks of Markdown files: finds them, and runs the Python ones."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
RUN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Block:
    """One fenced block: words after the fence, line of its first line (1 based), and its text."""

    info: tuple[str, ...]
    line: int
    text: str


def blocks_of(markdown: str) -> Iterator[Block]:
    """All fenced blocks in order; an unclosed fence is a ValueError."""
    opened: tuple[int, str, tuple[str, ...]] | None = None
    body: list[str] = []
    for number, line in enumerate(markdown.splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened, body = (number + 1, fence["indent"], tuple(fence["info"].split())), []
        elif opened is not None and fence and not fence["info"].strip():
            yield Block(info=opened[2], line=opened[0], text="\n".join(body) + "\n")
            opened = None
        elif opened is not None:
            body.append(line.removeprefix(opened[1]))
    if opened is not None:
        raise ValueError(f"the code block that begins at line {opened[0] - 1} is never closed")


def must_run(block: Block) -> bool:
    return block.info[:1] == ("python",) and "no-run" not in block.info


def server() -> ForkServerContext:
    """Forks children from a process that has imported what every example imports: seconds saved for each file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightning.pytorch", "tests.docs.blocks"])
    return context


def run_blocks(name: str, blocks: list[Block], folder: str, output: str) -> None:
    """Runs the blocks of one file, one after the other in one namespace, as a reader would. In a child process."""
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.chdir(folder)
    sys.argv = [name]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        try:
            # Padded, so that a traceback gives the line of the Markdown file.
            exec(compile("\n" * (block.line - 1) + block.text, name, "exec"), namespace)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


def run_in_child(name: str, blocks: list[Block], folder: Path) -> None:
    """Raises AssertionError with the child's output when a block fails or all of them take too long.

    Blocks: up to 60 s.
    """
    folder.mkdir()
    output = folder.with_suffix(".out")
    child = server().Process(target=run_blocks, args=(name, blocks, str(folder), str(output)))
    child.start()
    child.join(RUN_TIMEOUT_S)
    late = child.is_alive()
    if late:
        child.kill()
        child.join(RUN_TIMEOUT_S)
    assert child.exitcode == 0, f"{name}: {'timed out' if late else 'failed'}\n{output.read_text()}"


def parse_python(name: str, block: Block) -> None:
    ast.parse("\n" * (block.line - 1) + block.text, filename=name)
