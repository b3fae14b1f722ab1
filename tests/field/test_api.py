"""What users of other event streams over HTTP have reported, tried on relay's: each test names the reports."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from threading import Thread
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.api import streams
from relay.config.settings import Settings
from tests.api import API, Program, Source, authorized, new_token, served, settings_of
from tests.chaos.proxy import through_proxy
from tests.integration.test_api import number_of, publish_amounts
from tests.outbox import Outbox, event, host, wait_until
from tests.postgres import start_server


@pytest.fixture
def settings(outbox: Outbox) -> Settings:
    return settings_of(outbox, streams=20, streams_per_token=20)


@pytest.fixture
def address(settings: Settings) -> Iterator[str]:
    with served(settings) as address:
        yield address


@pytest.fixture
def token(settings: Settings) -> str:
    return new_token(settings)


def test_what_is_published_during_the_handover_to_the_live_end(
    outbox: Outbox, address: str, token: str
) -> None:
    """A subscriber lost what came between its history and its registration: dunglas/mercure#178; others skipped from
    the replay to the head: commanded/eventstore#327, johanhaleby/occurrent#208."""
    publish_amounts(outbox, 0)
    last = Program(address, token).get("/events")["next"]
    with psycopg.connect(outbox.publisher_dsn, autocommit=True) as conn:

        def publish() -> None:
            for number in range(1, 200):
                conn.execute(
                    "select relay.publish(%s, null, %s)", (host(1), Jsonb([event(number)]))
                )

        publishing = Thread(target=publish)
        publishing.start()
        for _ in range(5):
            with Source(address, token, last) as source:
                assert [number_of(each) for each in source.take(30)] == list(range(1, 31))
        with Source(address, token, last) as source:
            assert [number_of(each) for each in source.take(199)] == list(range(1, 200))
        publishing.join()


def test_a_transaction_that_was_open_when_later_ones_were_read(
    outbox: Outbox, address: str, token: str
) -> None:
    """Sequences that transactions in flight had reserved were passed over: JasperFx/marten#1629, #4952 and #4977."""
    with psycopg.connect(outbox.publisher_dsn) as late, Source(address, token).ready() as source:
        late.execute("select relay.publish(%s, null, %s)", (host(1), Jsonb([event(1)])))
        publish_amounts(outbox, 2)
        assert [number_of(each) for each in source.take(1)] == [2]
        last = source.last
        late.commit()
        assert [number_of(each) for each in source.take(2)] == [2, 1]
    with Source(address, token, last) as again:
        assert [number_of(each) for each in again.take(1)] == [1]


def test_a_transaction_of_which_the_end_does_not_match(
    outbox: Outbox, address: str, token: str
) -> None:
    """Its position was unknown to the server, which began again for ever: electric-sql/electric#1555."""
    outbox.publish(host(1), event(1), event(2, event_type="other"))
    with Source(address, token, after="beginning", type="order.*") as source:
        source.take(1)
        last = source.last
    publish_amounts(outbox, 3)
    with Source(address, token, last, type="order.*") as source:
        assert [number_of(each) for each in source.take(1)] == [3]


def test_a_position_ahead_of_the_log_is_refused(address: str, token: str) -> None:
    """It was status 500: electric-sql/electric#2063; or everything came again: YoEight/eventstore#62; or nothing ever
    came, and nobody was told: dunglas/mercure#704."""
    _, _, origin = Program(address, token).get("/events", after="now")["next"].partition("@")
    # As relay made them before it took witnesses.
    server, timeline, lsn, _ = origin.split(".")
    ahead = "99999999999:99999999999:"
    for position in (
        f"{ahead}@{server}.{timeline}.{lsn}",
        f"5:5:@{int(server) + 1}.{timeline}.{lsn}",
        f"5:5:@{server}.{int(timeline) + 1}.{lsn}",
    ):
        for path in ("/v1/events", "/v1/events/stream"):
            refused = httpx.get(
                address + path, params={"after": position}, headers=authorized(token)
            )
            assert refused.status_code == 410, position
            assert "has been replaced" in refused.json()["detail"]


def _publish_at_once(conn: psycopg.Connection[Any], events: int) -> None:
    """Publish many events in one transaction, whose amounts count from 0."""
    conn.execute(
        "insert into outbox_message_t (host_id, event_type, payload, c_offset)"
        " select %s, 'order.placed', jsonb_build_object('amount', n - 1), nextval('relay.offsets')"
        " from generate_series(1, %s) as n",
        (host(1), events),
    )


def _pages(program: Program, most: int) -> list[int]:
    """Read all pages of 1,000 events, of which each but the last has some."""
    found: list[int] = []
    after = "beginning"
    while True:
        page = program.get("/events", after=after, limit=most)
        found += map(number_of, page["events"])
        after = page["next"]
        if not page["more"]:
            return found
        assert page["events"]


def _stream(address: str, token: str, count: int, each: int) -> list[int]:
    """Read a stream over connections that are cut after so many events."""
    found: list[int] = []
    last = ""
    while len(found) < count:
        with Source(address, token, last, **({} if last else {"after": "beginning"})) as source:
            took = source.take(min(each, count - len(found)))
            found += map(number_of, took)
            last = source.ids[len(took) - 1]
    return found


@pytest.mark.parametrize(
    "events",
    [3_000, pytest.param(200_000, marks=[pytest.mark.rare, pytest.mark.long, pytest.mark.slow])],
)
def test_a_transaction_that_is_larger_than_a_page(outbox: Outbox, events: int) -> None:
    """Consumers held a whole transaction in memory: Trendyol/go-pq-cdc#151, pingcap/ticdc#5596,
    airbytehq/airbyte#20873, instantdb/instant#1576; or one such page for each of many readers:
    scylladb/scylla-cdc-java#79."""
    settings = settings_of(outbox, replay=1_000_000)
    with served(settings) as address:
        token = new_token(settings)
        publish_amounts(outbox, -1)
        _publish_at_once(outbox.conn, events)
        publish_amounts(outbox, -2)
        wanted = [-1, *range(events), -2]
        assert _pages(Program(address, token), 1_000) == wanted
        assert _stream(address, token, len(wanted), events // 3 + 1) == wanted
        with Source(address, token).ready() as source:
            _publish_at_once(outbox.conn, events)
            publish_amounts(outbox, -3)
            last, found = source.last, list[int]()
            while len(found) < events + 1:
                # One that the end of the log was too quick for is cut, and resumes.
                with Source(address, token, last) as again:
                    again.limit(20)
                    while len(found) + len(again.events) < events + 1:
                        try:
                            again.block()
                        except EOFError:
                            break
                    found += map(number_of, again.events)
                    last = again.ids[-1] if again.ids else last
        assert found == [*range(events), -3]


def test_a_transaction_that_was_prepared_when_later_ones_were_streamed(
    outbox: Outbox, address: str, token: str
) -> None:
    """What was prepared before a reader's position and committed after it was skipped: kurrent-io/KurrentDB#627."""
    with closing(psycopg.connect(outbox.publisher_dsn)) as other:
        with Source(address, token).ready() as source:
            other.tpc_begin("late")
            other.execute(
                "select relay.publish(%s, null, %s)", (host(1), Jsonb([event(1), event(2)]))
            )
            other.tpc_prepare()
            publish_amounts(outbox, 3)
            assert [number_of(each) for each in source.take(1)] == [3]
            last = source.last
            outbox.conn.execute("commit prepared 'late'")
            assert [number_of(each) for each in source.take(3)] == [3, 1, 2]
        with Source(address, token, last) as again:
            assert [number_of(each) for each in again.take(2)] == [1, 2]


def test_a_database_that_is_killed_between_the_commit_and_the_answer() -> None:
    """The repetition of a request whose answer was lost published a second time: ulsklyc/yuvomi#822,
    apache/fineract#5674."""
    with start_server() as server, Outbox(server.create_database("app")) as victim:
        victim.install()

        def commits(data: bytes) -> bool:
            if b"COMMIT" not in data or killed:
                return False
            wait_until(lambda: victim.value("select count(*) from outbox_message_t") == 1)
            killed.append(True)
            victim.conn.close()
            server.kill()
            return True

        killed: list[bool] = []
        settings = settings_of(victim)
        token = new_token(settings, rights=["publish"])
        body = {"host_id": str(host(1)), "event_type": "a", "payload": 1}
        with through_proxy(victim.relay_dsn) as proxy:
            of_source = {"dsn": proxy.dsn, "slot": "app", "publication": "app"}
            proxy.cut_after = commits
            with served(victim.settings(api={**API}, source=of_source)) as address:

                def post() -> httpx.Response:
                    head = {**authorized(token), "idempotency-key": "order 1"}
                    return httpx.post(f"{address}/v1/events", json=body, headers=head, timeout=60)

                first = post()
                assert killed
                assert first.status_code == 503
                assert "retry-after" in first.headers
                server.start()
                victim.reconnect()
                wait_until(lambda: post().status_code == 200)
                assert victim.value("select count(*) from outbox_message_t") == 1


def test_a_stream_has_a_position_before_its_first_event(
    outbox: Outbox, address: str, token: str
) -> None:
    """What was published between two connections without an event was missed: dunglas/mercure#354; an empty stream
    never told that it was at the end: kurrent-io/KurrentDB#4115."""
    with Source(address, token).ready() as source:
        last = source.last
    publish_amounts(outbox, 1)
    with Source(address, token, last) as source:
        assert [number_of(each) for each in source.take(1)] == [1]


@pytest.mark.parametrize(
    "text", ["a\rid: 1", "a\nevent: x", "a\r\n\r\ndata: {}", "a\u2028b\u0085c"]
)
def test_line_ends_in_what_was_published_make_no_fields(
    outbox: Outbox, address: str, token: str, text: str
) -> None:
    """fastapi/fastapi#15187, nestjs/nest#16686, fanout/django-eventstream#185, singingwolfboy/flask-sse#40."""
    kind = f"order.{text}"
    outbox.publish(host(1), event(1, kind, payload={"text": text, text: 1}, aggregate_id=text))
    publish_amounts(outbox, 2)
    with Source(address, token, after="beginning") as source:
        first, second = source.take(2)
    assert (first["payload"], first["event_type"], first["aggregate_id"]) == (
        {"text": text, text: 1},
        kind,
        text,
    )
    assert number_of(second) == 2


def test_connections_that_are_reset_at_once_leave_no_slot_taken(address: str, token: str) -> None:
    """The slots of all clients leaked before the answer began: stemdeckapp/stemdeck#513; health checks that connected
    and went did: modelcontextprotocol/rust-sdk#165."""
    where, port = address.removeprefix("http://").split(":")
    head = f"GET /v1/events/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n"
    for _ in range(60):
        with socket.create_connection((where, int(port))) as client:
            client.sendall(head.encode())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def all_open() -> bool:
        found = [Source(address, token) for _ in range(20)]
        for each in found:
            each.__exit__()
        return {each.status for each in found} == {200}

    wait_until(all_open, 30)


def test_the_server_ends_although_clients_stay(settings: Settings, token: str) -> None:
    """It waited for them: sysid/sse-starlette#8 and #128, Kludex/uvicorn#2829."""
    with served(settings) as address:
        found = [Source(address, token).ready() for _ in range(5)]
        began = time.monotonic()
    took = time.monotonic() - began
    for each in found:
        each.until_the_end()
        each.__exit__()
    assert took < 30


def test_a_token_in_the_address_is_only_for_streams(address: str, token: str) -> None:
    """It opened every route: joshuaswarren/remnic#754."""
    query = {"access_token": token}
    assert httpx.get(f"{address}/v1/events", params=query).status_code == 401
    with httpx.stream("GET", f"{address}/v1/events/stream", params=query) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["content-type"].startswith("text/event-stream")


def test_an_idle_stream_says_something(
    address: str, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies ended idle ones: stellar/go-stellar-sdk#376, esengine/DeepSeek-Reasonix#3064."""
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.05)
    with Source(address, token).ready() as source:
        for _ in range(3):
            source.block()
        assert source.events == []


def test_a_burst_cuts_nobody_who_reads(
    outbox: Outbox, address: str, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer of live events filled up within a burst of writes, and the subscription was dropped:
    kurrent-io/KurrentDB#891 and #4089; a client that took nothing cost memory without bound: HenryLach/taskplane#664,
    OpenCTI-Platform/opencti#13908. Whoever is cut all the same resumes."""
    monkeypatch.setattr(streams, "BUFFER_BYTES", 50_000)
    found: list[int] = []
    with Source(address, token).ready() as source:
        last = source.last
    for first in range(0, 300, 10):
        publish_amounts(
            outbox, *range(first, first + 10), payload={"amount": 1, "note": "x" * 2_000}
        )
    while len(found) < 300:
        with Source(address, token, last) as source:
            source.limit(20)
            while len(found) + len(source.events) < 300:
                try:
                    source.block()
                except EOFError:
                    break
            found += [each["transaction_ordinal"] for each in source.events]
            last = source.last
    assert found == [*range(1, 11)] * 30
