"""Faults of sinks that reviews have found: each test is one that once failed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest

from relay.config.loading import load
from relay.delivery import polling
from relay.store import deferred
from tests.integration.test_sinks import assert_in_order, hanging_for, ids, posting, state
from tests.outbox import Outbox, event, host, initialise, relaying, wait_until
from tests.postgres import Server
from tests.process import running
from tests.webhook import Answer, Webhook


def reader(outbox: Outbox) -> int | None:
    """The backend that reads the slot."""
    found = outbox.value(
        "select active_pid from pg_replication_slots where slot_name = %s", (outbox.slot,)
    )
    return None if found is None else int(found)


@pytest.mark.parametrize("mode", ["auto", "wal"])
def test_an_instance_that_lost_the_slot_leaves_its_sinks_to_the_one_that_has_it(
    outbox: Outbox, tmp_path: Path, mode: str
) -> None:
    """A node was frozen for so long that another one took the slot; thawed, it held its claims for ever."""
    with Webhook() as webhook:
        source = {**outbox.config()["source"], "mode": mode}
        config = outbox.config_file(tmp_path / "relay.yaml", source=source, **posting(webhook))
        with running(config) as frozen:
            outbox.publish(host(1), event(1))
            wait_until(lambda: len(webhook.accepted) == 1)
            wait_until(lambda: outbox.value("select state from relay.sinks") == "attached")
            first = reader(outbox)
            with relaying(load(config)):
                os.kill(frozen.process.pid, signal.SIGSTOP)
                outbox.value("select pg_terminate_backend(%s)", (first,))
                wait_until(lambda: reader(outbox) not in (None, first))
                os.kill(frozen.process.pid, signal.SIGCONT)
                for number in range(20):
                    outbox.publish(host(number % 4), event(number))
                outbox.wait_handled()
                wait_until(lambda: len(webhook.accepted) == 21)
                outbox.wait_drained()
    assert set(webhook.ids().values()) == {1}


def test_a_sink_that_is_left_to_another_instance_ends_what_is_under_way(outbox: Outbox) -> None:
    with Webhook() as webhook:
        webhook.answers = lambda _, body: Answer(204, after=1.0)
        settings = outbox.settings(**posting(webhook, concurrency=2), sinks={"attach_seconds": 0.3})
        with relaying(settings), relaying(settings):
            for number in range(8):
                outbox.publish(host(number), event(number))
            wait_until(lambda: set(webhook.ids()) == ids(outbox), 30)
            wait_until(lambda: state(outbox) != "lagging", 30)
            outbox.wait_drained()
    assert set(webhook.ids().values()) == {1}


@pytest.mark.rare
def test_a_source_that_restarts_costs_a_polling_sink_no_copy(
    killable_server: Server, outbox: Outbox
) -> None:
    """The target lives on, so what is under way can be stored."""
    dsn = killable_server.create_database("source")
    with Webhook() as webhook, Outbox(dsn) as source:
        webhook.answers = lambda _, body: Answer(204, after=0.5)
        config = posting(webhook, concurrency=4)
        config["source"] = {**source.config()["source"], "mode": "poll"}
        config["target"] = {"dsn": outbox.relay_dsn}
        settings = outbox.settings(group="remote", **config, poll={"wait_period_ms": 100})
        initialise(settings)
        with relaying(settings):
            source.publish(host(0), event(0))
            wait_until(lambda: len(webhook.accepted) == 1)
            for number in range(1, 13):
                source.publish(host(number), event(number))
            wait_until(lambda: len(webhook.accepted) >= 5)
            killable_server.stop("immediate")
            time.sleep(1.0)
            killable_server.start()
            wait_until(lambda: len(webhook.ids()) == 13, 30)
            time.sleep(1.5)
    assert set(webhook.ids().values()) == {1}


def test_a_key_that_fails_while_held_keys_are_looked_up_is_held(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a slow target tells of held keys does not know those that failed in the meantime."""
    queried = deferred.held

    def slowly(conn: Any, group: str, sink: str, keys: Collection[str]) -> set[str]:
        found = queried(conn, group, sink, keys)
        time.sleep(0.6 if sink else 0)
        return found

    failed: list[bool] = []

    def answers(_: dict[str, str], body: bytes) -> Answer:
        amount = json.loads(body)["data"]["amount"]
        if amount == 0:
            return Answer(503)
        if amount == 1 and not failed:
            failed.append(True)
            return Answer(503, after=0.4)
        return Answer(204)

    monkeypatch.setattr(deferred, "held", slowly)
    with Webhook(answers) as webhook:
        # Nothing is looked up before something is held.
        settings = outbox.settings(**posting(webhook, circuit_breaker=None))
        with relaying(settings):
            outbox.publish(host(0), event(0))
            wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 1)
            outbox.publish(host(1), event(1))
            wait_until(lambda: outbox.value("select count(*) from projection") == 2)
            time.sleep(0.8)
            outbox.publish(host(1), event(2))
            wait_until(lambda: len(webhook.accepted) == 2)
    assert webhook.order(host(1)) == [2, 3]


def test_rows_from_before_relay_are_delivered_once_where_joining_the_stream_is_too_much(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no transaction id by which a sink that gives up joining could know them again."""
    monkeypatch.setattr(polling, "JOINING_TRANSACTIONS", 5)
    for number in range(30):
        outbox.publish(host(number % 4), event(number))
    outbox.conn.execute("update outbox_message_t set c_xid = null")
    with Webhook() as webhook:
        config = posting(webhook)
        config["handlers"]["hook0"]["start"] = "beginning"
        settings = outbox.settings(**config)
        initialise(settings)
        with relaying(settings):
            wait_until(lambda: set(webhook.ids()) == ids(outbox), 30)
            wait_until(lambda: state(outbox) == "attached")
    assert set(webhook.ids().values()) == {1}


@pytest.mark.rare
def test_rows_from_before_relay_are_not_lost_with_a_restart(outbox: Outbox) -> None:
    """A sink that attached to the stream had a position past all events, also past those not delivered yet."""
    for number in range(30):
        outbox.publish(host(0), event(number))
    outbox.conn.execute("update outbox_message_t set c_xid = null")
    with Webhook(lambda _, body: Answer(204, after=0.2)) as webhook:
        config = posting(webhook)
        config["handlers"]["hook0"]["start"] = "beginning"
        settings = outbox.settings(**config)
        initialise(settings)
        with relaying(settings):
            wait_until(lambda: len(webhook.accepted) == 10)
        with relaying(settings):
            wait_until(lambda: set(webhook.ids()) == ids(outbox))
    assert set(webhook.ids().values()) == {1}
    assert_in_order(outbox, webhook, 1)


@pytest.mark.parametrize(
    "modes",
    [
        ("wal", "auto"),
        ("auto", "poll"),
        *(
            pytest.param(each, marks=pytest.mark.rare)
            for each in (("auto", "wal"), ("poll", "auto"))
        ),
    ],
)
def test_another_way_to_read_the_source_costs_no_copy(
    outbox: Outbox, modes: tuple[str, str]
) -> None:
    with Webhook() as webhook:
        for turn, mode in enumerate((*modes, modes[0])):
            source = {**outbox.config()["source"], "mode": mode}
            settings = outbox.settings(
                source=source, **posting(webhook), poll={"wait_period_ms": 100}
            )
            initialise(settings)
            with relaying(settings, accept_configuration=True):
                for number in range(20):
                    outbox.publish(host(number % 4), event(number))
                wait_until(lambda turn=turn: len(webhook.accepted) >= 20 * turn + 20)  # type: ignore[misc]
                outbox.wait_handled()
                if mode != "poll":
                    outbox.wait_drained()
    assert set(webhook.ids().values()) == {1}
    assert_in_order(outbox, webhook, 4)
    outbox.assert_exact()


def test_a_kill_repeats_rows_from_before_relay_from_the_oldest_in_flight(
    outbox: Outbox, tmp_path: Path
) -> None:
    """They have no transaction id by which what is done after that one could be stored."""
    for number in range(10):
        outbox.publish(host(number), event(number))
    outbox.conn.execute("update outbox_message_t set c_xid = null")
    let_go = Event()
    with Webhook(hanging_for(host(4), let_go)) as webhook:
        config = posting(webhook, projected=False)
        config["handlers"]["hook0"]["start"] = "beginning"
        initialise(outbox.settings(**config))
        file = outbox.config_file(tmp_path / "relay.yaml", **config)
        with running(file) as service:
            wait_until(lambda: len(webhook.accepted) == 9)
            wait_until(lambda: outbox.value("select polled_offset from relay.sinks") == 4)
            service.kill()
        let_go.set()
        with running(file) as service:
            wait_until(lambda: set(webhook.ids()) == ids(outbox))
            assert service.terminate() == 0
    once = {id for id, count in webhook.ids().items() if count == 1}
    assert once >= set(
        outbox.column("select id::text from outbox_message_t where c_offset <= 4 order by 1")
    )


@pytest.mark.rare
def test_a_sink_whose_progress_cannot_be_stored_holds_no_wal(
    outbox: Outbox, tmp_path: Path
) -> None:
    """Somebody has locked its row and went to lunch."""
    with Webhook() as first, Webhook() as second:
        config = outbox.config_file(
            tmp_path / "relay.yaml",
            **posting(first, second),
            sinks={"attach_seconds": 0.5},
            shutdown_timeout=5,
        )
        with running(config) as service:
            outbox.publish(host(1), event(1))
            wait_until(lambda: state(outbox) == state(outbox, "hook1") == "attached")
            with psycopg.connect(outbox.superuser_dsn) as other:
                other.execute("select from relay.sink_claims where sink = 'hook0' for update")
                for number in range(10):
                    outbox.publish(host(number), event(number))
                wait_until(lambda: len(second.accepted) == 11, 10)
                outbox.wait_drained(10)
                time.sleep(1)
                outbox.publish(host(1), event(11))
                outbox.wait_drained(10)
                service.process.send_signal(signal.SIGTERM)
                service.process.wait(15)
        with running(config):
            wait_until(lambda: set(first.ids()) == ids(outbox), 20)


def test_a_sink_that_is_back_where_only_the_wal_is_read_misses_nothing_silently(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    source = {**outbox.config()["source"], "mode": "wal"}
    with Webhook() as first, Webhook() as second:
        both = outbox.settings(source=source, **posting(first, second))
        without = outbox.settings(source=source, **posting(first))
        for number, settings in enumerate((both, without, both)):
            with relaying(settings, accept_configuration=True):
                outbox.publish(host(1), event(number))
                wait_until(lambda number=number: len(first.accepted) > number)  # type: ignore[misc]
                outbox.wait_drained()
                if settings is both:
                    wait_until(lambda: state(outbox, "hook1") == "attached")
    assert len(second.accepted) == 2
    said = [r.getMessage() for r in caplog.records if r.__dict__.get("handler") == "hook1"]
    assert [line for line in said if "kept for it" in line] == [
        "a sink is not configured, and without polling nothing is kept for it",
        "a sink is configured again: nothing was kept for it meanwhile",
    ]


@pytest.mark.rare
def test_a_target_that_restarts_loses_nothing_and_keeps_the_order(
    killable_server: Server, outbox: Outbox
) -> None:
    killable_server.create_database("target")
    dsn = killable_server.dsn("target")
    with Webhook(lambda _, body: Answer(204, after=0.02)) as webhook:
        config = posting(webhook, projected=False, concurrency=4)
        slot = f"{outbox.slot}_remote"
        config["source"] = {**outbox.config()["source"], "slot": slot}
        config["target"] = {"dsn": dsn}
        settings = outbox.settings(group="remote", **config, sinks={"attach_seconds": 0.5})
        initialise(settings)
        with relaying(settings):
            for number in range(300):
                outbox.publish(host(number % 6), event(number))
                if number in (100, 200):
                    killable_server.stop("immediate")
                    time.sleep(1.0)
                    killable_server.start()
                time.sleep(0.005)
            wait_until(lambda: set(webhook.ids()) == ids(outbox), 40)
    assert_in_order(outbox, webhook, 6)


def test_a_sink_that_was_polled_and_stored_is_stored_again_once_it_is_streamed(
    outbox: Outbox,
) -> None:
    """It had nothing to read while the slot was not read yet, and was left in the moment in which it was to join."""
    source = outbox.config()["source"]
    with Webhook() as webhook:
        for mode in ("poll", "auto", "poll", "auto"):
            settings = outbox.settings(source={**source, "mode": mode}, **posting(webhook))
            initialise(settings)
            with relaying(settings, accept_configuration=True):
                before = len(webhook.accepted)
                outbox.publish(host(1), event(1))
                wait_until(lambda before=before: len(webhook.accepted) == before + 1, 20)  # type: ignore[misc]
                if mode == "auto":
                    wait_until(lambda: state(outbox) == "attached", 20)
                    outbox.wait_drained()
                began = time.monotonic()
            assert time.monotonic() - began < 5
    assert set(webhook.ids().values()) == {1}
