"""One tenant's endpoint concerns nobody else: neither the order nor the delivery of others' events, nor the sink.

Reports: keygen-sh/keygen-api#771, owncast/owncast#1504, rmyndharis/OpenWA#511, JSONbored/metagraphed#9740 and
formbricks/formbricks#9123 (a slow or dead endpoint blocks the others), getfider/fider#1404 and
RedHatInsights/notifications-backend#1469 (disabled by one failure), hookdeck/outpost#596 (never disabled),
hookdeck/outpost#611 (what comes while it is disabled is gone), growthbook/growthbook#5405 (a new URL enables),
liwala/ay-framework#182 and outline/outline#5934 (disabled in silence), svix/svix-webhooks#567 and svix/svix-docs#159
(when the clock starts). The endpoints of tests/integration/test_endpoints.py are those of a target.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.config.handlers import HttpHandler
from relay.delivery.dispatch import Dispatcher
from relay.delivery.order import Delivery
from relay.faults import (
    EndpointBusy,
    EndpointDisabled,
    EndpointDown,
    EndpointFailed,
    EndpointRejected,
)
from relay.model.dispositions import Applied, DeadLetter, Disposition, RetryLater
from relay.model.events import Commit, Lsn, Transaction
from relay.model.transactions import Undecoded
from relay.pipeline.failure_limit import FailureLimit
from relay.sinks import Target, endpoints
from relay.sinks.endpoints import EndpointId, Endpoints
from relay.sinks.http_endpoints import HttpEndpoints
from relay.store.endpoints import StoredEndpoint
from tests.sinks import make_event

TENANTS = "abcd"
BEHAVIOURS = ("well", "hangs", "503", "400", "410", "closes", "slow")


def handler(port: int, **more: Any) -> HttpHandler:
    return HttpHandler.model_validate(
        {
            "type": "http",
            "url": f"http://127.0.0.1:{port}/{{payload.tenant}}",
            "private_addresses": "allow",
            "timeout": 0.3,
            "concurrency": 2,
            "retry": {"defer_after": 0, "attempts": 3},
            "circuit_breaker": {"failures": 2, "cool_down": 0.2},
            "endpoints": {"concurrency": 1},
            **more,
        }
    )


@contextmanager
def stored_in_memory() -> Iterator[dict[str, StoredEndpoint]]:
    """Let endpoints be stored in a dictionary, by their ids, in place of the target."""
    rows: dict[str, StoredEndpoint] = {}

    def exchange(self: Endpoints, _: Any, unstored: Any) -> tuple[list[StoredEndpoint], datetime]:
        rows.update(unstored.failing)
        for digest in unstored.works:
            rows.pop(digest, None)
        return list(rows.values()), datetime.now(UTC)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Endpoints, "_exchange", exchange)
        yield rows


class Servers:
    """One server with an endpoint for each tenant, by the path, which behaves as a test says."""

    def __init__(self, behaviours: dict[str, str]) -> None:
        self.behaviours = behaviours
        self.accepted: defaultdict[str, list[str]] = defaultdict(list)
        self.asked: defaultdict[str, int] = defaultdict(int)
        self.failing: set[str] = set()
        """Events, by their ids, that every endpoint answers with 503."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                tenant = head.split(b" ", 2)[1].decode().strip("/")
                fields = dict(
                    line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:] if line
                )
                await reader.readexactly(int(fields["content-length"]))
                self.asked[tenant] += 1
                behaviour = self.behaviours[tenant]
                if behaviour == "hangs":
                    await asyncio.sleep(5)
                elif behaviour == "slow":
                    await asyncio.sleep(0.02)
                if behaviour == "closes":
                    return
                status = behaviour if behaviour.isdecimal() else "204"
                if fields["idempotency-key"] in self.failing:
                    status = "503"
                if status == "204":
                    self.accepted[tenant].append(fields["idempotency-key"])
                writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: 0\r\n\r\n".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def delivery(number: int, tenant: str, key: int) -> Delivery:
    commit = Commit(Lsn(number), Lsn(number), 0, number)
    rows = Undecoded(commit, str(number), (), (), (), 1)
    one: Any = (make_event(number, payload=f'{{"tenant": "{tenant}"}}'),)
    return Delivery(rows, Transaction(str(number), commit, one), frozenset([f"{tenant}{key}"]))


async def delivered(
    servers: Servers, plan: list[tuple[str, int]], **more: Any
) -> dict[int, Disposition]:
    """Deliver an event for each tenant and key of a plan; returns what became of them, in the order of their ends."""
    server = await asyncio.start_server(servers.serve, "127.0.0.1", 0)
    settings = handler(server.sockets[0].getsockname()[1], **more)
    sink = HttpEndpoints("hook", settings, Target("", "default", 1))
    dispatcher = Dispatcher(sink, settings, 1_000_000, FailureLimit({"hook": 2}, {}))
    ended: dict[int, Disposition] = {}
    for number, (tenant, key) in enumerate(plan):
        dispatcher.submit(delivery(number, tenant, key))
    async with asyncio.timeout(30):
        while dispatcher.count or dispatcher.has_ended.is_set():
            await asyncio.sleep(0.002)
            for each, disposition in dispatcher.take_ended():
                ended[each.rows.commit.xid] = disposition
    assert not dispatcher.breaker.is_open
    await dispatcher.close()
    await sink.close()
    server.close()
    return ended


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries({tenant: st.sampled_from(BEHAVIOURS) for tenant in TENANTS}),
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 2)), max_size=40),
)
def test_whatever_one_endpoint_does_others_get_all_their_events_in_order(
    behaviours: dict[str, str], plan: list[tuple[str, int]]
) -> None:
    servers = Servers(behaviours)
    with stored_in_memory():
        ended = asyncio.run(delivered(servers, plan))
    for tenant, behaviour in behaviours.items():
        own = [n for n, (of, _) in enumerate(plan) if of == tenant]
        outcomes = [ended[n] for n in own]
        if behaviour in ("well", "slow"):
            assert all(isinstance(each, Applied) for each in outcomes)
            for key in range(3):
                ids = [f"{1:08d}-0000-0000-0000-{n:012d}" for n in own if plan[n][1] == key]
                assert [each for each in servers.accepted[tenant] if each in ids] == ids
        elif behaviour in ("400", "410"):
            assert all(isinstance(each, DeadLetter) and not each.holds for each in outcomes)
            if behaviour == "410":
                assert servers.asked[tenant] <= 1
        else:
            # No attempt beyond those that open the breaker counts, and none becomes a dead letter.
            assert not any(isinstance(each, Applied | DeadLetter) for each in outcomes)
            counted = [each for each in outcomes if isinstance(each, RetryLater) and each.attempts]
            assert len(counted) <= 2


def test_a_hanging_endpoint_with_many_keys_takes_one_slot() -> None:
    """A hundred keys of one tenant do not fill the sink's two slots: the other's events go on beside them."""
    servers = Servers({"a": "hangs", "b": "well"})
    plan = [*(("a", key) for key in range(100)), *(("b", key) for key in range(20))]
    ends: list[float] = []

    async def run() -> None:
        began = time.monotonic()
        done = asyncio.create_task(delivered(servers, plan, timeout=4.0))
        while len(servers.accepted["b"]) < 20:
            await asyncio.sleep(0.005)
        ends.append(time.monotonic() - began)
        await done

    with stored_in_memory():
        asyncio.run(run())
    assert ends[0] < 4
    assert servers.asked["a"] <= 3


def test_connections_of_many_endpoints_are_closed() -> None:
    """Sixty hosts in turn, and two requests at once: no connection for each stays open."""
    served = Servers({"x": "well"})
    opened: list[asyncio.StreamWriter] = []
    most = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most
        opened.append(writer)
        most = max(most, sum(not each.is_closing() for each in opened))
        await served.serve(reader, writer)

    async def run() -> None:
        server = await asyncio.start_server(serve, "0.0.0.0", 0)
        url = f"http://{{payload.host}}:{server.sockets[0].getsockname()[1]}/x"
        sink = HttpEndpoints("hook", handler(1, url=url), Target("", "default", 1))
        for number in range(60):
            one: Any = (make_event(number, payload=f'{{"host": "127.0.0.{number + 1}"}}'),)
            await sink.deliver(Transaction(None, Commit(Lsn(0), Lsn(0), 0, 0), one))
        await sink.close()
        server.close()

    with stored_in_memory():
        asyncio.run(run())
    assert len(served.accepted["x"]) == 60
    assert most <= 6


def endpoint_states(**more: Any) -> Endpoints:
    return Endpoints("hook", handler(1, **more), Target("", "default", 1))


ID = EndpointId("0" * 16, "http://hooks.example")


async def fails(states: Endpoints, times: int) -> Exception:
    """What the last of some failed attempts raises."""
    fault: Exception = EndpointFailed("HTTP 503")
    for _ in range(times):
        fault = await states.failed(states.of(ID), "host", EndpointFailed("HTTP 503"))
    return fault


def later(monkeypatch: pytest.MonkeyPatch, **passed: float) -> None:
    """Let time pass for the endpoints."""
    now = datetime.now(UTC) + timedelta(**passed)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return now

    monkeypatch.setattr(endpoints, "datetime", Clock)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        await test()

    with stored_in_memory():
        asyncio.run(within())


def test_one_failure_disables_nothing_however_long_ago_the_last_success_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        states = endpoint_states()
        states.succeeded(states.of(ID), "host")
        later(monkeypatch, days=30)
        assert isinstance(await fails(states, 1), EndpointFailed)
        assert isinstance(await fails(states, 50), EndpointDown)
        later(monkeypatch, days=34)
        assert isinstance(await fails(states, 1), EndpointDown)
        later(monkeypatch, days=35)
        assert isinstance(await fails(states, 1), EndpointDisabled)

    run(test)


def test_a_success_ends_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        states = endpoint_states()
        for day in range(1, 20):
            await fails(states, 9)
            later(monkeypatch, days=3 * day)
            assert isinstance(await fails(states, 1), EndpointDown)
            states.succeeded(states.of(ID), "host")

    run(test)


def test_many_refusals_in_a_row_are_a_failing_endpoint() -> None:
    async def test() -> None:
        states = endpoint_states()
        refusal = EndpointFailed("HTTP 400")
        faults = [
            await states.refused(states.of(ID), "host", refusal)
            for _ in range(endpoints.MOST_REFUSED + 1)
        ]
        assert not any(isinstance(each, EndpointDown) for each in faults[:-1])
        assert isinstance(faults[-1], EndpointDown)
        with pytest.raises(EndpointDown):
            states.require(states.of(ID))

    run(test)


def test_a_trial_that_is_cancelled_is_not_the_last_one() -> None:
    async def test() -> None:
        states = endpoint_states(circuit_breaker={"failures": 1, "cool_down": 0.01})
        await fails(states, 1)
        await asyncio.sleep(0.02)
        endpoint = states.of(ID)

        async def hang() -> None:
            async with states.turn(endpoint):
                await asyncio.sleep(60)

        trial = asyncio.create_task(hang())
        await asyncio.sleep(0.01)
        with pytest.raises(EndpointDown):
            states.require(endpoint)
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)
        states.require(endpoint)

    run(test)


def test_endpoints_that_work_are_forgotten_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten thousand tenants are remembered, not a million; a failing one stays among any number."""
    monkeypatch.setattr(endpoints, "MOST_IDLE", 100)

    async def test() -> None:
        # However slow this is, it is not tried again meanwhile.
        states = endpoint_states(circuit_breaker={"failures": 3, "cool_down": 60})
        await fails(states, 3)
        for number in range(1_000):
            states.succeeded(states.of(EndpointId(f"{number + 1:016x}", "http://a")), "host")
        assert len(states._known) <= 101
        with pytest.raises(EndpointDown):
            states.require(states.of(ID))

    run(test)


def test_that_an_endpoint_is_disabled_is_logged_as_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        states = endpoint_states()
        with stored_in_memory() as rows:
            fault = await states.gone(states.of(ID), "host-7", EndpointFailed("HTTP 410"))
            assert isinstance(fault, EndpointDisabled)
            # It is stored before its events are dead letters.
            assert rows[ID.digest].disabled_at is not None

    with caplog.at_level(logging.ERROR):
        run(test)
    (line,) = [each for each in caplog.records if each.getMessage() == "an endpoint is disabled"]
    assert (line.__dict__["address"], line.__dict__["host_id"]) == (ID.address, "host-7")


def test_endpoints_that_fail_leave_room_for_others() -> None:
    """owncast/owncast#1504, rmyndharis/OpenWA#511: many dead endpoints, each of which takes as long as the time-out."""

    async def test() -> None:
        states = endpoint_states(concurrency=8)
        hang = asyncio.Event()

        async def use(number: int) -> None:
            endpoint = states.of(EndpointId(str(number), "http://hooks.example"))
            endpoint.failures = 1
            async with states.turn(endpoint):
                await hang.wait()

        using = [asyncio.create_task(use(number)) for number in range(50)]
        await asyncio.sleep(0)
        async with asyncio.timeout(0.5), states.turn(states.of(ID)):
            pass
        await asyncio.wait(using, timeout=2 * endpoints.LONGEST_TURN_SECONDS)
        assert sum(each.done() for each in using) == 48
        assert all(isinstance(each.exception(), EndpointDown) for each in using if each.done())
        hang.set()
        await asyncio.gather(*using, return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoints, "LONGEST_TURN_SECONDS", 0.1)
        run(test)


@pytest.mark.parametrize("host", [f"{'a' * 64}.example", "a..example", "\ud800.example"])
def test_a_host_that_is_none_is_the_fault_of_its_endpoint(host: str) -> None:
    """hookdeck/outpost#571: what a tenant got wrong counts as a fault of the pipeline."""

    async def test() -> None:
        sink = HttpEndpoints("hook", handler(1, url="{payload.url}"), Target("", "default", 1))
        one: Any = (make_event(1, payload=json.dumps({"url": f"http://{host}/x"})),)
        with pytest.raises(EndpointRejected):
            await sink.deliver(Transaction(None, Commit(Lsn(0), Lsn(0), 0, 0), one))
        await sink.close()

    with stored_in_memory():
        run(test)


def test_what_waits_for_its_turn_does_not_come_later_and_later() -> None:
    """ixti/sidekiq-throttled#36, enova/sidekiq-rate-limiter#10: what is at its limit comes back together."""

    async def test() -> None:
        states = endpoint_states(rate_limit=10)
        endpoint = states.of(ID)
        assert endpoint.pace is not None
        for _ in range(20):
            endpoint.pace.turn()
        told: list[float] = []
        for _ in range(100):
            with pytest.raises(EndpointBusy) as raised:
                async with states.turn(endpoint):
                    pass
            told.append(raised.value.after or 0.0)
        assert told == sorted(told)
        assert 9 < told[-1] < 12
        endpoint.promised += 10_000
        assert 150 <= endpoint.later(0.1) <= 300

    run(test)


def test_one_key_that_fails_is_no_outage_of_its_endpoint() -> None:
    """As that of a plain sink, the breaker opens only if other keys fail, too: this event's attempts count."""
    servers = Servers({"a": "well"})
    servers.failing.add(f"{1:08d}-0000-0000-0000-{1:012d}")
    retry = {"defer_after": 5, "attempts": 3, "wait": 0.01, "max_wait": 0.02, "jitter": 0.001}
    with stored_in_memory():
        ended = asyncio.run(delivered(servers, [("a", 0), ("a", 1)], retry=retry))
    assert isinstance(ended[0], Applied)
    assert isinstance(ended[1], DeadLetter)


def test_credentials_that_an_endpoint_refuses_cost_no_attempt() -> None:
    """As those of a plain sink: they may be changing."""
    with stored_in_memory():
        ended = asyncio.run(delivered(Servers({"a": "401"}), [("a", 0)]))
    assert isinstance(ended[0], RetryLater)
    assert not ended[0].attempts


def test_a_handler_that_is_not_reliable_tries_each_event_once() -> None:
    """As with a plain sink: it drops what fails, and needs no breaker, which would drop what was not tried."""
    servers = Servers({"a": "503"})
    with stored_in_memory():
        asyncio.run(delivered(servers, [("a", key) for key in range(6)], reliable=False))
    assert servers.asked["a"] == 6
