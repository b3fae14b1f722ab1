"""The workloads of endurance: what must not grow with time, with sinks, or with what is due. Each has its goals."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from bench import live, sink_workloads
from bench.backlog import STATEMENTS, fill
from bench.case import Case
from bench.endurance_rows import (
    Consumption,
    Rows,
    Together,
    held_snapshot,
    left_the_stream,
    new_outbox,
    peaks,
)
from bench.live import latencies
from bench.memory import Footprint
from bench.outbox import Outbox, wait_until
from bench.peers.psycopg2_loop import Psycopg2Loop
from bench.plan import Plan
from bench.receivers import Endpoint
from bench.relaying import NOTE, NOTE_AND_INSERT, Relay
from bench.results import Contender, Goal, Measurement, Workload
from relay.admin.install import initialise
from relay.config.settings import Settings
from relay.retention.schedule import Schedule
from relay.store.connections import connect

PROJECTION = "projection"
FLAT = 1.1
"""How much more than in the first part a figure of the last part may be."""
RATE = 300
HALF_AN_HOUR = 30.0
FIRST, LAST = "first part", "last part"


def held_target(plan: Plan) -> Iterator[Workload]:
    """A snapshot that is held in the target's database."""
    return _held(plan, "endurance-held-target", 4.0)


def held_source(plan: Plan) -> Iterator[Workload]:
    """A snapshot that is held in the source's database while relay polls."""
    return _held(plan, "endurance-held-source", 3.0, mode="poll")


def held_state(plan: Plan) -> Iterator[Workload]:
    """A snapshot that is held in the target's database, and every kind of state that relay stores there."""
    return _held(plan, "endurance-held-state", 3.0, every_kind=True)


def _held(
    plan: Plan, name: str, minutes: float, mode: str = "auto", every_kind: bool = False
) -> Iterator[Workload]:
    total = plan.minutes or (0.4 if plan.quick else minutes)
    part = min(60.0, total * 60 / 4)
    between = total * 60 - 2 * part
    # As many versions of one partition's row as half an hour makes of each of eight. What sinks and deferred
    # transactions store depends on the number of hosts in other ways: a sink delivers the events of one by one.
    hosts = 64 if every_kind or total >= HALF_AN_HOUR else 1

    def measure() -> Rows:
        outbox = new_outbox(plan, name)
        target = plan.cluster.create_database(f"{outbox.name}_target")
        case = _with_every_kind(plan, outbox, target) if every_kind else None
        if case is None:
            handlers = {PROJECTION: STATEMENTS["each: event"]}
            case = Case(outbox, plan.folder, handlers, {}, mode=mode, target=target)
        held = target if mode == "auto" else outbox.dsn
        types = {"order.later": 50, "order.poison": 70, "order.refused": 90} if every_kind else {}
        published: dict[int, int] = {}
        rows: Rows = {FIRST: {}, LAST: {}}
        with case.running():
            if mode == "auto":
                case.wait_streaming()
            with case.publishing(RATE, 5, hosts, types) as warming:
                warming.done()
            with held_snapshot(held):
                for phase, seconds in ((FIRST, part), ("between", between), (LAST, part)):
                    case.phases.begin(phase)
                    before = Consumption(plan, case)
                    with case.publishing(RATE, seconds, hosts, types) as publishing:
                        published |= publishing.done()
                    if phase in rows:
                        rows[phase] |= before.figures()
                case.phases.begin("after")
                time.sleep(3)
        effects = case.effects()
        for phase, figures in rows.items():
            sent = case.sent(published, phase)
            figures |= latencies(sent, effects, warm_up_ns=0)
            if every_kind:
                arrived = dict(case.arrivals("healthy"))
                figures |= latencies(sent, arrived, "sink ", warm_up_ns=0)
            # Of a transaction: what a task costs, whatever the publisher's pace.
            per_commit = part / len(sent) * 1e4 if sent else 0.0
            figures["relay, CPU µs a commit"] = figures["relay CPU, %"] * per_commit
            figures["server, CPU µs a commit"] = figures["server CPU, %"] * per_commit
            figures |= peaks(case, phase)
        return rows

    together = Together(measure)
    judged = ["p50", "p99", "relay CPU, %", "server CPU, %", "RSS MiB"]
    judged += ["sink p50", "sink p99"] if every_kind else []
    spread = "64 hosts" if hosts > 1 else "one host, so that each commit touches one partition"
    size = f"{RATE} commits/s of {spread}; a part is {part:.0f} s, with {between:.0f} s in between; milliseconds"
    yield Workload(
        name,
        size,
        [together.contender(FIRST, FIRST), together.contender(LAST, FIRST)],
        [Goal(LAST, figure, FLAT, FIRST) for figure in judged],
    )


def _with_every_kind(plan: Plan, outbox: Outbox, target: str) -> Case:
    endpoints = {
        sink: Endpoint(plan.folder, plan.folder / f"{outbox.name}.{sink}", status=status)
        for sink, status in (("healthy", 204), ("refused", 400))
    }
    handlers: dict[str, Mapping[str, Any]] = {
        PROJECTION: STATEMENTS["each: event"],
        # It holds no key, so that nothing else waits for it.
        "later": {"type": "python", "callable": "bench.handlers:later", "order_by": "none"},
        "poison": {"type": "python", "callable": "bench.handlers:poison"},
        "lake": {
            **{"type": "spark", "path": str(plan.folder / f"{outbox.name}.lake")},
            **{"every": 5.0, "partition_by": []},
        },
        **{sink: endpoint.handler_of(sink) for sink, endpoint in endpoints.items()},
    }
    routes = [
        {"match": {"event_type": "order.later"}, "handlers": ["later"]},
        {"match": {"event_type": "order.poison"}, "handlers": ["poison"]},
        {"match": {"event_type": "order.refused"}, "handlers": ["refused"]},
        {"handlers": [PROJECTION, "healthy", "lake"]},
    ]
    return Case(
        *(outbox, plan.folder, handlers, endpoints, ("healthy", "refused")),
        target=target,
        routes=routes,
        dead_letters={"brake": 0},
    )


def _many_sinks(endpoint: Endpoint, count: int) -> dict[str, dict[str, Any]]:
    names = [f"s{number:02}" for number in range(1, count + 1)]
    return {name: endpoint.handler_of(name) for name in names}


def sinks_idle(plan: Plan) -> Iterator[Workload]:
    """Sinks that have nothing to do."""
    seconds = 8.0 if plan.quick else 60.0

    def measure(count: int) -> Measurement:
        outbox = new_outbox(plan, "endurance-sinks-idle")
        endpoint = Endpoint(plan.folder, plan.folder / f"{outbox.name}.arrived")
        sinks = _many_sinks(endpoint, count)
        case = Case(outbox, plan.folder, sinks, dict.fromkeys(sinks, endpoint), list(sinks))
        with case.running(samples=False):
            # What begins with the start: the comparison with the outbox, the first look of retention.
            time.sleep(12 if plan.quick else 20)
            before = Consumption(plan, case)
            time.sleep(seconds)
            figures = before.figures()
            case.phases.begin("idle")
            case.sample()
        return {**figures, **peaks(case, "idle")}

    rows = {f"relay, {count} sinks": count for count in (3, 32)}
    many = "relay, 32 sinks"
    yield Workload(
        "endurance-sinks-idle",
        f"no events for {seconds:.0f} s",
        [Contender(row, lambda of=count: measure(of), 1) for row, count in rows.items()],  # type: ignore[misc]
        [
            Goal(many, "threads", 40),
            Goal(many, "connections", 12),
            Goal(many, "commits/s of the databases", 5),
            Goal(many, "relay CPU, %", 2),
        ],
    )


def sinks_busy(plan: Plan) -> Iterator[Workload]:
    """Three healthy sinks, and 32 of which one is slow and one hangs."""
    rate, seconds = 100, 8.0 if plan.quick else 60.0

    def measure(healthy: int, ill: bool) -> Measurement:
        outbox = new_outbox(plan, "endurance-sinks-busy")
        endpoint = Endpoint(plan.folder, plan.folder / f"{outbox.name}.arrived")
        sinks = _many_sinks(endpoint, healthy)
        endpoints = dict.fromkeys(sinks, endpoint)
        if ill:
            endpoints["slow"] = Endpoint(plan.folder, delay=1.0)
            endpoints["hanging"] = Endpoint(plan.folder, hangs=True)
        others = {name: endpoints[name].handler_of(name) for name in endpoints if name not in sinks}
        handlers = {PROJECTION: STATEMENTS["each: event"], **sinks, **others}
        case = Case(outbox, plan.folder, handlers, endpoints, list(sinks))
        with case.running():
            with case.publishing(rate, seconds + 5) as publishing:
                time.sleep(5)
                case.phases.begin("busy")
                before = Consumption(plan, case)
                time.sleep(seconds)
                figures = before.figures()
                left = left_the_stream(case, "busy", sinks)
                case.phases.begin("after")
                published = publishing.done()
            with suppress(TimeoutError):
                every = len(sinks) * len(published)
                wait_until(lambda: endpoint.received() >= every, "every event", 120)
            case.wait_applied(len(published))
            sent = case.sent(published, "busy")
            arrived = {
                (sink, number): clock
                for sink, number, clock in reversed(endpoint.arrived())
                if number in sent
            }
            of_all = {(sink, number): clock for sink in sinks for number, clock in sent.items()}
            figures |= {
                **latencies(sent, case.effects(), warm_up_ns=0),
                **latencies(of_all, arrived, "http ", warm_up_ns=0),
                "missing": float(len(of_all.keys() - arrived.keys())),
                "left the stream": left,
                **peaks(case, "busy"),
            }
        return figures

    few, many = "relay, 3 sinks", "relay, 32 sinks, one slow, one hanging"
    yield Workload(
        "endurance-sinks-busy",
        f"{rate} transactions/s of one event for {seconds:.0f} s, to a projection and all sinks, milliseconds",
        [
            Contender(few, lambda: measure(3, ill=False), 1, few),
            Contender(many, lambda: measure(30, ill=True), 1, few),
        ],
        [Goal(many, "p50", 2, few), Goal(many, "left the stream", 0)],
    )


def poll_sinks(plan: Plan) -> Iterator[Workload]:
    """Polling with many sinks: their connections."""
    rate, seconds = 100, 8.0 if plan.quick else 30.0

    def measure() -> Measurement:
        outbox = new_outbox(plan, "endurance-poll-sinks")
        endpoint = Endpoint(plan.folder, plan.folder / f"{outbox.name}.arrived")
        sinks = _many_sinks(endpoint, 32)
        endpoints = dict.fromkeys(sinks, endpoint)
        handlers = {PROJECTION: STATEMENTS["each: event"], **sinks}
        case = Case(outbox, plan.folder, handlers, endpoints, mode="poll")
        with case.running(), case.publishing(rate, seconds) as publishing:
            case.phases.begin("busy")
            published = publishing.done()
            wait_until(
                lambda: endpoint.received() >= len(sinks) * len(published), "every event", 120
            )
            arrived = {
                (sink, number): clock for sink, number, clock in reversed(endpoint.arrived())
            }
            of_all = {
                (sink, number): clock for sink in sinks for number, clock in published.items()
            }
            return {**latencies(of_all, arrived, "http "), **peaks(case, "busy")}

    row = "relay, 32 sinks"
    yield Workload(
        "endurance-poll-sinks",
        f"mode poll, {rate} transactions/s of one event for {seconds:.0f} s, milliseconds",
        [Contender(row, measure, 1)],
        [Goal(row, "connections", 16)],
    )


DUE = """
    insert into outbox_message_t (host_id, aggregate_type, aggregate_id, event_type, payload, transaction_id,
                                  transaction_ordinal, transaction_count, deliver_at)
    select ('00000000-0000-4000-8000-' || lpad((n %% 64)::text, 12, '0'))::uuid, 'Order', n::text, 'order.placed',
           jsonb_build_object('amount', n, 'note', repeat('x', %s)), gen_random_uuid(), 1, 1, %s
      from generate_series(1, %s) as n
"""


def due(plan: Plan) -> Iterator[Workload]:
    """Events that fall due at the same time: their payloads, and their number."""
    fraction = 10 if plan.quick else 1
    payloads, deliveries = 600 // fraction, 20_000 if plan.quick else 100_000
    rows: dict[str, tuple[str, int, int]] = {}
    for kind in ("the target", "a sink"):
        for count in (payloads // 4, payloads):
            rows[f"relay, {count} MB to {kind}"] = (kind, count, 1_000_000)
    for count in (deliveries // 4, deliveries):
        rows[f"relay, {count:,} deliveries to a sink"] = ("a sink", count, 100)

    def measure(kind: str, count: int, size: int) -> Measurement:
        outbox = new_outbox(plan, "endurance-due")
        endpoint = Endpoint(plan.folder, plan.folder / f"{outbox.name}.arrived")
        sink = kind == "a sink"
        handler = endpoint.handler_of("sink") if sink else STATEMENTS["each: event"]
        case = Case(
            *(outbox, plan.folder, {"sink": handler}, {"sink": endpoint} if sink else {}),
            awaited=["sink"] if sink else [],
        )
        with case.running(samples=False):
            case.wait_streaming()
            tomorrow = datetime.now(UTC) + timedelta(days=1)
            outbox.conn.execute(DUE.encode(), (size, tomorrow, count))
            wait_until(lambda: case.deferred() == count, "all are scheduled", 600)
            process = case.instances[0].process
            assert process is not None
            before = case.instances[0].resident
            started = time.monotonic()
            with Footprint(process.pid) as footprint:
                case.command("deferred", "run", "--all", "--yes")
                received = endpoint.received if sink else case.applied
                over = wait_until(lambda: received() >= count, "all are delivered", 900, process)
        peak = footprint.peaks["driver MiB"]
        return {"delivered s": over - started, "before MiB": before, "peak MiB": peak}

    names = list(rows)
    yield Workload(
        "endurance-due",
        "events of 1 MB, and small ones, that fall due at the same time",
        [Contender(row, lambda of=of: measure(*of), 1) for row, of in rows.items()],  # type: ignore[misc]
        [
            Goal(more, "peak MiB", FLAT, fewer)
            for fewer, more in zip(names[::2], names[1::2], strict=True)
        ],
    )


def replay(plan: Plan) -> Iterator[Workload]:
    """The dead letters of a sink are replayed beside live events of the same hosts."""
    dead, rate, seconds = (1_000, 100, 8.0) if plan.quick else (10_000, 100, 30.0)

    def measure() -> Rows:
        outbox = new_outbox(plan, "endurance-replay")
        endpoint = Endpoint(plan.folder, plan.folder / f"{outbox.name}.arrived", status=400)
        case = Case(
            *(outbox, plan.folder, {"sink": endpoint.handler_of("sink")}, {"sink": endpoint}),
            awaited=["sink"],
            dead_letters={"brake": 0},
        )
        with case.running():
            fill(outbox.conn, dead, events=1)
            wait_until(lambda: case.dead() == dead, "all are dead-lettered")
            endpoint.stop()
            endpoint.start(status=204)
            case.number_from(dead + 1)
            with case.publishing(rate, 900) as publishing:
                time.sleep(3)
                case.phases.begin("before")
                time.sleep(seconds)
                case.phases.begin("meanwhile")
                started = time.monotonic()
                case.command("dlq", "replay", "--all", "--yes")
                wait_until(lambda: not case.dead("replaying"), "all are replayed", 600)
                took = time.monotonic() - started
                case.phases.begin("after")
                published = publishing.end()
            time.sleep(3)
            rows = {
                f"live, {phase}": case.latencies(published, "sink", phase)
                for phase in ("before", "meanwhile")
            }
            rows["live, meanwhile"] |= {"replayed s": took, "dead again": float(case.dead())}
        return rows

    together = Together(measure)
    yield Workload(
        "endurance-replay",
        f"{dead:,} dead letters of a sink replayed beside {rate} transactions/s of the same hosts, milliseconds",
        [together.contender(f"live, {phase}") for phase in ("before", "meanwhile")],
        [
            Goal("live, meanwhile", "p50", 2_000),
            Goal("live, meanwhile", "p99", 2_000),
            Goal("live, meanwhile", "dead again", 0),
        ],
    )


def dead_letters(plan: Plan) -> Iterator[Workload]:
    """Dead letters are written, and replayed."""
    dead = 1_000 if plan.quick else 10_000

    def measure(sink: bool) -> Measurement:
        outbox = new_outbox(plan, "endurance-dead-letters")
        endpoint = Endpoint(plan.folder, plan.folder / f"{outbox.name}.arrived", status=400)
        handler = endpoint.handler_of("handler") if sink else STATEMENTS["each: event"]
        case = Case(
            *(outbox, plan.folder, {"handler": handler}, {"handler": endpoint} if sink else {}),
            awaited=["handler"] if sink else [],
            dead_letters={"brake": 0},
        )
        outbox.conn.execute("alter table projection add constraint refuses check (amount < 0)")
        with case.running(samples=False):
            case.wait_streaming()
            started = time.monotonic()
            fill(outbox.conn, dead, events=1)
            written = wait_until(lambda: case.dead() == dead, "all are dead-lettered") - started
            outbox.conn.execute("alter table projection drop constraint refuses")
            if sink:
                endpoint.stop()
                endpoint.start(status=204)
            started = time.monotonic()
            case.command("dlq", "replay", "--all", "--yes")
            over = wait_until(lambda: not case.dead("replaying"), "all are replayed")
            replayed = over - started
            done = endpoint.received() if sink else case.applied()
        return {"written s": written, "replayed s": replayed, "missing": float(dead - done)}

    rows = {"relay, of a sink": True, "relay, of the target": False}
    yield Workload(
        "endurance-dead-letters",
        f"{dead:,} dead letters",
        [Contender(row, lambda of=of: measure(of), 1) for row, of in rows.items()],  # type: ignore[misc]
        [Goal(row, figure, 5) for row in rows for figure in ("written s", "replayed s")],
    )


def throughput(plan: Plan) -> Iterator[Workload]:
    """A sink beside a plain loop over its client."""
    for kind, workload in sink_workloads.BACKLOGS.items():
        yield from workload(plan, f"endurance-throughput-{kind}", at_least=0.8)


def retention(plan: Plan) -> Iterator[Workload]:
    """Retention by DELETE while a snapshot is held."""
    sizes = (25_000, 100_000) if plan.quick else (250_000, 1_000_000)

    def measure(rows: int) -> Measurement:
        outbox = new_outbox(plan, "endurance-retention")
        fill(outbox.conn, rows // 100, events=100)
        settings = Settings(
            **outbox.config(outbox.new_name(), "poll", retention={"keep": "1m"}, unrouted="ignore")
        )
        initialise(settings)
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        schedule = Schedule(settings, lambda: None, lambda _: tomorrow)
        with (
            held_snapshot(outbox.dsn),
            connect(settings.source_dsn) as source,
            connect(settings.target_dsn) as target,
        ):
            started = time.monotonic()
            schedule.retain(source, target)
            took = time.monotonic() - started
        left = int(outbox.value("select count(*) from outbox_message_t"))
        if left:
            raise AssertionError(f"{left} of {rows} rows were not removed")
        return {"s": took, "s for 100,000 rows": took / rows * 100_000}

    names = {f"relay, {rows:,} rows": rows for rows in sizes}
    fewer, more = names
    yield Workload(
        "endurance-retention",
        "events removed by DELETE while a snapshot is held",
        [Contender(row, lambda of=of: measure(of), 1, fewer) for row, of in names.items()],  # type: ignore[misc]
        [Goal(more, "s for 100,000 rows", 1.25, fewer)],
    )


def live_latencies(plan: Plan) -> Iterator[Workload]:
    """A publisher at a fixed rate, beside a plain loop."""
    outbox = new_outbox(plan, "endurance-live")
    seconds = 8 if plan.quick else 20
    plain, none, durable = "psycopg2 loop", "relay, no effect", "relay, durable effect"
    consumers: dict[str, live.Consumer] = {
        plain: Psycopg2Loop(),
        none: Relay("", NOTE),
        durable: Relay("", NOTE_AND_INSERT),
    }
    for rate, limits in ((200, (2.0, 3.0)), (1_000, (3.0, 8.0))):
        rows = [
            Contender(
                name,
                lambda of=of, rate=rate: live.measure(of, outbox, plan.folder, rate, seconds),  # type: ignore[misc]
                plan.often(expensive=True),
                plain,
                of.unavailable(),
            )
            for name, of in consumers.items()
        ]
        yield Workload(
            f"endurance-live-{rate}",
            f"{rate:,} transactions/s of 5 events for {seconds} s, milliseconds",
            rows,
            [
                Goal(row, figure, limit, plain)
                for row, limit in zip((none, durable), limits, strict=True)
                for figure in ("p50", "p99")
            ],
        )


def observed(plan: Plan) -> Iterator[Workload]:
    """A drain into a table, with and without metrics."""
    transactions = 8_000 if plan.quick else 40_000
    outbox = new_outbox(plan, "endurance-observed")
    backlog = outbox.publish(transactions)
    without, with_metrics = "relay inline, each: batch", "relay inline, each: batch, metrics"
    handler = STATEMENTS["each: batch"]
    relays = {without: Relay("", handler), with_metrics: Relay("", handler, observed=True)}

    def drain(relay: Relay) -> Measurement:
        return relay.drain_measured(outbox, backlog, plan.folder)

    yield Workload(
        "endurance-observed",
        f"{backlog.events:,} events in {transactions:,} commits",
        [
            Contender(name, lambda of=of: drain(of), 2 if plan.quick else 9, without)  # type: ignore[misc]
            for name, of in relays.items()
        ],
        [
            Goal(with_metrics, "events/s", 0.98, without, at_least=True),
            Goal(with_metrics, "its CPU, µs/event", 1.02, without),
        ],
    )
