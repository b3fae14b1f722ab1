"""The slot is confirmed up to what is stored, whatever ends: the process, a session, a claim, a delivery.

Where only the WAL is read, what is confirmed too early is lost for ever, while every state says "attached".
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.admin import sinks
from relay.config.settings import Settings
from relay.faults import RelayError
from relay.model.events import Lsn
from relay.runtime.threads import beside
from relay.service import Service
from relay.source.stream import replication
from relay.source.walsender import open_replication
from relay.store import locks
from relay.store.connections import Connection
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import running
from tests.webhook import Answer, Webhook

HOSTS = 8

ORDERS: dict[str, Any] = {
    "routes": [{"match": {"event_type": "order.*"}, "handlers": ["hook"]}],
    "unrouted": "ignore",
}
"""Only orders go to the webhook."""

_CUT = """
    select pg_terminate_backend(pid) from pg_stat_activity
     where datname = current_database() and application_name like 'relay %:%'
"""
"""Ends the sessions that have a sink's claim or say that an instance runs, as a failover of the target does."""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as running:
        yield running


def configured(outbox: Outbox, webhook: Webhook, mode: str = "wal", **more: Any) -> Settings:
    """Every event goes to the webhook, and nothing else: the target has no effects that could slow it down."""
    handler = {"type": "http", "url": webhook.url, "concurrency": 4, **more.pop("handler", {})}
    return outbox.settings(
        source={**outbox.config()["source"], "mode": mode},
        handlers={"hook": handler},
        shutdown_timeout=1,
        **{"routes": [{"handlers": ["hook"]}], **more},
    )


def publish(outbox: Outbox, events: int) -> None:
    for number in range(events):
        outbox.publish(host(number % HOSTS), event(number))


def slowly(seconds: float) -> Callable[[dict[str, str], bytes], Answer]:
    return lambda headers, body: Answer(after=seconds)


def assert_delivered(outbox: Outbox, webhook: Webhook) -> None:
    """Assert that every event came, and each host's in their order."""
    missing = set(outbox.column("select id::text from outbox_message_t")) - set(webhook.ids())
    assert len(missing) == 0
    for number in range(HOSTS):
        assert webhook.order(host(number)) == outbox.column(
            "select c_offset from outbox_message_t where host_id = %s order by 1", (host(number),)
        )


def is_delivered(outbox: Outbox, webhook: Webhook) -> bool:
    return set(outbox.column("select id::text from outbox_message_t")) <= set(webhook.ids())


def deliver_the_rest(outbox: Outbox, webhook: Webhook, settings: Settings) -> None:
    """Run relay with an endpoint that is fast again, until the slot is drained and every event has come."""
    webhook.answers = slowly(0)
    with relaying(settings):
        outbox.wait_drained()
        with suppress(AssertionError):
            wait_until(lambda: is_delivered(outbox, webhook))
    assert_delivered(outbox, webhook)


def wait_reported(outbox: Outbox) -> None:
    """Wait until the reader of the slot has told the server several times how far it is, with stores in between."""
    query = """
        select reply_time > %s from pg_stat_replication join pg_replication_slots on active_pid = pid
         where slot_name = %s
    """
    for _ in range(5):
        now = outbox.value("select clock_timestamp()")
        wait_until(lambda now=now: outbox.column(query, (now, outbox.slot)) == [True])  # type: ignore[misc]


def end_stream(outbox: Outbox) -> None:
    """End the stream, as an administrator does."""
    outbox.conn.execute(
        "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s",
        (outbox.slot,),
    )


class Instance:
    """relay in a thread, which may end by itself with `error`."""

    def __init__(self, settings: Settings) -> None:
        self.service = Service(settings)
        self.error: RelayError | None = None
        self.thread = threading.Thread(target=self._run, name="relay")
        self.thread.start()

    def _run(self) -> None:
        try:
            self.service.run()
        except RelayError as error:
            self.error = error

    def stop(self) -> None:
        self.service.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()


def test_an_orderly_stop_with_a_slow_endpoint_confirms_what_is_stored(
    outbox: Outbox, webhook: Webhook
) -> None:
    """Issue 28: 1,369 of 1,500 events never came."""
    settings = configured(outbox, webhook)
    webhook.answers = slowly(0.05)
    with relaying(settings):
        publish(outbox, 200)
        wait_until(lambda: len(webhook.accepted) >= 20)
    assert len(webhook.ids()) < 150
    deliver_the_rest(outbox, webhook, settings)


def test_a_cut_session_of_the_target_confirms_what_is_stored(
    outbox: Outbox, webhook: Webhook
) -> None:
    settings = configured(outbox, webhook)
    webhook.answers = slowly(0.05)
    relay = Instance(settings)
    publish(outbox, 200)
    wait_until(lambda: len(webhook.accepted) >= 20)
    outbox.conn.execute(_CUT)
    relay.thread.join(30)
    assert "restart relay" in str(relay.error)
    deliver_the_rest(outbox, webhook, settings)


def publishing(outbox: Outbox, a_second: int) -> AbstractContextManager[None]:
    """Publish all the time, from a thread with a connection of its own."""

    def run(ended: threading.Event) -> None:
        number = 0
        with Outbox(outbox.superuser_dsn) as publisher:
            while not ended.wait(1 / a_second):
                publisher.publish(host(number % HOSTS), event(number))
                number += 1

    return beside(run, "publisher")


def test_restarts_under_load_skip_nothing(outbox: Outbox, webhook: Webhook) -> None:
    """Issue 28: of 9,382 events of 11 runs, 4,308 never came to an endpoint that was fast all the time."""
    settings = configured(outbox, webhook)
    with publishing(outbox, 300):
        for _ in range(3):
            before = len(webhook.ids())
            with relaying(settings):
                wait_until(lambda before=before: len(webhook.ids()) > before + 50)  # type: ignore[misc]
    deliver_the_rest(outbox, webhook, settings)


@pytest.mark.parametrize("mode", ["auto", "wal"])
def test_a_sink_holds_no_wal_for_events_that_are_not_its_own(
    outbox: Outbox, webhook: Webhook, mode: str
) -> None:
    """The last commits of a batch go to the target alone, and nothing follows them."""
    settings = configured(outbox, webhook, mode, **ORDERS)
    outbox.publish(host(1), event(1))
    outbox.publish(host(1), event(1, "stock.moved"))
    with relaying(settings):
        wait_until(lambda: len(webhook.accepted) == 1)
        outbox.wait_drained(5)


@pytest.mark.parametrize("following", [pytest.param("auto", marks=pytest.mark.rare), "wal"])
def test_an_orderly_stop_leaves_an_attached_sink_what_it_has_not_stored(
    outbox: Outbox, webhook: Webhook, following: str
) -> None:
    """Though its rows are deleted meanwhile, or relay only reads the WAL from then on."""
    webhook.answers = slowly(0.05)
    with relaying(configured(outbox, webhook, "auto")):
        wait_until(lambda: outbox.column("select state from relay.sinks") == ["attached"])
        publish(outbox, 100)
        wait_until(lambda: len(webhook.accepted) >= 10)
    assert outbox.value("select state from relay.sinks") == "attached"
    published = outbox.column("select id::text from outbox_message_t")
    assert set(webhook.ids()) < set(published)
    outbox.conn.execute("delete from outbox_message_t")
    webhook.answers = slowly(0)
    with relaying(configured(outbox, webhook, following), accept_configuration=True):
        wait_until(lambda: set(webhook.ids()) == set(published))


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.rare), "wal"])
def test_a_store_that_fails_is_not_followed_by_one_that_lacks_its_outcomes(
    outbox: Outbox, webhook: Webhook, mode: str
) -> None:
    """Somebody cancels the statement that stores a dead letter: the position was stored without it a moment later."""
    webhook.answers = lambda headers, body: Answer(400)
    settings = configured(outbox, webhook, mode)
    relay = Instance(settings)
    wait_until(lambda: outbox.column("select state from relay.sinks") == ["attached"])
    with psycopg.connect(outbox.superuser_dsn) as other:
        other.execute("select from relay.sink_claims for update")
        outbox.publish(host(1), event(1))
        wait_until(
            lambda: bool(
                outbox.column(
                    """
                    select pg_cancel_backend(pid) from pg_stat_activity
                     where wait_event_type = 'Lock' and datname = current_database()
                    """
                )
            )
        )
    if mode == "wal":
        relay.thread.join(30)
        assert "restart relay" in str(relay.error)
        relay = Instance(settings)
    try:
        wait_until(
            lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 1,
        )
    finally:
        relay.stop()


def test_what_is_not_the_sinks_does_not_carry_the_slot_past_what_is(
    outbox: Outbox, webhook: Webhook
) -> None:
    """Commits for others, commits of other tables, and keepalives follow an event that is not delivered yet.

    spiceai/spiceai#11582, electric-sql/electric#4731, Trendyol/go-pq-cdc#107, agoodway/walex#64,
    readysettech/readyset#471
    """
    settings = configured(outbox, webhook, **ORDERS)
    outbox.conn.execute("create table noise (n int)")
    webhook.answers = slowly(60)
    with relaying(settings):
        outbox.publish(host(1), event(1))
        end = outbox.wal_end()
        wait_until(lambda: webhook.connections > 0)
        for _ in range(30):
            outbox.publish(host(2), event(1, "stock.moved"))
            outbox.conn.execute("insert into noise select generate_series(1, 100)")
        wait_reported(outbox)
        assert not outbox.confirmed(end)
    assert not outbox.confirmed(end)
    webhook.answers = slowly(0)
    with relaying(settings):
        wait_until(lambda: len(webhook.accepted) == 1)


@pytest.mark.parametrize("stops", [True, pytest.param(False, marks=pytest.mark.rare)])
def test_nothing_is_confirmed_for_a_sink_that_another_process_has(
    outbox: Outbox, webhook: Webhook, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slot, and a consumer that has not attached yet: spiceai/spiceai#11289."""
    monkeypatch.setattr("relay.source.stream.receiver.ASK_SECONDS", 0.2)
    settings = configured(outbox, webhook)
    with relaying(settings):
        outbox.publish(host(1), event(0))
        wait_until(lambda: len(webhook.accepted) == 1)
    with psycopg.connect(outbox.relay_dsn, autocommit=True) as other:
        assert locks.try_lock(other, locks.sink(settings.group, "hook"))
        relay = Instance(settings)
        outbox.publish(host(1), event(1))
        end = outbox.wal_end()
        wait_reported(outbox)
        assert not outbox.confirmed(end)
        if stops:
            relay.stop()
            assert not outbox.confirmed(end)
    if stops:
        relay = Instance(settings)
    try:
        wait_until(lambda: is_delivered(outbox, webhook))
    finally:
        relay.stop()


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.rare), "wal"])
def test_only_the_last_reader_says_where_it_left_the_slot(
    outbox: Outbox, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One instance is cut off and stopped in order, the other one reads on and is killed."""
    source = {**outbox.config()["source"], "mode": mode}
    settings = outbox.settings(source=source)
    outbox.install_again(settings)
    opened, cut_off = open_replication, set[threading.Thread]()

    def refusing(settings: Settings) -> Connection:
        if threading.current_thread() in cut_off:
            raise psycopg.OperationalError("connection refused")
        return opened(settings)

    monkeypatch.setattr(replication, "open_replication", refusing)
    with ExitStack() as former:
        service = former.enter_context(relaying(settings))
        outbox.publish(host(0), event(0))
        outbox.wait_handled()
        receiver = service._source.receiver
        assert receiver is not None
        cut_off.add(receiver._thread)
        with relaying(settings) as other:
            end_stream(outbox)
            assert other._source.receiver is not None
            wait_until(lambda: other._source.receiver.state.connections > 0)  # type: ignore[union-attr]
            outbox.publish(host(0), event(1))
            outbox.wait_drained()
            former.close()
            monkeypatch.setattr(replication.Replication, "note_left", lambda self: None)
    monkeypatch.undo()
    caplog.clear()
    outbox.publish(host(0), event(2))
    with relaying(settings):
        outbox.wait_handled()
    assert "another client has advanced the slot" not in caplog.text
    outbox.assert_exact()


def test_a_stop_during_an_outage_of_the_endpoint_skips_nothing(
    outbox: Outbox, webhook: Webhook
) -> None:
    """fluent/fluent-bit#1797, vectordotdev/vector#13714, SolaceProducts/pubsubplus-connector-kafka-source#75."""
    settings = configured(outbox, webhook, handler={"circuit_breaker": {"cool_down": 0.2}})
    webhook.answers = lambda headers, body: Answer(503)
    for _ in range(2):
        with relaying(settings):
            publish(outbox, 30)
            wait_until(lambda: len(webhook.requests) > 5)
    deliver_the_rest(outbox, webhook, settings)


def test_one_that_hangs_is_not_passed_over_by_those_that_follow(
    outbox: Outbox, webhook: Webhook
) -> None:
    """vectordotdev/vector#24215: the last one that was delivered was committed, not the last one before a gap."""
    settings = configured(outbox, webhook)
    webhook.answers = lambda headers, body: Answer(
        after=60 if b'"amount": 0' in body or b'"amount":0' in body else 0
    )
    with relaying(settings):
        publish(outbox, 30)
        wait_until(lambda: len(webhook.accepted) >= 26)
        began = outbox.value("select clock_timestamp()")
        outbox.publish(host(HOSTS - 1), event(30))
        wait_until(lambda: outbox.value("select updated_at > %s from relay.sinks", (began,)))
    deliver_the_rest(outbox, webhook, settings)


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.rare), "wal"])
def test_a_transaction_that_began_before_the_stored_position_comes_after_it(
    outbox: Outbox, webhook: Webhook, mode: str
) -> None:
    """risingwavelabs/risingwave#14060, apache/flink-cdc#1893, ClickHouse/walshadow#60: skipped after a restart."""
    settings = configured(outbox, webhook, mode)
    with Outbox(outbox.superuser_dsn) as other:
        other.conn.autocommit = False
        other.publish(host(1), event(1))
        with relaying(settings):
            outbox.publish(host(2), event(2))
            wait_until(lambda: len(webhook.accepted) == 1)
        with relaying(settings):
            outbox.publish(host(2), event(3))
            wait_until(lambda: len(webhook.accepted) == 2)
        other.conn.commit()
        with relaying(settings):
            wait_until(lambda: is_delivered(outbox, webhook))
    assert set(webhook.ids().values()) == {1}


def test_a_stop_reports_what_is_stored(outbox: Outbox, webhook: Webhook) -> None:
    """What was acknowledged last was still in memory: Trendyol/go-pq-cdc#148."""
    settings = configured(outbox, webhook)
    with relaying(settings):
        publish(outbox, 20)
        wait_until(lambda: len(webhook.accepted) == 20)
    stored = outbox.value("select applied_lsn::text from relay.sinks")
    assert outbox.confirmed(stored)
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: len(webhook.accepted) == 21)
    assert set(webhook.ids().values()) == {1}


class History:
    """Instances of one group in mode wal, an endpoint and a publisher, to which `step` does something at random."""

    def __init__(self, outbox: Outbox, webhook: Webhook, chance: random.Random) -> None:
        self.outbox = outbox
        self.webhook = webhook
        self.chance = chance
        self.done: list[str] = []
        self.published: list[tuple[Lsn, Lsn]] = []
        """The WAL's end before and after each event."""
        retry = {"wait": 0.05, "max_wait": 0.1, "jitter": 0.01, "defer_after": 0.05}
        self.settings = configured(
            outbox,
            webhook,
            sinks={"attach_seconds": 0.4},
            handler={"retry": retry, "circuit_breaker": {"cool_down": 0.2}},
        )
        self.instances = [Instance(self.settings)]

    def step(self) -> None:
        """Publish, disturb, and assert that the slot is confirmed to no more than what the sink has stored."""
        for number in range(self.chance.randrange(30)):
            before = Lsn.parse(self.outbox.wal_end())
            self.outbox.publish(host(self.chance.randrange(HOSTS)), event(number))
            self.published.append((before, Lsn.parse(self.outbox.wal_end())))
        disturbance = self.chance.choice(
            [
                self.stop,
                self.stop,
                self.cut_target,
                self.cut_source,
                self.take_over,
                self.pause,
                self.resume,
                self.fail,
                self.answer,
                self.answer,
            ]
        )
        self.done.append(disturbance.__name__)
        disturbance()
        for instance in [each for each in self.instances if not each.thread.is_alive()]:
            assert instance.error is None or "restart relay" in str(instance.error)
            self.instances.remove(instance)
        if not self.instances:
            self.instances.append(Instance(self.settings))
        time.sleep(self.chance.random() * 0.3)
        self.assert_held()

    def assert_held(self) -> None:
        confirmed = Lsn.parse(
            self.outbox.value(
                "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s",
                (self.outbox.slot,),
            )
        )
        stored = Lsn.parse(
            self.outbox.value("select coalesce(max(applied_lsn), '0/0')::text from relay.sinks")
        )
        needed = max((before for before, after in self.published if after <= confirmed), default=0)
        assert stored >= needed, self.done

    def stop(self) -> None:
        self.instances[0].stop()

    def cut_target(self) -> None:
        self.outbox.conn.execute(_CUT)

    def cut_source(self) -> None:
        end_stream(self.outbox)

    def take_over(self) -> None:
        if len(self.instances) < 2:
            self.instances.append(Instance(self.settings))
        self.cut_source()

    def pause(self) -> None:
        if self.outbox.column("select 1 from relay.sinks"):
            sinks.pause(self.settings, "hook")

    def resume(self) -> None:
        if self.outbox.column("select 1 from relay.sinks"):
            sinks.resume(self.settings, "hook")

    def fail(self) -> None:
        self.webhook.answers = lambda headers, body: Answer(503)

    def answer(self) -> None:
        self.webhook.answers = slowly(self.chance.random() * 0.05)

    def end(self) -> None:
        """Let everything that is left be delivered."""
        for each in self.instances:
            each.stop()
        self.resume()
        deliver_the_rest(self.outbox, self.webhook, self.settings)


ROUNDS = int(os.environ.get("RELAY_CHAOS_ROUNDS", "1"))


@pytest.mark.chaos
@pytest.mark.parametrize("number", range(ROUNDS))
def test_no_history_confirms_more_than_is_stored(
    outbox: Outbox, webhook: Webhook, number: int
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    history = History(outbox, webhook, random.Random(seed))
    for _ in range(10 if ROUNDS == 1 else 40):
        history.step()
    history.end()


@pytest.mark.chaos
@pytest.mark.rare
def test_kills_and_stops_of_processes_in_mode_wal_skip_nothing(
    outbox: Outbox, webhook: Webhook, tmp_path: Path
) -> None:
    settings = configured(outbox, webhook)
    source = {**outbox.config()["source"], "mode": "wal"}
    handlers = {"hook": {"type": "http", "url": webhook.url, "concurrency": 4}}
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        source=source,
        handlers=handlers,
        routes=[{"handlers": ["hook"]}],
        shutdown_timeout=1,
    )
    webhook.answers = slowly(0.02)
    for turn in range(2 * ROUNDS):
        with running(config) as process:
            publish(outbox, 100)
            goal = len(webhook.accepted) + 20
            wait_until(lambda goal=goal: len(webhook.accepted) >= goal)  # type: ignore[misc]
            if turn % 2:
                process.kill()
            else:
                assert process.terminate() == 0
    deliver_the_rest(outbox, webhook, settings)
