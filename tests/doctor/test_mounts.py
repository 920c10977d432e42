"""Which mount a path lies on."""

from __future__ import annotations

from pathlib import Path

import pytest

from resiliency.doctor.mounts import Mount, mount_of, parse_mounts

MOUNTS = r"""22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:22 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=65536k
24 22 0:30 / /ckpts rw - nfs4 server:/x rw,vers=4.2
25 24 0:31 / /ckpts/fast ro - xfs /dev/vdb rw
26 22 0:40 / /with\040space rw - fuse.gcsfuse bucket rw
27 22 0:41 / /twice rw - ext4 /dev/vdc rw
28 27 0:42 / /twice rw - btrfs /dev/vdd rw
a line that says nothing
"""


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [
        ("/home/me", "/", "ext4"),
        ("/dev/shm", "/dev/shm", "tmpfs"),
        ("/dev/shmoo", "/", "ext4"),
        ("/ckpts/run", "/ckpts", "nfs4"),
        ("/ckpts/fast/run", "/ckpts/fast", "xfs"),
        ("/ckpts/faster", "/ckpts", "nfs4"),
        ("/with space/run", "/with space", "fuse.gcsfuse"),
        ("/twice/x", "/twice", "btrfs"),
    ],
)
def test_the_longest_and_last_mount_above_a_path_is_its_own(path: str, point: str, kind: str) -> None:
    found = parse_mounts(MOUNTS, path)
    assert (found.point, found.kind) == (point, kind)


def test_options_of_the_mount_and_of_the_file_system_are_told() -> None:
    assert parse_mounts(MOUNTS, "/ckpts/fast").options >= {"ro", "rw"}
    assert "size=65536k" in parse_mounts(MOUNTS, "/dev/shm").options


@pytest.mark.parametrize(
    ("kind", "ramdisk", "network", "copies"),
    [
        ("tmpfs", True, False, False),
        ("ext4", False, False, False),
        ("nfs", False, True, False),
        ("nfs4", False, True, False),
        ("lustre", False, True, False),
        ("fuse.gcsfuse", False, True, False),
        ("fuseblk", False, False, False),
        ("zfs", False, False, True),
        ("", False, False, False),
    ],
)
def test_kinds_of_file_systems(kind: str, ramdisk: bool, network: bool, copies: bool) -> None:
    mount = Mount(point="/", kind=kind)
    assert (mount.is_ramdisk, mount.is_network, mount.copies_on_write) == (ramdisk, network, copies)


def test_a_link_lies_where_it_leads_to(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/shm")
    assert mount_of(str(link)) == mount_of("/dev/shm") and mount_of("/dev/shm").is_ramdisk
    assert parse_mounts("", "/x").kind == ""
