"""What dead letters keep, exactly, and how they are told: any payload, any type of id, any text."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from relay.admin import dead_letters
from relay.admin.dead_letters import DeadLetters
from relay.admin.status import read
from relay.faults import ConfigurationError
from relay.spark.session import Session
from relay.store.dead_letters.selection import DeadLetterSelection
from relay.store.deferred.selection import Reason
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import relay as command
from tests.process import running

EXACT = "12345678901234567.89"
LONG = "9" * 5_000
DEEP = "[" * 3_000 + "]" * 3_000
MARKUP = "[/b] [/usr/bin] \x1b[2J \u202e \u2028"


@pytest.fixture
def config(outbox: Outbox, tmp_path: Path) -> Path:
    return outbox.config_file(tmp_path / "relay.yaml")


def dlq(config: Path, *words: str, status: int = 0) -> str:
    done = command("dlq", words[0], "--config", str(config), *words[1:])
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def publish(outbox: Outbox, payload: str, event_type: str = "order.placed") -> None:
    """Publish an event whose payload is given as JSON text."""
    outbox.conn.execute(
        "select relay.publish(%s, %s, jsonb_build_array(jsonb_build_object("
        "'event_type', %s::text, 'aggregate_type', 'Order', 'aggregate_id', '1', 'payload', %s::jsonb)))",
        (host(1), host(999), event_type, payload),
    )


def allow(outbox: Outbox) -> None:
    outbox.conn.execute("alter table projection drop constraint projection_amount_check")


# Payloads.


def test_any_payload_survives_export_edit_and_replay(
    config: Path, outbox: Outbox, tmp_path: Path
) -> None:
    settings = outbox.settings()
    for value in (EXACT, LONG, DEEP):
        publish(outbox, f'{{"amount": -1, "value": {value}, "word": "a \u2028 b"}}')
    outbox.drain(settings)
    listed = json.loads(dlq(config, "list", "--json"))
    first = listed[-1]["id"]
    for value, each in zip((DEEP, LONG, EXACT), listed, strict=True):
        for words in (("--json",), ()):
            assert f'"value": {value}' in dlq(config, "show", str(each["id"]), *words)
    file = tmp_path / "letters.jsonl"
    dlq(config, "export", "-o", str(file))
    exported = file.read_text(encoding="utf-8")
    assert [value for value in (EXACT, LONG, DEEP) if f'"value": {value}' in exported] == [
        EXACT,
        LONG,
        DEEP,
    ]
    file.write_text(exported.replace('"amount": -1', '"amount": 1'), encoding="utf-8")
    dlq(config, "replay", "--all", "--edit", str(file), "--yes")
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from projection") == 3)
    assert outbox.column("select payload->>'amount' from relay.dead_letter_queue") == ["1"] * 3
    # Nothing but the edited number differs, in any digit.
    assert outbox.column(
        """
        select d.id from relay.dead_letter_queue d join outbox_message_t o on o.id::text = d.event_id
         where d.original_payload = o.payload and d.payload = o.payload || '{"amount": 1}' order by d.id
        """
    ) == [first, first + 1, first + 2]


MALFORMED = [
    ('{"id": 1}', "must be an object with id and payload"),
    ('{"payload": {}}', "must be an object with id and payload"),
    ('{"id": "1", "payload": {}}', "must be an object with id and payload"),
    ('[{"id": 1, "payload": {}}]', "must be an object with id and payload"),
    ('{"id": 1, "payload": {}', "is not JSON"),
    ('{"id": 1, "payload": "\\u0000"}', "is not JSON"),
    ('{"id": 1, "payload": "\0"}', "is not JSON"),
]


def test_a_malformed_edit_is_refused_with_its_line_and_changes_nothing(
    outbox: Outbox, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    settings = outbox.settings()
    outbox.publish(host(1), event(-1))
    outbox.drain(settings)
    dead_letter_admin = DeadLetters(settings, outbox.conn)
    file = tmp_path / "letters.jsonl"
    for line, fault in MALFORMED:
        with subtests.test(line):
            file.write_text(f'{{"id": 1, "payload": {{"amount": 1}}}}\n\n{line}\n')
            with pytest.raises(ConfigurationError, match=f"letters.jsonl:3: {fault}"):
                dead_letter_admin.replay(dead_letter_admin.find(DeadLetterSelection()), None, file)
            assert outbox.column("select status from relay.dead_letter_queue") == ["dead"]
            assert outbox.column("select payload from relay.dead_letter_queue") == [{"amount": -1}]


def test_a_scheduled_event_keeps_its_time(outbox: Outbox) -> None:
    """The time is kept with the letter. A replay is made now: it is asked for."""
    statement = (
        "insert into projection (id, amount, deliver_at) "
        "values (%(id)s, (%(payload)s->>'amount')::numeric, %(deliver_at)s)"
    )
    outbox.conn.execute("alter table projection add deliver_at timestamptz")
    settings = outbox.settings(handlers={"projection": {"type": "sql", "statement": statement}})
    outbox.publish(host(1), event(-1, deliver_at="2020-05-06T07:08:09.123456Z"))
    outbox.drain(settings)
    assert outbox.column("select deliver_at::text from relay.dead_letter_queue") == outbox.column(
        "select deliver_at::text from outbox_message_t"
    )
    allow(outbox)
    dead_letter_admin = DeadLetters(settings, outbox.conn)
    dead_letter_admin.replay(dead_letter_admin.find(DeadLetterSelection()), None)
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from projection") == 1)
    assert outbox.value(
        "select count(*) from projection join outbox_message_t using (id, deliver_at)"
    )


# Columns that refuse a value.


APPLY = """
    insert into applied (amount, note, host_id, event_ts, event_type)
    values ((%(payload)s->>'amount')::numeric, %(payload)s->>'note', %(host_id)s, %(event_ts)s, %(event_type)s)
"""


def test_only_the_value_that_is_refused_degrades_and_a_replay_has_all_of_them(
    database: str, engine: str, session: Session | None
) -> None:
    with Outbox(database) as outbox:
        outbox.conn.execute(
            """
            create table events (
                id text primary key, host_id uuid, user_id text, event_type text, payload json, event_ts timestamptz,
                transaction_id text, c_offset bigint);
            create table applied (
                amount numeric constraint odd check (amount < 0), note text, host_id uuid, event_ts timestamptz,
                event_type text);
            """
        )
        settings = outbox.settings(
            engine,
            source={**outbox.config()["source"], "table": "public.events"},
            handlers={"projection": {"type": "sql", "statement": APPLY}},
        )
        outbox.install_again(settings)
        payloads = [
            '{"amount": 5000, "note": "x"}',
            '{"amount": 5000, "note": "\\u0041", "odd": "\\u0000"}',
        ]
        for number, payload in enumerate(payloads):
            outbox.conn.execute(
                "insert into events (id, host_id, user_id, event_type, payload, event_ts, transaction_id)"
                " values (%s, %s, 'Zoë', 'placed', %s::json, '2020-05-06T07:08:09Z', 'T-1')",
                (str(7000 + number), host(1), payload),
            )
        outbox.drain(settings, session)
        rows = outbox.conn.execute(
            """
            select event_id, host_id, user_id, event_type, event_ts::timestamptz = '2020-05-06T07:08:09Z', payload,
                   refused::text
              from relay.dead_letter_queue order by id
            """
        ).fetchall()
        kept = (str(host(1)), "Zoë", "placed", True)
        assert [row[:5] for row in rows] == [("7000", *kept), ("7001", *kept)]
        assert [row[5] for row in rows] == [json.loads(payloads[0]), payloads[1]]
        assert rows[0][6] is None
        assert json.loads(rows[1][6]) == {"payload": payloads[1]}
        outbox.conn.execute("alter table applied drop constraint odd")
        found = DeadLetters(settings, outbox.conn)
        first = outbox.value("select min(id) from relay.dead_letter_queue")
        assert len(found.replay(found.find(DeadLetterSelection(ids=[first])), None)) == 1
        (row,) = outbox.column("select data from relay.deferred")
        assert all(value in row for value in (b"7000", "Zoë".encode(), b"T-1"))
        with relaying(settings, session):
            wait_until(lambda: outbox.value("select count(*) from applied") == 1)
        assert outbox.conn.execute(
            "select amount::int, note, host_id, event_ts = '2020-05-06T07:08:09Z', event_type from applied"
        ).fetchall() == [(5000, "x", host(1), True, "placed")]


# Texts.


def test_markup_and_control_characters_are_shown_as_text(config: Path, outbox: Outbox) -> None:
    settings = outbox.settings()
    outbox.publish(host(1), event(MARKUP, MARKUP, aggregate_id=MARKUP))
    outbox.drain(settings)
    number = outbox.value("select min(id) from relay.dead_letter_queue")
    output = [
        dlq(config, "list"),
        dlq(config, "list", "--json"),
        dlq(config, "show", str(number)),
        dlq(config, "show", str(number), "--json"),
        dlq(config, "export"),
        dlq(config, "replay", "--all", "--dry-run"),
    ]
    for each in output:
        assert "[/usr/bin]" in each
        assert not {"\x1b", "\u202e", "\u2028"} & set(each)
    for text in (output[3][1:-2], output[4]):
        assert json.loads(text)["payload"] == {"amount": MARKUP}


def test_an_export_is_for_its_owner_alone(config: Path, outbox: Outbox, tmp_path: Path) -> None:
    file = tmp_path / "letters.jsonl"
    file.touch(0o644)
    outbox.publish(host(1), event(-1))
    outbox.drain(outbox.settings())
    before = os.umask(0)
    try:
        for _ in range(2):
            dlq(config, "export", "-o", str(file))
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            file.unlink()
    finally:
        os.umask(before)
    assert "cannot be written" in dlq(
        config, "export", "-o", str(tmp_path / "no" / "file"), status=2
    )


# Many, and large ones.


def test_large_transactions_are_replayed_in_portions_and_in_order(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever does not fit into memory is read as it is written."""
    monkeypatch.setattr(dead_letters, "_EVENTS_AT_ONCE", 6)
    monkeypatch.setattr(dead_letters, "_TRANSACTIONS_AT_ONCE", 3)
    monkeypatch.setattr(dead_letters, "_ROWS_AT_ONCE", 4)
    settings = outbox.settings()
    for number, events in enumerate((1, 20, 2, 2, 1, 1, 1, 7, 1)):
        outbox.publish(host(number % 2), *(event(-1 - n) for n in range(events)))
    outbox.drain(settings)
    allow(outbox)
    dead_letter_admin = DeadLetters(settings, outbox.conn)
    found = dead_letter_admin.find(DeadLetterSelection())
    assert (found.transactions, found.events) == (9, 36)
    assert len(dead_letter_admin.replay(found, None)) == 9
    assert len(dead_letter_admin.replay(found, None)) == 0
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from projection") == 36)
    outbox.conn.execute("delete from relay.dead_letter_queue")
    outbox.assert_exact()


def test_transactions_of_one_host_that_polling_read_stay_apart(outbox: Outbox) -> None:
    """Polling does not know the commit, and a publisher need not have transaction ids: each is replayed by itself."""
    settings = outbox.settings(source={**outbox.config()["source"], "mode": "poll"})
    for number in range(3):
        outbox.publish(host(1), event(-1 - number))
        outbox.conn.execute("update outbox_message_t set transaction_id = null")
        with relaying(settings):
            wait_until(
                lambda number=number: (  # type: ignore[misc]
                    outbox.value("select count(*) from relay.dead_letter_queue") == number + 1
                )
            )
    dead_letter_admin = DeadLetters(settings, outbox.conn)
    assert dead_letter_admin.find(DeadLetterSelection()).transactions == 3
    assert (
        len(dead_letter_admin.replay(dead_letter_admin.find(DeadLetterSelection(ids=[1])), None))
        == 1
    )
    assert outbox.column("select status from relay.dead_letter_queue order by id") == [
        "replaying",
        "dead",
        "dead",
    ]


# Replays, as they are told.


def test_a_replay_is_queued_and_its_outcome_can_be_waited_for(config: Path, outbox: Outbox) -> None:
    settings = outbox.settings()
    bad = outbox.publish(host(1), event(-1))
    outbox.publish(host(2), event(-2), event(3))
    outbox.drain(settings)
    outbox.conn.execute(
        "update relay.dead_letter_queue set handler = 'gone' where transaction_id = %s", (str(bad),)
    )
    output = dlq(config, "replay", "--transaction", str(bad), "--yes")
    assert "1 transaction is queued" in output
    assert "no instance of group 'default' is running" in output
    assert "handler 'gone', in which 1 of these transactions failed, is not configured" in output
    with running(config) as service:
        attempts = "select attempts from relay.dead_letter_queue order by id"
        wait_until(lambda: outbox.column(attempts) == [2, 1, 1])
        output = dlq(config, "replay", "--all", "--yes", "--wait", status=1)
        assert "no instance" not in output
        assert "0 transactions are applied, 2 are dead again" in output
        allow(outbox)
        output = dlq(config, "replay", "--all", "--yes", "--wait")
        assert "2 transactions are applied, 0 are dead again" in output
        assert service.terminate() == 0
    said = [line for line in service.lines() if line["message"] == "dead letter"]
    assert [line["handler"] for line in said] == ["projection"] * 3
    assert said[0]["transaction_id"] == str(bad)


def test_status_tells_why_transactions_are_deferred(outbox: Outbox, config: Path) -> None:
    from tests.webhook import Answer, Webhook

    with Webhook(lambda _, body: Answer(400 if b'"amount": 13' in body else 503)) as webhook:
        hook = {
            "type": "http",
            "url": webhook.url,
            "on_exhausted": "block_key",
            "retry": {"wait": 60, "defer_after": 0},
            "circuit_breaker": None,
        }
        overrides: dict[str, Any] = {"handlers": {"hook": hook}, "routes": [{"handlers": ["hook"]}]}
        outbox.config_file(config, **overrides)
        settings = outbox.settings(**overrides)
        for number in (1, 2):
            outbox.publish(host(number), event(1))
        for _ in range(3):
            outbox.publish(host(1), event(2))
        outbox.publish(host(3), event(13))
        outbox.publish(host(4), event(1, deliver_at="infinity"))
        outbox.drain(settings)
    waiting = read(settings).deferred
    assert waiting is not None
    assert (waiting.transactions, waiting.holding) == (7, 1)
    assert [
        (each.kind, each.handler, each.reason, each.transactions) for each in waiting.reasons
    ] == [
        ("blocked", None, None, 3),
        ("retry", "hook", "Undelivered: HTTP 503", 2),
        ("holding", "hook", "Rejected: HTTP 400", 1),
        ("scheduled", None, None, 1),
    ]
    retry: Reason = waiting.reasons[1]
    assert retry.next is not None
    assert retry.until is not None
    assert retry.since < retry.next
    assert retry.next <= retry.until
    output = json.loads(command("status", "--config", str(config), "--json").stdout)["deferred"]
    assert output["reasons"][1]["reason"] == "Undelivered: HTTP 503"
    printed = command("status", "--config", str(config)).stdout
    assert "hook: Undelivered: HTTP 503; next 20" in printed
    assert "blocked by an earlier transaction of the same key" in printed
