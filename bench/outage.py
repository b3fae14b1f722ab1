"""Measures outages: one sink is down, rebuilt or hangs, while another sink and the target's projection continue."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.backlog import STATEMENTS
from bench.case import SAMPLE_SECONDS, Case, Sample
from bench.outbox import Outbox, wait_until
from bench.receivers import Endpoint
from bench.results import Measurement

HEALTHY, OTHER, PROJECTION = "healthy", "other", "projection"
SECOND = 1_000_000_000
WARM_UP_SECONDS = 3.0
DRAIN_SECONDS = 1_800.0
Harm = Callable[[float], None]
"""Does more harm during an outage, and returns after the given seconds."""
Rows = dict[str, Measurement]
"""Figures by the name of their row."""


def two_sinks(
    outbox: Outbox, folder: Path, other: Mapping[str, Any] | None = None, instances: int = 1
) -> Case:
    """A projection, and two sinks with an endpoint each; `other` has additional settings of the other sink."""
    endpoints = {
        sink: Endpoint(folder, folder / f"{outbox.name}.{sink}") for sink in (HEALTHY, OTHER)
    }
    handlers = {
        PROJECTION: STATEMENTS["each: event"],
        HEALTHY: endpoints[HEALTHY].handler_of(HEALTHY),
        OTHER: {**endpoints[OTHER].handler_of(OTHER), **(other or {})},
    }
    return Case(outbox, folder, handlers, endpoints, (HEALTHY, OTHER), instances)


def delivered(
    published: Sequence[int], arrivals: Sequence[tuple[int, int]], hosts: int
) -> Measurement:
    """The number of events that are missing, that came again, and that came first after a later one of their host."""
    counts = Counter(number for number, _ in arrivals)
    last: dict[int, int] = {}
    misplaced = 0
    for number in counts:  # in order of their first arrival
        host = number % hosts
        misplaced += number < last.get(host, -1)
        last[host] = max(number, last.get(host, -1))
    return {
        "missing": float(len(set(published) - counts.keys())),
        "again": float(counts.total() - len(counts)),
        "misplaced": float(misplaced),
    }


def down(case: Case, rate: int, before: float, away: float, after: float, harm: Harm) -> Rows:
    """Stop the other sink's endpoint for `away` seconds, in which `harm` does more harm.

    Returns rows of figures: the healthy sink before, meanwhile and after; the other sink; the projection.
    """
    hosts = 64
    with (
        case.running(),
        case.publishing(rate, WARM_UP_SECONDS + before + away + after) as publishing,
    ):
        time.sleep(WARM_UP_SECONDS)
        case.phases.begin("before")
        time.sleep(before)
        case.endpoints[OTHER].stop()
        case.phases.begin("meanwhile")
        harm(away)
        case.endpoints[OTHER].start()
        case.phases.begin("after")
        published = publishing.done()
        for sink in case.endpoints:
            _all_noted(case, sink, len(published))
        case.wait_attached(OTHER)
        attached = time.time_ns()
        case.wait_applied(len(published))
        time.sleep(2)
    again = case.applied() - int(
        case.outbox.value("select count(distinct aggregate_id) from projection")
    )
    rows = _healthy(case, published)
    for sink in (HEALTHY, OTHER):
        rows[f"{sink} sink"] = delivered(list(published), case.arrivals(sink), hosts)
    back, _ = case.phases.span("after")
    rows[f"{OTHER} sink"] |= {
        "drained s": _drained(published, case.arrivals(OTHER), back),
        "attached s": (_attached(case.samples, back, attached) - back) / SECOND,
    }
    rows["projection"] = {
        "missing": float(len(published) - case.applied() + again),
        "again": float(again),
    }
    return rows


def _all_noted(case: Case, sink: str, events: int) -> None:
    """Wait until an endpoint has noted every event. Its own count is lost when it is restarted."""
    deadline = time.monotonic() + DRAIN_SECONDS
    while len({number for number, _ in case.arrivals(sink)}) < events:
        if time.monotonic() > deadline:
            return
        time.sleep(1)


def _drained(published: Mapping[int, int], arrivals: Sequence[tuple[int, int]], back: int) -> float:
    """Seconds from `back` until all events that were published before it had arrived."""
    first: dict[int, int] = {}
    for number, clock in arrivals:
        first.setdefault(number, clock)
    late = [first[number] for number, clock in published.items() if clock < back]
    return max(0.0, (max(late) - back) / SECOND)


def _attached(samples: Sequence[Sample], back: int, otherwise: int) -> int:
    return next(
        (each.at for each in samples if each.at > back and each.states.get(OTHER) == "attached"),
        otherwise,
    )


def killing(case: Case, every: float) -> Harm:
    """Kill and restart relay, with `every` seconds in between."""

    def harm(seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() + every < ends:
            time.sleep(every)
            case.instances[0].kill()
            case.instances[0].start()
        time.sleep(max(0.0, ends - time.monotonic()))

    return harm


def taking_over(case: Case) -> Harm:
    """Kill the instance that reads the stream in the middle of the outage; another instance takes over."""

    def harm(seconds: float) -> None:
        time.sleep(seconds / 2)
        instance = case.outbox.value(
            "select instance from relay.sinks where group_id = %s and sink = %s",
            case.group,
            HEALTHY,
        )
        for each in case.instances:
            if each.process is not None and str(each.process.pid) in str(instance):
                each.kill()
                break
        else:
            raise AssertionError(f"no process of {instance}")
        time.sleep(seconds / 2)

    return harm


def rebuild(case: Case, rate: int, before: float) -> Rows:
    """Rebuild the other sink, which receives all events again while live events flow to the healthy one."""
    with case.running(), case.publishing(rate, DRAIN_SECONDS) as publishing:
        time.sleep(WARM_UP_SECONDS)
        case.phases.begin("before")
        time.sleep(before)
        case.phases.begin("meanwhile")
        started = time.monotonic()
        case.command("sink", "rebuild", OTHER, "--yes")
        wait_until(lambda: case.states()[OTHER] != "attached", "the other sink lags", 60)
        took = case.wait_attached(OTHER, DRAIN_SECONDS) - started
        case.phases.begin("after")
        time.sleep(before)
        published = publishing.end()
        _all_noted(case, HEALTHY, len(published))
        events = int(case.outbox.value("select count(*) from outbox_message_t"))
        endpoint = case.endpoints[OTHER]
        wait_until(lambda: endpoint.received() >= events, "every event")
    rows = _healthy(case, published)
    rows["other sink"] = {"events/s": events / took, "attached s": took}
    return rows


def hanging(case: Case, rate: int, keys: int, before: float, meanwhile: float) -> Rows:
    """Let the other sink's endpoint hang, so that `keys` keys hang at once."""
    seconds = WARM_UP_SECONDS + before + meanwhile + before
    with case.running(), case.publishing(rate, seconds, keys) as publishing:
        time.sleep(WARM_UP_SECONDS)
        case.phases.begin("before")
        time.sleep(before)
        endpoint = case.endpoints[OTHER]
        endpoint.stop()
        endpoint.start(hangs=True)
        case.phases.begin("meanwhile")
        hung = 0
        ends = time.monotonic() + meanwhile
        while time.monotonic() < ends:
            time.sleep(SAMPLE_SECONDS)
            hung = max(hung, endpoint.received())
        endpoint.stop()
        endpoint.start()
        case.phases.begin("after")
        published = publishing.done()
        _all_noted(case, HEALTHY, len(published))
    rows = _healthy(case, published)
    rows["other sink"] = {"hanging": float(hung)}
    return rows


def _healthy(case: Case, published: Mapping[int, int]) -> Rows:
    return {
        f"healthy sink, {phase}": case.latencies(published, HEALTHY, phase)
        for phase in case.phases.begins
    }
