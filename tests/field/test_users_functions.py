"""A user's function ends nothing but its own work, and what it has not done does not count as done."""

from __future__ import annotations

from typing import Any

import pytest

from relay.config.imports import load
from relay.event_types.event_type import EventType
from relay.faults import ConfigurationError, exception_text
from relay.spark.session import Session
from relay.spark.sink_worker import SparkWorker
from tests import callables
from tests.outbox import Outbox, event, host, relaying, relaying_until_it_ends, wait_until


def settings(outbox: Outbox, name: str, **more: Any) -> Any:
    handler = {"type": "python", "callable": f"tests.callables:{name}"}
    return outbox.settings(handlers={"users": handler}, routes=[{"handlers": ["users"]}], **more)


RAISED = {
    "cancelled": "RuntimeError: the function raised CancelledError",
    "interrupt": "RuntimeError: the function raised KeyboardInterrupt",
    "not caught": "RuntimeError: the function raised NotCaught",
    "group": "RuntimeError: the function raised BaseExceptionGroup",
    "broken": "Broken",
    "long": f"ValueError: {'x' * 100}",
}


def test_what_a_handler_raises_is_its_events_and_ends_no_relay(
    outbox: Outbox, subtests: pytest.Subtests
) -> None:
    """dask/distributed#5958, uqfoundation/multiprocess#220, spotify/luigi#440: here it ended relay, at every start."""
    with relaying(settings(outbox, "raise_what_is_named")):
        for number, (name, text) in enumerate(RAISED.items(), 1):
            with subtests.test(name):
                outbox.publish(host(1), event(1, aggregate_id=name))
                outbox.publish(host(1), event(2))
                outbox.wait_handled()
                found = outbox.column("select exception from relay.dead_letter_queue order by id")
                assert len(found) == number
                assert found[-1].startswith(text)
                assert "callables.py" in found[-1]
                assert len(found[-1]) < 12_000
    outbox.assert_exact()


def test_an_event_for_which_memory_does_not_suffice_stops_no_other_host(outbox: Outbox) -> None:
    """`bytearray(event.payload["size"])`: the batch was retried for ever."""
    with relaying(settings(outbox, "raise_what_is_named")):
        with outbox.conn.transaction():
            outbox.publish(host(1), event(1, aggregate_id="memory"))
            outbox.publish(host(1), event(2))
            outbox.publish(host(2), event(3))
        wait_until(lambda: outbox.column("select amount from projection") == [3])
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 2)
    failed, blocked = outbox.column("select reason from relay.deferred order by id")
    assert failed.startswith("MemoryError (callables.py:")
    assert blocked is None


@pytest.mark.parametrize(
    "statement", ["set transaction read only", "set local transaction_read_only = on"]
)
def test_a_handler_that_makes_the_transaction_read_only_is_told_so(
    outbox: Outbox, statement: str
) -> None:
    """It counted as a failover, and was retried for ever."""
    with relaying_until_it_ends(
        settings(outbox, "obey"),
        "handlers.users.callable: the function made the database transaction read-only",
    ):
        outbox.publish(host(1), event(1, aggregate_id=statement))
    assert outbox.handled() == 0


def as_superuser(outbox: Outbox) -> dict[str, Any]:
    """Keys of a relay whose handlers may set what only a superuser may."""
    return {"source": outbox.config()["source"] | {"dsn": outbox.superuser_dsn}}


@pytest.mark.parametrize(
    "leaves", ["set local role {}", "set role {}", "set session authorization {}"]
)
def test_a_role_that_a_handler_has_set_is_not_relays(outbox: Outbox, leaves: str) -> None:
    """Tenants' policies need a role: VariantEffect/mavedb-api#808. relay ended at every start."""
    tenant = f"{outbox.slot}_tenant"
    outbox.conn.execute(
        f"create role {tenant}; grant select, insert on projection to {tenant};"
        f"grant usage on sequence projection_seq_seq to {tenant}; grant {tenant} to app_relay".encode()
    )
    # Only a superuser may give another session's identity.
    more = as_superuser(outbox) if "authorization" in leaves else {}
    try:
        with relaying(settings(outbox, "execute_what_is_named", **more)):
            outbox.publish(host(1), event(1, aggregate_id=leaves.format(tenant)))
            outbox.publish(host(1), event(2, aggregate_id="select 1"))
            outbox.wait_drained()
        assert outbox.column("select amount from projection") == [1, 2]
    finally:
        outbox.conn.execute(f"drop owned by {tenant}; drop role {tenant}".encode())


def test_triggers_that_a_handler_has_switched_off_are_not_relays(outbox: Outbox) -> None:
    """The keys of what was deferred were not held, so that later transactions of the host came first."""
    with relaying(settings(outbox, "execute_what_is_named", **as_superuser(outbox))):
        with outbox.conn.transaction():
            quiet = "set local session_replication_role = replica"
            outbox.publish(host(1), event(1, aggregate_id=quiet))
            outbox.publish(host(2), event(2, aggregate_id="later"))
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 1)
        assert outbox.value("select count(*) from relay.deferred_keys") == 1


@pytest.mark.parametrize("name", ["coroutine", "generator"])
def test_a_handler_that_returns_its_work_has_not_done_it(outbox: Outbox, name: str) -> None:
    """The event counted as applied, and was lost."""
    with relaying_until_it_ends(
        settings(outbox, "raise_what_is_named"),
        f"handlers.users.callable: the function returned a {name}, which nobody runs",
    ):
        outbox.publish(host(1), event(1, aggregate_id=name))
    assert outbox.handled() == 0
    outbox.conn.execute("update outbox_message_t set aggregate_id = '1'")
    with relaying(settings(outbox, "record")):
        outbox.wait_handled()
    outbox.assert_exact()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("tests.callables:record_async", "is async"),
        ("tests.callables:Handlers.awaited", "is async"),
        ("tests.callables:record_lazily", r"is a generator \(it has `yield`\)"),
        ("tests.callables:count_lazily", r"is a generator \(it has `yield`\)"),
    ],
)
def test_a_function_whose_call_does_nothing_is_refused(path: str, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^key: '{path}' {kind}"):
        load("key", path)


def test_an_upcaster_that_is_registered_in_code_is_a_plain_function() -> None:
    lazy: Any = callables.record_lazily
    found = EventType("order.placed", upcasters={1: lazy})
    problem, *_ = found.problems()
    assert problem.startswith("events.order.placed.upcast.1: is a generator")


def test_a_spark_function_that_exits_is_a_fault_of_its_sink(
    outbox: Outbox, spark_session: Session
) -> None:
    """The thread of the sink ended without a word."""
    lake = {"type": "spark", "callable": "tests.callables:exit_of_spark", "every": 0.05}
    configured = outbox.settings(handlers={"lake": lake}, routes=[{"handlers": ["lake"]}])
    outbox.publish(host(1), event(1))
    worker = SparkWorker("lake", configured, spark_session)
    worker.start()
    try:
        wait_until(
            lambda: (
                outbox.column(
                    "select 1 from relay.sinks where starts_with(fault, 'handlers.lake.callable: RuntimeError')"
                )
                != []
            )
        )
        assert worker.is_alive
    finally:
        worker.stop()
        worker.join(10)


def test_a_message_that_cannot_be_had_is_left_out() -> None:
    assert exception_text(callables.Broken()) == "Broken"
