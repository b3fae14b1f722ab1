"""Values that PostgreSQL has and Python has not, in each column that others write and relay reads.

Reports: psycopg/psycopg#315 and #1251 (infinity cannot be loaded), psycopg/psycopg2#1307 (years above 9999),
FuzzyGrim/Yamtrack#1662 (the year 1 in a zone east of UTC: a container that never starts),
ansible-collections/community.postgresql#714 (one role that is valid for ever fails the list of all),
pgpartman/pg_partman#519 and #769 and pgEdge/coldfront#68 (bounds of partitions: maintenance of all tables ends).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from relay.admin import endpoints, queues, readers, schedules, status
from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.admin.retention import partition
from relay.client.reader import subscribe
from relay.client.worker import Worker
from relay.config.settings import Settings
from relay.model.json_fields import json_fields
from relay.model.moments import EARLIEST, LATEST, moment_of
from relay.retention import partitions
from relay.retention.schedule import Schedule
from relay.store.connections import connect
from relay.store.dead_letters import selection as dead_letters
from relay.store.dead_letters.selection import DeadLetterSelection, DeadTransaction
from relay.store.deferred import selection as deferred
from relay.store.filters import DeferredSelection
from relay.store.queues import MessageSelection
from tests.outbox import DEFER, Outbox, event, host, relaying, wait_until
from tests.webhook import Webhook
from tests.workers import working

TIMES = ["infinity", "-infinity", "12026-01-01 00:00Z", "0044-03-15 00:00Z BC"]

COLUMNS = [
    ("relay.queue_messages", "available_at"),
    ("relay.queue_messages", "event_ts"),
    ("relay.queue_messages", "enqueued_at"),
    ("relay.queue_messages", "first_taken_at"),
    ("relay.queue_dead_letters", "event_ts"),
    ("relay.queues", "paused_at"),
    ("relay.queues", "stopped_at"),
    ("relay.endpoints", "failing_since"),
    ("relay.endpoints", "disabled_at"),
    ("relay.endpoints", "changed_at"),
    ("relay.schedules", "due_at"),
    ("relay.schedules", "next_at"),
    ("relay.schedules", "passed_at"),
    ("relay.schedules", "since"),
    ("relay.deferred", "retry_at"),
    ("relay.deferred", "first_failed_at"),
    ("relay.dead_letter_queue", "event_ts"),
    ("public.outbox_message_t", "event_ts"),
    ("public.outbox_message_t", "deliver_at"),
    ("relay.api_tokens", "expires_at"),
]
INTERVALS = [
    ("relay.log_readers", "expires"),
    ("relay.log_readers", "max_lag"),
    ("relay.queues", "backoff"),
    ("relay.queues", "max_backoff"),
    ("relay.queues", "keep_done"),
]


@pytest.fixture
def full(outbox: Outbox) -> Outbox:
    """An outbox with a row in each of the tables."""
    conn = outbox.conn
    conn.execute("select relay.declare_queue('mail', null)")
    conn.execute("select relay.enqueue('mail', '{}')")
    conn.execute("select relay.enqueue('mail', '{}')")
    conn.execute("select relay.fail('mail', id, attempt) from relay.lease('mail')")
    conn.execute("select relay.declare_reader('r')")
    conn.execute(
        "select relay.declare_schedule('s', jsonb_build_object('host_id', %s::text, 'event_type', 'e'),"
        " every => '1 hour')",
        (str(host(1)),),
    )
    outbox.publish(host(1), event(1))
    outbox.publish(host(2), event(-1))
    with relaying(outbox.settings()):
        outbox.wait_handled()
    conn.execute(DEFER, ("default", [str(host(3))]))
    conn.execute(
        "insert into relay.endpoints (group_id, sink, endpoint, address, failing_since)"
        " values ('default', 'hook', 'e', 'http://a', now())"
    )
    return outbox


def _list_all(settings: Settings) -> None:
    """Look at everything that has such a column."""
    queue, messages = queues.shown(settings, "mail", MessageSelection(), 10)
    assert json_fields(queue)
    assert [json_fields(each) for each in messages]
    assert [json_fields(each) for each in endpoints.listed(settings)]
    assert [(each.when, each.state, each.begins) for each in schedules.listed(settings)]
    found = readers.listed(settings)
    assert [json_fields(each) for each in found]
    readers.summed(found)
    with connect(settings.target_dsn) as target:
        deferred.listed(target, "default", DeferredSelection(), 10)
        deferred.count(target, "default")
        dead_letters.listed(target, "default", DeadLetterSelection(), 10, DeadTransaction)
    assert status.read(settings).as_json()
    with connect(settings.source_dsn) as source:
        source.execute("select * from relay.api_tokens").fetchall()


@contextmanager
def _changed(outbox: Outbox, table: str, column: str) -> Iterator[Callable[[str], None]]:
    """Yield what gives all rows a value in a column; it is one that was there before at the end."""
    former = outbox.value(f"select min({column})::text from {table}")

    def change(value: str | None) -> None:
        outbox.conn.execute(f"update {table} set {column} = %s".encode(), (value,))

    try:
        yield change
    finally:
        change(former)


@pytest.mark.timeout(900)
def test_a_time_that_python_has_not_hides_nothing(full: Outbox, subtests: pytest.Subtests) -> None:
    settings = full.settings()
    for table, column in COLUMNS:
        with subtests.test(f"{table}.{column}"), _changed(full, table, column) as change:
            for value in TIMES:
                change(value)
                _list_all(settings)
            faults = [each.text for each in examine(settings) if each.level is Severity.ERROR]
            assert not faults


def test_an_interval_that_python_has_not_hides_nothing(
    full: Outbox, subtests: pytest.Subtests
) -> None:
    settings = full.settings()
    for table, column in INTERVALS:
        with subtests.test(f"{table}.{column}"), _changed(full, table, column) as change:
            change("170000000 years")
            _list_all(settings)
            retention = Schedule(settings, lambda: None)
            with connect(settings.source_dsn) as source, connect(settings.target_dsn) as target:
                retention.retain(source, target)


@pytest.mark.parametrize("option", ["expires", "max_lag"])
def test_the_interval_of_a_reader_is_bounded(outbox: Outbox, option: str) -> None:
    """now() - expires is out of range for the server, too: no reader of anybody expired."""
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="36500 days"):
        outbox.reader.execute(
            f"select relay.declare_reader('r', {option} => '40000 days')".encode()
        )


@pytest.mark.parametrize("value", TIMES)
def test_events_of_such_a_time_reach_whoever_does_not_look_at_it(
    outbox: Outbox, value: str
) -> None:
    """Readers, workers and handlers that never look at event_ts go on; for a worker it is the nearest of Python's."""
    outbox.worker.execute("select relay.declare_queue('mail')")
    outbox.reader.execute("select relay.declare_reader('r')")
    with relaying(outbox.settings()):
        outbox.publish(host(1), event(1, event_ts=value))
        outbox.publish(host(1), event(2))
        outbox.wait_handled()
    outbox.assert_exact()
    reader: Any = subscribe(outbox.reader_dsn, "r", poll=0.02)
    seen: list[Any] = []
    with closing(iter(reader)) as transactions:
        for transaction in transactions:
            seen += [each.payload["amount"] for each in transaction.events]
            transaction.done()
            if len(seen) == 2:
                break
    assert seen == [1, 2]
    worked: list[datetime | None] = []
    worker = Worker(outbox.worker_dsn, "mail", poll=0.02)

    @worker.handles()
    def work(message: Any, _: Any) -> None:
        worked.append(message.event_ts)

    with working(worker):
        wait_until(lambda: len(worked) == 2)
    early = value.startswith("-") or value.endswith("BC")
    assert (EARLIEST if early else LATEST) in worked
    assert outbox.value("select count(*) from relay.queue_items") == 0


def test_the_row_of_an_endpoint_may_have_such_values(outbox: Outbox) -> None:
    """A column that no template names made its tenant's events dead letters: `DataError: date too large`."""
    outbox.conn.execute(
        """
        create table hook (url text, day date, at timestamptz, span interval, kind "char", size numeric);
        grant select on hook to public;
        insert into hook
        values ('', 'infinity', '12026-01-01', '170000000 years', 0::"char", repeat('9', 5001)::numeric)
        """
    )
    with Webhook() as webhook:
        outbox.conn.execute("update hook set url = %s", (webhook.url,))
        handler = {
            "type": "http",
            "url": "{endpoint.url}",
            "headers": {"x-day": "{endpoint.day}", "x-span": "{endpoint.span}"},
            "private_addresses": "allow",
            "endpoints": {"select": "select * from hook where %(host_id)s is not null"},
        }
        settings = outbox.settings(handlers={"hook": handler}, routes=[{"handlers": ["hook"]}])
        with relaying(settings):
            outbox.publish(host(1), event(1))
            wait_until(lambda: len(webhook.accepted) == 1)
        sent = webhook.accepted[0].headers
        assert (sent["x-day"], sent["x-span"]) == ("infinity", "170000000 years")
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


@pytest.mark.parametrize("path", ["payload.key", "metadata.key"])
def test_a_key_may_be_the_char_0(outbox: Outbox, path: str) -> None:
    """The type "char" has it, as an empty text: it is a key as any other."""
    conn = outbox.conn
    conn.execute("select relay.declare_queue('mail', key => %s)", (path,))
    with relaying(outbox.settings()):
        keyed = conn.execute(
            "select jsonb_build_object('key', 0::\"char\", 'amount', 1)"
        ).fetchone()
        assert keyed is not None
        outbox.publish(host(1), {**event(1), "payload": keyed[0], "metadata": keyed[0]})
        outbox.wait_handled()
        wait_until(lambda: outbox.value("select count(*) from relay.queue_items") == 1)
    ((key,),) = conn.execute("select key from relay.queue_items").fetchall()
    assert key is not None
    assert outbox.value("select count(*) from relay.take('mail')") == 1


def test_times_are_the_nearest_that_python_has() -> None:
    assert moment_of("2026-01-02 03:04:05+00") == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    # FuzzyGrim/Yamtrack#1662: it can be read, and not be converted to UTC.
    assert moment_of("0001-01-01 00:00:00+00:50:20") == EARLIEST
    with pytest.raises(ValueError, match="Invalid isoformat"):
        moment_of("tomorrow")


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ("minvalue", "'0044-03-15 BC'"),
        ("'0044-03-15 BC'", "'2000-01-03'"),
        ("'12026-01-01'", "'infinity'"),
        ("'12026-01-01'", "maxvalue"),
        ("'-infinity'", "'2000-01-03'"),
    ],
)
def test_partitions_are_made_ahead_beside_one_with_such_a_bound(
    outbox: Outbox, lower: str, upper: str
) -> None:
    """pgpartman/pg_partman#519, #769, pgEdge/coldfront#68: maintenance failed; here no partition was made ahead."""
    settings = outbox.settings(retention={"keep": "7d"})
    partition(settings, "1d", outbox.installer_dsn)
    outbox.conn.execute("drop table outbox_message_t_before")
    outbox.conn.execute(
        f"create table odd partition of outbox_message_t for values from ({lower}) to ({upper})".encode()
    )
    with connect(settings.source_dsn) as source:
        before = {each.name for each in partitions.partitions(source, settings.source.table)}
        assert "public.odd" in before
        newest = [
            each
            for each in partitions.partitions(source, settings.source.table)
            if not each.is_default and each.name != "public.odd"
        ][-1]
        outbox.conn.execute(f"drop table {newest.name}".encode())
        Schedule(settings, lambda: None).retain(source, source)
        found = {each.name for each in partitions.partitions(source, settings.source.table)}
        assert newest.name in found
    faults = [each.text for each in examine(settings) if each.level is Severity.ERROR]
    assert not faults
    status.read(settings).as_json()


def test_where_nothing_waits_nothing_is_late(outbox: Outbox) -> None:
    """The bound of times that Python has not was that of no time at all: minus 8,000 years in an empty queue."""
    outbox.worker.execute("select relay.declare_queue('q', '{}')")
    outbox.reader.execute("select relay.declare_reader('r')")
    assert outbox.worker.column("select oldest_seconds from relay.queue_figures") == [0]
    assert [each.lag_seconds for each in readers.listed(outbox.settings())] == [0]
    outbox.publish(host(1), event())
    with relaying(outbox.settings()):
        outbox.wait_handled()
    for waits in (
        outbox.worker.value("select oldest_seconds from relay.queue_figures"),
        readers.listed(outbox.settings())[0].lag_seconds,
    ):
        assert 0 < waits < 3600
    outbox.worker.execute("select relay.take('q')")
    outbox.reader.execute("select relay.seek('r', 'now')")
    assert outbox.worker.column("select oldest_seconds from relay.queue_figures") == [0]
    assert [each.lag_seconds for each in readers.listed(outbox.settings())] == [0]


@pytest.mark.server(17)
@pytest.mark.parametrize(
    "call",
    [
        "relay.lease('mail', 1, '{0}')",
        "relay.extend('mail', id, attempt, '{0}') from relay.lease('mail')",
        "relay.release('mail', id, attempt, '{0}') from relay.lease('mail')",
        "relay.retry('mail', id, attempt, '{0}') from relay.lease('mail')",
        "relay.declare_queue('more', null, keep_done => '{0}')",
        "relay.declare_queue('more', null, backoff => '{0}')",
        "relay.declare_queue('more', null, max_backoff => '{0}')",
        "relay.declare_reader('more', '{{}}', expires => '{0}')",
        "relay.declare_reader('more', '{{}}', max_lag => '{0}')",
        "relay.declare_subscriber('r', 's', expires => '{0}')",
        'relay.declare_schedule(\'more\', \'{{"host_id": "00000000-0000-4000-8000-000000000001", '
        '"event_type": "t"}}\', every => \'{0}\')',
        'relay.declare_schedule(\'more\', \'{{"host_id": "00000000-0000-4000-8000-000000000001", '
        "\"event_type\": \"t\"}}', every => '1 hour', jitter => '{0}')",
    ],
)
def test_an_interval_without_end_is_refused_or_shown(full: Outbox, call: str) -> None:
    """PostgreSQL 17 has infinite intervals. debezium/debezium#7382, timescale/timescaledb#2161."""
    settings = full.settings()
    for forever in ("infinity", "-infinity", "170000000 years", "-1 day"):
        with suppress(psycopg.errors.InvalidParameterValue, psycopg.errors.DatetimeFieldOverflow):
            full.conn.execute(f"select {call.format(forever)}".encode())
        _list_all(settings)
    with connect(settings.source_dsn) as source, connect(settings.target_dsn) as target:
        retention = Schedule(settings, lambda: None)
        retention.retain(source, target)
    assert retention.condition.fault is None
