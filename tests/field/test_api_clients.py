"""Clients of the HTTP API that would harm others, and streams that would end in silence."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from http.client import IncompleteRead
from threading import Lock
from typing import Any

import httpx
import pytest

from relay.admin.events import EventDestination
from relay.api import streams
from relay.api.events import EventState
from relay.api.positions import LogHistory
from relay.api.shared_commits import CommitWriter
from relay.api.tail import Tail
from relay.config.settings import Settings
from relay.intake.messages import IncomingEvents, MessageReader
from relay.model.snapshots import Snapshot
from relay.store.connections import Connection
from relay.store.log_pages import LogPosition
from relay.web import protocol, requests
from tests.api import Source, authorized, new_token, served, settings_of
from tests.outbox import Outbox, event, host, wait_until

_HOST = host(1)
_FILL = """
    do $$
    begin
        for number in 1..6000 loop
            perform relay.publish('00000000-0000-4000-8000-000000000001', null, jsonb_build_array(jsonb_build_object(
                'event_type', 'a', 'aggregate_type', 'b', 'aggregate_id', 'c', 'payload', repeat('x', 2000))));
            commit;
            set local synchronous_commit = off;
        end loop;
    end $$
"""


@pytest.fixture
def settings(outbox: Outbox) -> Settings:
    return settings_of(outbox)


@pytest.fixture
def address(settings: Settings) -> Iterator[str]:
    with served(settings) as address:
        yield address


def _number(found: Any) -> int:
    return int(found["payload"]["amount"])


def _requested(address: str, token: str, query: str = "", head: str = "") -> socket.socket:
    """The socket of a client that has asked for a stream, and has read nothing of it."""
    where, port = address.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((where, int(port)))
    client.sendall(
        f"GET /v1/events/stream{query} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n{head}\r\n".encode()
    )
    return client


def test_clients_that_take_nothing_keep_nobody_from_catching_up(
    outbox: Outbox, settings: Settings, address: str
) -> None:
    """As many as read pages of their own at once, and more: each of them has asked for more than the sockets hold."""
    outbox.conn.execute(_FILL)
    slow, token = new_token(settings, "slow"), new_token(settings)
    with ExitStack() as stack:
        for _ in range(8):
            client = stack.enter_context(
                closing(_requested(address, slow, query="?after=beginning"))
            )
            assert client.recv(8) == b"HTTP/1.1"
        with Source(address, token, after="beginning") as source:
            assert len(source.take(6_000)) == 6_000


def test_an_open_stream_has_no_silent_gap_where_retention_was_quicker(
    outbox: Outbox, settings: Settings, address: str
) -> None:
    """Such as of a transaction that was open for longer than events are kept."""
    token = new_token(settings)
    with Source(address, token).ready() as source:
        outbox.publish(_HOST, event(1))
        source.take(1)
        with outbox.conn.transaction():
            outbox.publish(_HOST, event(2))
            outbox.conn.execute(
                "insert into relay.removed (outbox, newest, snapshot)"
                " values ('public.outbox_message_t', pg_current_xact_id(), pg_current_snapshot())"
            )
            outbox.conn.execute("delete from outbox_message_t")
        outbox.publish(_HOST, event(3))
        with suppress(EOFError, OSError, IncompleteRead):
            source.take(2)
        assert [_number(each) for each in source.events] == [1]
    with Source(address, token, source.last) as again:
        assert again.status == 410


def test_streams_end_where_a_failover_has_lost_what_they_had(
    outbox: Outbox, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They did not stand still with heartbeats until the new primary had come as far."""
    ahead: list[LogPosition] = []
    read = Tail._read

    def moved(self: Tail, conn: Connection) -> None:
        if ahead:
            self._position = ahead.pop()
        read(self, conn)

    monkeypatch.setattr(Tail, "_read", moved)
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 1.0)
    with served(settings) as address:
        token = new_token(settings)
        with Source(address, token).ready() as source:
            xid = outbox.value("select pg_current_xact_id()::text::bigint") + 1_000_000
            ahead.append(LogPosition(Snapshot(xid, xid)))
            _require_end(source)
        with Source(address, token).ready() as source:
            outbox.publish(_HOST, event(2))
            assert [_number(each) for each in source.take(1)] == [2]


def test_streams_end_at_a_failover_that_may_have_lost_what_they_had(
    outbox: Outbox, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new primary gave the ids of lost transactions to others, which would have been passed over."""
    with served(settings) as address:
        token = new_token(settings)
        with Source(address, token).ready() as source:
            outbox.publish(_HOST, event(1))
            source.take(1)
            with monkeypatch.context() as replaced:
                replaced.setattr(LogHistory, "has", lambda *_: False)
                _require_end(source)
        outbox.publish(_HOST, event(2))
        with Source(address, token, source.last) as again:
            assert [_number(each) for each in again.take(1)] == [2]


def test_a_request_for_a_stream_whose_body_does_not_end_is_ended(
    settings: Settings, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would notice that such a client has gone."""
    monkeypatch.setattr(requests, "BODY_SECONDS", 0.5)
    head = "transfer-encoding: chunked\r\n"
    with closing(_requested(address, new_token(settings), head=head)) as client:
        client.settimeout(30)
        came = b""
        while not came.endswith(b"\r\n0\r\n\r\n"):
            received = client.recv(4096)
            assert received
            came += received


def _require_end(source: Source) -> None:
    end = time.monotonic() + 60
    with suppress(EOFError, IncompleteRead):
        while True:
            source.block()
            assert time.monotonic() < end, "heartbeats, and nothing else"


def test_few_large_bodies_are_read_at_once(
    settings: Settings, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON such as [{},{},...] takes thirty times its bytes: forty of them took the memory of the machine."""
    lock, reading, most = Lock(), 0, 0
    read = MessageReader.read

    def counted(*arguments: Any) -> IncomingEvents:
        nonlocal reading, most
        with lock:
            reading += 1
            most = max(most, reading)
        try:
            time.sleep(0.1)
            return read(*arguments)
        finally:
            with lock:
                reading -= 1

    monkeypatch.setattr(MessageReader, "read", counted)
    head = {
        **authorized(new_token(settings, rights=["publish"])),
        "content-type": "application/json",
    }
    body = b"[" + b"{}," * 20_000 + b"{}]"
    with (
        httpx.Client(base_url=address, headers=head, timeout=60) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(lambda _: client.post("/v1/events", content=body), range(16)))
    assert {each.status_code for each in answers} == {413}
    assert 1 <= most <= 2


def test_the_state_of_a_message_of_a_queue_quotes_no_text_of_a_worker() -> None:
    """The first word of `relay.fail(…, error => 'jane.doe: …')` was shown as the kind of fault."""
    for kind, reason in (("queue", None), ("sink", "CheckViolation")):
        found = EventDestination(kind, "mail", (), "dead", reason="CheckViolation: jane.doe")
        assert EventState.of(found).reason == reason


def test_a_relay_that_is_not_installed_is_no_conflict(
    outbox: Outbox, settings: Settings, address: str
) -> None:
    """While an upgrade waited for `relay init`, senders got 409, which says that an id is known, and gave up."""
    token = new_token(settings, rights=["read", "publish"])
    document = {"host_id": str(_HOST), "event_type": "a", "payload": {}}
    outbox.conn.execute("alter table relay.api_tokens rename to former")
    for answer in (
        httpx.post(f"{address}/v1/events", json=document, headers=authorized(token), timeout=30),
        httpx.get(f"{address}/v1/events", headers=authorized(token), timeout=30),
    ):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["detail"] == "relay cannot serve this now: `relay check` says why"


def test_a_sender_is_not_told_where_the_database_is() -> None:
    writer = CommitWriter("host=127.0.0.1 port=1 dbname=of_the_shop", wait_seconds=1.0)
    writer.start()
    try:
        message = MessageReader().read(json.dumps(event(host_id=str(_HOST))).encode())
        futures = [writer.submit(message) for _ in range(3)]
        texts = {str(each.exception(30)) for each in futures}
    finally:
        writer.close()
    assert texts <= {"relay cannot publish now: its log says why", "the database is busy"}


def test_a_head_that_is_huge_or_never_ends_harms_nobody(
    settings: Settings, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    where, port = address.removeprefix("http://").split(":")
    start = b"GET /v1/events HTTP/1.1\r\nhost: x\r\n"
    with ExitStack() as stack:
        for rest in (b"x-large: " + b"x" * 1_000_000, b"x-half: "):
            client = stack.enter_context(socket.create_connection((where, int(port)), timeout=30))
            with suppress(ConnectionError):
                client.sendall(start + rest)
            with suppress(ConnectionError):
                while client.recv(65536):
                    pass
        answer = httpx.get(
            f"{address}/v1/events", headers=authorized(new_token(settings)), timeout=30
        )
    assert answer.status_code == 200


def test_large_bodies_are_bounded_together(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each had a limit, and slow ones together took the memory: rmyndharis/OpenWA#936, elastic/beats#48571,
    aipoch/open-science#1857, buchgr/bazel-remote#908. Small ones pass meanwhile."""
    monkeypatch.setattr(requests, "BODIES_BYTES", 4 * 1024 * 1024)
    token = new_token(settings, rights=["publish"])
    part, size = b" " * 100_000, 1_000_000
    message = json.dumps({"host_id": str(_HOST), "event_type": "a", "payload": 1}).encode()
    with served(settings) as address, ExitStack() as stack:
        where, port = address.removeprefix("http://").split(":")
        head = (
            f"POST /v1/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {size}\r\n\r\n"
        )
        slow = [
            stack.enter_context(socket.create_connection((where, int(port)), timeout=60))
            for _ in range(40)
        ]

        def post() -> httpx.Response:
            headers = {**authorized(token), "content-type": "application/json"}
            return httpx.post(f"{address}/v1/events", content=message, headers=headers, timeout=60)

        refused: list[socket.socket] = []
        for each in slow:
            each.sendall(head.encode())
        for _ in range(9):
            for each in slow:
                if each not in refused:
                    with suppress(ConnectionError):
                        each.sendall(part)
                    # One that is refused has its answer before the body has ended.
                    if select.select([each], [], [], 0)[0]:
                        refused.append(each)
            assert post().status_code == 202
        wait_until(lambda: len(_answered(slow)) >= 36)
        refused = _answered(slow)
        for each in slow:
            if each not in refused:
                each.sendall(message.rjust(100_000))
        answers = [_answer(each) for each in slow]
        assert post().status_code == 202
    found = [answer.split(b" ", 2)[1] for answer in answers]
    assert found.count(b"503") >= 36
    assert set(found) == {b"202", b"503"}
    for answer in answers:
        assert b" 202 " in answer[:20] or b"retry-after: " in answer


def _answered(clients: list[socket.socket]) -> list[socket.socket]:
    return select.select(clients, [], [], 0)[0]


def _answer(client: socket.socket) -> bytes:
    came = b""
    with suppress(ConnectionError):
        while received := client.recv(65536):
            came += received
    return came
