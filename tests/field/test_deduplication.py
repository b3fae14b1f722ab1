"""A broker that drops repetitions drops nothing else: not another sink's events, not another outbox's, not a rebuild's.

Reports: nats-io/nats-server#3645, #5142, #4815 and #3272, nats-io/jetstream#340.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.admin import sinks
from relay.config.handlers import NatsHandler
from relay.sinks import build_sinks
from relay.store.positions import sinks as positions
from tests.brokers import NatsServer, sending, started
from tests.jetstream import JetStream, jetstream
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.sinks import make_event, transaction


@pytest.fixture
def stream() -> Iterator[JetStream]:
    with jetstream() as server:
        yield server


def subjects(stream: JetStream) -> Counter[str]:
    return Counter(each.subject.partition(".")[0] for each in stream.stored)


def two_sinks(url: str) -> dict[str, Any]:
    """The configuration of two sinks with one stream."""
    handlers = {
        name: {"type": "nats", "servers": [url], "topic": f"{name}.{{event_type}}", "timeout": 3}
        for name in ("a", "b")
    }
    return {"handlers": handlers, "routes": [{"handlers": list(handlers)}]}


def rebuild(name: str, settings: Any) -> None:
    sinks.rebuild(settings, name)


def test_two_sinks_of_one_stream_both_get_every_event(outbox: Outbox, stream: JetStream) -> None:
    for number in range(10):
        outbox.publish(host(number), event(number))
    with relaying(outbox.settings(**two_sinks(stream.url))):
        for name in ("a", "b"):
            outbox.wait_delivered(name)
    assert subjects(stream) == {"a": 10, "b": 10}


def test_a_stream_that_was_purged_is_filled_again_by_a_rebuild(
    outbox: Outbox, stream: JetStream
) -> None:
    settings = outbox.settings(**two_sinks(stream.url))
    for number in range(10):
        outbox.publish(host(number), event(number))
    with relaying(settings):
        outbox.wait_delivered("a")
        outbox.wait_delivered("b")
        stream.purge()
        rebuild("a", settings)
        wait_until(lambda: subjects(stream)["a"] == 10)
        outbox.wait_delivered("a")
    assert subjects(stream) == {"a": 10}


def test_a_sink_that_was_dropped_and_made_again_sends_what_its_namesake_sent(
    outbox: Outbox, stream: JetStream
) -> None:
    settings = outbox.settings(**two_sinks(stream.url))
    outbox.publish(host(1), event(1))
    with relaying(settings):
        outbox.wait_delivered("a")
        outbox.wait_delivered("b")
    positions.remove(outbox.conn, settings.group, ["a"])
    stream.purge()
    again = two_sinks(stream.url)
    again["handlers"]["a"]["start"] = "beginning"
    with relaying(outbox.settings(**again)):
        wait_until(lambda: subjects(stream)["a"] == 1)


def test_a_crash_repeats_nothing_in_the_stream(outbox: Outbox, stream: JetStream) -> None:
    """The position is set back beside relay, as if the process had died before it stored it."""
    settings = outbox.settings(**two_sinks(stream.url))
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_delivered("a")
        outbox.wait_delivered("b")
        outbox.publish(host(1), event(2))
        outbox.publish(host(2), event(3))
        outbox.wait_delivered("a")
        outbox.wait_delivered("b")
    outbox.set_sinks_back()
    with relaying(settings):
        wait_until(lambda: stream.duplicates == 6)
        outbox.wait_delivered("a")
    assert subjects(stream) == {"a": 3, "b": 3}


def send(stream: JetStream, series: str, *events: Any) -> None:
    settings = NatsHandler(type="nats", servers=[stream.url], topic="t")
    ((sink, _),) = build_sinks({"s": settings}).values()

    async def deliver() -> None:
        sink.resume(series)
        try:
            await sink.deliver(transaction(*events))
        finally:
            await sink.close()

    asyncio.run(deliver())


def test_rows_with_equal_ids_are_all_stored(stream: JetStream) -> None:
    """A table that relay did not make need not have a unique id; a line end is no reason to be equal either."""
    rows = [
        make_event(1, id="7"),
        make_event(2, id="7"),
        make_event(3, id="a\nb"),
        make_event(3, id="a b"),
    ]
    send(stream, "s", *rows)
    assert len(stream.stored) == 4
    send(stream, "s", *rows)
    assert (len(stream.stored), stream.duplicates) == (4, 4)
    send(stream, "another", *rows)
    assert len(stream.stored) == 8


@pytest.mark.brokers
def test_a_server_with_jetstream_stores_each_event_of_each_sink(
    outbox: Outbox, tmp_path: Path
) -> None:
    for number in range(10):
        outbox.publish(host(number), event(number))
    with started(NatsServer, tmp_path / "broker") as broker:
        sections = sending(broker)
        sections["handlers"]["second"] = {
            **sections["handlers"]["broker"],
            "topic": "shop.second",
        }
        sections["routes"] = [{"handlers": list(sections["handlers"])}]
        settings = outbox.settings(**sections)
        with relaying(settings):
            outbox.wait_delivered("broker")
            outbox.wait_delivered("second")
            assert broker.count() == 20
            rebuild("second", settings)
            wait_until(lambda: broker.count() == 30)
