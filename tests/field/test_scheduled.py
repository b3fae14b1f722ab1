"""Scheduled events: cancelled, moved, and many at once, by what went wrong for users of other schedulers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner, Result

from relay.admin.events import find
from relay.cli.app import app
from relay.client.errors import EventInvalid, NotInTransaction, UnknownSession
from relay.client.scheduled import (
    Stop,
    cancel,
    cancel_async,
    cancel_messages,
    move_messages,
    reschedule,
    reschedule_async,
)
from relay.config.settings import Settings
from relay.retention.schedule import Schedule
from relay.store.deferred import event_key
from tests.client_sessions import DRIVERS
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Webhook

LATER = datetime(2999, 1, 1, tzinfo=UTC)
PAST = datetime(2001, 1, 1, tzinfo=UTC)


def publish(outbox: Outbox, at: datetime = LATER, number: int = 1) -> str:
    """Publish one event for a time; returns its id."""
    transaction = outbox.publish(host(number), event(number, deliver_at=at.isoformat()))
    return str(
        outbox.value("select id from outbox_message_t where transaction_id = %s", (transaction,))
    )


def stops(outbox: Outbox, event_id: str, **more: Any) -> dict[str, str]:
    """Cancel an event in a transaction of its own; returns the outcome of each place."""
    with psycopg.connect(outbox.relay_dsn) as conn:
        return {
            each.name or each.kind or "": each.outcome for each in cancel(conn, event_id, **more)
        }


def deferred(outbox: Outbox) -> int:
    """How many transactions are deferred."""
    return int(outbox.value("select count(*) from relay.deferred"))


def applied(outbox: Outbox) -> int:
    """How many events have been applied."""
    return int(outbox.value("select count(*) from projection"))


def states(settings: Settings, event_id: str) -> dict[str, str]:
    """The state of an event at each destination."""
    return {each.name or each.kind: each.state for each in find(settings, event_id).destinations}


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook(lambda _headers, _body: Answer()) as found:
        yield found


@pytest.fixture
def settings(outbox: Outbox, webhook: Webhook) -> Settings:
    """All events go to the projection and to a sink."""
    return with_sink(outbox, webhook)


def with_sink(outbox: Outbox, webhook: Webhook) -> Settings:
    handlers = outbox.config()["handlers"] | {"hook": {"type": "http", "url": webhook.url}}
    found = outbox.settings(handlers=handlers, routes=[{"handlers": ["projection", "hook"]}])
    outbox.install_again(found)
    return found


def test_what_is_cancelled_is_delivered_nowhere(
    outbox: Outbox, settings: Settings, webhook: Webhook
) -> None:
    """A cancelled job stayed in the scheduled set and ran; another could not be cancelled at all.

    https://github.com/rq/rq/issues/1669
    https://github.com/enioka-Haute-Couture/jqm/issues/303
    """
    with relaying(settings):
        gone, kept = publish(outbox), publish(outbox)
        wait_until(lambda: deferred(outbox) == 4)
        assert stops(outbox, gone) == {"target": "cancelled", "hook": "cancelled"}
        # Again: there is nothing left to stop.
        assert stops(outbox, gone) == {"": "requested"}
        with psycopg.connect(outbox.relay_dsn) as conn:
            assert {each.outcome for each in reschedule(conn, kept, PAST)} == {"moved"}
        wait_until(lambda: applied(outbox) == 1 and len(webhook.requests) == 1)
        wait_until(lambda: deferred(outbox) == 0)
    assert webhook.requests[0].event["id"] == kept
    assert states(settings, kept) == {"target": "passed", "hook": "delivered"}


def test_who_cancelled_it_is_to_be_seen(outbox: Outbox, settings: Settings) -> None:
    """Removing a job should leave a record of what happened to it.

    https://github.com/graphile/worker/issues/61
    """
    with relaying(settings):
        gone = publish(outbox)
        wait_until(lambda: deferred(outbox) == 2)
        stops(outbox, gone)
        found = find(settings, gone).destinations
    assert [each.state for each in found] == ["cancelled", "cancelled"]
    assert all((each.reason or "").startswith("cancelled by ") for each in found)
    outbox.conn.execute("update relay.cancellations set noted_at = now() - interval '8 days'")
    held = publish(outbox)
    stops(outbox, held)
    Schedule(settings, lambda: None)._remove_cancellations(outbox.conn)
    assert outbox.column("select distinct event_id from relay.cancellations") == [held]


@pytest.mark.parametrize("at", [LATER, PAST], ids=["later", "past"])
def test_it_is_cancelled_before_relay_has_read_it(
    outbox: Outbox, settings: Settings, webhook: Webhook, at: datetime
) -> None:
    """A cancellation right after the publisher's commit finds nothing yet, and holds all the same.

    https://github.com/sidekiq/sidekiq/issues/2145
    """
    gone = publish(outbox, at)
    assert stops(outbox, gone) == {"": "requested"}
    kept = publish(outbox, PAST)
    with relaying(settings):
        wait_until(lambda: applied(outbox) == 1 and len(webhook.requests) == 1)
        if at == LATER:
            # Deferred like others, with the reason; its time comes.
            wait_until(lambda: deferred(outbox) == 2)
            assert "is not delivered" in str(find(settings, gone).destinations[0].reason)
            outbox.conn.execute("update relay.deferred set retry_at = now()")
        wait_until(lambda: deferred(outbox) == 0)
        assert states(settings, gone) == {"target": "cancelled", "hook": "cancelled"}
    assert applied(outbox) == 1
    assert [each.event["id"] for each in webhook.requests] == [kept]


def test_each_is_either_cancelled_or_applied(outbox: Outbox) -> None:
    """Of thousands of jobs that were cancelled around their time, some were said to be cancelled and ran.

    https://github.com/node-schedule/node-schedule/issues/369
    https://github.com/elastic/elasticsearch/pull/63770
    """
    settings = outbox.settings()
    due = datetime.now(UTC) + timedelta(seconds=1)
    ids = [publish(outbox, due + timedelta(milliseconds=n), n) for n in range(300)]
    outcomes: dict[str, str] = {}
    with relaying(settings), psycopg.connect(outbox.relay_dsn) as conn:
        wait_until(lambda: applied(outbox) > 10)
        for each in reversed(ids):
            (stop,) = cancel(conn, each)
            conn.commit()
            outcomes[each] = stop.outcome
        wait_until(lambda: deferred(outbox) == 0)
    stopped = set(outbox.column("select event_id from relay.cancellations where group_id <> ''"))
    done = set(outbox.column("select id::text from projection"))
    assert not stopped & done
    assert stopped | done == set(ids)
    assert {each for each in ids if outcomes[each] == "cancelled"} <= stopped
    assert {each for each in ids if outcomes[each] == "done"} <= done


@contextmanager
def held_back(outbox: Outbox) -> Iterator[None]:
    """Whatever is applied waits for the end of the block, in its transaction."""
    with psycopg.connect(outbox.relay_dsn) as conn:
        conn.execute("lock table projection in exclusive mode")
        yield


def test_one_that_is_being_applied_is_not_cancelled_too(outbox: Outbox) -> None:
    """A job that ran while it was replaced ran twice, or with the wrong data.

    https://github.com/graphile/worker/issues/303
    https://github.com/graphile/worker/pull/63
    """
    found: list[Stop] = []

    def act(call: Any, *arguments: Any) -> None:
        with psycopg.connect(outbox.relay_dsn) as conn:
            found.extend(call(conn, running, *arguments))

    with relaying(outbox.settings()):
        running = publish(outbox)
        wait_until(lambda: deferred(outbox) == 1)
        with held_back(outbox):
            outbox.conn.execute("update relay.deferred set retry_at = now()")
            wait_until(lambda: waiting(outbox, "relation") > 0)
            sessions = [
                threading.Thread(target=act, args=(cancel,)),
                threading.Thread(target=act, args=(reschedule, LATER)),
            ]
            for each in sessions:
                each.start()
            wait_until(lambda: waiting(outbox, "transactionid") + waiting(outbox, "tuple") >= 2)
            assert not found
        for each in sessions:
            each.join(60)
    assert [each.outcome for each in found] == ["done", "done"]
    assert (applied(outbox), deferred(outbox)) == (1, 0)


def waiting(outbox: Outbox, kind: str) -> int:
    """How many sessions of the database wait for a lock of a kind."""
    return int(
        outbox.value(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and wait_event_type = 'Lock' and wait_event = %s",
            (kind,),
        )
    )


def test_a_transaction_that_cancels_and_stays_open_stops_only_its_own_event(outbox: Outbox) -> None:
    """A job that hangs must not keep those after it.

    https://github.com/graphile/worker/pull/313
    """
    with relaying(outbox.settings()):
        gone, kept = publish(outbox), publish(outbox)
        wait_until(lambda: deferred(outbox) == 2)
        with psycopg.connect(outbox.relay_dsn) as conn:
            assert [each.outcome for each in cancel(conn, gone)] == ["cancelled"]
            outbox.conn.execute(
                "update relay.deferred set retry_at = now() where event_ids @> array[%s]", (kept,)
            )
            wait_until(lambda: applied(outbox) == 1)
            conn.rollback()
        assert outbox.value("select event_ids from relay.deferred") == [gone]


def test_a_delivery_in_flight_is_told_of(outbox: Outbox) -> None:
    """The number of what was cancelled said nothing of what had started.

    https://github.com/oban-bg/oban/pull/527
    """
    begun, ends = threading.Event(), threading.Event()

    def answer(_headers: dict[str, str], _body: bytes) -> Answer:
        begun.set()
        ends.wait(60)
        return Answer()

    with Webhook(answer) as webhook:
        settings = with_sink(outbox, webhook)
        with relaying(settings):
            gone = publish(outbox)
            wait_until(lambda: deferred(outbox) == 2)
            outbox.conn.execute("update relay.deferred set retry_at = now() where sink = 'hook'")
            assert begun.wait(60)
            with psycopg.connect(outbox.relay_dsn) as conn:
                moved = {each.kind: each.outcome for each in reschedule(conn, gone, LATER)}
                assert moved == {"target": "moved", "sink": "due"}
            assert stops(outbox, gone) == {"target": "cancelled", "hook": "in doubt"}
            reasons = [each.reason or "" for each in find(settings, gone).destinations]
            assert "in flight" in reasons[1]
            ends.set()
            outcome = "select outcome from relay.cancellations where sink = 'hook'"
            wait_until(lambda: outbox.value(outcome) == "delivered")
        assert states(settings, gone) == {"target": "cancelled", "hook": "delivered"}


def test_what_may_be_in_flight_is_not_moved(
    outbox: Outbox, tmp_path: Path, settings: Settings
) -> None:
    """A job that was rescheduled while it ran, ran again.

    https://github.com/graphile/worker/issues/303
    """
    with relaying(settings):
        publish(outbox)
        wait_until(lambda: deferred(outbox) == 2)
    # Due at both, while nobody works them.
    outbox.conn.execute("update relay.deferred set retry_at = now()")
    file = outbox.config_file(tmp_path / "relay.yaml", handlers=_handlers(settings), routes=_ROUTES)
    words = ["deferred", "move", "--config", str(file), "--all", "--yes", "--to", "2999-01-01"]
    assert "1 transaction is moved" in CliRunner().invoke(app, words).output
    assert outbox.column("select sink from relay.deferred where retry_at > now()") == [""]


_ROUTES = [{"handlers": ["projection", "hook"]}]


def _handlers(settings: Settings) -> dict[str, Any]:
    hook = settings.handlers["hook"].model_dump(mode="json", exclude_unset=True)
    return {"projection": {"type": "sql", "statement": APPEND}, "hook": hook}


def test_an_event_is_found_by_an_index(outbox: Outbox) -> None:
    """Deleting a job by its id took seconds with a few hundred thousand scheduled.

    https://github.com/sidekiq/sidekiq/issues/1491
    https://github.com/sidekiq/sidekiq/issues/6338
    """
    with relaying(outbox.settings()):
        some = publish(outbox)
        wait_until(lambda: deferred(outbox) == 1)
    columns = "group_id, sink, keys, holds, retry_at, hosts, columns, commit_lsn, end_lsn, commit_ts, xid, first_offset, last_offset, events, size, sizes, data"  # noqa: E501
    outbox.conn.execute(
        f"insert into relay.deferred ({columns}, event_ids)"
        f" select {columns}, array[gen_random_uuid()::text] from relay.deferred, generate_series(1, 20000)".encode()
    )
    outbox.conn.execute("vacuum analyze relay.deferred")
    with psycopg.connect(outbox.relay_dsn) as conn:
        read = "select coalesce(seq_tup_read, 0) from pg_stat_xact_all_tables where relid = 'relay.deferred'::regclass"
        cancel(conn, some)
        reschedule(conn, some, LATER)
        assert conn.execute(read).fetchone() == (0,)
        conn.rollback()
    plan = outbox.column(
        "explain select id from relay.deferred as d"
        " where d.group_id = 'default' and d.event_ids @> array[%s] order by d.id",
        (some,),
    )
    assert any("deferred_events" in line for line in plan)


def test_all_are_cancelled_not_every_second(outbox: Outbox, tmp_path: Path) -> None:
    """Whoever deleted all scheduled jobs deleted half of them.

    https://github.com/sidekiq/sidekiq/issues/866
    """
    with relaying(outbox.settings()):
        publish(outbox)
        wait_until(lambda: deferred(outbox) == 1)
    columns = "group_id, sink, keys, holds, retry_at, hosts, columns, commit_lsn, end_lsn, commit_ts, xid, first_offset, last_offset, events, size, sizes, data, event_ids"  # noqa: E501
    outbox.conn.execute(
        f"insert into relay.deferred ({columns})"
        f" select {columns} from relay.deferred, generate_series(1, 1201)".encode()
    )
    config = str(outbox.config_file(tmp_path / "relay.yaml"))
    words = ["deferred", "cancel", "--config", config, "--all", "--yes"]
    assert "1202 transactions are dead letters" in CliRunner().invoke(app, words).output.replace(
        ",", ""
    )
    assert deferred(outbox) == 0


def test_a_thousand_of_one_moment_come_once_each(outbox: Outbox) -> None:
    """Several workers ran each of the tasks with an ETA; 300 jobs of one second took twenty minutes.

    https://github.com/celery/celery/issues/3270
    https://github.com/celery/celery/issues/2599
    https://github.com/resque/resque-scheduler/issues/640
    """
    settings = outbox.settings()
    moment = (datetime.now(UTC) + timedelta(seconds=2)).isoformat()
    for number in range(20):
        for _ in range(50):
            outbox.publish(host(number), event(number, deliver_at=moment))
    with relaying(settings), relaying(settings):
        wait_until(lambda: applied(outbox) >= 1000)
        wait_until(lambda: deferred(outbox) == 0)
    assert applied(outbox) == 1000
    assert outbox.value("select count(distinct id) from projection") == 1000


def test_the_time_is_one_whatever_the_session_shows(outbox: Outbox) -> None:
    """A job ran two hours late because of the zone of the session that scheduled it.

    https://github.com/collectiveidea/delayed_job/issues/1021
    """
    at = datetime(2999, 1, 1, 12, tzinfo=UTC)
    with relaying(outbox.settings()):
        moved = publish(outbox)
        wait_until(lambda: deferred(outbox) == 1)
        with psycopg.connect(
            outbox.relay_dsn, options="-c timezone=Asia/Tokyo -c datestyle=German"
        ) as conn:
            reschedule(conn, moved, at)
    assert outbox.value("select retry_at from relay.deferred") == at
    with (
        psycopg.connect(outbox.relay_dsn) as conn,
        pytest.raises(EventInvalid, match="time zone"),
    ):
        reschedule(conn, moved, datetime(2999, 1, 1))  # noqa: DTZ001


def test_a_tenant_cancels_only_its_own(outbox: Outbox) -> None:
    """An id that a request brings may be of another tenant."""
    with relaying(outbox.settings()):
        foreign = publish(outbox, number=1)
        wait_until(lambda: deferred(outbox) == 1)
        assert stops(outbox, foreign, host_id=host(2)) == {"": "requested"}
        outbox.conn.execute("update relay.deferred set retry_at = now()")
        wait_until(lambda: applied(outbox) == 1)
        own = publish(outbox, number=1)
        wait_until(lambda: deferred(outbox) == 1)
        assert stops(outbox, own, host_id=host(1)) == {"target": "cancelled"}


def test_a_request_of_another_tenant_does_not_replace_the_first(outbox: Outbox) -> None:
    """Before relay has read the event, its own tenant cancels it, and then somebody who has its id from elsewhere."""
    settings = outbox.settings()
    with relaying(settings):
        publish(outbox, PAST, number=2)
        wait_until(lambda: applied(outbox) == 1)
    gone = publish(outbox, PAST, number=1)
    for number in (1, 2):
        assert stops(outbox, gone, host_id=host(number)) == {"": "requested"}
    with relaying(settings):
        wait_until(lambda: states(settings, gone) == {"target": "cancelled"})
    assert applied(outbox) == 1


def test_who_may_cancel(outbox: Outbox) -> None:
    """A role that was not granted the function cannot call it; one that was can do nothing else."""
    name = f"{outbox.slot}_booking"
    outbox.conn.execute(
        f"create role {name} login password 'p'; grant usage on schema relay to {name}".encode()
    )
    dsn = outbox.dsn_as(name)
    try:
        with relaying(outbox.settings()):
            gone = publish(outbox)
            wait_until(lambda: deferred(outbox) == 1)
        with psycopg.connect(dsn) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
            cancel(conn, gone)
        outbox.conn.execute(f"grant execute on function relay.cancel to {name}".encode())
        with psycopg.connect(dsn) as conn:
            assert [each.outcome for each in cancel(conn, gone)] == ["cancelled"]
        with psycopg.connect(dsn) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("select from relay.deferred")
        asked = "select distinct requested_by from relay.cancellations"
        assert outbox.column(asked) == [name]
    finally:
        outbox.conn.execute(f"drop owned by {name}; drop role {name}".encode())


def test_every_session_may_cancel(outbox: Outbox, subtests: pytest.Subtests) -> None:
    """In the caller's transaction, whatever its driver: a rollback takes it back."""
    with relaying(outbox.settings()):
        moved = publish(outbox)
        wait_until(lambda: deferred(outbox) == 1)
    for driver in DRIVERS:
        with subtests.test(driver):
            outbox.conn.execute("update relay.deferred set retry_at = %s", (LATER,))
            asyncio.run(_act(outbox.relay_dsn, driver, moved))
            found = outbox.column("select retry_at from relay.deferred")
            assert found == [LATER + timedelta(days=1)]


async def _act(dsn: str, driver: str, event_id: str) -> None:
    at = LATER + timedelta(days=1)
    async with DRIVERS[driver](dsn) as opened:
        if opened.asynchronous:
            found = await reschedule_async(opened.session, event_id, at)
        else:
            found = reschedule(opened.session, event_id, at)
        assert found == [Stop("target", "", "moved")]
        await opened.run(opened.commit)
    async with DRIVERS[driver](dsn) as opened:
        if opened.asynchronous:
            found = await cancel_async(opened.session, event_id)
        else:
            found = cancel(opened.session, event_id)
        assert found == [Stop("target", "", "cancelled")]
        await opened.run(opened.rollback)


def test_a_session_without_a_transaction_is_refused(outbox: Outbox) -> None:
    with (
        psycopg.connect(outbox.relay_dsn, autocommit=True) as conn,
        pytest.raises(NotInTransaction, match="autocommit"),
    ):
        cancel(conn, "x")
    with pytest.raises(UnknownSession):
        cancel(object(), "x")


def test_an_operator_cancels_and_moves_messages(outbox: Outbox, tmp_path: Path) -> None:
    """As an application does, and it is recorded who did it."""
    outbox.worker.execute("select relay.declare_queue('mail', null)")
    enqueue = "select relay.enqueue('mail', '{}', deliver_at => %s, event_id => %s)"
    number = outbox.value(enqueue, (LATER, "a"))
    outbox.value(enqueue, (LATER, "b"))
    config = ["--config", str(outbox.config_file(tmp_path / "relay.yaml"))]

    def command(*words: str) -> str:
        done = CliRunner().invoke(app, ["queue", words[0], "mail", *config, *words[1:]])
        return f"{done.output}{done.exception or ''}"

    assert "1 message moved" in command("move", "--id", str(number), "--to", "2999-02-01")
    assert "1 message cancelled" in command("cancel", "--event", "b")
    assert "no such message" in command("cancel", "--event", "b")
    assert "by a filter" in command("cancel")
    found = outbox.conn.execute(
        "select event_id, available_at from relay.queue_messages"
    ).fetchall()
    assert found == [("a", datetime(2999, 2, 1, tzinfo=UTC))]
    actions = outbox.column("select action from relay.actions order by id")
    assert actions[:2] == ["queue move", "queue cancel"]


def test_messages_of_a_queue_are_cancelled_and_moved(outbox: Outbox) -> None:
    """A deleted job whose worker had it went on; one that waits for its time is moved, and not added a second time.

    https://github.com/graphile/worker/pull/63
    https://github.com/rq/rq/issues/1669
    """
    outbox.worker.execute("select relay.declare_queue('mail', null)")
    enqueue = "select relay.enqueue('mail', '{}', deliver_at => %s, event_id => %s)"
    first, second, third = (
        outbox.worker.value(enqueue, (at, name))
        for at, name in ((LATER, "a"), (LATER, "b"), (None, "c"))
    )
    with psycopg.connect(outbox.relay_dsn) as conn:
        assert move_messages(conn, "mail", PAST, event_id="a") == 1
        assert move_messages(conn, "mail", PAST, id=third) == 0
        assert cancel_messages(conn, "mail", id=second) == 1
    available = "select id from relay.queue_messages where available_at is null or available_at <= clock_timestamp()"
    wait_until(lambda: sorted(outbox.column(available)) == [first, third])
    with (
        psycopg.connect(outbox.worker_dsn) as worker,
        psycopg.connect(outbox.relay_dsn) as conn,
    ):
        taken = worker.execute("select id from relay.take('mail', 1)").fetchall()
        assert taken == [(first,)]
        assert cancel_messages(conn, "mail", event_id="a") == 0
        assert cancel_messages(conn, "mail", event_id="c") == 1
    assert outbox.value("select count(*) from relay.queue_messages") == 0
    with (
        psycopg.connect(outbox.relay_dsn) as conn,
        pytest.raises(psycopg.errors.NullValueNotAllowed),
    ):
        cancel_messages(conn, "mail")


def test_a_message_that_waits_for_its_next_attempt_is_run_now(
    outbox: Outbox, tmp_path: Path
) -> None:
    """`no such message waits`, with status 0, of one that the same command's list shows in state `retry`."""
    outbox.worker.execute("select relay.declare_queue('mail', null)")
    number = outbox.worker.value("select relay.enqueue('mail', '{}')")
    outbox.worker.execute(
        "select relay.retry('mail', id, attempt, '1 h', 'away') from relay.lease('mail', 1)"
    )
    assert outbox.column("select state from relay.queue_items") == ["retry"]
    config = ["--config", str(outbox.config_file(tmp_path / "relay.yaml"))]
    to = ["--to", "2026-01-01"]

    def moved(which: int) -> Result:
        return CliRunner().invoke(app, ["queue", "move", "mail", *config, "--id", str(which), *to])

    assert "1 message moved" in moved(number).output
    wait_until(lambda: outbox.worker.column("select id from relay.take('mail', 1)") == [number])
    missing = moved(number + 1)
    assert missing.exit_code == 1
    assert "no such message waits for its time" in missing.output


def test_messages_of_a_key_are_cancelled_but_for_one_that_is_leased(outbox: Outbox) -> None:
    """What is in flight is neither counted nor deleted.

    https://github.com/oban-bg/oban/pull/527
    """
    outbox.worker.execute("select relay.declare_queue('mail', null, key => 'host')")
    for number in (1, 1, 2):
        outbox.worker.execute("select relay.enqueue('mail', '{}', host_id => %s)", (str(number),))
    key = outbox.value("select key from relay.queue_messages where host_id = '1' limit 1")
    outbox.worker.execute("select relay.lease('mail', 1)")
    with psycopg.connect(outbox.relay_dsn) as conn:
        assert cancel_messages(conn, "mail", key=key) == 1
    left = outbox.column("select host_id from relay.queue_messages order by id")
    assert left == ["1", "2"]


def test_a_key_of_the_publishers_own_finds_it(outbox: Outbox) -> None:
    """A job could be cancelled only by the id that its insertion returned, which nobody had stored.

    https://github.com/timgit/pg-boss/issues/139, https://github.com/timgit/pg-boss/issues/419
    https://github.com/graphile/worker/issues/61, https://github.com/hardbyte/awa/pull/70
    """
    key = outbox.value("select md5('reminder 42')::uuid::text")
    reminder = event(42, id=key, deliver_at=LATER.isoformat())
    with relaying(outbox.settings()):
        outbox.publish(host(1), reminder)
        wait_until(lambda: deferred(outbox) == 1)
        with pytest.raises(psycopg.errors.UniqueViolation):
            outbox.publish(host(1), reminder)
        assert stops(outbox, outbox.value("select md5('reminder 42')::uuid::text")) == {
            "target": "cancelled"
        }
    assert deferred(outbox) == 0


def test_an_id_of_any_length_is_deferred_and_found(outbox: Outbox) -> None:
    """An entry of an index has a limited length: what is deferred must not fail for its id."""
    long = "x" * 5000
    (key,) = outbox.conn.execute("select relay.event_key(%s)", (long,)).fetchone() or ("",)
    assert key == event_key(long)
    assert len(key) == 64


@pytest.mark.rare
@pytest.mark.parametrize("call", ["cancel", "reschedule"])
def test_a_sink_gets_nothing_that_an_open_transaction_has_stopped(
    outbox: Outbox, settings: Settings, webhook: Webhook, call: str
) -> None:
    """A job was cancelled before its time, in a transaction that committed after it, and had run."""
    stopped = publish(outbox, LATER)
    with relaying(settings):
        wait_until(lambda: deferred(outbox) == 2)
        outbox.conn.execute(
            "update relay.deferred set retry_at = clock_timestamp() + interval '5 s'"
        )
        with psycopg.connect(outbox.relay_dsn) as conn:
            stops = cancel(conn, stopped) if call == "cancel" else reschedule(conn, stopped, LATER)
            assert {each.outcome for each in stops} == {
                "cancelled" if call == "cancel" else "moved"
            }
            wait_until(
                lambda: outbox.value("select bool_and(retry_at < now()) from relay.deferred")
            )
            # What is due later has had its turn meanwhile.
            first = publish(outbox, datetime.now(UTC) + timedelta(seconds=1), 2)
            wait_until(lambda: any(each.event["id"] == first for each in webhook.requests))
        second = publish(outbox, datetime.now(UTC) + timedelta(seconds=1), 2)
        wait_until(lambda: any(each.event["id"] == second for each in webhook.requests))
        wait_until(lambda: deferred(outbox) == (0 if call == "cancel" else 2))
    assert stopped not in [each.event["id"] for each in webhook.requests]
