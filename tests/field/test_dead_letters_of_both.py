"""Reports of users who replay, discard and count failed jobs, tried on dead letters of the target and of a queue."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from typer.testing import CliRunner

from relay.admin import status
from relay.admin.connections import reach_target
from relay.admin.dead_letters import DeadLetters
from relay.cli.app import app
from relay.config.settings import Settings
from relay.demo.embedded import free_port
from relay.store import queues
from relay.store.connections import Connection
from relay.store.dead_letters import of_queue, selection
from relay.store.dead_letters.selection import DeadLetterSelection, WholeDeadTransaction
from tests.console import Visitor, console_of, served
from tests.observing import Scrape, is_good
from tests.outbox import Outbox, event, host, initialise, relaying, wait_until
from tests.roles import Role

ALL = DeadLetterSelection()
GAUGE = "relay_dead_letters"
DEAD = "select payload ->> 'amount' from relay.dead_letters where status = 'dead' order by dead_transaction"


class Target:
    """Dead letters of the target: its handler refuses negative amounts."""

    sink = ""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.settings = outbox.settings()

    def die(self, *amounts: int) -> None:
        for amount in amounts:
            self._outbox.publish(host(1), event(amount))
        self._outbox.drain(self.settings)

    def fail_again(self) -> None:
        self._outbox.drain(self.settings)
        wait_until(lambda: not self.brought())

    def brought(self) -> list[int]:
        """The amounts of what is replayed, in order."""
        return self._outbox.column(
            "select (d.payload -> 'amount')::int from relay.deferred as r join relay.dead_letter_queue as d"
            " using (dead_transaction) order by r.id"
        )


class Queue:
    """Dead letters of a work queue, whose messages have one key and two attempts."""

    sink = "queue:mail"

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.settings = outbox.settings()
        outbox.worker.execute(
            "select relay.declare_queue('mail', null, key => 'host', attempts => 2, backoff => '0 s')"
        )

    def die(self, *amounts: int) -> None:
        for amount in amounts:
            self._outbox.worker.execute(
                "select relay.enqueue('mail', jsonb_build_object('amount', %s::int), host_id => %s)",
                (amount, str(host(1))),
            )
            self.fail_again()

    def fail_again(self) -> None:
        """Let a worker take all, and fail in each attempt."""
        while self.brought():
            self._outbox.worker.execute(
                "select relay.retry('mail', id, attempt, '0 s', 'refused') from relay.claim('mail')"
            )

    def brought(self) -> list[int]:
        return self._outbox.column(
            "select (payload -> 'amount')::int from relay.queue_messages order by id"
        )


@pytest.fixture(params=[Target, Queue], ids=["target", "queue"])
def kind(request: pytest.FixtureRequest, outbox: Outbox) -> Any:
    return request.param(outbox)


@contextmanager
def opened(settings: Settings) -> Iterator[tuple[Connection, DeadLetters]]:
    with reach_target(settings) as conn:
        yield conn, DeadLetters(settings, conn)


def acts(outbox: Outbox) -> list[tuple[str, str]]:
    return [
        (action, consumer)
        for action, consumer in outbox.conn.execute(
            "select action, consumer from relay.dead_letter_actions order by id"
        )
    ]


def test_what_dies_while_all_are_replayed_is_not_replayed_with_them(
    kind: Any, outbox: Outbox
) -> None:
    """sidekiq/sidekiq#6481: `Retry All` went on until nothing was dead, so what died again was retried for ever."""
    kind.die(-1, -2)
    with opened(kind.settings) as (_, dead):
        found = dead.find(ALL)
        kind.die(-3)
        assert len(dead.replay(found, None)) == 2
    assert kind.brought() == [-1, -2]


@pytest.mark.parametrize("first", ["replay", "discard"])
def test_of_two_who_act_on_the_same_dead_letters_one_does(
    kind: Any, outbox: Outbox, first: str
) -> None:
    """sidekiq/sidekiq#3436: two that retried all at the same time put each job into its queue twice."""
    kind.die(-1, -2, -3)
    others: list[int] = []

    def act() -> None:
        with opened(kind.settings) as (_, dead):
            others.append(len(dead.replay(dead.find(ALL), None)))

    with opened(kind.settings) as (conn, dead):
        thread = threading.Thread(target=act)
        with conn.transaction():
            selected = dead.find(ALL)
            if first == "replay":
                assert len(dead.replay(selected, None)) == 3
            else:
                assert dead.discard(selected, None) == 3
            thread.start()
            wait_until(
                lambda: (
                    outbox.value(
                        "select count(*) from pg_stat_activity"
                        " where datname = current_database() and wait_event_type = 'Lock'"
                    )
                    == 1
                )
            )
        thread.join(60)
    assert others == [0]
    assert kind.brought() == ([-1, -2, -3] if first == "replay" else [])
    assert acts(outbox) == [(first, kind.sink)] * 3


def test_workers_who_requeue_do_not_wait_for_an_operator(outbox: Outbox) -> None:
    """sidekiq/sidekiq#3436, with one of a worker's own: `relay.requeue` beside a discard of the same messages."""
    queue = Queue(outbox)
    queue.die(-1, -2)
    with opened(queue.settings) as (conn, dead), conn.transaction():
        assert dead.discard(dead.find(ALL), "no use") == 2
        assert outbox.worker.value("select relay.requeue('mail')") == 0
    assert queue.brought() == []
    assert acts(outbox) == [("discard", "queue:mail")] * 2


def test_a_worker_that_requeues_is_in_the_record(outbox: Outbox) -> None:
    """langwatch/langwatch#7127: what redrove the dead letters wrote its record after the act, or none."""
    queue = Queue(outbox)
    queue.die(-1, -2)
    letters = outbox.column("select id from relay.queue_dead_letters order by id")
    with suppress(RuntimeError), outbox.worker.transaction():
        outbox.worker.execute("select relay.requeue('mail')")
        raise RuntimeError
    assert acts(outbox) == []
    outbox.worker.execute("select relay.requeue('mail', %s, 'mended')", (letters[:1],))
    record = "select consumer, letters, action, reason, acted_by from relay.dead_letter_actions"
    assert outbox.conn.execute(record.encode()).fetchall() == [
        ("queue:mail", letters[:1], "replay", "mended", Role.WORKER)
    ]


def test_what_fails_again_is_one_dead_letter(kind: Any, outbox: Outbox) -> None:
    """resque/resque#548: jobs that failed again were there twice, and the next retry did their work twice."""
    kind.die(-1, -2)
    for _ in range(2):
        with opened(kind.settings) as (_, dead):
            assert len(dead.replay(dead.find(ALL), "again")) == 2
        kind.fail_again()
        assert sorted(outbox.column(DEAD)) == ["-1", "-2"]


def test_a_replayed_message_has_all_its_attempts_and_dies_into_the_same_place(
    outbox: Outbox,
) -> None:
    """timgit/pg-boss#874, sidekiq/sidekiq#3101: what was redriven had no attempts left, or no dead letters to go to."""
    queue = Queue(outbox)
    queue.die(-1)
    with opened(queue.settings) as (_, dead):
        dead.replay(dead.find(ALL), None)
    assert outbox.worker.column(
        "select relay.retry('mail', id, attempt, '0 s', 'x') from relay.claim('mail')"
    ) == ["retry"]
    queue.fail_again()
    assert outbox.conn.execute(
        "select consumer, attempts, exception from relay.dead_letters"
    ).fetchall() == [("queue:mail", 2, "refused")]


def test_replayed_messages_of_a_key_come_in_the_order_that_they_had(outbox: Outbox) -> None:
    """riverqueue/river#971: the discarded jobs of a sequence, retried at once, ran beside each other in any order."""
    queue = Queue(outbox)
    for amount in (1, 2, 3):
        outbox.worker.execute(
            "select relay.enqueue('mail', jsonb_build_object('amount', %s::int), host_id => 'h')",
            (amount,),
        )
    # The last dies first: a superuser moves them as the functions of a queue would.
    outbox.conn.execute(
        "select relay.dead_letter_messages(array[ctid], 'x') from relay.queue_messages order by id desc"
    )
    with opened(queue.settings) as (_, dead):
        assert len(dead.replay(dead.find(ALL), None)) == 3
    assert queue.brought() == [1, 2, 3]
    with outbox.worker.transaction():
        assert len(outbox.worker.column("select id from relay.claim('mail', 10)")) == 1


def test_an_id_selects_one_dead_letter(outbox: Outbox, tmp_path: Path) -> None:
    """timgit/pg-boss#860, #810: none could be chosen by its id, and it did not say what it had been.

    A dead letter of the target and one of a queue may have the same number: a queue's has the queue in its name.
    """
    target, queue = Target(outbox), Queue(outbox)
    target.die(-1, -2)
    first, second = outbox.column("select id from relay.dead_letter_queue order by id")
    outbox.conn.execute(f"alter sequence relay.queue_message_ids restart {first}".encode())
    queue.die(-3, -4)
    config = str(outbox.config_file(tmp_path / "relay.yaml"))

    def run(*words: str) -> str:
        return CliRunner().invoke(app, ["dlq", *words, "--config", config]).output

    listed = json.loads(run("list", "--json"))
    assert [(each["id"], each["sink"]) for each in listed] == [
        *((second, "queue:mail"), (first, "queue:mail"), (second, ""), (first, "")),
    ]
    (shown,) = json.loads(run("show", f"mail/{first}", "--json"))
    assert (shown["payload"], shown["exception"], shown["host_id"]) == (
        *({"amount": -3}, "refused", str(host(1))),
    )
    assert shown["event_id"] == listed[1]["event_id"]
    assert json.loads(run("show", str(first), "--json"))[0]["payload"] == {"amount": -1}
    assert "1 transaction is queued" in run("replay", "--id", str(first), "--yes")
    assert (target.brought(), queue.brought()) == ([-1], [])
    assert "1 message is discarded" in run("discard", "--id", f"mail/{first}", "--yes")
    assert "1 message is in the queue again" in run(
        *("replay", "--sink", "queue:mail", "--id", f"mail/{second}", "--yes")
    )
    assert (target.brought(), queue.brought()) == ([-1], [-4])
    mixed = CliRunner().invoke(
        app, ["dlq", "list", "--id", "1", "--id", "mail/1", "--config", config]
    )
    assert "of one queue, or of none" in str(mixed.exception)
    assert acts(outbox) == [
        ("replay", ""),
        ("discard", "queue:mail"),
        ("replay", "queue:mail"),
    ]


def test_a_filter_selects_dead_letters_of_both_kinds(outbox: Outbox) -> None:
    """langwatch/langwatch#7127: each kind had its own way to discard and to redrive in bulk."""
    target, queue = Target(outbox), Queue(outbox)
    target.die(-1)
    queue.die(-2)
    outbox.worker.execute("select relay.enqueue('mail', '{}', host_id => 'other')")
    outbox.worker.execute("select relay.fail('mail', id, 1) from relay.claim('mail')")
    of_host = DeadLetterSelection(host=str(host(1)))
    with opened(target.settings) as (_, dead):
        found = dead.find(of_host)
        assert (found.transactions, found.events, found.messages) == (2, 2, 1)
        assert dead.verb(found) == "applied or enqueued"
        assert len(dead.replay(found, "repaired")) == 2
        assert (target.brought(), queue.brought()) == ([-1], [-2])
        assert dead.find(ALL).messages == dead.find(ALL).transactions == 1
        assert dead.discard(dead.find(DeadLetterSelection(sink=of_queue("mail"))), None) == 1
    assert sorted(acts(outbox)) == [
        ("discard", "queue:mail"),
        ("replay", ""),
        ("replay", "queue:mail"),
    ]


def test_a_replay_that_cannot_end_loses_and_records_nothing(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Carael/CrossBusExplorer#64: a resend that was cancelled had removed all dead letters already."""
    target, queue = Target(outbox), Queue(outbox)
    target.die(-1)
    queue.die(-2)

    def cancelled(conn: Any, name: str, ids: Any, reason: str | None) -> int:
        requeued(conn, name, ids, reason)
        raise KeyboardInterrupt

    requeued = queues.requeue
    monkeypatch.setattr(queues, "requeue", cancelled)
    with opened(target.settings) as (_, dead), suppress(KeyboardInterrupt):
        dead.replay(dead.find(ALL), None)
    assert outbox.column(DEAD) == ["-1", "-2"]
    assert target.brought() == queue.brought() == []
    assert acts(outbox) == []


@pytest.mark.parametrize("by", ["file", "console"])
def test_an_edited_payload_is_what_comes_again(
    kind: Any, outbox: Outbox, tmp_path: Path, by: str
) -> None:
    """KanishJebaMathewM/Truxify#6707: handlers got what the dead letter had been wrapped in, not the event."""
    kind.die(-7)
    with opened(kind.settings) as (conn, dead):
        (line,) = selection.exported(conn, kind.settings.group, ALL)
        exported = json.loads(line)
        assert (exported["payload"], exported["sink"]) == ({"amount": -7}, kind.sink)
        if by == "file":
            file = tmp_path / "edited.jsonl"
            file.write_text(json.dumps({**exported, "payload": {"amount": 7}}) + "\n")
            dead.replay(dead.find(ALL), "edited", file)
        else:
            queue = None if kind.sink == "" else "mail"
            dead.edit(exported["id"], '{"amount": 7}', "edited", queue)
            kept = outbox.value("select original_payload from relay.dead_letters")
            assert kept == {"amount": -7}
            dead.replay(dead.find(ALL), "edited")
    assert kind.brought() == [7]
    assert acts(outbox) == [("edit", kind.sink), ("replay", kind.sink)]


def test_an_edited_line_without_its_queue_is_one_of_the_selected_queue(
    outbox: Outbox, tmp_path: Path
) -> None:
    """A file by hand has an id and a payload: of two dead letters with one number it meant the target's, in silence."""
    target, queue = Target(outbox), Queue(outbox)
    target.die(-1)
    letter = outbox.value("select id from relay.dead_letter_queue")
    outbox.conn.execute(f"alter sequence relay.queue_message_ids restart {letter}".encode())
    queue.die(-2)
    file = tmp_path / "edited.jsonl"
    file.write_text(json.dumps({"id": letter, "payload": {"amount": 7}}) + "\n")
    with opened(queue.settings) as (_, dead):
        dead.replay(dead.find(DeadLetterSelection(sink="queue:mail")), None, file)
        assert queue.brought() == [7]
        dead.replay(dead.find(ALL), None, file)
    assert target.brought() == [7]


def test_a_replay_into_a_paused_queue_waits_there(outbox: Outbox) -> None:
    """OptimalBits/bull#2540: jobs that were retried while their queue was paused ran, or were stuck afterwards."""
    queue = Queue(outbox)
    queue.die(-1, -2)
    outbox.worker.execute("select relay.pause_queue('mail')")
    with opened(queue.settings) as (_, dead):
        assert len(dead.replay(dead.find(ALL), None)) == 2
    take = "select payload ->> 'amount' from relay.take('mail')"
    assert outbox.worker.column(take) == []
    outbox.worker.execute("select relay.pause_queue('mail', false)")
    assert outbox.worker.column(take) + outbox.worker.column(take) == ["-1", "-2"]


def test_all_who_count_dead_letters_count_the_same(outbox: Outbox, tmp_path: Path) -> None:
    """JasperFx/wolverine#3495, microsoft/ghcrawler#69: four that counted dead letters gave four numbers."""
    target, queue = Target(outbox), Queue(outbox)
    target.die(-1, -2)
    queue.die(-3, -4, -5)
    settings = outbox.settings(observe=console_of())
    read = status.read(settings)
    assert (read.dead_letters, read.dead_messages) == (5, 3)
    watch = status.Watch(settings)
    try:
        assert watch.read().dead == {("", "projection"): 2, ("queue:mail", ""): 3}
    finally:
        watch.close()
    port = free_port()
    with relaying(outbox.settings(observe={"listen": f"127.0.0.1:{port}"})):
        wait_until(lambda: is_good(port, "/livez"))
        wait_until(lambda: Scrape(port).value(GAUGE, handler="queue:mail") == 3)
        assert Scrape(port).value(GAUGE, handler="projection") == 2
        assert Scrape(port).value(GAUGE, handler="") == 0
    with opened(settings) as (conn, dead):
        assert dead.find(ALL).transactions == 5
        listed = selection.listed(conn, settings.group, ALL, 100, WholeDeadTransaction)
        assert [each.sink for each in listed] == ["queue:mail"] * 3 + [""] * 2
        assert selection.statuses(conn, settings.group) == {"dead": 5}
        assert sum(each.events for each in selection.kinds(conn, settings.group, 10)) == 5
    config = str(outbox.config_file(tmp_path / "relay.yaml"))
    check = CliRunner().invoke(app, ["status", "--check", "--max-dead", "4", "--config", config])
    assert "there are 5 dead letters, the limit is 4" in check.output
    with served(settings) as address:
        visitor = Visitor(address)
        page = visitor.page("/groups/default/dead-letters")
        assert "5 dead letters shown" in page
        assert 'dead <span class="count">5</span>' in page
        assert "queue mail" in page
        letter = outbox.value("select max(id) from relay.queue_dead_letters")
        one = visitor.page(f"/groups/default/dead-letter?id={letter}&queue=mail")
        assert "refused" in one
        sent = visitor.send(
            f"/groups/default/dead-letters/discard?ids={letter}&sink=queue:mail", reason="no use"
        )
        assert "1 message is discarded" in sent.text
        assert "4 dead letters shown" in visitor.page("/groups/default/dead-letters")


def test_pages_of_a_list_pass_each_dead_letter_once(outbox: Outbox) -> None:
    """Both kinds have ids of their own; the pages are of the numbers that they share."""
    target, queue = Target(outbox), Queue(outbox)
    for amount in (-1, -2, -3):
        queue.die(amount)
        target.die(amount)
    seen: list[tuple[str, int]] = []
    with opened(target.settings) as (conn, _):
        before = None
        while page := selection.listed(
            conn, target.settings.group, ALL, 2, WholeDeadTransaction, before=before
        ):
            before = page[-1].number
            seen += [(each.sink, each.id) for each in page]
    assert len(seen) == len(set(seen)) == 6
    assert [sink for sink, _ in seen] == ["", "queue:mail"] * 3


def test_acts_on_a_message_are_kept_as_long_as_it_is_dead(outbox: Outbox) -> None:
    """MarcosRabadan/Agendia#322: neither the dead letters nor what was done to them ever went, or too early."""
    queue = Queue(outbox)
    queue.die(-1)
    with opened(queue.settings) as (conn, dead):
        letter = outbox.value("select id from relay.queue_dead_letters")
        dead.edit(letter, '{"amount": 1}', "a typing error", "mail")

        def prune() -> list[str]:
            outbox.conn.execute(
                "update relay.dead_letter_actions set acted_at = now() - interval '3 days'"
            )
            conn.execute("select relay.prune_history('default', now() - interval '2 days', 100)")
            return outbox.column("select action from relay.dead_letter_actions order by id")

        assert prune() == ["edit"]
        assert dead.discard(dead.find(ALL), None) == 1
        assert prune() == []


def test_a_message_without_error_and_payload_is_shown(outbox: Outbox, tmp_path: Path) -> None:
    """A worker need not say why it gives up."""
    outbox.worker.execute("select relay.declare_queue('mail', null)")
    outbox.worker.execute("select relay.enqueue('mail', null)")
    outbox.worker.execute("select relay.fail('mail', id, 1) from relay.claim('mail')")
    config = str(outbox.config_file(tmp_path / "relay.yaml"))
    listed = CliRunner().invoke(app, ["dlq", "list", "--queue", "mail", "--config", config])
    assert "message" in listed.output
    letter = outbox.value("select id from relay.queue_dead_letters")
    with served(outbox.settings(observe=console_of())) as address:
        visitor = Visitor(address)
        page = visitor.page(f"/groups/default/dead-letter?id={letter}&queue=mail")
        assert "of queue mail" in page
        whole = visitor.client.get(f"/groups/default/dead-letter/payload?id={letter}&queue=mail")
        assert whole.text == "null"


def test_a_handler_is_not_named_like_a_queue(outbox: Outbox) -> None:
    """The dead letters of a sink `queue:mail` would be those of the queue `mail`."""
    handlers = {"queue:mail": {"type": "http", "url": "http://127.0.0.1:1"}}
    with pytest.raises(ValueError, match="begins with queue:"):
        outbox.settings(handlers=handlers, routes=[{"handlers": ["queue:mail"]}])


def test_dead_messages_of_a_former_edition_get_numbers(outbox: Outbox) -> None:
    queue = Queue(outbox)
    queue.die(-1, -2)
    outbox.conn.execute(
        "drop view relay.dead_letters;"
        "alter table relay.queue_dead_letters drop column dead_transaction, drop column original_payload;"
        "alter table relay.dead_letter_actions drop column consumer;"
        "delete from relay.migrations where name = 'target/006_dead_letters.sql'"
    )
    assert initialise(queue.settings) == ["schema file target/006_dead_letters.sql"]
    assert outbox.column(DEAD) == ["-1", "-2"]
    with opened(queue.settings) as (_, dead):
        assert len(dead.replay(dead.find(ALL), None)) == 2
    assert queue.brought() == [-1, -2]


def test_a_page_of_many_dead_letters_reads_a_page(outbox: Outbox) -> None:
    """The view is of two tables, and what it costs to list them does not grow with them."""
    queue = Queue(outbox)
    outbox.conn.execute(
        """
        insert into relay.dead_letter_queue (group_id, exception) select 'default', 'x' from generate_series(1, 20000);
        insert into relay.queue_dead_letters (id, queue_id, attempts, enqueued_at, event_id, event_type)
        select n, (select id from relay.queues), 1, now(), n, 'x' from generate_series(1, 20000) as n;
        analyze relay.dead_letter_queue, relay.queue_dead_letters;
        """
    )
    for wanted in (ALL, DeadLetterSelection(status="dead"), DeadLetterSelection(sink="queue:mail")):
        where, parameters = wanted.where()
        query = sql.SQL(
            "explain (analyze, format json) select distinct d.dead_transaction from relay.dead_letters d where {}"
            " order by d.dead_transaction desc limit 50"
        ).format(where)
        with reach_target(queue.settings) as conn:
            ((plan,),) = conn.execute(query, {**parameters, "group": "default"}).fetchall()
        assert rows_of(plan[0]["Plan"]) < 1_000, json.dumps(plan, indent=1)


def rows_of(node: dict[str, Any]) -> float:
    """The most rows that a node of a plan returns or leaves out."""
    seen = float(node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
    return max([seen, *map(rows_of, node.get("Plans", ()))])
