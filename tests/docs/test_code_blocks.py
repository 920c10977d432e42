"""What the documentation shows works: Python blocks run, shell blocks parse, JSON, TOML and YAML load.

The Python blocks of a file run in order and in one namespace, each file in a process and folder of its own.
```` ```python no-run ```` is only parsed: for what needs a GPU, a bucket or NeMo.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import Block, blocks_of, must_run, parse_python, run_in_child

ROOT = Path(__file__).parents[2]
FILES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
NAMES = [path.relative_to(ROOT).as_posix() for path in FILES]
#: Every block says what it is, so that none escapes by having no name.
KNOWN = {"python", "bash", "console", "json", "toml", "yaml", "text", "diff", "mermaid"}


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_named_and_parse(name: str) -> None:
    for block in blocks_of((ROOT / name).read_text()):
        where = f"{name}:{block.line}"
        assert block.info and block.info[0] in KNOWN, f"{where}: begin the block with one of {sorted(KNOWN)}"
        if block.info[0] == "python":
            parse_python(name, block)
        elif block.info[0] == "bash":
            result = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=10)
            assert result.returncode == 0, f"{where}: {result.stderr}"
        elif block.info[0] == "json":
            json.loads(block.text)
        elif block.info[0] == "yaml":
            list(yaml.safe_load_all(block.text))


WITH_PYTHON = [name for name in NAMES if any(map(must_run, blocks_of((ROOT / name).read_text())))]


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_python_blocks_run(name: str, tmp_path: Path) -> None:
    blocks = [block for block in blocks_of((ROOT / name).read_text()) if must_run(block)]
    run_in_child(name, blocks, tmp_path / "here")


GOOD = """a
```python
x = 1
```
b
   ```python
   assert x == 1; open('made', 'w').close()
   ```
```python no-run
import nowhere
```
"""


def test_a_good_file_passes(tmp_path: Path) -> None:
    found = list(blocks_of(GOOD))
    assert [block.line for block in found] == [3, 7, 10]
    run_in_child("GOOD.md", [block for block in found if must_run(block)], tmp_path / "here")
    assert (tmp_path / "here" / "made").exists()


def test_a_bad_block_fails_and_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r'File "BAD.md", line 41(.|\n)*NameError'):
        run_in_child("BAD.md", [Block(info=("python",), line=40, text="x = 1\nx + unknown\n")], tmp_path / "here")


def test_an_unclosed_block_is_noticed() -> None:
    with pytest.raises(ValueError, match="line 2 is never closed"):
        list(blocks_of("a\n```python\nx = 1\n"))
