"""Metrics for Prometheus. Needs prometheus-client (extra ``supervisor``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from resiliency.supervisor.model import HostState, WorkloadState
from resiliency.supervisor.service import Service

__all__ = ["Metrics"]

_PREFIX = "resiliency_supervisor"
_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics(Collector):
    """Collects the metrics when they are asked for. Thread: the event loop's.

    Args:
        service: returns the service while this supervisor leads; None otherwise.
    """

    def __init__(self, service: Callable[[], Service | None]) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._handled = Histogram(
            f"{_PREFIX}_message_seconds",
            "From a message's arrival until it is handled",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._commit = Histogram(
            f"{_PREFIX}_commit_seconds",
            "To write a set of changes to the state file",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(self)

    def handled(self, seconds: float) -> None:
        self._handled.observe(seconds)

    def committed(self, seconds: float) -> None:
        self._commit.observe(seconds)

    def text(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        service = self._service()
        yield _gauge("leads", "1 in the supervisor that leads", float(service is not None))
        if service is None:
            return
        yield _gauge("term", "Term of this leader", service.term)
        yield _gauge("connections", "Monitors that are connected", service.connected())
        yield _gauge("store_ok", "0 while the state file cannot be written", float(not service.journal.problem))
        yield _gauge("frozen", "1 while so many hosts are silent that nothing is done", float(service.sensor.frozen))
        states = service.sensor.states()
        hosts = GaugeMetricFamily(f"{_PREFIX}_hosts", "Hosts by state", labels=["state"])
        for state in HostState:
            hosts.add_metric([str(state)], states[state])
        yield hosts
        if service.jobs.facts:
            unwanted = sum(bool(facts.unwanted) for facts in service.jobs.facts.values())
            yield _gauge("cluster_hosts", "Hosts that the cluster knows, connected or not", len(service.jobs.facts))
            yield _gauge("cluster_unwanted_hosts", "Those that the cluster wants empty", unwanted)
        yield from self._workloads(service)
        counts = service.counts
        yield _gauge(
            "open_incidents", "Now", sum(incident.is_open for incident in service.controller.incidents.values())
        )
        incidents = CounterMetricFamily(f"{_PREFIX}_incidents", "Opened under this leader")
        incidents.add_metric([], counts.incidents)
        yield incidents
        plans = CounterMetricFamily(f"{_PREFIX}_plans", "Ended under this leader", labels=["remedy", "outcome"])
        for (remedy, outcome), count in counts.plans.items():
            plans.add_metric([remedy, outcome], count)
        yield plans
        messages = CounterMetricFamily(f"{_PREFIX}_messages", "Handled, by kind", labels=["kind"])
        for kind, count in counts.messages.items():
            messages.add_metric([kind], count)
        yield messages
        refused = CounterMetricFamily(f"{_PREFIX}_refused", "Messages and calls refused, by reason", labels=["reason"])
        for reason, count in (counts.refused + service.controller.refused).items():
            refused.add_metric([reason], count)
        yield refused
        failures = CounterMetricFamily(f"{_PREFIX}_commit_failures", "Writes to the state file that failed")
        failures.add_metric([], service.journal.failures)
        yield failures

    def _workloads(self, service: Service) -> Iterator[Metric]:
        state = GaugeMetricFamily(f"{_PREFIX}_workload_state", "1 for the present state", labels=["workload", "state"])
        generation = GaugeMetricFamily(
            f"{_PREFIX}_workload_generation",
            "Generations so far; a new set of places is a new generation",
            labels=["workload"],
        )
        replicas = GaugeMetricFamily(
            f"{_PREFIX}_workload_replicas", "Replicas that have places now", labels=["workload"]
        )
        step = GaugeMetricFamily(f"{_PREFIX}_workload_step", "The furthest that was reported", labels=["workload"])
        goodput = GaugeMetricFamily(
            f"{_PREFIX}_workload_goodput",
            "Share of its time in which it made steps that were kept",
            labels=["workload"],
        )
        for workload in service.controller.workloads.values():
            for each in WorkloadState:
                state.add_metric([workload.name, str(each)], float(each is workload.state))
            generation.add_metric([workload.name], workload.generation)
            replicas.add_metric([workload.name], workload.replicas)
            step.add_metric([workload.name], service.step_of(workload))
            share = service.controller.goodput_of(workload.name).share
            if share is not None:
                goodput.add_metric([workload.name], share)
        yield from (state, generation, replicas, step, goodput)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=value)
