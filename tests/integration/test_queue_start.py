"""Queues that are filled from the log: `start` of a declaration, and `relay queue rebuild`."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.admin.dead_letters import DeadLetters
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.pipeline import backfill
from relay.pipeline.apply import Applier
from relay.pipeline.backfill import _Filler, _Moved
from relay.retention import reader_positions
from relay.source.outbox.differences import Difference
from relay.store import queue_fills
from relay.store.connections import connect
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.integration.test_work_queues import declare, enqueued
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import Running, relay, running


def wait_filled(outbox: Outbox, queue: str = "mail") -> None:
    """Wait until a queue is filled like others."""
    ended = """
        select f.ended_at is not null from relay.queue_fills as f join relay.queues as q on q.id = f.queue_id
         where q.name = %s
    """
    wait_until(lambda: outbox.column(ended, (queue,)) == [True])


def test_a_queue_has_what_was_published_before_it_was_declared(outbox: Outbox) -> None:
    outbox.publish(host(1), event(1))
    outbox.publish(host(1), event(2), event(3, "mail.sent"))
    with relaying(outbox.settings()):
        outbox.wait_handled()
        assert declare(outbox, match='{"event_type": "order.*"}', start="beginning")
        outbox.publish(host(1), event(4))
        wait_filled(outbox)
        outbox.publish(host(2), event(5))
        outbox.wait_handled()
    assert enqueued(outbox) == [1, 2, 4, 5]
    outbox.assert_exact()


def test_a_queue_begins_at_a_c_offset_or_a_time(outbox: Outbox) -> None:
    for number in range(1, 4):
        outbox.publish(host(1), event(number), event(number * 10))
    between = outbox.value("select clock_timestamp()")
    outbox.publish(host(1), event(4))
    # The transactions with a row at the c_offset or after it: of the second one, both.
    second = outbox.value(
        "select max(c_offset) from outbox_message_t where payload ->> 'amount' = '20'"
    )
    with relaying(outbox.settings()):
        declare(outbox, "number", start=str(second))
        declare(outbox, "time", start=between.isoformat())
        declare(outbox, "large", start="beginning", where="$.payload.amount > 9", key="host")
        outbox.wait_handled()
        for queue in ("number", "time", "large"):
            wait_filled(outbox, queue)
        outbox.publish(host(1), event(50))
        outbox.wait_handled()
        # A later declaration does not repeat it.
        assert not declare(outbox, "large", start="1", where="$.payload.amount > 9", key="host")
    assert enqueued(outbox, "number") == [2, 20, 3, 30, 4, 50]
    assert enqueued(outbox, "time") == [4, 50]
    assert enqueued(outbox, "large") == [10, 20, 30, 50]


NO_START: list[str] = ["", "-1", "now then", "infinity", "16/B374D848", "end"]


def test_a_start_that_is_none_is_refused(outbox: Outbox, subtests: pytest.Subtests) -> None:
    for start in NO_START:
        with subtests.test(start):
            with pytest.raises(psycopg.errors.InvalidParameterValue) as refusal:
                declare(outbox, start=start)
            assert str(refusal.value).startswith(
                f"relay.declare_queue: start: '{start}' is neither"
            )
            assert not outbox.column("select 1 from relay.queues")


def test_a_group_that_reads_only_the_wal_fills_no_queue(outbox: Outbox) -> None:
    outbox.conn.execute("delete from relay.snapshots")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match=r"source\.mode: wal"):
        declare(outbox, start="beginning")


def test_what_is_deferred_or_dead_comes_with_its_retry_or_replay(outbox: Outbox) -> None:
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    outbox.publish(host(1), event(1))
    outbox.publish(host(1), event(2, deliver_at=later))
    outbox.publish(host(2), event(-3))
    settings = outbox.settings()
    with relaying(settings):
        wait_until(
            lambda: (
                outbox.handled() == 2
                and outbox.column("select count(*) from relay.deferred") == [1]
            )
        )
        declare(outbox, start="beginning")
        wait_filled(outbox)
        assert enqueued(outbox) == [1]
        outbox.conn.execute("update relay.deferred set retry_at = now()")
        wait_until(lambda: enqueued(outbox) == [1, 2])
        outbox.conn.execute("alter table projection drop constraint projection_amount_check")
        letters = DeadLetters(settings, outbox.conn)
        letters.replay(letters.find(DeadLetterSelection()), "the column takes them now")
        wait_until(lambda: outbox.handled() == 4)
    assert sorted(enqueued(outbox)) == [-3, 1, 2]


def filler(outbox: Outbox, settings: Settings) -> _Filler:
    """What fills queues, step by step."""
    return _Filler(settings, connect(outbox.relay_dsn), lambda: False)


def test_what_is_passed_by_and_applied_before_the_end_is_put_in_before_what_follows(
    outbox: Outbox,
) -> None:
    settings = outbox.settings()
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    outbox.publish(host(1), event(1, deliver_at=later))
    outbox.publish(host(1), event(2))
    outbox.drain(settings)
    declare(outbox, start="beginning")
    with (
        closing(filler(outbox, settings)) as filling,
        closing(connect(outbox.relay_dsn)) as conn,
    ):
        (fill,) = queue_fills.open_fills(conn, "default")
        filling._begin(fill)
        (fill,) = queue_fills.open_fills(conn, "default")
        queue_fills.open_difference(conn, fill, filling._applied().newest)
        (fill,) = queue_fills.open_fills(conn, "default")
        assert fill.before is not None
        assert fill.after is not None
        filling._read(fill, Difference(fill.before, fill.after))
        assert outbox.value("select count(*) from relay.queue_fill_deferred") == 1
        # It is applied by a task that does not fill the queue.
        outbox.conn.execute("update relay.deferred set retry_at = now()")
        with closing(Applier(settings, 1)) as applier:
            assert applier.retry_deferred().applied == 1
        (fill,) = queue_fills.open_fills(conn, "default")
        assert filling.fill(fill)
    outbox.publish(host(1), event(3))
    outbox.drain(settings)
    assert enqueued(outbox) == [2, 1, 3]
    assert outbox.value("select count(*) from relay.queue_fill_deferred") == 0


def test_a_handler_of_a_queue_is_filled_by_its_routes(outbox: Outbox) -> None:
    settings = outbox.settings(
        handlers={**outbox.config()["handlers"], "mail": {"type": "queue"}},
        routes=[
            {"match": {"event_type": "order.large"}, "handlers": ["projection", "mail"]},
            {"handlers": ["projection"]},
        ],
    )
    declare(outbox, match=None, start="beginning")
    outbox.publish(host(1), event(1), event(2, "order.large"))
    with relaying(settings):
        wait_filled(outbox)
        outbox.publish(host(1), event(3, "order.large"), event(4))
        outbox.wait_handled()
    assert enqueued(outbox) == [2, 3]


def test_an_event_that_cannot_be_put_in_is_a_dead_letter_of_the_queue(outbox: Outbox) -> None:
    outbox.publish(host(1), event(1))
    outbox.publish(host(1), event(2, payload={"amount": 2, "note": "x" * 100_000}))
    outbox.publish(host(1), event(3))
    outbox.drain(outbox.settings())
    declare(outbox, start="beginning")
    source = {**outbox.config()["source"], "max_event_bytes": 50_000}
    with relaying(outbox.settings(source=source)):
        wait_filled(outbox)
    assert enqueued(outbox) == [1, 3]
    (error,) = outbox.column("select error from relay.queue_items where state = 'dead'")
    assert error.startswith(
        "relay cannot put it into the queue: NotReceived: payload and metadata are too large"
    )


def test_a_rebuild_empties_the_queue_and_fills_it_again(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    declare(outbox, key="host", attempts=1)
    for number in range(1, 5):
        outbox.publish(host(number), event(number))
    outbox.drain(outbox.settings())
    ((leased, attempt),) = outbox.worker.execute("select id, attempt from relay.lease('mail')")
    ((failed, again),) = outbox.worker.execute("select id, attempt from relay.lease('mail')")
    outbox.worker.execute("select relay.retry('mail', %s, %s)", (failed, again))
    outbox.worker.execute("select relay.enqueue('mail', '{\"amount\": 100}', host_id => 'h')")
    outbox.worker.execute("select from relay.take('mail')")
    rebuilt = relay("queue", "rebuild", "mail", "--yes", "--config", str(config))
    assert rebuilt.stdout.splitlines() == [
        "queue mail is filled again, beginning with the oldest event",
        "3 messages and 1 dead letter are deleted, also those that are not in the log",
    ]
    listed = relay("queue", "list", "--config", str(config))
    assert "queue mail is being filled from the log, with 0 messages so far" in listed.stdout
    with relaying(outbox.settings()):
        wait_filled(outbox)
        outbox.publish(host(5), event(5))
        outbox.wait_handled()
    assert enqueued(outbox) == [1, 2, 3, 4, 5]
    assert not outbox.worker.value("select relay.complete('mail', %s, %s)", (leased, attempt))
    assert outbox.column("select action from relay.actions") == ["queue rebuild"]
    assert not outbox.column("select 1 from relay.queue_dead_letters")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("nobody",), "there is no queue 'nobody' that group default fills"),
        (("mail", "--from", "end"), "--from: 'end' is neither a c_offset, a time"),
        (("mail", "--from", "0/1"), "--from: '0/1' is neither a c_offset, a time"),
        (("mail", "--from", "99"), "--from: 99 is past the end of the outbox"),
        (
            ("mail", "--from", "noon"),
            "--from: 'noon' is neither a c_offset, a time such as 2026-03-01T12:00, nor beginning",
        ),
    ],
)
def test_a_rebuild_that_cannot_be_is_refused(
    outbox: Outbox, tmp_path: Path, arguments: tuple[str, ...], error: str
) -> None:
    declare(outbox)
    config = outbox.config_file(tmp_path / "relay.yaml")
    refused = relay("queue", "rebuild", *arguments, "--yes", "--config", str(config))
    assert refused.returncode == 2
    assert error in refused.stderr
    assert not outbox.column("select 1 from relay.queue_fills")


def test_a_fill_that_cannot_go_on_says_why_and_harms_no_other_queue(
    outbox: Outbox, tmp_path: Path
) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    outbox.publish(host(1), event(1))
    declare(outbox, start="99")
    declare(outbox, "other", start="beginning")
    with relaying(outbox.settings()) as service:
        wait_filled(outbox, "other")
        wait_until(lambda: any(each.fault is not None for each in service.conditions))
        (fault,) = [each.fault for each in service.conditions if each.fault is not None]
        assert fault.part == "queue filling"
        assert (
            fault.fault == "mail: start: 99 is past the end of the outbox; the next c_offset is 2"
        )
        shown = relay("queue", "show", "mail", "--config", str(config)).stdout
        assert "with 0 messages so far; it cannot go on: start: 99 is past the end" in shown
        outbox.publish(host(1), event(2))
        outbox.wait_handled()
        relay("queue", "rebuild", "mail", "--from", "2", "--yes", "--config", str(config))
        wait_filled(outbox)
    assert enqueued(outbox) == [2]
    assert enqueued(outbox, "other") == [1, 2]


def test_retention_keeps_the_log_for_a_fill_until_it_gives_it_up(outbox: Outbox) -> None:
    settings = outbox.settings()
    outbox.fill(3)
    outbox.drain(settings)
    declare(outbox, start="beginning")
    with (
        closing(connect(outbox.relay_dsn)) as conn,
        closing(filler(outbox, settings)) as filling,
    ):
        (fill,) = queue_fills.open_fills(conn, "default")
        filling._begin(fill)
        assert (
            outbox.value("select snapshot from relay.readers where reader = 'queue mail'") == "1:1:"
        )
        outbox.conn.execute(
            "update relay.readers set given_up_at = now() where reader = 'queue mail'"
        )
        (fill,) = queue_fills.open_fills(conn, "default")
        with pytest.raises(ConfigurationError, match="retention has given up the fill"):
            filling.fill(fill)
        assert not enqueued(outbox)
        outbox.worker.execute("select relay.drop_queue('mail')")
        with pytest.raises(_Moved):
            filling.fill(fill)
        reader_positions.note(conn, conn, "default", settings.source.table)
    assert not outbox.column("select 1 from relay.readers where reader = 'queue mail'")


def test_a_queue_of_the_configuration_is_filled_once_in_portions(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "FEW_ROWS", 1)
    outbox.fill(40, events=3, hosts=4)
    settings = outbox.settings(
        queues={"mail": {"start": "beginning", "key": "host"}}, poll={"batch_size": 7}
    )
    outbox.drain(outbox.settings())
    with relaying(settings):
        wait_filled(outbox)
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
    assert len(enqueued(outbox)) == 121
    assert_filled(outbox, "mail")


class Publishers:
    """Threads that publish until they are stopped, each for hosts of its own, in transactions of all kinds."""

    def __init__(self, outbox: Outbox, chance: random.Random, count: int = 3) -> None:
        self._dsn = outbox.publisher_dsn
        self._stopping = Event()
        seeds = [chance.random() for _ in range(count)]
        self._threads = [
            Thread(target=self._publish, args=(number, random.Random(seed)))
            for number, seed in enumerate(seeds)
        ]

    def __enter__(self) -> Publishers:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for each in self._threads:
            each.join(30)

    def _publish(self, number: int, chance: random.Random) -> None:
        with closing(psycopg.connect(self._dsn)) as conn:
            while not self._stopping.is_set():
                for _ in range(chance.randint(1, 3)):
                    self._one(conn, number, chance)
                if chance.random() < 0.2:
                    conn.execute("savepoint here")
                    self._one(conn, number, chance)
                    conn.execute(
                        "rollback to here" if chance.random() < 0.5 else "release savepoint here"
                    )
                # A long transaction is open while the queue is declared, filled, and its fill ends.
                self._stopping.wait(chance.choice((0, 0.005, 0.01, 0.5)))
                conn.rollback() if chance.random() < 0.15 else conn.commit()

    def _one(self, conn: psycopg.Connection[Any], number: int, chance: random.Random) -> None:
        later = datetime.now(UTC) + timedelta(seconds=chance.choice((0.5, 2)))
        kind = chance.choices(("plain", "dead", "scheduled"), (20, 1, 2))[0]
        events = [
            event(
                -1 if kind == "dead" else 1,
                **({"deliver_at": later.isoformat()} if kind == "scheduled" else {}),
            )
            for _ in range(chance.randint(1, 3))
        ]
        conn.execute(
            "select relay.publish(%s, %s, %s)",
            (host(number * 10 + chance.randint(0, 3)), host(999), Jsonb(events)),
        )


def assert_filled(outbox: Outbox, queue: str) -> None:
    """Assert that a queue has once what the target has applied, from its beginning on, each host's in order.

    What was scheduled before its beginning, and was due after its declaration, it may have.
    """
    ((number, first, seen),) = outbox.conn.execute(
        "select f.queue_id, f.from_offset, f.seen::text from relay.queue_fills as f join relay.queues as q"
        " on q.id = f.queue_id where q.name = %s",
        (queue,),
    )
    expected = outbox.column(
        """
        select o.id::text
          from (select *, max(c_offset) over (partition by c_xid) as last from outbox_message_t) as o
         where o.id in (select id from projection)
           and not coalesce(o.last < %s and pg_visible_in_snapshot(o.c_xid, %s::pg_snapshot), false)
        """,
        (first, seen),
    )
    scheduled = outbox.column(
        "select id::text from outbox_message_t where deliver_at is not null and c_offset < %s",
        (first or 0,),
    )
    found = outbox.column(
        "select event_id from relay.queue_messages where queue_id = %s", (number,)
    )
    assert len(found) == len(set(found))
    assert set(expected) <= set(found) <= {*expected, *scheduled}
    assert not outbox.column(
        """
        select event_id
          from (select m.event_id, o.c_offset < lag(o.c_offset) over (partition by o.host_id order by m.id) as overtaken
                  from relay.queue_messages as m join outbox_message_t as o on o.id::text = m.event_id
                 where m.queue_id = %s and o.deliver_at is null) as m where overtaken
        """,
        (number,),
    )


@pytest.mark.parametrize("mode", ["auto", "poll"])
@pytest.mark.parametrize(
    "seed",
    [
        1,
        *(pytest.param(seed, marks=pytest.mark.rare) for seed in (2, 3)),
        *(pytest.param(seed, marks=[pytest.mark.rare, pytest.mark.long]) for seed in range(4, 12)),
    ],
)
def test_random_histories_with_kills_fill_each_event_once(
    outbox: Outbox, tmp_path: Path, mode: str, seed: int
) -> None:
    chance = random.Random(seed)
    source = {**outbox.config()["source"], "mode": mode}
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        source=source,
        poll={"batch_size": 20},
        batch={"inline_max_events": 1_000_000_000, "max_events": 50},
    )
    with ExitStack() as stack:
        instances: list[Running] = []

        def start(number: int) -> None:
            copy = tmp_path / f"{number}-{len(instances)}.yaml"
            copy.write_text(config.read_text())
            instances.append(stack.enter_context(running(copy)))

        with Publishers(outbox, chance):
            start(0)
            start(1)
            wait_until(lambda: outbox.handled() > 50)
            declare(outbox, "all", key="host", start="beginning")
            middle = outbox.value("select max(c_offset) - 20 from outbox_message_t")
            declare(outbox, "some", key="host", start=str(middle))
            for _ in range(2 if seed == 1 else 4):
                time.sleep(chance.uniform(0.1, 1.5))
                instances.pop(0).kill()
                start(2)
            wait_filled(outbox, "all")
            outbox.worker.execute("select relay.rebuild_queue('all')")
            time.sleep(chance.uniform(0.0, 1.0))
            instances.pop(0).kill()
            start(3)
            wait_filled(outbox, "some")
            wait_filled(outbox, "all")
            time.sleep(0.5)
        outbox.wait_handled(120)
    outbox.assert_complete()
    assert_filled(outbox, "all")
    assert_filled(outbox, "some")
