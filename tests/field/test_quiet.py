"""What happens while nothing is published, and long after: nothing waits for an event that does not come.

Each scene has a pause before and after its cause, of which a test that publishes at once knows nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest

from relay.client.reader import subscribe
from relay.client.worker import Message, Worker
from relay.store.positions import sinks
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.postgres import Server
from tests.webhook import Answer, Webhook
from tests.workers import working

pytestmark = pytest.mark.rare

MODES = ["auto", "poll"]
LONG = 60.0
"""The interval of polls in seconds, where a notification or a connection that was lost has to end the wait."""


def pause() -> None:
    """Let time pass in which nothing is published."""
    time.sleep(2.5)


def configured(outbox: Outbox, mode: str, **more: Any) -> Any:
    """Settings that read the source in a mode; polls come rarely, and notifications wake relay."""
    source = {
        "dsn": outbox.relay_dsn,
        "slot": outbox.slot,
        "publication": outbox.slot,
        "mode": mode,
    }
    poll = {"wait_period_ms": int(1000 * LONG), "listen": True} if mode == "poll" else {}
    return outbox.settings(source=source, poll=poll, **more)


def with_sink(outbox: Outbox, mode: str, url: str, **more: Any) -> Any:
    """The same, with a sink that has every event beside the projection."""
    handlers = {
        "projection": outbox.config()["handlers"]["projection"],
        "hook": {"type": "http", "url": url, "start": "beginning", **more},
    }
    return configured(
        outbox, mode, handlers=handlers, routes=[{"handlers": ["projection", "hook"]}]
    )


@contextmanager
def reading(outbox: Outbox) -> Iterator[list[str]]:
    """The ids that a reader gets, in a thread."""
    ids: list[str] = []
    reader = subscribe(outbox.reader_dsn, "r", poll=LONG, lease=4 * LONG)

    def read() -> None:
        for transaction in reader:
            ids.extend(str(each.id) for each in transaction.events)
            transaction.done()

    thread = Thread(target=read)
    thread.start()
    try:
        wait_until(lambda: bool(outbox.column("select 1 from relay.log_readers")))
        yield ids
    finally:
        reader.stop()
        thread.join(30)


def wait_for(hook: Webhook, taken: list[str], read: list[str], events: int) -> None:
    """Wait until a sink, a worker and a reader have had some events, sooner than any of them polls."""
    wait_until(lambda: len(hook.ids()) == events, 40)
    wait_until(lambda: len(set(taken)) == events, 40)
    wait_until(lambda: len(set(read)) == events, 40)


@pytest.mark.parametrize("mode", MODES)
def test_a_queue_is_filled_from_a_log_that_is_quiet(outbox: Outbox, mode: str) -> None:
    """2ndQuadrant/pglogical#337, readysettech/readyset#903, debezium/debezium#5163, debezium/debezium#7544.

    A catch-up that ends with the next commit does not end where there is none.
    """
    settings = configured(outbox, mode)
    outbox.install_again(settings)
    with relaying(settings):
        for number in range(20):
            outbox.publish(host(number), event(number))
        outbox.wait_handled()
        pause()
        outbox.worker.execute("select relay.declare_queue('q', '{}', start => 'beginning')")
        wait_until(lambda: outbox.value("select ended_at is not null from relay.queue_fills"), 20)
        assert outbox.value("select count(*) from relay.queue_messages") == 20
        pause()
        outbox.publish(host(1), event())
        wait_until(lambda: outbox.value("select count(*) from relay.queue_messages") == 21, 20)


@pytest.mark.parametrize("mode", MODES)
def test_a_sink_is_added_to_a_log_that_is_quiet(outbox: Outbox, mode: str) -> None:
    """The same of a sink that begins with the oldest event, and joins the stream."""
    outbox.install_again(configured(outbox, mode))
    with relaying(configured(outbox, mode)):
        for number in range(20):
            outbox.publish(host(number), event(number))
        outbox.wait_handled()
    with Webhook() as hook, relaying(with_sink(outbox, mode, hook.url)):
        wait_until(lambda: len(hook.accepted) == 20, 20)
        if mode == "auto":
            wait_until(lambda: outbox.column("select state from relay.sinks") == ["attached"], 20)
        pause()
        outbox.publish(host(1), event())
        wait_until(lambda: len(hook.accepted) == 21, 20)


@pytest.mark.parametrize("mode", MODES)
def test_a_sink_that_was_paused_goes_on_after_a_quiet_time(outbox: Outbox, mode: str) -> None:
    """confluentinc/librdkafka#1753, apache/pulsar#6965: what was resumed waits for the next message."""
    outbox.install_again(configured(outbox, mode))
    with Webhook() as hook, relaying(with_sink(outbox, mode, hook.url)):
        outbox.publish(host(1), event())
        wait_until(lambda: len(hook.accepted) == 1, 20)
        pause()
        sinks.pause(outbox.conn, "default", "hook", True, None)
        pause()
        for number in range(5):
            outbox.publish(host(number), event())
        outbox.wait_handled()
        pause()
        assert len(hook.accepted) == 1
        sinks.pause(outbox.conn, "default", "hook", False, None)
        wait_until(lambda: len(hook.accepted) == 6, 20)


@pytest.mark.parametrize("mode", MODES)
def test_a_destination_that_returns_in_a_quiet_time_gets_what_it_lacks(
    outbox: Outbox, mode: str
) -> None:
    """No later event tells that it is there again."""
    away = True
    outbox.install_again(configured(outbox, mode))
    with (
        Webhook(lambda *_: Answer(503 if away else 200)) as hook,
        relaying(with_sink(outbox, mode, hook.url, circuit_breaker={"failures": 2})),
    ):
        for number in range(5):
            outbox.publish(host(number), event())
        wait_until(lambda: len(hook.requests) >= 3, 20)
        pause()
        away = False
        wait_until(lambda: len(hook.ids()) == 5, 60)
        outbox.wait_delivered("hook")


@pytest.mark.parametrize("mode", MODES)
def test_sessions_that_are_ended_in_a_quiet_time_are_missed_by_nobody(
    outbox: Outbox, mode: str
) -> None:
    """taskforcesh/bullmq#4729, graphile/worker#541, transact-rs/sqlx#3062, brianc/node-postgres#967 and #2234.

    A listener that is gone is noticed with the next message, which it does not hear of.
    """
    outbox.install_again(configured(outbox, mode))
    outbox.worker.execute("select relay.declare_queue('q', '{}')")
    worker = Worker(outbox.worker_dsn, "q", poll=LONG)
    taken: list[str] = []

    @worker.handles()
    def handle(message: Message, session: object) -> None:
        taken.append(str(message.event_id))

    with (
        Webhook() as hook,
        relaying(with_sink(outbox, mode, hook.url)),
        working(worker),
        reading(outbox) as read,
    ):
        for wanted in range(1, 4):
            outbox.publish(host(wanted), event())
            wait_for(hook, taken, read, wanted)
            pause()
            outbox.conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            outbox.close_logins()
            pause()
        outbox.publish(host(9), event())
        wait_for(hook, taken, read, 4)
        outbox.wait_handled()
    outbox.assert_exact()


def test_a_server_that_was_away_for_a_while_is_found_again_by_all(killable_server: Server) -> None:
    """supabase/storage#846, monetr/monetr#3038: whoever connects in vain for a while never tries again."""
    with Outbox(killable_server.create_database("app")) as outbox:
        outbox.install()
        outbox.worker.execute("select relay.declare_queue('q', '{}')")
        worker = Worker(outbox.worker_dsn, "q", poll=LONG)
        taken: list[str] = []

        @worker.handles()
        def handle(message: Message, session: object) -> None:
            taken.append(str(message.event_id))

        with (
            Webhook() as hook,
            relaying(with_sink(outbox, "auto", hook.url)),
            working(worker),
            reading(outbox) as read,
        ):
            outbox.publish(host(1), event())
            wait_for(hook, taken, read, 1)
            pause()
            killable_server.stop()
            pause()
            killable_server.start()
            outbox.reconnect()
            pause()
            outbox.publish(host(2), event())
            wait_for(hook, taken, read, 2)
            outbox.wait_handled()
        outbox.assert_exact()
