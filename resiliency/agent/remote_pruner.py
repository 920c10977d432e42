"""Deletes steps from a remote tier: those its retention settings do not keep, and those requested by name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from resiliency.agent._fence import Fence
from resiliency.agent._reporter import Reporter
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.errors import AgentError, TierError
from resiliency.storage.catalog import StepListing, scan
from resiliency.storage.deletion import delete_step
from resiliency.storage.retention import DeleteRequest, Hold, due_requests, steps_to_delete
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier

__all__ = ["RemotePruner"]

logger = logging.getLogger(__name__)


class RemotePruner:
    """Prunes one remote tier for one run. Thread: :meth:`request` and :meth:`hold` from any, :meth:`prune` from one.

    Args:
        config: of this attempt. Only the agent that serves rank 0 prunes, so that agents do not race each other.
        spec: of the tier.
        reporter: writes the events.
        fence: of this attempt.
    """

    def __init__(self, config: AgentConfig, spec: TierSpec, reporter: Reporter, fence: Fence) -> None:
        self._fence = fence
        self._config = config
        self._spec = spec
        self._reporter = reporter
        self._requested: dict[str, DeleteRequest] = {}
        self._held: Hold | None = None

    def request(self, requests: Mapping[str, DeleteRequest]) -> None:
        """Adds names to delete once the step they wait for (``after``) or a newer one is committed on this tier."""
        self._requested.update(requests)

    def hold(self, hold: Hold) -> None:
        """Keeps this step and its names until a step that follows it is committed on this tier."""
        self._held = hold

    def prune(self, tier: Tier, sent: StepId) -> None:
        """Deletes what may be deleted. Call it after a step was ``sent``, because older steps are deleted only when a
        newer one is committed. Steps of a later attempt stay: on a host with a folder of its own, the fence does not
        see that a later attempt has started.

        Blocks: for a listing, a read per manifest, and a delete per file. A failure of the tier is logged, and the next
            call tries again.
        """
        if 0 not in self._config.local_ranks:
            return
        try:
            until = (sent.line, self._config.attempt)
            listings = scan(tier, self._config.run)
            for listing in self._deletable(one for one in listings if (one.id.line, one.id.attempt) <= until):
                delete_step(
                    tier,
                    self._config.run,
                    listing.id,
                    files=listing.sizes,
                    names=_names(listing),
                    before_each=self._fence.check,
                )
                self._reporter.log_deleted(listing.id, self._spec.name)
        except (OSError, TierError, AgentError) as error:
            logger.warning(
                "old steps on %s could not be deleted: %s; tried again after the next upload",
                self._spec.address,
                error,
            )

    def _deletable(self, listings: Iterable[StepListing]) -> list[StepListing]:
        by_id = {listing.id: listing for listing in listings}
        committed = [found.manifest for found in by_id.values() if found.manifest is not None and found.committed]
        held = self._held.held(committed) if self._held is not None else frozenset()
        requested = due_requests(dict(self._requested), committed, held)
        # Unfinished steps newer than every committed one stay: another host may still be sending its part.
        unfinished = [found.id for found in by_id.values() if not found.committed and found.readable]
        steps = steps_to_delete(
            committed,
            unfinished,
            keep=self._spec.keep,
            keep_named=self._spec.keep_named,
            deleted=requested,
            busy=held,
        )
        return [by_id[step] for step in steps]


def _names(listing: StepListing) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for record in listing.records.values() for name in record.names))
