"""Reports of users who run, move, cancel and edit many jobs at once, tried on the messages of a queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from relay.cli.app import app
from tests.console import Program, Visitor, console_of, served
from tests.outbox import Outbox, wait_until
from tests.roles import Role

G = "/groups/default"
STATES = "select event_id, state from relay.queue_items order by event_id"


@pytest.fixture
def queue(outbox: Outbox) -> Outbox:
    """An outbox whose queue `mail` has a message in each state, named after it."""
    outbox.worker.execute("select relay.declare_queue('mail', null, keep_done => '1 day')")
    for state in ("done", "dead", "leased", "retry"):
        put(outbox, state)
        end = {
            "done": "select relay.complete('mail', id, attempt) from relay.claim('mail')",
            "dead": "select relay.fail('mail', id, attempt, 'no address') from relay.claim('mail')",
            "leased": "select id from relay.lease('mail', 1, '1 hour')",
            "retry": "select relay.retry('mail', id, attempt, '1 hour', 'away: 503') from relay.claim('mail')",
        }
        outbox.worker.execute(end[state].encode())
    put(outbox, "scheduled", "1 hour")
    put(outbox, "enqueued")
    return outbox


def put(outbox: Outbox, name: str, after: str | None = None, **more: Any) -> int:
    given = {"event_id": name, "event_type": f"{name}.type", "host_id": f"host of {name}", **more}
    named = "".join(f", {each} => %s" for each in given)
    at = f"now() + interval '{after}'" if after else "null"
    call = f"select relay.enqueue('mail', '{{}}', deliver_at => {at}{named})"
    return int(outbox.worker.value(call, list(given.values())))


def states(outbox: Outbox) -> dict[str, str]:
    return dict(outbox.conn.execute(STATES.encode()).fetchall())


def takeable(outbox: Outbox) -> list[str]:
    return outbox.column(
        "select event_id from relay.queue_messages where available_at is null or available_at <= clock_timestamp()"
        " order by event_id"
    )


@pytest.mark.parametrize(
    ("chosen", "moved"),
    [
        ("states => '{retry,scheduled}'", {"retry", "scheduled"}),
        ("states => '{retry}'", {"retry"}),
        ("error => '503'", {"retry"}),
        ("event_type => 'scheduled.type'", {"scheduled"}),
        ("host_id => 'host of done'", set()),
        ("host_id => 'host of leased'", set()),
        ("event_id => 'scheduled', states => '{retry}'", set()),
    ],
)
def test_what_waits_is_run_now_and_nothing_else(
    queue: Outbox, chosen: str, moved: set[str]
) -> None:
    """oban-bg/oban#926: all jobs were to be retried, and those that were completed ran again.

    oban-bg/oban#514, oban-bg/oban#526, oban-bg/oban#333: those that a filter selects, but for those at work.
    timgit/pg-boss#400, timgit/pg-boss#440: a time is changed, and nothing is cancelled and sent again.
    """
    before = states(queue)
    assert set(before) == set(before.values())
    call = f"select relay.move_messages('mail', now(), {chosen})"
    assert queue.worker.value(call) == len(moved)
    wait_until(lambda: set(takeable(queue)) == {"enqueued", *moved})
    assert len(states(queue)) == len(before)


@pytest.mark.parametrize(
    ("chosen", "gone"),
    [
        ("states => '{enqueued,scheduled,retry}'", {"enqueued", "scheduled", "retry"}),
        ("states => '{scheduled}'", {"scheduled"}),
        ("event_type => 'enqueued.type'", {"enqueued"}),
        ("error => 'away'", {"retry"}),
        ("host_id => 'host of leased'", set()),
        ("event_id => 'dead'", set()),
    ],
)
def test_what_a_filter_selects_is_cancelled(queue: Outbox, chosen: str, gone: set[str]) -> None:
    """riverqueue/river#962, enioka-Haute-Couture/jqm#388: jobs could be deleted one by one only.

    vishaltps/solid_queue_monitor#45: stragglers of a former name could not be deleted while they were ready.
    """
    before = set(states(queue))
    assert queue.worker.value(f"select relay.cancel_messages('mail', {chosen})") == len(gone)
    assert set(states(queue)) == before - gone


def test_a_filter_is_needed_and_is_understood(queue: Outbox) -> None:
    """A forgotten filter selects nothing, and a state in which a message is not waiting is refused."""
    before = states(queue)
    for call in ("cancel_messages('mail')", "move_messages('mail', now())"):
        with pytest.raises(psycopg.errors.NullValueNotAllowed, match="condition"):
            queue.worker.value(f"select relay.{call}")
    for state in ("dead", "done", "leased", "running"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=state):
            queue.worker.value(f"select relay.cancel_messages('mail', states => '{{{state}}}')")
    assert states(queue) == before


def test_a_message_is_edited_unless_a_worker_has_it(queue: Outbox) -> None:
    """graphile/worker#279: what an update of a job that is locked does was not known. Here it changes nothing.

    riverqueue/river#360: a job that has failed for good is mended, and enqueued again.
    """
    edit = "select relay.edit_message('mail', %s, '{\"to\": \"b\"}', 'wrong address')"
    numbers = dict(queue.conn.execute("select event_id, id from relay.queue_items").fetchall())
    edited = {name for name, number in numbers.items() if queue.worker.value(edit, (number,))}
    assert edited == {"enqueued", "scheduled", "retry", "dead"}
    has = "select event_id from relay.queue_messages where payload ->> 'to' = 'b' order by 1"
    assert queue.column(has) == ["enqueued", "retry", "scheduled"]
    assert queue.column(
        "select original_payload::text || payload::text from relay.dead_letters"
    ) == ['{}{"to": "b"}']
    assert queue.worker.value("select relay.requeue('mail', array[%s])", (numbers["dead"],)) == 1
    assert queue.column(has) == ["dead", "enqueued", "retry", "scheduled"]
    noted = queue.conn.execute(
        "select action, reason, acted_by <> '' from relay.dead_letter_actions order by id"
    ).fetchall()
    assert noted == [("edit", "wrong address", True), ("replay", None, True)]


def test_only_members_of_the_queues_role_act_on_its_messages(queue: Outbox) -> None:
    for call in (
        "cancel_messages('mail', states => '{enqueued}')",
        "move_messages('mail', now(), states => '{retry}')",
        "edit_message('mail', 1, '{}')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            queue.login(Role.READER).value(f"select relay.{call}")


def test_one_that_is_cancelled_while_its_worker_has_it_is_retried(queue: Outbox) -> None:
    """procrastinate-org/procrastinate#1131, #1132: a job that was aborted at work could not be retried.

    Its worker ended with the error. Here it is left to its worker, who ends the attempt as always.
    """
    number = queue.value("select id from relay.queue_items where state = 'leased'")
    assert queue.worker.value("select relay.cancel_messages('mail', id => %s)", (number,)) == 0
    assert queue.worker.value("select relay.retry('mail', %s, 1, '1 h')", (number,)) == "retry"
    assert queue.worker.value("select relay.cancel_messages('mail', id => %s)", (number,)) == 1


def test_what_a_dead_worker_had_is_cancelled_and_frees_its_key(outbox: Outbox) -> None:
    """graphile/worker#328: who deleted the job of a dead worker had to unlock its queue by hand."""
    outbox.worker.execute("select relay.declare_queue('mail', null, key => 'host')")
    put(outbox, "first", host_id="h")
    put(outbox, "second", host_id="h")
    outbox.worker.execute("select id from relay.lease('mail', 1, '0 s')")
    assert outbox.worker.value("select relay.cancel_messages('mail', event_id => 'first')") == 1
    assert outbox.worker.column("select event_id from relay.take('mail', 2)") == ["second"]


def test_many_with_a_unique_key_are_run_together(outbox: Outbox) -> None:
    """oban-bg/oban#1259: retrying all failed for each, since one of them had a twin that was enqueued meanwhile."""
    outbox.worker.execute("select relay.declare_queue('mail', null)")
    for name in ("a", "b"):
        put(outbox, name, unique_key=name)
    outbox.worker.execute("select id from relay.lease('mail', 2, '1 hour')")
    put(outbox, "twin of a", unique_key="a", on_duplicate="replace")
    outbox.worker.execute(
        "select relay.retry('mail', n, 1, '1 hour', 'x') from unnest(%s::bigint[]) as n",
        (outbox.column("select id from relay.queue_messages where leased"),),
    )
    assert outbox.worker.value("select relay.move_messages('mail', now(), error => 'x')") == 2
    wait_until(lambda: takeable(outbox) == ["a", "b", "twin of a"])


def test_the_heads_of_many_keys_come_in_one_call(outbox: Outbox) -> None:
    """pgmq/pgmq#478, pgmq/pgmq#476: one read returned many messages of one group, and those of others later."""
    outbox.worker.execute("select relay.declare_queue('mail', null, key => 'host')")
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        put(outbox, name, host_id=name[0])
    take = "select event_id from relay.take('mail', 10)"
    assert outbox.worker.column(take) == ["a1", "b1", "c1"]
    assert outbox.worker.column(take) == ["a2", "b2"]


def test_messages_behind_a_key_that_waits_are_taken(outbox: Outbox) -> None:
    """ixti/sidekiq-throttled#188: one user's many jobs were throttled, and those of all others waited behind them."""
    outbox.worker.execute("select relay.declare_queue('mail', null, key => 'host')")
    outbox.worker.execute(
        "select relay.enqueue('mail', '{}', host_id => 'loud') from generate_series(1, 500)"
    )
    put(outbox, "quiet")
    outbox.worker.execute(
        "select relay.retry('mail', id, attempt, '1 hour') from relay.lease('mail', 1)"
    )
    assert outbox.worker.column("select event_id from relay.take('mail', 10)") == ["quiet"]


def test_operators_act_by_command_api_and_console(queue: Outbox, tmp_path: Path) -> None:
    """With one filter, that of `relay queue show`; each act is recorded with its reason."""
    config = ["--config", str(queue.config_file(tmp_path / "relay.yaml"))]

    def command(*words: str) -> str:
        done = CliRunner().invoke(app, ["queue", words[0], "mail", *config, *words[1:]])
        return f"{done.output}{done.exception or ''}"

    shown = command("show", "--error", "503", "--type", "retry.type")
    assert "away: 503" in shown
    assert "scheduled" not in shown
    assert "1 message can be taken now" in command("run", "--error", "503", "--reason", "mended")
    wait_until(lambda: "retry" in takeable(queue))
    assert "'dead' is not enqueued, scheduled or retry" in command("cancel", "--state", "dead")
    numbers = dict(queue.conn.execute("select event_id, id from relay.queue_items").fetchall())
    number = str(numbers["enqueued"])
    assert "is not JSON" in command("edit", "--id", number, "--payload", "{")
    assert "has the new payload" in command("edit", "--id", number, "--payload", '{"a": 1}')
    leased = command("edit", "--id", str(numbers["leased"]), "--payload", "1")
    assert "a worker has it" in leased
    with served(queue.settings(observe=console_of())) as address:
        api, visitor = Program(address), Visitor(address)
        path = "/queues/mail/messages"
        chosen = {"event_id": "scheduled"}
        to = "2999-01-01T00:00:00Z"
        assert api.post(f"{path}/move", filter=chosen, to=to) == {"messages": 1}
        assert api.post(f"{path}/{number}/edit", payload="[1]") == {"changed": True}
        assert queue.value("select payload from relay.queue_messages where id = %s", (number,)) == [
            1
        ]
        unmeant = api.client.post(f"{path}/cancel", json={"reason": "x", "filter": {}})
        assert unmeant.status_code == 409
        page = visitor.send(
            f"{G}/queue/run", name="mail", id="", event_type="scheduled.type", reason="now"
        )
        assert "1 message can be taken now" in page.text
        wait_until(lambda: "scheduled" in takeable(queue))
        page = visitor.send(f"{G}/queue/cancel", name="mail", key="", state="retry", reason="no")
        assert "1 message cancelled" in page.text
        assert api.post(f"{path}/cancel", filter=chosen) == {"messages": 1}
    assert set(states(queue)) == {"done", "dead", "leased", "enqueued"}
    assert queue.column("select action from relay.actions order by id") == [
        *("queue run", "queue edit", "queue move", "queue edit", "queue run"),
        *("queue cancel", "queue cancel"),
    ]
