"""Positions of the HTTP API on a server that is another one than it was: held by a witness, or refused.

Reports: 2ndQuadrant/bdr#208 (an old backup joins as if nothing had happened, and changes are silently lost),
sboesebeck/morphium#361 (no resume token survives a change of primary), kurrent-io/KurrentDB#4970 (the position after an
empty page is past the next event), yugabyte/yugabyte-db#3319 (a position that is safe to begin at after a restore).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from relay.api import positions
from tests.api import API, Program, Source, new_token, served, settings_of
from tests.chaos.test_failover import streaming_pair
from tests.clusters import lead, next_id, pass_ids, replace_folder, restore, two_clusters
from tests.outbox import Outbox, event, host, initialise, wait_until
from tests.postgres import EmbeddedServer, start_server
from tests.roles import join_roles

pytestmark = pytest.mark.timeout(300)

_WITNESSED = re.compile(r"@\d+\.\d+\.\d+\.[0-9a-f]{32}$")
"""A position that a witness covers."""


@pytest.fixture(autouse=True)
def _always_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "_WITNESS_SECONDS", 0.0)


def _publish(outbox: Outbox, *numbers: int) -> None:
    for number in numbers:
        outbox.publish(host(number), event(number))


def _amounts(events: list[dict[str, dict[str, int]]]) -> list[int]:
    return [each["payload"]["amount"] for each in events]


@contextmanager
def _program(outbox: Outbox) -> Iterator[Program]:
    settings = settings_of(outbox)
    with served(settings) as address:
        yield Program(address, new_token(settings, name=str(uuid4())))


def _refused(program: Program, after: str) -> None:
    for path in ("/events", "/events/stream"):
        answer = program.client.get(path, params={"after": after})
        assert answer.status_code == 410, answer.text
        assert "has been replaced" in answer.json()["detail"]


def test_a_position_at_the_end_has_a_witness(outbox: Outbox) -> None:
    """Of what a page has read beyond the newest one it names that; neither is more than a position."""
    _publish(outbox, 1, 2)
    with _program(outbox) as program:
        page = program.get("/events", limit=1)
        assert page["more"]
        assert not _WITNESSED.search(page["next"])
        rest = program.get("/events", after=page["next"])
        assert _WITNESSED.search(rest["next"])
        assert _amounts(page["events"] + rest["events"]) == [1, 2]
        assert program.get("/events", after="now")["next"].split(".")[-1] in rest["next"]
        former = rest["next"].rpartition(".")[0]
        assert program.get("/events", after=former)["events"] == []


def test_an_idle_api_writes_nothing(outbox: Outbox) -> None:
    """Also while others write, and while a stream is open."""
    _publish(outbox, 1)
    settings = settings_of(outbox)
    with served(settings) as address:
        token = new_token(settings)
        program = Program(address, token)
        with Source(address, token, "beginning") as source:
            source.take(1)
            page = program.get("/events")
            wait_until(lambda: bool(_WITNESSED.search(program.get("/events")["next"])))
            witnesses = outbox.value("select count(*) from relay.witnesses")
            before = next_id(outbox)
            for number in range(20):
                pass_ids(outbox, before + 10 * number)
                page = program.get("/events", after=page["next"])
                assert program.get("/events", after="now")["events"] == []
            assert outbox.value("select count(*) from relay.witnesses") == witnesses
            _publish(outbox, 2)
            source.take(2)
        assert _amounts(program.get("/events", after=page["next"])["events"]) == [2]


def test_a_position_holds_where_its_witness_is_held(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after pg_upgrade, which gives a server another identifier, and keeps transaction ids and rows."""
    _publish(outbox, 1)
    with _program(outbox) as program:
        read = program.get("/events")
        end = program.get("/events", after=read["next"])["next"]
        assert _WITNESSED.search(end)
        # What comes now has no witness yet.
        monkeypatch.setattr(positions, "_WITNESS_SECONDS", 3600.0)
        pass_ids(outbox, next_id(outbox) + 50)
        _publish(outbox, 2)
        elsewhere = re.sub(r"@\d+", "@7", end)
        assert _amounts(program.get("/events", after=elsewhere)["events"]) == [2]
        # One that its witness does not cover, and one without any, as relay made them before.
        _refused(program, elsewhere.rpartition(".")[0])
        _publish(outbox, 3)
        beyond = program.get("/events", after=end, limit=1)["next"]
        _refused(program, re.sub(r"@\d+", "@7", re.sub(r"[.~]([0-9a-f]{32})$", r"~\1", beyond)))
        assert _amounts(program.get("/events", after=beyond)["events"]) == [3]


def test_a_position_with_a_witness_that_is_not_held_is_refused(outbox: Outbox) -> None:
    """Whoever makes up a witness has made up a position that is refused, and nothing else."""
    _publish(outbox, 1)
    with _program(outbox) as program:
        end = program.get("/events")["next"]
        end = program.get("/events", after=end)["next"]
        for proof in (f".{uuid4().hex}", f"~{uuid4().hex}"):
            _refused(program, re.sub(r"[.~][0-9a-f]{32}$", proof, end))
        for forged in (f"{end}0", f"{end[:-1]}", end.replace("@", "~5.1@")):
            assert program.client.get("/events", params={"after": forged}).status_code in (400, 410)


def test_a_position_of_before_a_dump_is_refused() -> None:
    """At once, and when the transaction ids of the other cluster have passed it."""
    with two_clusters() as (old, new):
        lead(old, new)
        with Outbox(old.create_database("app")) as before:
            before.install()
            _publish(before, *range(5))
            with _program(before) as program:
                end = program.get("/events")["next"]
                end = program.get("/events", after=end)["next"]
            with Outbox(restore(old, new)) as after:
                # Who restores the roles, too.
                initialise(settings_of(after), after.superuser_dsn)
                join_roles(after.conn)
                with _program(after) as program:
                    for moved in (end, re.sub(r"@\d+", f"@{_identifier(after)}", end)):
                        _refused(program, moved)
                    pass_ids(after, next_id(before))
                    _publish(after, 5)
                    for moved in (end, re.sub(r"@\d+", f"@{_identifier(after)}", end)):
                        _refused(program, moved)


def _identifier(outbox: Outbox) -> str:
    return str(outbox.value("select system_identifier from pg_control_system()"))


def test_a_position_of_after_an_older_image_is_refused() -> None:
    """The disk of a server is replaced by an older image of it: same identifier, same timeline, and its ids pass."""
    with start_server() as server:
        if not isinstance(server, EmbeddedServer):
            pytest.skip("needs the server's files")
        with Outbox(server.create_database("app")) as outbox:
            outbox.install()
            _publish(outbox, 0, 1)
            with _program(outbox) as program:
                kept = program.get("/events")["next"]
                kept = program.get("/events", after=kept)["next"]
            replace_folder(server, "data", "image")
            outbox.reconnect()
            _publish(outbox, 2, 3)
            with _program(outbox) as program:
                lost = program.get("/events", after=kept)["next"]
                covered = program.get("/events", after=lost)["next"]
                assert _WITNESSED.search(covered)
            beyond = next_id(outbox)
            replace_folder(server, "image", "data")
            outbox.reconnect()
            for passes in (False, True):
                if passes:
                    pass_ids(outbox, beyond)
                _publish(outbox, 10)
                with _program(outbox) as program:
                    _refused(program, covered)
                    found = program.get("/events", after=kept)["events"]
            assert _amounts(found) == [10, 10]


@pytest.mark.chaos
@pytest.mark.rare
def test_a_failover_that_loses_nothing_but_a_witness_stops_nobody() -> None:
    """A position that the standby has, by its LSN, goes on; one after it names a witness that this server has."""
    with streaming_pair() as pair:
        pair.source.install()
        _publish(pair.source, 0, 1)
        settings = pair.source.settings(
            api={**API}, source={"dsn": pair.either(), "slot": "app", "publication": "app"}
        )
        with served(settings) as address:
            program = Program(address, new_token(settings))
            read = program.get("/events")["next"]
            end = program.get("/events", after=read)["next"]
            pair.replicate()
            pair.fail_over()
            wait_until(lambda: not pair.copy.value("select pg_is_in_recovery()"))
            wait_until(lambda: program.client.get("/events").is_success)
            _publish(pair.copy, 2)
            for position in (end, re.sub(r"[0-9a-f]{32}$", uuid4().hex, end)):
                page = program.get("/events", after=position)
                assert _amounts(page["events"]) == [2]
                assert program.get("/events", after=page["next"])["events"] == []
