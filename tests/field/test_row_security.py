"""Rows that relay's role may not see: a policy hides them from a SELECT without an error, and never from the WAL.

powersync-ja/powersync-service#275, planetscale/migration-scripts#56, TeamWarp/effect-mq#9 (queries return no rows),
MaterializeInc/materialize#22249 and #33784 (BYPASSRLS is asked for), KanishJebaMathewM/Truxify#10817 (events are lost);
supabase enables row-level security on each new table.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from relay.admin import check
from relay.admin.findings import Severity
from relay.faults import ConfigurationError, RelayError
from relay.model.snapshots import BEGINNING
from relay.source import hybrid
from relay.source.outbox.differences import Difference
from relay.source.server import current_position
from relay.spark.data_source_options import parse
from relay.spark.reading import TaskPortion, read
from tests.outbox import Outbox, event, host, relaying, relaying_until_it_ends, wait_until
from tests.webhook import Answer, Webhook

HIDDEN = "row-level security hides rows of public.outbox_message_t"
ENABLE = """
    alter table outbox_message_t enable row level security;
    create policy publish on outbox_message_t for insert with check (true)
"""
DISABLE = "drop policy publish on outbox_message_t; alter table outbox_message_t disable row level security"


@pytest.fixture
def role(outbox: Outbox) -> Iterator[tuple[str, str]]:
    """The name and DSN of a role that is neither the outbox's owner nor has BYPASSRLS."""
    with outbox.limited_role() as limited:
        yield limited


def settings_of(outbox: Outbox, dsn: str, mode: str, **more: Any) -> Any:
    source = {"dsn": dsn, "slot": outbox.slot, "publication": outbox.slot, "mode": mode}
    return outbox.settings(source=source, **more)


@pytest.mark.parametrize("mode", ["poll", "auto"])
def test_a_policy_that_hides_rows_is_refused_with_its_cure(
    outbox: Outbox, role: tuple[str, str], mode: str
) -> None:
    name, dsn = role
    settings = settings_of(outbox, dsn, mode)
    outbox.conn.execute(ENABLE)
    for number in range(3):
        outbox.publish(host(number), event())
    errors = [each for each in check.examine(settings) if each.level is Severity.ERROR]
    assert errors[0].subject == "rows"
    assert {each.text for each in errors} == {errors[0].text}
    assert HIDDEN in errors[0].text
    assert f"`alter role {name} bypassrls`" in errors[0].text
    with pytest.raises(ConfigurationError, match=re.escape(HIDDEN)):
        check.require(settings)
    outbox.conn.execute(f"alter role {name} bypassrls".encode())
    check.require(settings)
    with relaying(settings):
        outbox.wait_handled()


def test_polling_without_a_check_ends_with_the_same_error(
    outbox: Outbox, role: tuple[str, str]
) -> None:
    outbox.conn.execute(ENABLE)
    outbox.publish(host(1), event())
    with relaying_until_it_ends(settings_of(outbox, role[1], "poll"), re.escape(HIDDEN)):
        pass
    outbox.conn.execute(DISABLE)
    with relaying(settings_of(outbox, role[1], "poll")):
        outbox.wait_handled()


def test_a_policy_that_comes_while_relay_streams_ends_it(
    outbox: Outbox, role: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.1)
    settings = settings_of(outbox, role[1], "auto")
    with relaying_until_it_ends(settings, re.escape(HIDDEN)):
        outbox.publish(host(1), event())
        outbox.wait_handled()
        outbox.conn.execute(ENABLE)
    outbox.publish(host(1), event())
    outbox.conn.execute(DISABLE)
    with relaying(settings):
        outbox.wait_handled()
    outbox.assert_exact()


def test_a_revoked_select_ends_relay_too(
    outbox: Outbox, role: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison with the outbox failed every five seconds, and only a debug log said so."""
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.1)
    settings = settings_of(outbox, role[1], "auto")
    with relaying_until_it_ends(settings, r"grant SELECT on public\.outbox_message_t"):
        outbox.publish(host(1), event())
        outbox.wait_handled()
        outbox.conn.execute("revoke select on outbox_message_t from relay")


def test_a_lagging_sink_does_not_pass_over_hidden_rows(
    outbox: Outbox, role: tuple[str, str]
) -> None:
    """It got 40 of 100 events, and was attached again."""
    released = threading.Event()

    def hang(headers: dict[str, str], body: bytes) -> Answer:
        released.wait(20)
        return Answer()

    with Webhook(hang) as endpoint:
        hook: dict[str, Any] = {
            "handlers": {"hook": {"type": "http", "url": endpoint.url}},
            "routes": [{"handlers": ["hook"]}],
            "sinks": {"attach_seconds": 0.2},
        }
        outbox.install_again(outbox.settings(**hook))
        settings = settings_of(outbox, role[1], "auto", **hook)
        with relaying_until_it_ends(settings, re.escape(HIDDEN)):
            outbox.publish(host(1), event())
            wait_until(lambda: lags(outbox))
            outbox.conn.execute(ENABLE)
            for number in range(10):
                outbox.publish(host(number), event())
            released.set()
        outbox.conn.execute(DISABLE)
        with relaying(settings):
            outbox.wait_delivered("hook")
        assert len(endpoint.ids()) == 11


def lags(outbox: Outbox) -> bool:
    return outbox.column("select state from relay.sinks where sink = 'hook'") == ["lagging"]


def test_a_spark_query_fails_instead_of_reading_nothing(
    outbox: Outbox, role: tuple[str, str]
) -> None:
    outbox.publish(host(1), event())
    outbox.conn.execute(ENABLE)
    now = current_position(outbox.conn).snapshot
    options = parse({"dsn": role[1]})
    portion = TaskPortion(Difference(BEGINNING, now))
    with pytest.raises(RelayError, match="row-level security"):
        list(read(role[1], options.table, portion, 8, None))


def test_retention_does_not_take_hidden_rows_for_read_ones(outbox: Outbox) -> None:
    """What the function does not see could be unread, and it drops whole partitions."""
    owner = f"{outbox.slot}_owner"
    outbox.conn.execute(f"create role {owner}".encode())
    try:
        outbox.conn.execute(
            f"grant usage on schema relay to {owner}; grant select on outbox_message_t to {owner};"
            f"grant select on all tables in schema relay to {owner};"
            f"grant execute on all functions in schema relay to {owner};"
            f"set role {owner}".encode()
        )
        held = "select relay.is_held('public.outbox_message_t', 'outbox_message_t', 'c_offset')"
        outbox.value(held)
        outbox.conn.execute("reset role")
        outbox.conn.execute(ENABLE)
        outbox.conn.execute(f"set role {owner}".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
            outbox.value(held)
    finally:
        outbox.conn.execute(f"reset role; drop owned by {owner}; drop role {owner}".encode())
