"""Makes a JobSet anew from its own specification, once, as a last resort.

Until it is made the specification is an annotation of the supervisor's Lease, so that whoever leads goes on. The new
JobSet carries an annotation, and is not made anew again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from resiliency.supervisor.clusters.kubernetes.api import ApiError, ApiUnavailable, KubernetesApi

__all__ = ["RENEWED", "Renewal", "next_jobset"]

logger = logging.getLogger(__name__)

#: Annotation of a JobSet that was made anew: why. Of the Lease: what is to be made, and the uid of the one before.
RENEWED, _TO_MAKE = "resiliency/renewed", "resiliency/to-make"
_MERGE = "application/merge-patch+json"
_LONGEST_REASON = 200


def next_jobset(item: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """The JobSet that follows this one: what its user has written, without what belongs to the one that was."""
    metadata = item["metadata"]
    annotations = {key: value for key, value in (metadata.get("annotations") or {}).items() if "resiliency/" not in key}
    return {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": metadata.get("labels") or {},
            "annotations": {**annotations, RENEWED: reason[:_LONGEST_REASON] or "a last resort"},
        },
        "spec": item["spec"],
    }


class Renewal:
    """Thread: the event loop's. Every method raises :class:`ApiError` when the API server is away, or refuses it.

    Args:
        path: of the JobSets.
        lease: path of the supervisor's Lease.
    """

    def __init__(self, api: KubernetesApi, *, path: str, lease: str) -> None:
        self._api, self._path, self._lease = api, path, lease
        self._to_make: dict[str, Any] | None = None
        self._lock = asyncio.Lock()

    async def load(self) -> None:
        """Reads what an earlier leader has left to make."""
        found = (await self._get(self._lease)).get("metadata", {}).get("annotations") or {}
        self._to_make = json.loads(found[_TO_MAKE]) if _TO_MAKE in found else None

    async def begin(self, name: str, uid: str, reason: str) -> str:
        """Deletes a JobSet, for :meth:`go_on` to make it anew. Returns why not; "" when it does."""
        item = await self._api.request("GET", f"{self._path}/{name}")
        metadata = item["metadata"]
        if metadata["uid"] != uid:
            return "another one has its name"
        if RENEWED in (metadata.get("annotations") or {}):
            return f"it was made anew before: {metadata['annotations'][RENEWED]}"
        if owners := metadata.get("ownerReferences"):
            return f"it belongs to {owners[0]['kind']} {owners[0]['name']}"
        wanted = next_jobset(item, reason)
        trial = {**wanted, "metadata": {**wanted["metadata"], "name": f"{name[:50]}-trial"}}
        await self._api.request("POST", self._path, trial, query={"dryRun": "All"})
        await self._keep({"uid": uid, "jobset": wanted})
        await self.go_on()
        logger.error("JobSet %s is made anew from its own specification: %s", name, reason)
        return ""

    async def go_on(self) -> None:
        """Deletes the JobSet before, and makes the next one when that is gone. To be called now and then."""
        async with self._lock:
            if self._to_make is not None:
                await self._go_on(self._to_make["jobset"], self._to_make["uid"])

    async def _go_on(self, wanted: dict[str, Any], uid: str) -> None:
        path = f"{self._path}/{wanted['metadata']['name']}"
        try:
            metadata = (await self._get(path)).get("metadata")
            if metadata is None:
                await self._api.request("POST", self._path, wanted)
            elif metadata["uid"] == uid:
                if "deletionTimestamp" not in metadata:
                    body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
                    await self._api.request("DELETE", path, {**body, "preconditions": {"uid": uid}})
                return  # its pods end
            await self._keep(None)
        except ApiUnavailable:
            raise
        except ApiError as error:
            if error.status not in (404, 409):  # it was deleted meanwhile; go on with the next look
                await self._keep(None)  # what is refused now must not be done in an hour, when all is well
            raise

    async def _get(self, path: str) -> dict[str, Any]:
        """The object; empty: there is none."""
        try:
            return await self._api.request("GET", path)
        except ApiError as error:
            if error.status == 404:
                return {}
            raise

    async def _keep(self, to_make: dict[str, Any] | None) -> None:
        text = None if to_make is None else json.dumps(to_make)
        await self._api.request("PATCH", self._lease, {"metadata": {"annotations": {_TO_MAKE: text}}}, kind=_MERGE)
        self._to_make = to_make
