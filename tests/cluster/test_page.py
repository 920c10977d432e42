"""The supervisor's page in a real browser, of a job on Kubernetes that loses a node."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.client import address_in_pods, wait_for
from tests.cluster.release import Release
from tests.cluster.rig import Rig
from tests.goodput.browser import Browser


def open_page(browser: Browser, release: Release) -> None:
    """Of the supervisor, with the operators' token."""
    (pod,) = release.cluster.pods(release.system)
    secret = release.cluster.get(f"/api/v1/namespaces/{release.system}/secrets/supervisor-operator")["data"]["token"]
    password = base64.b64decode(secret).decode().strip()
    told = base64.b64encode(f"me:{password}".encode()).decode()
    size: dict[str, Any] = {"width": 1100, "height": 1400, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.call("Security.setIgnoreCertificateErrors", ignore=True)
    browser.call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Basic {told}"})
    browser.call("Page.navigate", url=f"https://{address_in_pods(pod['status']['podIP'])}:7600/")


@pytest.mark.browser
@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_page_says_which_node_died_and_who_took_its_place(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    release = Release(rig, tmp_path / "job", hosts=2, spares=1, steps=100_000)
    release.until_step(30)
    lost = release.host_of(1)
    node = release.node_of(lost)
    (spare,) = {each["name"] for each in release.status()["hosts"] if each["node_rank"] is None}
    with Browser(deadline_s=200) as browser:
        open_page(browser, release)
        until_it_says(browser, f"{lost} on {node.name}", f"{spare} on ", "3 ready, 1 spare")
        node.kill()
        # Its pod is forgotten soon, and with it the name: the node is what somebody must look at.
        silent = f"host_silent on {lost}: not heard of for "
        until_it_says(
            browser, "hot_swap helped", silent, f" s (node {node.name})", f"{lost} is forgotten", "2 ready, no spares"
        )
        assert f"{spare} takes the place of {lost}" in text_of(browser)
        rows = browser.evaluate("[...document.querySelectorAll('tbody tr')].map(row => row.innerText)")
        (row,) = (each for each in rows if each.startswith(f"{spare} on "))
        assert "node rank 1" in row
        if shots := os.environ.get("RESILIENCY_TESTS_SCREENSHOTS"):
            Path(shots, "kubernetes.png").write_bytes(browser.screenshot(width=1100, height=1400))


def text_of(browser: Browser) -> str:
    return str(browser.evaluate("document.body ? document.body.innerText : ''"))


def until_it_says(browser: Browser, *words: str) -> None:
    """The page fetches itself again every two seconds."""
    wait_for(f"{words} on the page", lambda: all(each in text_of(browser) for each in words))
