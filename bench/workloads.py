"""The workloads: the contenders of each, and their set-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bench import (
    client,
    delta,
    endurance,
    endurance_week,
    live,
    memory,
    outage_workloads,
    queue_rows,
    queues,
    readers,
    sagas,
    scheduled,
    schedules,
    sink_workloads,
    spark_work,
    subscribers,
)
from bench.backlog import STATEMENTS
from bench.live import Consumer
from bench.outbox import Backlog, Outbox
from bench.peers import Peer
from bench.peers.debezium import Debezium
from bench.peers.pgqueuer import TUNED_BATCH, PgQueuer
from bench.peers.psycopg2_loop import Psycopg2Loop
from bench.peers.recvlogical import Recvlogical
from bench.peers.subscription import Subscription
from bench.peers.transactional_outbox import TransactionalOutbox
from bench.plan import Plan
from bench.publishing import CREATE_PLAIN_TABLE, PLAIN_TABLE, RELAY_TABLE, Publishers
from bench.relaying import COMPUTE, NOTE, NOTE_AND_INSERT, NOTHING, WAIT, Relay
from bench.results import Contender, Measurement, Workload
from bench.spark_reading import SparkReading

BATCH, EVENT = STATEMENTS["each: batch"], STATEMENTS["each: event"]
DEFAULT_CONFIGURATION: dict[str, int] = {}
MANY = 64
"""Partitions for 64 hosts. With 8, one has twice the hosts of another, and the longest task determines a batch."""
INSERT_SELECT = """
    insert into projection select id, host_id, user_id, aggregate_id, (payload->>'amount')::numeric, payload
    from outbox_message_t
"""


def _drain(
    plan: Plan,
    name: str,
    peers: Sequence[tuple[Peer, bool]],
    against: Peer,
    effect: bool,
) -> Iterator[Workload]:
    transactions = 8_000 if plan.quick else 40_000
    outbox = Outbox(plan.cluster, name.replace("-", "_"))
    backlog = outbox.publish(transactions)

    def contender(peer: Peer, expensive: bool) -> Contender:
        return Contender(
            peer.name,
            lambda: {"events/s": peer.drain(outbox, backlog, plan.folder, effect)},
            plan.often(expensive),
            against.name,
            peer.unavailable(),
        )

    chosen = [
        contender(peer, expensive) for peer, expensive in peers if plan.takes(name, peer.name)
    ]
    yield Workload(name, f"{backlog.events:,} events in {transactions:,} commits", chosen)


def drain_noop(plan: Plan) -> Iterator[Workload]:
    """A backlog to a handler that does nothing."""
    peers: list[tuple[Peer, bool]] = [
        (Recvlogical(), False),
        (Psycopg2Loop(), False),
        (Debezium(tuned=False), True),
        (Debezium(tuned=True), True),
        (PgQueuer("default batch"), True),
        (PgQueuer(f"batch of {TUNED_BATCH}", TUNED_BATCH), True),
        (TransactionalOutbox(tuned=False), True),
        (TransactionalOutbox(tuned=True), True),
        (Relay("relay inline", NOTHING), False),
        (Relay("relay inline, metrics", NOTHING, observed=True), False),
        (Relay("relay on Spark", NOTHING, spark=True), True),
    ]
    return _drain(plan, "drain-noop", peers, Recvlogical(), effect=False)


def drain_apply(plan: Plan) -> Iterator[Workload]:
    """A backlog into a table, a row for each event; every commit is durable, except in one of the subscriptions."""
    peers: list[tuple[Peer, bool]] = [
        (Subscription("on"), False),
        (Subscription("off"), False),
        (Psycopg2Loop(), True),
        (Debezium(tuned=True), True),
        (Relay("relay inline, each: event", EVENT), False),
        (Relay("relay inline, each: batch", BATCH), False),
        (Relay("relay inline, each: batch, metrics", BATCH, observed=True), False),
        (Relay("relay on Spark, each: event", EVENT, spark=True), True),
        (Relay("relay on Spark, each: batch", BATCH, spark=True), True),
    ]
    return _drain(plan, "drain-apply", peers, Subscription("on"), effect=True)


def live_streams(plan: Plan) -> Iterator[Workload]:
    """A publisher at a fixed rate: the latency from its COMMIT to the handler, and to the commit of the effect."""
    outbox = Outbox(plan.cluster, "live")
    plain, durable = "psycopg2 loop", "psycopg2 loop, durable effect"
    rows: list[tuple[str, Consumer, str]] = [
        (plain, Psycopg2Loop(), plain),
        ("Debezium, defaults", Debezium(tuned=False), plain),
        ("Debezium, tuned", Debezium(tuned=True), plain),
        ("pg-transactional-outbox, tuned", TransactionalOutbox(tuned=True), plain),
        ("pgqueuer, no effect", PgQueuer("", batch_size=100), plain),
        ("relay, no effect", Relay("", NOTE), plain),
        ("pgqueuer, durable effect, default batch", PgQueuer("", effect=True), durable),
        (
            "pgqueuer, durable effect, batch of 100",
            PgQueuer("", batch_size=100, effect=True),
            durable,
        ),
        (durable, Psycopg2Loop(effect=True), durable),
        ("relay, durable effect", Relay("", NOTE_AND_INSERT), durable),
        ("relay, durable effect, metrics", Relay("", NOTE_AND_INSERT, observed=True), durable),
    ]
    seconds = 8 if plan.quick else 20

    def row(name: str, consumer: Consumer, against: str, rate: int) -> Contender:
        return Contender(
            name,
            lambda: live.measure(consumer, outbox, plan.folder, rate, seconds),
            plan.often(expensive=True),
            against,
            consumer.unavailable(),
        )

    for rate in (200,) if plan.quick else (200, 1_000):
        workload = f"live-{rate}"
        chosen = [row(*each, rate) for each in rows if plan.takes(workload, each[0])]
        size = f"{rate:,} transactions/s of 5 events for {seconds} s, milliseconds"
        yield Workload(workload, size, chosen)


def catch_up(plan: Plan) -> Iterator[Workload]:
    """Rows that are older than the slot, which relay polls from the first one on."""
    transactions = 10_000 if plan.quick else 200_000
    outbox = Outbox(plan.cluster, "catch_up")
    events = outbox.publish(transactions).events
    relay = Relay("relay on Spark, each: batch", BATCH, spark=True)
    statement = "insert … select, one statement"

    def insert_select() -> Measurement:
        outbox.conn.execute("truncate projection")
        started = time.monotonic()
        outbox.conn.execute(INSERT_SELECT)
        return {"events/s": events / (time.monotonic() - started)}

    def poll() -> Measurement:
        group = outbox.new_name()
        return {"events/s": relay.catch_up(outbox, group, events, plan.folder)}

    rows = [
        Contender(statement, insert_select, plan.rounds, statement),
        Contender(relay.name, poll, plan.often(expensive=True), statement),
    ]
    yield Workload("catch-up", f"{events:,} rows", rows)


def memory_and_start(plan: Plan) -> Iterator[Workload]:
    """Resident memory under load, with one very large commit, and idle; seconds to the first event."""
    outbox = Outbox(plan.cluster, "memory")
    backlog = outbox.publish(8_000 if plan.quick else 40_000)
    large = outbox.publish(100 if plan.quick else 1_000, events=1_000, one_commit=True)
    one = outbox.publish(1)
    inline, spark = Relay("", NOTHING), Relay("", NOTHING, spark=True)
    default = Relay("", NOTHING, batch=DEFAULT_CONFIGURATION)
    folder, seconds = plan.folder, 5 if plan.quick else 10
    many, huge = f"{backlog.events:,} events", f"one commit of {large.events:,} events"
    rows: dict[str, Callable[[], Measurement]] = {
        f"relay inline, {many}": lambda: memory.draining(inline, outbox, backlog, folder),
        f"relay on Spark, {many}": lambda: memory.draining(spark, outbox, backlog, folder),
        f"relay inline, {huge}": lambda: memory.draining(inline, outbox, large, folder),
        f"relay as configured by default, {huge}": lambda: memory.draining(
            default, outbox, large, folder
        ),
        "relay inline, idle": lambda: memory.idle(inline, outbox, folder, seconds),
        "relay as configured by default, idle": lambda: memory.idle(
            default, outbox, folder, seconds
        ),
        "relay inline, start": lambda: memory.first_event(Relay("", NOTE), outbox, one, folder),
        "relay on Spark, start": lambda: memory.first_event(
            Relay("", NOTE, spark=True), outbox, one, folder
        ),
    }
    # Memory hardly differs from round to round.
    contenders = [
        Contender(name, run, rounds=1) for name, run in rows.items() if plan.takes("memory", name)
    ]
    yield Workload("memory", "resident set, peaks of samples 0.1 s apart", contenders)


def scale(plan: Plan) -> Iterator[Workload]:
    """The same work on one to eight Spark slots: bound by the machine, and bound by waiting."""
    slots = (1, 4) if plan.quick else (1, 2, 4, 8)
    # A database for each, so that no drain continues into the other backlog.
    busy_outbox, waiting_outbox = Outbox(plan.cluster, "busy"), Outbox(plan.cluster, "waiting")
    busy = busy_outbox.publish(8_000 if plan.quick else 40_000)
    waiting = waiting_outbox.publish(800 if plan.quick else 4_000, events=1)

    def row(
        name: str, handler: dict[str, str], outbox: Outbox, backlog: Backlog, number: int
    ) -> Contender:
        relay = Relay(f"{name}, {number}", handler, True, f"local[{number}]", partitions=MANY)
        return Contender(
            relay.name,
            lambda: {"events/s": relay.drain(outbox, backlog, plan.folder, handler is BATCH)},
            plan.often(expensive=True),
            f"{name}, {slots[0]}",
        )

    apply, wait = "relay on Spark, each: batch, slots", "relay on Spark, 5 ms a transaction, slots"
    rows = [row(wait, WAIT, waiting_outbox, waiting, number) for number in slots]
    if not plan.quick:
        rows = [*(row(apply, BATCH, busy_outbox, busy, number) for number in slots), *rows]
    size = f"{busy.events:,} events into a table; {waiting.events:,} transactions of one event, 5 ms each"
    yield Workload("scale", size, rows)


def scale_cluster(plan: Plan) -> Iterator[Workload]:
    """One to eight executors of one core, processes as on a cluster: bound by waiting, and by CPU."""
    waiting_outbox, busy_outbox = Outbox(plan.cluster, "waits"), Outbox(plan.cluster, "computes")
    waiting = waiting_outbox.publish(800 if plan.quick else 4_000, events=1)
    busy = busy_outbox.publish(400 if plan.quick else 2_000, events=1)

    def row(
        name: str, handler: dict[str, str], outbox: Outbox, backlog: Backlog, number: int
    ) -> Contender:
        master = f"local-cluster[{number},1,1024]"
        relay = Relay(f"{name}, {number}", handler, True, master, partitions=MANY)
        return Contender(
            relay.name,
            lambda: {"events/s": relay.drain(outbox, backlog, plan.folder, effect=False)},
            plan.often(expensive=True),
            f"{name}, 1",
        )

    wait, compute = (
        "5 ms of waiting a transaction, executors",
        "5 ms of CPU a transaction, executors",
    )
    rows = [row(f"relay, {wait}", WAIT, waiting_outbox, waiting, each) for each in (1, 2, 4, 8)]
    rows += [row(f"relay, {compute}", COMPUTE, busy_outbox, busy, each) for each in (1, 2)]
    size = f"{waiting.events:,} transactions that wait, {busy.events:,} that compute"
    yield Workload("scale-cluster", size, rows)


def publish(plan: Plan) -> Iterator[Workload]:
    """The cost of relay for publishers: its outbox beside the same table without relay, without and with other work."""
    outbox = Outbox(plan.cluster, "publish")
    outbox.conn.execute(CREATE_PLAIN_TABLE)
    # The installation's slot, which has no reader, would retain all WAL.
    outbox.drop(f"{outbox.name}_base")
    plain = "plain table"
    tables = {
        plain: (PLAIN_TABLE, False),
        "relay's outbox": (RELAY_TABLE, False),
        "relay's outbox, offsets: gapless": (RELAY_TABLE, True),
    }
    seconds = 2 if plan.quick else 5

    def row(name: str, table: str, gapless: bool, clients: int, work_ms: int) -> Contender:
        publishers = Publishers(clients, work_ms, seconds)
        return Contender(
            f"{name}, clients: {clients}",
            lambda: publishers.measure(outbox, table, plan.folder, gapless),
            plan.often(expensive=True),
            f"{plain}, clients: {clients}",
        )

    for work_ms in (0, 5):
        rows = [
            row(name, *kind, clients, work_ms)
            for clients in ((1, 32) if plan.quick else (1, 8, 32, 64))
            for name, kind in tables.items()
        ]
        work = f", {work_ms} ms of work after the insert" if work_ms else ""
        size = f"one event a transaction{work}, {seconds} s a round"
        yield Workload(f"publish-{work_ms}ms" if work_ms else "publish", size, rows)


def spark_read(plan: Plan) -> Iterator[Workload]:
    """The whole outbox into Spark, which discards the rows."""
    transactions = 10_000 if plan.quick else 200_000
    outbox = Outbox(plan.cluster, "spark_read")
    events = outbox.publish(transactions).events
    outbox.conn.execute("create index on outbox_message_t (c_xid)")
    outbox.conn.execute("vacuum analyze outbox_message_t")
    against = "spark.read.jdbc"
    kinds = {
        against: "jdbc",
        'format("outbox")': "hosts",
        'format("outbox"), ordered: false': "ranges",
        'format("outbox"), AvailableNow, ordered: false': "stream",
        "relay.spark.read": "read",
        "spark.read.jdbc, two columns": "jdbc-two",
        "relay.spark.read, two columns": "read-two",
        'format("outbox"), ordered: false, two columns': "ranges-two",
    }

    def row(name: str, reading: SparkReading) -> Contender:
        return Contender(
            name,
            lambda: reading.read(outbox, events),
            plan.often(expensive=True),
            against,
            reading.unavailable(),
        )

    rows = [row(name, SparkReading(kind)) for name, kind in kinds.items()]
    yield Workload("spark-read", f"{events:,} rows, two tasks", rows)


def delta_table(plan: Plan) -> Iterator[Workload]:
    """Events from memory into a new Delta table."""
    outbox = Outbox(plan.cluster, "delta")
    outbox.publish(10_000 if plan.quick else 100_000)
    file = plan.folder / "events.parquet"
    events = delta.export(outbox, file)
    against = "deltalake.write_deltalake"
    kinds = {against: "deltalake", "relay on Spark, two tasks": "relay"}

    def row(name: str, kind: str) -> Contender:
        return Contender(
            name,
            lambda: delta.write(kind, file, events),
            plan.often(expensive=True),
            against,
        )

    rows = [row(name, kind) for name, kind in kinds.items()]
    yield Workload("delta", f"{events:,} events", rows)


def client_publish(plan: Plan) -> Iterator[Workload]:
    """Transactions of one event, as services publish, and of 10,000 events."""
    outbox = Outbox(plan.cluster, "client")
    few = 500 if plan.quick else 3_000
    for name, transactions, events in (("client-one", few, 1), ("client-many", 3, 10_000)):
        rows = []
        for driver in ("psycopg", "SQLAlchemy", "asyncpg"):
            against = f"{driver}, insert by hand"
            for kind in (against, f"{driver}, relay.client"):
                measured = partial(
                    client.measure, outbox, driver, kind == against, transactions, events
                )
                rows.append(Contender(kind, measured, plan.rounds, against))
        size = f"{transactions:,} transactions of {events:,} events, in one session"
        yield Workload(name, size, rows)


WORKLOADS: dict[str, Callable[[Plan], Iterator[Workload]]] = {
    "drain-noop": drain_noop,
    "drain-apply": drain_apply,
    "live": live_streams,
    "catch-up": catch_up,
    "memory": memory_and_start,
    "scale": scale,
    "scale-cluster": scale_cluster,
    "publish": publish,
    "client": client_publish,
    "queues": queues.queues,
    "queues-live": queue_rows.live_messages,
    "queues-failing": queue_rows.failing_keys,
    "queues-filling": queue_rows.filling,
    "queues-held": queue_rows.held,
    "queues-idle": queue_rows.idle,
    "sagas": sagas.sagas,
    "readers-drain": readers.drain,
    "readers-pages": readers.pages,
    "readers-held": readers.held,
    "readers-live": readers.latencies,
    "readers-idle": readers.idle,
    "scheduled": scheduled.scheduled,
    "readers-many": subscribers.many,
    "schedules": schedules.schedules,
    "spark-read": spark_read,
    "delta": delta_table,
    "spark-work-waits": spark_work.waits,
    "spark-work-computes": spark_work.computes,
    "spark-work-large": spark_work.large,
    "spark-work-catch-up": spark_work.catch_up,
    "spark-work-delta": spark_work.to_delta,
    "sinks-function": sink_workloads.sinks_function,
    "sinks-function-waits": sink_workloads.sinks_function_waits,
    "sinks-http": sink_workloads.sinks_http,
    "sinks-redis": sink_workloads.sinks_redis,
    "sinks-nats": sink_workloads.sinks_nats,
    "sinks-rabbitmq": sink_workloads.sinks_rabbitmq,
    "sinks-live": sink_workloads.sinks_live,
    "outage-down": outage_workloads.outage_down,
    "outage-kills": outage_workloads.outage_kills,
    "outage-standby": outage_workloads.outage_standby,
    "outage-rebuild": outage_workloads.outage_rebuild,
    "outage-hanging": outage_workloads.outage_hanging,
    "endurance-held-target": endurance.held_target,
    "endurance-held-state": endurance.held_state,
    "endurance-held-source": endurance.held_source,
    "endurance-sinks-idle": endurance.sinks_idle,
    "endurance-sinks-busy": endurance.sinks_busy,
    "endurance-poll-sinks": endurance.poll_sinks,
    "endurance-due": endurance.due,
    "endurance-replay": endurance.replay,
    "endurance-dead-letters": endurance.dead_letters,
    "endurance-throughput": endurance.throughput,
    "endurance-retention": endurance.retention,
    "endurance-live": endurance.live_latencies,
    "endurance-observed": endurance.observed,
    "endurance-week": endurance_week.week,
}

LONG = tuple(
    name for name in WORKLOADS if name.startswith(("outage-", "endurance-", "spark-work-"))
)
"""The workloads that take long, and run only if they are named."""

QUICK = tuple(
    name
    for name in WORKLOADS
    if name not in ("scale", "scale-cluster", "spark-read", "delta", *LONG)
    and not name.startswith("sinks-")
)
"""The workloads of a quick run that names none. Without `scale`: each of its rows starts a Spark session."""
