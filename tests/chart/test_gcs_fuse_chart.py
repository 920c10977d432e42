"""The chart of a bucket as a volume."""

from __future__ import annotations

import pytest

from tests.chart.rendering import Helm, Json, one, pods


def test_lint(helm: Helm) -> None:
    done = helm.lint("gcs-fuse")
    assert done.returncode == 0, done.stdout


def test_a_claim_is_bound_to_the_bucket(helm: Helm) -> None:
    objects = helm.render("gcs-fuse", {"bucket": "b", "onlyDir": "llama"}, name="ckpts", namespace="jobs")
    volume, claim = one(objects, "PersistentVolume"), one(objects, "PersistentVolumeClaim")
    assert volume["spec"]["csi"] == {"driver": "gcsfuse.csi.storage.gke.io", "volumeHandle": "b", "readOnly": False}
    assert volume["spec"]["claimRef"] == {"namespace": "jobs", "name": "ckpts"}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    assert {"metadata-cache:ttl-secs:0", "only-dir:llama"} <= set(volume["spec"]["mountOptions"])


def test_the_workload_chart_mounts_buckets_with_the_same_options(helm4: Helm) -> None:
    volume = one(helm4.render("gcs-fuse", {"bucket": "b"}), "PersistentVolume")
    values: Json = {"workload": {"image": "i"}, "infrastructure": {"enable_gcsfuse": True, "gcsfuse_bucket": "b"}}
    (pod,) = pods(helm4.render("workload", values))
    (csi,) = (each["csi"] for each in pod["spec"]["volumes"] if each["name"] == "gcs")
    assert csi["volumeAttributes"]["mountOptions"].split(",") == volume["spec"]["mountOptions"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "bucket: name the bucket"),
        ({"bucket": "gs://b"}, "bucket: gs://b is an address"),
        ({"bucket": "b", "mountOptions": ["only-dir:x"]}, "mountOptions: only-dir is the value onlyDir"),
        ({"bucket": "b", "buckets": "c"}, "buckets"),
        ({"bucket": "b", "capacity": "big"}, "capacity"),
    ],
)
def test_what_cannot_work_is_refused_with_its_name(helm: Helm, values: Json, said: str) -> None:
    assert said in helm.refusal("gcs-fuse", values)
