"""docs/format.md is enough to read a checkpoint: nothing here imports this library.

The sample is a run "pretrain" of two ranks with steps 10 and 20.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

SAMPLE = Path(__file__).parent / "samples" / "format-2"
RUN = SAMPLE / ".resiliency" / "pretrain"
FOLDER = re.compile(r"(\d{10,})-a(\d{4,})-([0-9a-f]{6})-(\d{2,})")


# -- the page in code -------------------------------------------------------------------------------------------------


def identity(fields: dict[str, Any]) -> tuple[int, int, str, int]:
    return fields["step"], fields["attempt"], fields["token"], fields["serial"]


def folders() -> dict[tuple[int, int, str, int], Path]:
    """Step folders by identity, oldest first."""
    found = {}
    for path in (RUN / "steps").iterdir():
        match = FOLDER.fullmatch(path.name)
        assert match is not None, path
        found[int(match[1]), int(match[2]), match[3], int(match[4])] = path
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0], item[0][3], item[0][2])))


def check(record: dict[str, Any]) -> str:
    fields = {name: value for name, value in record.items() if name != "check"}
    return xxhash.xxh3_64_hexdigest(
        json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    )


def header_of(data: bytes) -> tuple[dict[str, Any], int]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


def boxes_of(data: bytes) -> list[tuple[dict[str, Any], bytes]]:
    """What each entry of a shard is, and its bytes; the objects left out."""
    header, base = header_of(data)
    chunks = json.loads(header["__metadata__"]["resiliency"])["chunks"]
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "U8": "uint8"}
    found = []
    for name, entry in header.items():
        if name in ("__metadata__", "!objects"):
            continue
        start, end = entry["data_offsets"]
        whole = {"key": name, "offsets": [0] * len(entry["shape"]), "sizes": entry["shape"], "shape": entry["shape"]}
        chunk = chunks.get(name) or {**whole, "dtype": names[entry["dtype"]], "per_rank": False}
        found.append((chunk, data[base + start : base + end]))
    return found


def tensors_of(shards: list[bytes]) -> dict[str, torch.Tensor]:
    """The tensors of the state, put together from boxes; every element must come exactly once."""
    tensors: dict[str, torch.Tensor] = {}
    filled: dict[str, int] = {}
    for data in shards:
        for chunk, raw in boxes_of(data):
            if chunk["per_rank"]:
                continue
            dtype = getattr(torch, chunk["dtype"])
            tensor = tensors.setdefault(chunk["key"], torch.empty(chunk["shape"], dtype=dtype))
            where = tuple(slice(a, a + n) for a, n in zip(chunk["offsets"], chunk["sizes"], strict=True))
            tensor[where] = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(chunk["sizes"])
            filled[chunk["key"]] = filled.get(chunk["key"], 0) + math.prod(chunk["sizes"])
    assert filled == {key: tensor.numel() for key, tensor in tensors.items()}
    return tensors


def objects_of(data: bytes) -> dict[str, Any]:
    header, base = header_of(data)
    start, end = header["!objects"]["data_offsets"]
    found: dict[str, Any] = json.loads(data[base + start : base + end])
    return found


def decode(item: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tags that the sample uses."""
    if isinstance(item, list):
        return [decode(part, tensors) for part in item]
    if not isinstance(item, dict):
        return item
    tag = item.get("!")
    if tag is None:
        return {key: decode(part, tensors) for key, part in item.items()}
    if tag == "tensor":
        return tensors[item["key"]]
    if tag == "tensors":
        prefix = f"{item['at']}/" if item["at"] else ""
        usual = {name: prefix + name.replace("%", "%25").replace("/", "%2F") for name in item["names"]}
        return {name: tensors[item.get("keys", {}).get(name, key)] for name, key in usual.items()}
    value = item["value"]
    if tag == "int":
        return int(value, 16)
    if tag == "bytes":
        return base64.b64decode(value)
    if tag == "dict":
        return {key: decode(part, tensors) for key, part in value}
    assert tag == "tuple", f"the page does not know {tag}"
    return tuple(decode(part, tensors) for part in value)


# -- the sample by the page -------------------------------------------------------------------------------------------


def test_the_folders_spell_the_identities_and_order_them() -> None:
    assert [(step, attempt, serial) for step, attempt, _, serial in folders()] == [(10, 1, 0), (20, 1, 0)]
    assert (RUN / "attempt").read_text() == "1"


@pytest.mark.parametrize("step", [10, 20])
def test_the_manifest_lists_the_records_and_they_are_sound(step: int) -> None:
    ((wanted, folder),) = [item for item in folders().items() if item[0][0] == step]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["version"], identity(manifest), manifest["run"]) == (2, wanted, "pretrain")
    assert manifest["world_size"] == 2 and [record["rank"] for record in manifest["shards"]] == [0, 1]
    for record in manifest["shards"]:
        assert json.loads((folder / f"shard-{record['rank']:05d}.json").read_text()) == record
        assert record["check"] == check(record)
        assert (record["version"], identity(record), record["world_size"]) == (2, wanted, 2)
        assert record["names"] == [f"step={step}.ckpt", "last.ckpt"] and record["info"] == {"epoch": step // 10}
        assert (record["exact"], record["tiers"], record["supersedes"]) == (step == 10, [], [])
    assert len({record["plan"] for record in manifest["shards"]}) == 1


@pytest.mark.parametrize("step", [10, 20])
def test_the_shards_hold_what_was_saved(step: int) -> None:
    ((wanted, folder),) = [item for item in folders().items() if item[0][0] == step]
    shards = []
    for rank in range(2):
        record = json.loads((folder / f"shard-{rank:05d}.json").read_text())
        data = (folder / f"shard-{rank:05d}.safetensors").read_bytes()
        shards.append(data)
        size = record["block_bytes"]
        blocks = [data[at : at + size] for at in range(0, len(data), size)]
        assert len(data) == record["nbytes"]
        assert [xxhash.xxh3_64_hexdigest(block) for block in blocks] == record["digests"]
        header, base = header_of(data)
        assert base % 4096 == 0
        number, attempt, token, serial = header["__metadata__"]["stamp"].split(".")
        assert [len(number), len(attempt), len(token), len(serial)] == [20, 10, 6, 10]
        assert (int(number), int(attempt), token, int(serial)) == wanted
        own = objects_of(data)["per_rank"]
        assert own["seed"] == 100 * step + rank
        generator = [raw for chunk, raw in boxes_of(data) if chunk["per_rank"] and chunk["key"] == "generator"]
        assert generator == [bytes([rank, step])]
    assert objects_of(shards[1])["state"] is None, "rank 0 alone holds the tree"
    tree = decode(objects_of(shards[0])["state"], tensors_of(shards))
    weight = torch.arange(64, dtype=torch.float32).reshape(16, 4) + step
    assert torch.equal(tree["model"]["weight"], weight) and tree["model"]["tied"] is tree["model"]["weight"]
    assert tree["model"]["bias"].dtype is torch.bfloat16 and tree["model"]["bias"].tolist() == [0.5, -1.5]
    moments = tree["optimizer"]["state"][0]
    assert torch.equal(moments["exp_avg"], weight * 2) and float(moments["step"]) == step
    assert tree["optimizer"]["lr"] == 0.1 and tree["epoch"] == step // 10
    assert tree["!odd"]["a/b"].tolist() == [True, False] and tree["!odd"]["c%d"].tolist() == [1 + 2j, -3j]
    assert tree["note"] == ("tuple", {1: "a key that is no text"}, b"\x00\xff", 1 << 80, "é")


def test_the_ranks_share_a_tensor_out() -> None:
    """Or the sample would not show boxes."""
    *_, folder = folders().values()
    for rank in range(2):
        boxes = [chunk for chunk, _ in boxes_of((folder / f"shard-{rank:05d}.safetensors").read_bytes())]
        assert any(chunk["key"] == "model/weight" and chunk["sizes"] != chunk["shape"] for chunk in boxes)


def test_safetensors_reads_a_shard() -> None:
    *_, folder = folders().values()
    loaded = load_file(folder / "shard-00000.safetensors")
    assert loaded["model/bias"].tolist() == [0.5, -1.5]


@pytest.mark.parametrize(("name", "step"), [("step=10.ckpt", 10), ("step=20.ckpt", 20), ("last.ckpt", 20)])
def test_a_name_file_points_to_its_step(name: str, step: int) -> None:
    pointer = json.loads((SAMPLE / name).read_text())
    assert (pointer["format"], pointer["version"], pointer["run"]) == ("resiliency-checkpoint", 2, "pretrain")
    assert identity(pointer)[0] == step and SAMPLE / pointer["at"] == folders()[identity(pointer)]


def test_this_reader_uses_nothing_of_the_library() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); import tests.storage.test_format\n"
    code += "print([name for name in sys.modules if name.split('.')[0] == 'resiliency'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_the_library_reads_the_sample_too(tmp_path: Path) -> None:
    """The other way round: what stands on the page is what is written now. In a process of its own, see above."""
    code = (
        "import shutil, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        f"shutil.copytree({str(SAMPLE)!r}, {str(tmp_path / 'copy')!r})\n"
        "from resiliency.inspection.by_path import load_path, locate\n"
        "from resiliency.testing.checkpoints import differences\n"
        "from tests.storage.samples.make_format_2 import state\n"
        "for name, step in (('step=10.ckpt', 10), ('last.ckpt', 20)):\n"
        f"    found, own = load_path(locate({str(tmp_path / 'copy')!r} + '/' + name), rank=1)\n"
        "    assert differences(found, state(step)) == [] and own['seed'] == 100 * step + 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
