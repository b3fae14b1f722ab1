"""Sinks beside each other and beside the target: none feels another, and each goes on exactly where it was."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from relay.admin import sinks, status
from relay.admin.acts import Count
from relay.admin.check import require
from relay.admin.offsets import plan_seek, seek
from relay.cli.app import app
from relay.delivery import session as delivery_session
from relay.faults import ConfigurationError, Unreachable
from relay.model.snapshots import BEGINNING, Snapshot
from relay.retention import reader_positions
from relay.store.positions import spark_batches
from relay.store.positions.spark_batches import Contents
from tests.outbox import (
    APPEND,
    Outbox,
    event,
    host,
    initialise,
    relaying,
    run_until_fault,
    wait_until,
)
from tests.postgres import Server
from tests.process import running
from tests.roles import Role
from tests.webhook import Answer, Answers, Webhook, hanging_until

SHORT_INTERVALS = {"wait": 0.2, "max_wait": 0.4, "jitter": 0.01, "defer_after": 0.1}


@pytest.fixture
def webhooks() -> Iterator[list[Webhook]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Webhook()) for _ in range(2)]


def posting(*webhooks: Webhook, projected: bool = True, **more: Any) -> dict[str, Any]:
    """Every event goes to each webhook (`hook0`, `hook1`), and into the projection."""
    handlers: dict[str, Any] = {
        f"hook{number}": {"type": "http", "url": webhook.url, "retry": SHORT_INTERVALS, **more}
        for number, webhook in enumerate(webhooks)
    }
    if projected:
        handlers = {"projection": {"type": "sql", "statement": APPEND}, **handlers}
    return {"handlers": handlers, "routes": [{"handlers": list(handlers)}]}


def reading(outbox: Outbox, mode: str) -> dict[str, Any]:
    """The section `source` with a mode."""
    return {**outbox.config()["source"], "mode": mode}


def ids(outbox: Outbox) -> set[str]:
    return set(outbox.column("select id::text from outbox_message_t"))


def state(outbox: Outbox, sink: str = "hook0") -> str:
    found = outbox.column("select state from relay.sinks where sink = %s", (sink,))
    return str(found[0]) if found else "none"


def assert_in_order(outbox: Outbox, webhook: Webhook, hosts: int) -> None:
    for number in range(hosts):
        assert webhook.order(host(number)) == outbox.column(
            "select c_offset from outbox_message_t where host_id = %s order by 1", (host(number),)
        )


def test_an_endpoint_that_fails_costs_the_other_one_no_copy(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    failing, healthy = webhooks
    failing.answers = lambda _, body: Answer(503)
    with relaying(outbox.settings(**posting(*webhooks))):
        for number in range(40):
            outbox.publish(host(number % 8), event(number))
        wait_until(lambda: len(healthy.accepted) == 40)
        outbox.wait_handled()
        wait_until(lambda: len(failing.requests) >= 8)
        # Few are copied: the sink stops.
        assert outbox.value("select count(*) from relay.deferred") < 40
        failing.answers = lambda _, body: Answer(204)
        wait_until(lambda: set(failing.ids()) == ids(outbox))
    assert set(healthy.ids().values()) == {1}
    assert set(failing.ids().values()) == {1}
    assert_in_order(outbox, failing, 8)
    outbox.assert_exact()


def test_a_batch_of_spark_is_given_up_once_the_sink_is_of_another_kind(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    """It would hold the log for ever, and move the sink back once Spark writes it again."""
    settings = outbox.settings(**posting(webhooks[0]))
    outbox.begin_sink("hook0", f"'{BEGINNING}'")
    contents = Contents(BEGINNING, Snapshot(9, 9))
    spark_batches.begin(outbox.conn, "default", "hook0", "delta x", 0, ([], 8), contents)
    outbox.publish(host(1), event(1))
    with relaying(settings):
        wait_until(lambda: set(webhooks[0].ids()) == ids(outbox))
        wait_until(lambda: state(outbox) == "attached")
    assert spark_batches.begun(outbox.conn, "default", "hook0", "delta x") is None
    reader_positions.note(outbox.conn, outbox.conn, "default", settings.source.table)
    assert outbox.value("select snapshot::text from relay.readers where reader = 'hook0'") == (
        outbox.value("select snapshot::text from relay.sinks")
    )


@pytest.mark.parametrize("hosts", [pytest.param(4, marks=pytest.mark.rare), 32])
def test_an_outage_does_not_copy_the_stream(
    outbox: Outbox, webhooks: list[Webhook], hosts: int
) -> None:
    webhook = webhooks[0]
    webhook.answers = lambda _, body: Answer(503)
    config = posting(webhook, circuit_breaker={"cool_down": 1})
    # As configured by default.
    del config["handlers"]["hook0"]["retry"]
    with relaying(outbox.settings(**config)):
        for number in range(100):
            outbox.publish(host(number % hosts), event(number))
        wait_until(lambda: bool(outbox.column("select 1 from relay.sinks where fault is not null")))
        asked = len(webhook.requests)
        copied = outbox.value("select count(*) from relay.deferred")
        for number in range(400):
            outbox.publish(host(number % hosts), event(number))
        outbox.wait_handled()
        tried = len(webhook.requests)
        wait_until(lambda: len(webhook.requests) >= tried + 3)
        # At most one key for each trial is deferred, and no event that follows with it. 16 may have been under way.
        trials = len(webhook.requests) - asked + 16
        assert outbox.value("select count(*) from relay.deferred") <= copied + trials < 300
        webhook.answers = lambda _, body: Answer(204)
        wait_until(lambda: set(webhook.ids()) == ids(outbox))
    assert set(webhook.ids().values()) == {1}
    assert_in_order(outbox, webhook, hosts)


def test_a_slow_delivery_holds_back_neither_the_target_nor_other_sinks(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    slow, quick = webhooks
    let_go = Event()
    slow.answers = hanging_until(let_go)
    with ExitStack() as stack:
        stack.enter_context(relaying(outbox.settings(**posting(*webhooks))))
        stack.callback(let_go.set)
        outbox.publish(host(0), event(0))
        wait_until(lambda: len(quick.accepted) == 1)
        for _ in range(6):
            outbox.publish(host(1), event(1))
        wait_until(lambda: slow.connections > 0)
        outbox.publish(host(2), event(2))
        wait_until(lambda: len(quick.accepted) == 8)
        outbox.wait_handled()
        assert slow.requests == []
        let_go.set()
        wait_until(lambda: len(slow.accepted) == 8)
    outbox.assert_exact()


def test_order_holds_where_only_some_events_of_a_host_go_to_the_sink_that_fails(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    webhook = webhooks[0]
    webhook.answers = lambda _, body: Answer(503)
    config = posting(webhook)
    config["routes"] = [
        {"match": {"event_type": "order.paid"}, "handlers": ["projection"]},
        {"handlers": ["projection", "hook0"]},
    ]
    with relaying(outbox.settings(**config)):
        outbox.publish(host(1), event(1))
        outbox.publish(host(1), event(2, "order.paid"))
        outbox.wait_handled()
    assert outbox.column("select amount from projection order by seq") == [1, 2]
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


def test_a_timeout_of_idle_transactions_costs_nothing(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    webhook = webhooks[0]
    webhook.answers = lambda _, body: Answer(204, after=0.4)
    database = outbox.conn.info.dbname
    outbox.conn.execute(
        f"alter database {database} set idle_in_transaction_session_timeout = '200ms'".encode()
    )
    with relaying(outbox.settings(**posting(webhook, concurrency=20))):
        for number in range(40):
            outbox.publish(host(number % 20), event(number))
        wait_until(lambda: len(webhook.accepted) == 40)
        outbox.wait_drained()
    assert set(webhook.ids().values()) == {1}


def test_deliveries_run_side_by_side_behind_a_circuit_breaker(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    webhook = webhooks[0]
    together = threading.Barrier(8)

    def answer(headers: Mapping[str, str], body: bytes) -> Answer:
        # Broken, and answered at once, where fewer than eight come.
        with suppress(threading.BrokenBarrierError):
            together.wait(60)
        return Answer(204)

    webhook.answers = answer
    with relaying(outbox.settings(**posting(webhook, concurrency=8, timeout=60))):
        for number in range(8):
            outbox.publish(host(number), event(number))
        wait_until(lambda: len(webhook.accepted) == 8)
        assert not together.broken


def test_a_sink_that_hangs_leaves_the_stream_and_comes_back(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    hanging, healthy = webhooks
    hanging.answers = lambda _, body: Answer(204, after=2.0)
    config = posting(*webhooks, concurrency=1)
    with relaying(outbox.settings(**config, sinks={"attach_seconds": 0.3})):
        for number in range(3):
            outbox.publish(host(number), event(number))
        wait_until(lambda: state(outbox) == "lagging")
        # The WAL does not wait.
        outbox.wait_drained()
        assert len(hanging.accepted) < 3
        hanging.answers = lambda _, body: Answer(204)
        wait_until(lambda: state(outbox) == "attached")
        outbox.publish(host(1), event(4))
        wait_until(lambda: len(hanging.accepted) == len(healthy.accepted) == 4)
    assert set(hanging.ids().values()) == set(healthy.ids().values()) == {1}


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_what_hangs_keeps_only_its_key(
    outbox: Outbox,
    webhooks: list[Webhook],
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A sink that leaves the stream does not wait for it any more.
    monkeypatch.setattr(delivery_session, "STREAM_SECONDS", 60.0)
    caplog.set_level("INFO")
    webhook = webhooks[0]
    let_go = Event()
    webhook.answers = hanging_for(host(0), let_go)
    settings = outbox.settings(
        **posting(webhook), sinks={"attach_seconds": 0.3}, source=reading(outbox, mode)
    )
    with relaying(settings):
        outbox.publish(host(0), event(0))
        # It begins as one that lags, too.
        wait_until(lambda: mode == "poll" or "a sink lags, and polls" in caplog.text)
        wait_until(lambda: state(outbox) == "lagging")
        for number in range(1, 10):
            outbox.publish(host(number), event(number))
            # Each is a difference of its own.
            wait_until(lambda taken=number: len(webhook.accepted) == taken, 5)  # type: ignore[misc]
        assert not let_go.is_set()
        outbox.publish(host(0), event(10))
        if mode == "auto":
            # The WAL does not wait.
            outbox.wait_drained(10)
        let_go.set()
        wait_until(lambda: len(webhook.accepted) == 11)
        wait_until(lambda: outbox.value("select following is null from relay.sinks"))
        if mode == "auto":
            wait_until(lambda: state(outbox) == "attached")
    assert set(webhook.ids().values()) == {1}
    assert_in_order(outbox, webhook, 10)
    assert not outbox.column("select 1 from relay.deferred")


def hanging_for(key: Any, let_go: Event) -> Answers:
    """Answers at once, but for one host: for that after `let_go`."""
    hanging = hanging_until(let_go)

    def answer(headers: dict[str, str], body: bytes) -> Answer:
        return hanging(headers, body) if json.loads(body)["hostid"] == str(key) else Answer(204)

    return answer


@pytest.mark.rare
def test_a_backlog_larger_than_the_buffer_is_polled_in_order(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    webhook = webhooks[0]
    webhook.answers = lambda _, body: Answer(503)
    settings = outbox.settings(**posting(webhook), sinks={"attach_bytes": 65_536})
    with relaying(settings):
        for number in range(300):
            outbox.publish(host(number % 8), event(number, payload={"amount": 1, "x": "x" * 900}))
        outbox.wait_handled()
        wait_until(lambda: state(outbox) == "lagging")
        outbox.wait_drained()
        webhook.answers = lambda _, body: Answer(204)
        wait_until(lambda: set(webhook.ids()) == ids(outbox), 60)
        wait_until(lambda: state(outbox) == "attached")
    assert set(webhook.ids().values()) == {1}
    assert_in_order(outbox, webhook, 8)


def test_a_target_that_stands_still_does_not_stop_a_sink(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    webhook = webhooks[0]
    settings = outbox.settings(**posting(webhook), sinks={"attach_seconds": 0.3})
    with relaying(settings):
        outbox.publish(host(0), event(0))
        outbox.wait_handled()
        with psycopg.connect(outbox.superuser_dsn) as other:
            other.execute("lock projection")
            for number in range(1, 20):
                outbox.publish(host(number % 4), event(number))
            wait_until(lambda: len(webhook.accepted) == 20)
            wait_until(lambda: state(outbox) == "lagging")
        outbox.wait_handled()
        wait_until(lambda: state(outbox) == "attached")
    assert set(webhook.ids().values()) == {1}
    outbox.assert_exact()


def test_only_the_wal_feeds_a_sink_that_fails(outbox: Outbox, webhooks: list[Webhook]) -> None:
    """What it cannot deliver is kept in the target: nothing could poll it."""
    webhook = webhooks[0]
    webhook.answers = lambda _, body: Answer(503)
    source = {**outbox.config()["source"], "mode": "wal"}
    settings = outbox.settings(source=source, **posting(webhook), sinks={"attach_seconds": 0.3})
    with relaying(settings):
        for number in range(40):
            outbox.publish(host(number % 8), event(number))
        outbox.wait_handled()
        outbox.wait_drained()
        assert outbox.value("select count(*) from relay.deferred where sink = 'hook0'") == 40
        webhook.answers = lambda _, body: Answer(204)
        wait_until(lambda: len(webhook.accepted) == 40)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
        outbox.publish(host(1), event(41))
        wait_until(lambda: len(webhook.accepted) == 41)
        outbox.wait_drained()
    assert set(webhook.ids().values()) == {1}
    assert_in_order(outbox, webhook, 8)


def test_a_paused_sink_keeps_its_position_and_costs_nothing(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    settings = outbox.settings(**posting(*webhooks))
    paused, other = webhooks
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: len(paused.accepted) == len(other.accepted) == 1)
        assert sinks.pause(settings, "hook0", "maintenance").changed
        assert not sinks.pause(settings, "hook0").changed
        wait_until(lambda: outbox.value("select paused_at from relay.sinks where sink = 'hook0'"))
        time.sleep(1.2)
        for number in range(20):
            outbox.publish(host(number), event(number))
        wait_until(lambda: len(other.accepted) == 21)
        outbox.wait_drained()
        assert len(paused.accepted) == 1
        assert outbox.value("select count(*) from relay.deferred") == 0
        found = {each.name: each for each in sinks.listed(settings)}
        assert (found["hook0"].state, found["hook0"].unread) == ("paused", 20)
        assert (found["hook0"].reason, found["hook1"].state) == ("maintenance", "attached")
        assert found["hook1"].unread is None
        (stored, _) = status.read(settings).as_json()["sinks"]
        assert (stored["paused_by"], stored["reason"]) == (found["hook0"].paused_by, "maintenance")
        assert found["hook0"].why == f"by {Role.RELAY}: maintenance"
    with relaying(settings):
        assert sinks.resume(settings, "hook0", "done").changed
        wait_until(lambda: len(paused.accepted) == 21)
    assert set(paused.ids().values()) == {1}
    assert outbox.column("select action from relay.actions order by id") == [
        "sink pause",
        "sink resume",
    ]


def test_what_a_stopped_relay_has_not_delivered_is_counted(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    settings = outbox.settings(**posting(webhooks[0]))
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: state(outbox) == "attached")
        assert sinks.listed(settings)[0].unread is None
    assert state(outbox) == "attached"
    for number in range(3):
        outbox.publish(host(1), event(number))
    (found,) = sinks.listed(settings)
    assert found.unread == 3
    assert found.oldest == outbox.value(
        "select min(event_ts) from (select event_ts from outbox_message_t order by c_offset offset 1) as late"
    )


def test_sinks_are_listed_while_the_source_is_away(
    outbox: Outbox, webhooks: list[Webhook], tmp_path: Path
) -> None:
    settings = outbox.settings(**posting(webhooks[0]))
    with relaying(settings):
        wait_until(lambda: state(outbox) == "attached")
    away = {**outbox.config()["source"], "dsn": "host=127.0.0.1 port=1 dbname=none"}
    overrides = {
        **posting(webhooks[0]),
        "source": away,
        "target": {"dsn": settings.target_dsn.conninfo()},
    }
    config = outbox.config_file(tmp_path / "relay.yaml", **overrides)
    done = CliRunner().invoke(app, ["sink", "list", "--config", str(config)])
    assert done.exit_code == 0
    assert done.stdout.splitlines()[1].split("\t")[:4] == ["hook0", "not running", "-", "-"]
    assert "what is unread cannot be counted: source.dsn: cannot connect" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    with pytest.raises(Unreachable):
        sinks.listed(outbox.settings(**overrides))


@pytest.mark.parametrize("stored", ["lagging", "caught up"])
def test_a_change_to_mode_wal_is_refused_while_a_sink_is_not_attached(
    outbox: Outbox, webhooks: list[Webhook], stored: str
) -> None:
    settings = outbox.settings(**posting(webhooks[0]))
    with relaying(settings):
        wait_until(lambda: state(outbox) == "attached")
    only_wal = outbox.settings(**posting(webhooks[0]), source=reading(outbox, "wal"))
    require(only_wal)
    sinks.pause(settings, "hook0")
    outbox.conn.execute("update relay.sink_claims set state = %s", (stored,))
    require(settings)
    why = "hook0: is not attached to the stream, and only the outbox has the events"
    with pytest.raises(ConfigurationError, match=why):
        require(only_wal)
    assert why in run_until_fault(only_wal)


def test_where_only_the_wal_is_read_the_target_waits_for_room_in_a_sinks_buffer(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    """What is submitted, and what the buffer holds, each have `attach_bytes`."""
    webhook, let_go = webhooks[0], Event()
    webhook.answers = hanging_until(let_go)
    settings = outbox.settings(
        **posting(webhook, concurrency=1, order_by="none", timeout=60),
        source=reading(outbox, "wal"),
        sinks={"attach_bytes": 65_536, "attach_seconds": 60},
        batch={"max_bytes": 8_192},
    )
    with relaying(settings) as service:
        wait_until(lambda: state(outbox) == "attached")
        for number in range(100):
            outbox.publish(host(1), event(number, payload={"amount": 1, "x": "x" * 4_000}))
        wait_until(
            lambda: "waits for room in the buffer of sink hook0" in service._sinks.heartbeat.doing
        )
        assert 0 < outbox.handled() < 100
        assert outbox.value("select count(*) from relay.deferred") == 0
        let_go.set()
        wait_until(lambda: len(webhook.accepted) == 100)
        outbox.wait_handled()
        outbox.wait_drained()
    assert set(webhook.ids().values()) == {1}
    outbox.assert_exact()


def test_a_sink_that_only_the_wal_feeds_is_not_moved(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    settings = outbox.settings(**posting(webhooks[0]), source=reading(outbox, "wal"))
    with relaying(settings):
        wait_until(lambda: state(outbox) == "attached")
    for to in ("beginning", "end", "1"):
        with pytest.raises(ConfigurationError, match="past events are only in the slot"):
            sinks.seek.rehearse(settings, "hook0", to=to)


def test_a_sink_is_rebuilt_while_the_others_go_on(outbox: Outbox, webhooks: list[Webhook]) -> None:
    settings = outbox.settings(**posting(*webhooks))
    again, other = webhooks
    with relaying(settings):
        for number in range(30):
            outbox.publish(host(number % 3), event(number))
        wait_until(lambda: len(again.accepted) == len(other.accepted) == 30)
        again.requests.clear()
        sinks.rebuild(settings, "hook0", "a new consumer")
        assert outbox.value("select detail - 'positions' from relay.actions") == {
            "goes on": "with the oldest event",
            "dead": 0,
            "deferred": 0,
        }
        wait_until(lambda: len(again.accepted) == 30)
        wait_until(lambda: state(outbox) == "attached")
        for number in range(30, 40):
            outbox.publish(host(number % 3), event(number))
        wait_until(lambda: len(again.accepted) == 40)
        wait_until(lambda: len(other.accepted) == 40)
        assert_in_order(outbox, again, 3)
        middle = int(
            outbox.value(
                "select c_offset from outbox_message_t order by c_offset offset 20 limit 1"
            )
        )
        again.requests.clear()
        sinks.seek(settings, "hook0", to=str(middle))
        wait_until(lambda: len(again.accepted) == 20)
        wait_until(lambda: state(outbox) == "attached")
    assert set(again.ids().values()) == set(other.ids().values()) == {1}
    with pytest.raises(ConfigurationError, match="there is no sink 'hook9'"):
        sinks.seek.rehearse(settings, "hook9", to="end")


def test_a_new_sink_begins_where_it_says(outbox: Outbox, webhooks: list[Webhook]) -> None:
    for number in range(10):
        outbox.publish(host(1), event(number))
    outbox.drain(outbox.settings())
    config = posting(*webhooks)
    config["handlers"]["hook0"]["start"] = "beginning"
    initialise(outbox.settings(**config))
    with relaying(outbox.settings(**config)):
        outbox.publish(host(1), event(10))
        wait_until(lambda: len(webhooks[0].accepted) == 11)
        wait_until(lambda: len(webhooks[1].accepted) == 1)
    assert_in_order(outbox, webhooks[0], 1)


def test_a_sink_that_is_gone_is_noticed_and_goes_on_when_it_is_back(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    with_both, without = posting(*webhooks), posting(webhooks[0])
    with relaying(outbox.settings(**with_both)):
        outbox.publish(host(1), event(1))
        wait_until(lambda: len(webhooks[1].accepted) == 1)
    settings = outbox.settings(**without)
    with relaying(settings, accept_configuration=True):
        outbox.publish(host(1), event(2))
        wait_until(lambda: len(webhooks[0].accepted) == 2)
    found = {each.name: each.state for each in sinks.listed(settings)}
    assert found["hook1"] == "not configured"
    with pytest.raises(ConfigurationError, match="is configured"):
        sinks.drop(settings, "hook0")
    with relaying(outbox.settings(**with_both), accept_configuration=True):
        wait_until(lambda: len(webhooks[1].accepted) == 2)
        # It would begin again at its `start`, and what it has not delivered yet would be forgotten.
        with pytest.raises(ConfigurationError, match="runs with a configuration that still has"):
            sinks.drop(settings, "hook1")
    assert sinks.drop(settings, "hook1", "no longer wanted").answer == Count(0)
    assert [each.name for each in sinks.listed(settings)] == ["hook0"]


def test_a_paused_sink_tells_that_it_is_paused_whatever_fails(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    webhooks[0].answers = lambda _, body: Answer(503)
    settings = outbox.settings(
        **posting(webhooks[0], circuit_breaker={"failures": 1, "cool_down": 30})
    )
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: sinks.listed(settings)[0].why == "Undelivered: HTTP 503")
        sinks.pause(settings, "hook0")
        (found,) = sinks.listed(settings)
        assert (found.why, found.fault) == (f"by {found.paused_by}", "Undelivered: HTTP 503")
        assert found.since == outbox.value("select paused_at from relay.sinks")


def test_sinks_that_move_with_the_group_are_noted(outbox: Outbox, webhooks: list[Webhook]) -> None:
    source = {**outbox.config()["source"], "mode": "wal"}
    settings = outbox.settings(source=source, **posting(webhooks[0]))
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: len(webhooks[0].accepted) == 1)
    seek(settings, plan_seek(settings, "end", None), None)
    assert outbox.conn.execute(
        "select sink, action, reason from relay.actions order by id"
    ).fetchall() == [
        ("hook0", "sink seek", "relay offsets seek"),
        ("", "offsets seek", None),
    ]


def test_a_command_says_what_is_no_sink(outbox: Outbox, webhooks: list[Webhook]) -> None:
    settings = outbox.settings(**posting(webhooks[0]))
    with pytest.raises(ConfigurationError, match=r"handlers.hook0: the sink has not begun"):
        sinks.pause(settings, "hook0")
    with pytest.raises(ConfigurationError, match=r"handlers.projection: is not a sink"):
        sinks.pause(settings, "projection")
    with relaying(settings):
        wait_until(lambda: state(outbox) == "attached")
    with pytest.raises(ConfigurationError) as refused:
        sinks.seek.rehearse(settings, "hook0", to="nonsense")
    assert str(refused.value) == (
        "to: 'nonsense' is neither a c_offset, a time such as 2026-03-01T12:00, beginning nor end"
    )


def test_a_killed_relay_goes_on_within_seconds_and_loses_nothing(
    outbox: Outbox, webhooks: list[Webhook], tmp_path: Any
) -> None:
    webhook = webhooks[0]
    webhook.answers = lambda _, body: Answer(204, after=0.02)
    config = outbox.config_file(tmp_path / "relay.yaml", **posting(webhook))
    for _ in range(3):
        with running(config) as service:
            goal = len(webhook.accepted) + 20
            for number in range(60):
                outbox.publish(host(number % 4), event(number))
            wait_until(lambda goal=goal: len(webhook.accepted) > goal)  # type: ignore[misc]
            service.kill()
    with running(config) as service:
        wait_until(lambda: set(webhook.ids()) == ids(outbox), 30)
        assert service.terminate() == 0
    assert_in_order(outbox, webhook, 4)
    outbox.assert_exact()


@pytest.mark.parametrize(
    "mode",
    [
        "auto",
        pytest.param("poll", marks=pytest.mark.rare),
        pytest.param("wal", marks=pytest.mark.rare),
    ],
)
def test_a_kill_repeats_only_what_was_not_done(
    outbox: Outbox, webhooks: list[Webhook], tmp_path: Any, mode: str
) -> None:
    """Though the first delivery of all is still under way."""
    webhook = webhooks[0]
    let_go = Event()
    webhook.answers = hanging_for(host(0), let_go)
    config = outbox.config_file(
        tmp_path / "relay.yaml", **posting(webhook), source=reading(outbox, mode)
    )
    with running(config) as service:
        for number in range(50):
            outbox.publish(host(number), event(number))
        wait_until(lambda: len(webhook.accepted) == 49)
        wait_until(lambda: outbox.value(DONE) == 49)
        service.kill()
    let_go.set()
    with running(config) as service:
        wait_until(lambda: set(webhook.ids()) == ids(outbox), 30)
        outbox.publish(host(1), event(50))
        wait_until(lambda: set(webhook.ids()) == ids(outbox), 30)
        assert service.terminate() == 0
    twice = {id for id, count in webhook.ids().items() if count > 1}
    assert twice <= set(
        outbox.column("select id::text from outbox_message_t where host_id = %s", (host(0),))
    )


def test_a_target_that_is_restored_takes_sinks_back(
    outbox: Outbox, webhooks: list[Webhook], server: Server
) -> None:
    """What they had delivered since the backup comes again, and nothing before it."""
    webhook, name, saved = webhooks[0], f"{outbox.slot}_target", f"{outbox.slot}_saved"

    def deliver(numbers: range) -> None:
        with relaying(settings):
            for number in numbers:
                outbox.publish(host(number % 4), event(number))
            wait_until(lambda: set(webhook.ids()) == ids(outbox))

    try:
        with Outbox(server.create_database(name)) as target:
            settings = outbox.settings(
                **posting(webhook, projected=False), target={"dsn": target.relay_dsn}
            )
            initialise(settings)
        deliver(range(8))
        server.create_database(saved, template=name)
        before = ids(outbox)
        deliver(range(8, 16))
        server.drop_database(name)
        server.create_database(name, template=saved)
        with relaying(settings):
            wait_until(lambda: len(webhook.accepted) == 24)
        assert {id for id, count in webhook.ids().items() if count == 1} == before
    finally:
        server.drop_database(name)
        server.drop_database(saved)


def test_what_is_deferred_is_done_in_the_same_moment(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    """A kill between the two would deliver it twice."""
    webhook = webhooks[0]
    webhook.answers = lambda _, body: Answer(503 if b"900" in body else 204)
    found: list[tuple[int, int]] = []
    with relaying(outbox.settings(**posting(webhook))):
        wait_until(lambda: state(outbox) == "attached")
        for number in range(900, 903):
            outbox.publish(host(number), event(900))
            outbox.publish(host(number), event(1))

            def is_deferred() -> bool:
                found.extend(outbox.conn.execute(DEFERRED_AND_DONE).fetchall())
                return found[-1][0] > 0

            wait_until(is_deferred)
    assert all(deferred == done for deferred, done in found)


DEFERRED_AND_DONE = """
select count(*), count(*) filter (where d.xid::text::xid8 = any(done.xids)
                                     or pg_visible_in_snapshot(d.xid::text::xid8, s.snapshot))
  from relay.deferred d cross join relay.sinks s cross join
       (select coalesce(array_agg(xid), '{}') as xids from relay.sink_commits, unnest(xids) as xid) as done
"""
DONE = "select coalesce(sum(cardinality(xids)), 0) from relay.sink_commits"


@pytest.mark.parametrize("mode", ["auto", pytest.param("poll", marks=pytest.mark.rare)])
@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (1, "may have lost events that group 'default' has polled or delivered"),
        (100, "group 'default' has applied transactions below"),
    ],
)
def test_a_source_that_lost_what_was_delivered_stops_relay_until_somebody_decides(
    outbox: Outbox, webhooks: list[Webhook], mode: str, lost: int, said: str
) -> None:
    ahead, other = webhooks
    settings = outbox.settings(**posting(*webhooks), source=reading(outbox, mode))
    with relaying(settings):
        for number in range(10):
            outbox.publish(host(number % 3), event(number))
        wait_until(lambda: len(ahead.accepted) == len(other.accepted) == 10)
        outbox.wait_handled()
    outbox.conn.execute(
        "insert into relay.positions"
        " (group_id, owner, topic_id, partition_id, number, delivered_lsn, snapshot, notes_from)"
        " select group_id, sink, 1, 0, number + 1, delivered_lsn + 10000000000,"
        " (n || ':' || n + %s || ':')::pg_snapshot, notes_from from relay.sinks,"
        " (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint) as next (n) where sink = 'hook0'",
        (lost,),
    )
    first = outbox.value("select max(c_offset) + 1 from outbox_message_t")
    outbox.publish(host(1), event(10))
    assert said in run_until_fault(settings)
    assert outbox.handled() == 10
    move = plan_seek(settings, str(first), None)
    assert move.sinks == ["hook0"]
    seek(settings, move, None)
    with relaying(settings):
        wait_until(lambda: set(ahead.ids()) == set(other.ids()) == ids(outbox))
        # The target polls beside the sinks, and may be later than they.
        outbox.wait_handled()
    assert set(ahead.ids().values()) == {1}
    # The other sink may deliver the last event while relay stops because of the fault, and its answer comes too late.
    last = outbox.value("select id::text from outbox_message_t order by c_offset desc limit 1")
    assert {n for id_, n in other.ids().items() if id_ != last} == {1}
    assert other.ids()[last] <= 2
    outbox.assert_exact()


def test_two_instances_share_a_sink_without_delivering_twice(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    webhook = webhooks[0]
    settings = outbox.settings(**posting(webhook))
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: len(webhook.accepted) == 1)
        with relaying(settings):
            for number in range(30):
                outbox.publish(host(number % 4), event(number))
            wait_until(lambda: len(webhook.accepted) == 31)
    assert set(webhook.ids().values()) == {1}
    assert_in_order(outbox, webhook, 4)


def test_the_rights_that_are_granted_suffice_for_a_sink_and_its_operator(
    outbox: Outbox, webhooks: list[Webhook]
) -> None:
    webhook = webhooks[0]
    webhook.answers = lambda _, body: Answer(
        400 if b'"amount": 13' in body else 503 if b'"amount": 7' in body else 204
    )
    with outbox.limited_role() as (_, dsn):
        source = {**outbox.config()["source"], "dsn": dsn}
        settings = outbox.settings(source=source, **posting(webhook))
        with relaying(settings):
            for number in (1, 13, 7):
                outbox.publish(host(number), event(number))
            wait_until(lambda: len(webhook.accepted) == 1)
            wait_until(lambda: outbox.column("select sink from relay.deferred") == ["hook0"])
            wait_until(
                lambda: outbox.column("select sink from relay.dead_letter_queue") == ["hook0"]
            )
            assert sinks.pause(settings, "hook0", "maintenance").changed
            assert sinks.resume(settings, "hook0").changed
            sinks.seek(settings, "hook0", "once more", to="beginning")
            wait_until(lambda: len(webhook.accepted) == 2)
            assert [each.name for each in sinks.listed(settings)] == ["hook0"]
        sinks.drop(outbox.settings(source=source), "hook0", "no longer wanted")
    assert outbox.column("select action from relay.actions order by id") == [
        "sink pause",
        "sink resume",
        "sink seek",
        "sink drop",
    ]
