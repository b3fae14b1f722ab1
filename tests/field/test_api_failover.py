"""Clients of the HTTP API whose database fails over: their positions are in their own hands, not in the database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from tests.api import API, ENDED, Program, Source, authorized, new_token, served
from tests.chaos.test_failover import Pair, streaming_pair
from tests.integration.test_api import number_of, publish_amounts
from tests.outbox import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.rare, pytest.mark.timeout(300)]


@contextmanager
def _served(pair: Pair) -> Iterator[tuple[str, str]]:
    """Serve the API of whichever server may be written to; yields its address and a token."""
    pair.source.install()
    source = {"dsn": pair.either(), "slot": "app", "publication": "app"}
    settings = pair.source.settings(api={**API}, source=source)
    with served(settings) as address:
        yield address, new_token(settings)


def _fail_over(pair: Pair, address: str, token: str) -> None:
    pair.fail_over()
    wait_until(lambda: not pair.copy.value("select pg_is_in_recovery()"))
    headers = authorized(token)
    wait_until(lambda: httpx.get(f"{address}/v1/events", headers=headers, timeout=30).is_success)


def test_a_position_that_a_failover_has_lost_is_refused() -> None:
    """A promoted server gave the ids of what it had not received to others, which nobody got: ephpm/ephpm#315; or its
    events were not where their readers looked: pragmaticalabs/pragmatica#564."""
    with streaming_pair() as pair, _served(pair) as (address, token):
        with Source(address, token).ready() as source, Source(address, token).ready() as idle:
            publish_amounts(pair.source, 0)
            source.take(1)
            kept = source.last
            pair.cut()
            for number in range(1, 21):
                publish_amounts(pair.source, number)
            source.take(21)
            lost = source.last
            _fail_over(pair, address, token)
            for number in range(100, 160):
                publish_amounts(pair.copy, number)
            passed = int(lost.split(":")[1])
            assert pair.copy.value("select pg_current_xact_id()::text::bigint") > passed
            for each in (source, idle):
                each.until_the_end()
        program = Program(address, token)
        for path in ("/events", "/events/stream"):
            refused = program.client.get(path, params={"after": lost})
            assert refused.status_code == 410
            assert "has been replaced" in refused.json()["detail"]
        with Source(address, token, kept) as again:
            assert [number_of(each) for each in again.take(60)] == list(range(100, 160))
        pages = program.get("/events", after=kept)["events"]
        assert [number_of(each) for each in pages] == list(range(100, 160))


def test_a_position_holds_in_a_failover_that_loses_nothing() -> None:
    """Reads of a promoted replica have to go on from the position: redis/docs#3850."""
    with streaming_pair() as pair, _served(pair) as (address, token):
        with Source(address, token).ready() as source:
            for number in range(10):
                publish_amounts(pair.source, number)
            source.take(10)
            last = source.last
            pair.replicate()
            _fail_over(pair, address, token)
            for number in range(10, 20):
                publish_amounts(pair.copy, number)
            with suppress(*ENDED):  # where it had looked at more than was replicated
                source.take(20)
            read = [number_of(each) for each in source.events]
            assert read == list(range(len(read)))
        with Source(address, token, last) as again:
            assert [number_of(each) for each in again.take(10)] == list(range(10, 20))


def test_without_the_right_to_read_the_history_the_witness_of_a_position_decides() -> None:
    """Whether events are lost is known from the timelines, which a role without REPLICATION cannot read."""
    with streaming_pair() as pair, _served(pair) as (address, token):
        last = Program(address, token).get("/events", after="now")["next"]
        pair.source.conn.execute("create role reader login password 'p' in role relay")
        pair.replicate()
        _fail_over(pair, address, token)
        of_source = {"dsn": pair.either("reader"), "slot": "app", "publication": "app"}
        limited = pair.source.settings(api={**API}, source=of_source)
        with served(limited) as other:
            program = Program(other, token)
            assert program.get("/events", after=last)["events"] == []
            # As relay made it before it took witnesses.
            refused = program.client.get("/events", params={"after": last.rpartition(".")[0]})
        assert refused.status_code == 410
        assert Program(address, token).get("/events", after=last)["events"] == []
