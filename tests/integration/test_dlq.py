"""Dead letters that come back: replayed in order beside live events, edited, discarded, exported, purged."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from relay.admin.dead_letters import DeadLetters
from relay.spark.session import Session
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import relay, running
from tests.webhook import Answer, Webhook


@pytest.fixture
def config(outbox: Outbox, tmp_path: Path) -> Path:
    return outbox.config_file(tmp_path / "relay.yaml")


def allow(outbox: Outbox) -> None:
    outbox.conn.execute(PLAIN)


PLAIN = """
    do $$ declare found text; begin
        for found in select conname from pg_constraint where conrelid = 'projection'::regclass and contype = 'c' loop
            execute format('alter table projection drop constraint %I', found);
        end loop;
    end $$
"""


def test_a_replay_to_a_sink_is_delivered(outbox: Outbox, tmp_path: Path) -> None:
    with Webhook(lambda _, body: Answer(400)) as webhook:
        handlers = {
            **outbox.config()["handlers"],
            "hook": {"type": "http", "url": webhook.url},
        }
        overrides = {"handlers": handlers, "routes": [{"handlers": list(handlers)}]}
        config = outbox.config_file(tmp_path / "relay.yaml", **overrides)
        dead = "select count(*) from relay.dead_letter_queue where status = 'dead'"
        with running(config) as service:
            outbox.publish(host(1), event(-1))
            wait_until(lambda: outbox.value(dead) == 2)
            words = ("dlq", "replay", "--config", str(config), "--all")
            assert "will be applied or delivered again" in relay(*words, "--dry-run").stdout
            webhook.answers = lambda _, body: Answer(204)
            output = relay(*words[:-1], "--sink", "hook", "--yes", "--wait").stdout
            assert "1 transaction with 1 event will be delivered again" in output
            assert "1 transaction is delivered, 0 are dead again" in output
            assert service.terminate() == 0


def test_replay_is_exact_and_in_order_on_both_engines(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    settings = outbox.settings(engine)
    for number in range(30):
        outbox.publish(host(number % 3), event(-number - 1), event(number))
    outbox.publish(host(1), event(7))
    outbox.drain(settings, session)
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 60
    allow(outbox)
    dead_letters = DeadLetters(settings, outbox.conn)
    assert (
        len(
            dead_letters.replay(dead_letters.find(DeadLetterSelection(host=str(host(1)))), "mended")
        )
        == 10
    )
    with relaying(settings, session):
        wait_until(lambda: outbox.value("select count(*) from projection") == 21)
        assert len(dead_letters.replay(dead_letters.find(DeadLetterSelection()), None)) == 20
        wait_until(lambda: outbox.value("select count(*) from projection") == 61)
    assert outbox.column("select distinct status from relay.dead_letter_queue") == ["replayed"]
    assert outbox.value("select count(*) from relay.deferred") == 0
    stored = "id, host_id, c_offset, amount, transaction_id"
    assert not outbox.column(
        f"""
        (select {stored} from projection except
         select id, host_id, c_offset, (payload->>'amount')::numeric, transaction_id from outbox_message_t)
        """
    )
    overtaken = outbox.value(
        """
        select count(*) from (select c_offset < lag(c_offset) over (partition by host_id order by seq) as overtaken
                                from projection where amount <> 7) as followed where overtaken
        """
    )
    assert overtaken == 0


def test_what_fails_again_is_dead_again(outbox: Outbox) -> None:
    settings = outbox.settings()
    outbox.publish(host(1), event(-1), event(2))
    outbox.drain(settings)
    dead_letters = DeadLetters(settings, outbox.conn)
    with relaying(settings):
        assert len(dead_letters.replay(dead_letters.find(DeadLetterSelection()), "once more")) == 1
        wait_until(
            lambda: outbox.column("select distinct attempts from relay.dead_letter_queue") == [2]
        )
    assert outbox.column("select distinct status from relay.dead_letter_queue") == ["dead"]
    assert outbox.column("select action from relay.dead_letter_actions order by id") == [
        "replay",
        "died again",
    ]
    assert outbox.value("select count(*) from relay.deferred") == 0
    outbox.assert_exact()


@pytest.mark.rare
def test_a_thousand_come_back_while_live_events_of_their_hosts_flow(outbox: Outbox) -> None:
    settings = outbox.settings(dead_letters={"brake": 0})
    for number in range(1_000):
        outbox.publish(host(number % 20), event(-1 - number))
    outbox.drain(settings)
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 1_000
    allow(outbox)
    last_dead = outbox.value("select max(c_offset) from outbox_message_t")
    done = threading.Event()

    def publish() -> None:
        with Outbox(outbox.superuser_dsn) as writer:
            number = 0
            while not done.is_set():
                number += 1
                writer.publish(host(number % 20), event(number), event(number))

    writer = threading.Thread(target=publish)
    dead_letters = DeadLetters(settings, outbox.conn)
    with relaying(settings):
        writer.start()
        try:
            wait_until(lambda: outbox.value("select count(*) from projection") > 100)
            assert (
                len(dead_letters.replay(dead_letters.find(DeadLetterSelection()), "all")) == 1_000
            )
            wait_until(
                lambda: (
                    outbox.column("select distinct status from relay.dead_letter_queue")
                    == ["replayed"]
                )
            )
        finally:
            done.set()
            writer.join()
        outbox.wait_drained()
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert outbox.value("select count(*) from projection") == outbox.value(
        "select count(*) from outbox_message_t"
    )
    assert outbox.value("select count(distinct id) from projection") == outbox.value(
        "select count(*) from projection"
    )
    for which in ("<=", ">"):
        assert (
            outbox.value(
                f"""
                select count(*) from (
                    select c_offset < lag(c_offset) over (partition by host_id order by seq) as overtaken
                      from projection where c_offset {which} {last_dead}) as followed where overtaken
                """
            )
            == 0
        )


def test_the_commands(config: Path, outbox: Outbox, tmp_path: Path) -> None:
    def dlq(*words: str, status: int = 0) -> str:
        done = relay("dlq", words[0], "--config", str(config), *words[1:])
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    for number in (-1, -2, -3):
        outbox.publish(host(1), event(number, "order.odd"))
    outbox.publish(host(2), event(-4), event(5))
    with running(config) as service:
        outbox.wait_drained()
        assert service.terminate() == 0
    listed = json.loads(dlq("list", "--json"))
    assert [each["events"] for each in listed] == [2, 1, 1, 1]
    assert len(json.loads(dlq("list", "--type", "order.odd", "--json"))) == 3
    assert len(json.loads(dlq("list", "--host", str(host(2)), "--json"))) == 1
    assert len(json.loads(dlq("list", "--exception", "CheckViolation", "--json"))) == 4
    assert json.loads(dlq("list", "--handler", "nobody", "--json")) == []
    assert json.loads(dlq("list", "--until", "2020-01-01", "--json")) == []

    assert "by a filter such as --id" in dlq("replay", "--yes", status=2)
    assert "--status: 'ded' is not dead, " in dlq("list", "--status", "ded", status=2)
    assert "4 transactions with 5 events will be applied again" in dlq(
        "replay", "--all", "--dry-run"
    )
    assert outbox.value("select count(*) from relay.deferred") == 0

    export = tmp_path / "letters.jsonl"
    dlq("export", "--host", str(host(1)), "-o", str(export))
    exported = [json.loads(line) for line in export.read_text().splitlines()]
    assert [each["payload"]["amount"] for each in exported] == [-1, -2, -3]
    first, second, third = exported
    second["payload"] = {"amount": 22}
    export.write_text("\n".join(json.dumps(each) for each in exported))
    dlq("replay", "--id", str(second["id"]), "--edit", str(export), "--reason", "a typo", "--yes")
    dlq("discard", "--id", str(third["id"]), "--reason", "not wanted", "-y")
    with running(config) as service:
        wait_until(lambda: outbox.column("select amount from projection") == [22])
        assert service.terminate() == 0
    statuses: dict[int, str] = dict(
        outbox.conn.execute(
            "select id, status from relay.dead_letter_queue where host_id = %s", (str(host(1)),)
        ).fetchall()
    )
    assert statuses == {first["id"]: "dead", second["id"]: "replayed", third["id"]: "discarded"}
    (shown,) = json.loads(dlq("show", str(second["id"]), "--json"))
    assert (shown["payload"], shown["original_payload"]) == ({"amount": 22}, {"amount": -2})
    output = dlq("show", str(second["id"]))
    assert "replay by" in output
    assert "a typo" in output
    assert "2 transactions with 2 events will be deleted" in dlq("purge", "--all", "--yes")
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 3

    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": 1}\n')
    assert f"{bad}:1: must be an object with id and payload" in dlq(
        "replay", "--all", "--edit", str(bad), "--yes", status=2
    )


def test_a_blocked_key_is_released_by_replay_or_discard(outbox: Outbox) -> None:
    from tests.webhook import Answer, Webhook

    with Webhook(lambda _, body: Answer(400 if b'"amount": 13' in body else 200)) as webhook:
        handlers: dict[str, Any] = {
            "hook": {"type": "http", "url": webhook.url, "on_exhausted": "block_key"}
        }
        settings = outbox.settings(handlers=handlers, routes=[{"handlers": ["hook"]}])
        dead_letters = DeadLetters(settings, outbox.conn)
        for amount in (1, 13, 2):
            for number in (1, 2):
                outbox.publish(host(number), event(amount))
        with relaying(settings):
            wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 4)
            assert [each.event["data"]["amount"] for each in webhook.accepted] == [1, 1]
            assert outbox.column("select blocked from relay.deferred order by blocked") == [
                False,
                False,
                True,
                True,
            ]
            webhook.answers = lambda _, body: Answer(200)
            dead_letters.replay(dead_letters.find(DeadLetterSelection(host=str(host(1)))), None)
            dead_letters.discard(dead_letters.find(DeadLetterSelection(host=str(host(2)))), None)
            wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    amounts = {
        number: [
            each.event["data"]["amount"]
            for each in webhook.accepted
            if each.event["hostid"] == str(host(number))
        ]
        for number in (1, 2)
    }
    assert amounts == {1: [1, 13, 2], 2: [1, 2]}
    assert sorted(outbox.column("select status from relay.dead_letter_queue")) == [
        "discarded",
        "replayed",
    ]


def test_a_dead_letter_says_how_often_it_was_tried(outbox: Outbox) -> None:
    retry = {"on": "any", "attempts": 4, "wait": 0.1, "jitter": 0, "defer_after": 0.05}
    settings = outbox.settings(
        handlers={
            "python": {
                "type": "python",
                "callable": "tests.callables:always_later",
                "retry": retry,
            },
            "function": {
                "type": "function",
                "callable": "tests.callables:refuse_always",
                "retry": retry,
            },
        },
        routes=[{"handlers": ["python", "function"]}],
    )
    outbox.publish(host(1), event(1))
    tried = "select attempts from relay.dead_letter_queue order by handler"
    dead_letters = DeadLetters(settings, outbox.conn)
    with relaying(settings):
        wait_until(lambda: outbox.column(tried) == [4, 4])
        assert len(dead_letters.replay(dead_letters.find(DeadLetterSelection()), "again")) == 2
        wait_until(lambda: outbox.column(tried) == [8, 8])
