"""Sagas of the client: steps that commit with their checkpoint, undo in reverse order, waits, and time."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from relay import Fail
from relay.admin import status
from relay.cli.app import app
from relay.client import Event
from relay.client import Outbox as Publisher
from relay.client.attempts import Handling, Slot
from relay.client.databases import Steps
from relay.client.saga import Context, Saga, SagaStep, StepFailed, saga
from relay.client.sessions import Statement
from relay.client.worker import Message, Worker
from relay.observe.troubles import Trouble, troubles
from relay.retention.erasure import erase
from tests.outbox import Outbox, relaying, wait_until
from tests.workers import DATABASES, working

every_database = pytest.mark.parametrize("database", DATABASES)
HOST = str(uuid.UUID(int=1))


def checkout_of(function: Any, **options: Any) -> Saga:
    """A saga of orders, which waits 10 ms between attempts."""
    of: dict[str, Any] = {
        "starts": "order.placed",
        "key": "payload.order_id",
        "backoff": 0.01,
        "max_backoff": 0.01,
    }
    return saga("checkout", **(of | options))(function)


def declare(outbox: Outbox, of: Saga) -> None:
    statement, text = of.queue.declaration()
    outbox.worker.execute(statement.with_parameter("%s").encode(), (text,))
    outbox.conn.execute("create table if not exists done (what text, by text)")


def tell(outbox: Outbox, event_type: str, order: str = "1", **payload: Any) -> None:
    """Put an event into the queue of the saga, as relay does with one of the log."""
    outbox.worker.execute(
        "select relay.enqueue('checkout', %s::jsonb, %s, %s, %s)",
        (json.dumps({"order_id": order, **payload}), event_type, HOST, order),
    )


def done(outbox: Outbox) -> list[str]:
    return [str(each) for each in outbox.column("select what from done order by ctid")]


def states(outbox: Outbox) -> list[str]:
    return [str(each) for each in outbox.column("select state from relay.sagas order by key, id")]


def entries(outbox: Outbox) -> list[tuple[str, str]]:
    rows = outbox.conn.execute("select kind, step from relay.saga_steps order by saga_id, number")
    return [(kind, step) for kind, step in rows.fetchall()]


def attention(outbox: Outbox) -> list[Trouble]:
    """What needs attention of the sagas."""
    settings = outbox.settings()
    found = troubles(status.read(settings), settings.source.mode)
    return [each for each in found if each.alert == "RelaySagaStuck"]


def ends(outbox: Outbox, *expected: str) -> None:
    wait_until(lambda: states(outbox) == list(expected))


@every_database
def test_each_step_commits_with_its_effect_and_a_failed_saga_undoes_them(
    outbox: Outbox, database: str
) -> None:
    opened, is_async, execute = DATABASES[database]
    failed: list[int] = []

    def note(step: SagaStep, what: str) -> dict[str, str]:
        execute(step.session, f"insert into done values ('{what}', '{step.name}')")
        return {"noted": what}

    async def note_async(step: SagaStep, what: str) -> dict[str, str]:
        await execute(step.session, f"insert into done values ('{what}', '{step.name}')")
        return {"noted": what}

    def undo(step: SagaStep, what: str) -> None:
        assert step.result == {"noted": what}
        execute(step.session, f"insert into done values ('un{what}', '{step.name}')")

    async def undo_async(step: SagaStep, what: str) -> None:
        assert step.result == {"noted": what}
        await execute(step.session, f"insert into done values ('un{what}', '{step.name}')")

    def refuse(step: SagaStep) -> None:
        failed.append(step.attempt)
        if step.attempt == 3:
            raise Fail("no money")
        raise RuntimeError("not yet")

    async def checkout_async(ctx: Context, event: Message) -> None:
        assert event.payload == {"order_id": "1"}
        await ctx.step("reserve", note_async, "reserved", undo=undo_async)
        await ctx.step("pack", note_async, "packed", undo=undo_async)
        await ctx.step("pay", refuse)

    def checkout(ctx: Context, event: Message) -> None:
        assert event.payload == {"order_id": "1"}
        ctx.step("reserve", note, "reserved", undo=undo)
        ctx.step("pack", note, "packed", undo=undo)
        ctx.step("pay", refuse)

    of = checkout_of(checkout_async if is_async else checkout)
    declare(outbox, of)
    tell(outbox, "order.placed")

    async def serve() -> None:
        async with opened(outbox.worker_dsn) as given:
            worker = Worker(given, of, listen=False, poll=0.05)
            running = asyncio.create_task(worker.run())
            while states(outbox) != ["compensated"] and not running.done():
                await asyncio.sleep(0.02)
            worker.stop()
            await running

    asyncio.run(asyncio.wait_for(serve(), 60))
    assert done(outbox) == ["reserved", "packed", "unpacked", "unreserved"]
    assert failed == [1, 2, 3]
    assert entries(outbox) == [
        ("event", "order.placed"),
        ("step", "reserve"),
        ("step", "pack"),
        ("failed", "pay"),
        ("fail", ""),
        ("undone", "pack"),
        ("undone", "reserve"),
    ]
    assert outbox.column("select count(*) from relay.queue_messages") == [0]


def note(step: SagaStep, what: str) -> str:
    step.session.execute("insert into done values (%s, %s)", (what, step.idempotency_key))
    return what


def test_a_saga_catches_a_step_that_has_failed_and_takes_another_way(outbox: Outbox) -> None:
    def broken(step: SagaStep) -> None:
        note(step, "never")
        raise RuntimeError("broken")

    def ship(ctx: Context, event: Message) -> None:
        try:
            ctx.step("by air", broken, attempts=2)
        except StepFailed as error:
            ctx.step("by sea", note, error.step)

    of = checkout_of(ship)
    declare(outbox, of)
    tell(outbox, "order.placed")
    with working(Worker(outbox.worker_dsn, of)):
        ends(outbox, "done")
    assert done(outbox) == ["by air"]


def test_a_saga_waits_for_an_event_that_comes_before_or_after_or_not_at_all(outbox: Outbox) -> None:
    def checkout(ctx: Context, event: Message) -> None:
        paid = ctx.wait("order.paid", lambda each: bool(each.payload["amount"] == 5))
        ctx.step("pay", note, f"paid {paid.payload['amount']}")
        sent = ctx.wait("order.sent", timeout=0.2)
        ctx.step("send", note, "late" if sent is None else "sent")
        ctx.sleep(0.1)
        ctx.step("thank", note, "thanks")

    of = checkout_of(checkout, waits="order.*")
    declare(outbox, of)
    tell(outbox, "order.placed", "1")
    tell(outbox, "order.sent", "1")
    tell(outbox, "order.placed", "2")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        ends(outbox, "waiting", "waiting")
        tell(outbox, "order.paid", "1", amount=4)
        tell(outbox, "order.paid", "1", amount=5)
        ends(outbox, "done", "waiting")
        assert done(outbox) == ["paid 5", "sent", "thanks"]
        tell(outbox, "order.paid", "2", amount=5)
        ends(outbox, "done", "done")
    assert done(outbox)[3:] == ["paid 5", "late", "thanks"]
    assert outbox.column("select count(*) from relay.queue_messages") == [0]


def test_an_event_before_its_saga_is_held_beside_the_order_then_a_dead_letter(
    outbox: Outbox,
) -> None:
    def checkout(ctx: Context, event: Message) -> None:
        paid = ctx.wait("order.paid")
        ctx.step("pay", note, f"paid {paid.payload['amount']}")

    of = checkout_of(checkout, waits="order.paid", hold=600)
    declare(outbox, of)
    tell(outbox, "order.paid", "1", amount=1)
    tell(outbox, "order.paid", "2", amount=2)
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(
            lambda: (
                outbox.column("select count(*) from relay.queue_messages where key is null") == [2]
            )
        )
        tell(outbox, "order.placed", "1")
        ends(outbox, "done")
    assert done(outbox) == ["paid 1"]
    impatient = checkout_of(checkout, waits="order.paid", hold=0.01)
    with working(Worker(outbox.worker_dsn, impatient, poll=0.05)):
        wait_until(lambda: bool(outbox.column("select exception from relay.dead_letters")))
    assert outbox.column("select exception from relay.dead_letters") == [
        "Fail: no saga of its key has begun within 0.01 s"
    ]


@dataclass
class Bank:
    """Another service, which knows each idempotency key once."""

    charged: dict[str, str] = field(default_factory=dict)
    calls: int = 0

    def charge(self, step: SagaStep, order: str) -> str:
        self.calls += 1
        return self.charged.setdefault(step.idempotency_key, order)

    def refund(self, step: SagaStep, order: str) -> None:
        assert step.result == order
        self.calls += 1
        self.charged.setdefault(step.idempotency_key, f"refund {order}")


class Died(BaseException):
    """What a worker dies of."""


NEVER, BEFORE_END, BEFORE_COMMIT = 0, 2, 3
"""The statement of its link before which a worker is killed: of an attempt, the second one ends it."""


@pytest.mark.parametrize("fails", [False, True])
def test_whenever_a_worker_is_killed_each_effect_is_there_once_or_undone_once(
    outbox: Outbox, fails: bool
) -> None:
    """Every attempt of a history is killed at each of its points; the next worker goes on."""
    bank = Bank()

    def refuse(step: SagaStep) -> None:
        raise Fail("no parcels")

    def checkout(ctx: Context, event: Message) -> None:
        order = event.payload["order_id"]
        ctx.step("reserve", note, f"reserve {order}", undo=unnote)
        ctx.step("pay", bank.charge, order, undo=bank.refund)
        ctx.send(Event("order.paid", ("Order", order), payload={"order_id": order}))
        ctx.wait("parcel.ready")
        ctx.step("ship", refuse if fails else note, *([] if fails else [f"ship {order}"]))

    def unnote(step: SagaStep, what: str) -> None:
        step.session.execute("insert into done values (%s)", (f"un{what}",))

    of = checkout_of(checkout, waits="parcel.ready", attempts=100)
    declare(outbox, of)
    tell(outbox, "order.placed")
    tell(outbox, "parcel.ready")
    ended = "compensated" if fails else "done"
    rounds = 0
    outbox.conn.execute("grant insert on done to public")
    with outbox.member("app_worker", "relay_publisher") as dsn:
        while states(outbox) != [ended]:
            # After a kill, one claim only counts what was aborted.
            for point in (BEFORE_END, NEVER, BEFORE_COMMIT, NEVER, NEVER):
                attempt_once(dsn, of, point)
            rounds += 1
            assert rounds < 50
    expected = ["reserve 1", "unreserve 1"] if fails else ["reserve 1", "ship 1"]
    assert done(outbox) == expected
    assert bank.calls > len(bank.charged)
    assert sorted(bank.charged.values()) == (["1", "refund 1"] if fails else ["1"])
    assert outbox.column("select event_type from outbox_message_t") == ["order.paid"]
    assert outbox.column("select count(*) from relay.queue_messages") == [0]


def attempt_once(dsn: str, of: Saga, point: int) -> None:
    """Work one attempt in a transaction, as a worker does, that is killed at a point; at none it commits."""
    handling = Handling("checkout", lambda _: of.handler(Publisher()), (), Publisher(), None, None)
    with suppress(Died), psycopg.connect(dsn, autocommit=True) as conn:
        conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        Slot(handling, Killing(conn, point)).attempt(lambda _: None)


class Killing(Steps):
    """The link of a worker that is killed before its n-th statement, or before the commit; 0: never."""

    def __init__(self, conn: psycopg.Connection[Any], point: int) -> None:
        self._conn, self._point, self._count = conn, point, 0

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        with self._conn.transaction():
            yield self._conn
            self._die()

    def _die(self) -> None:
        self._count += 1
        if self._count == self._point:
            raise Died

    def savepoint(self, session: Any) -> Any:
        return session.transaction()

    def fetch(self, session: Any, statement: Statement, text: str) -> list[str]:
        self._die()
        rows = session.execute(statement.with_parameter("%s", "%").encode(), (text,)).fetchall()
        return [row[0] for row in rows]

    def close(self) -> None:
        self._conn.close()


def steer(outbox: Outbox, act: str, **more: Any) -> bool:
    (number,) = outbox.column("select max(id) from relay.sagas")
    row = outbox.worker.execute(
        "select relay.steer_saga('checkout', %s, %s, result => %s::json)",
        (number, act, json.dumps(more["result"]) if more else None),
    ).fetchone()
    return row == (True,)


def test_operators_skip_a_step_that_fails_undo_give_up_and_resume(outbox: Outbox) -> None:
    broken = [True]

    def pay(step: SagaStep) -> None:
        raise RuntimeError("no bank")

    def unpay(step: SagaStep, what: str) -> None:
        if broken[0]:
            raise RuntimeError("no refund")
        note(step, f"un{what}")

    def checkout(ctx: Context, event: Message) -> None:
        ctx.step("reserve", note, "reserved", undo=unpay)
        ctx.step("pay", pay, attempts=1_000_000)
        ctx.wait("parcel.ready")

    of = checkout_of(checkout, waits="parcel.ready", undo_attempts=2)
    declare(outbox, of)
    tell(outbox, "order.placed")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: outbox.column("select step from relay.sagas") == ["pay"])
        assert outbox.column("select error from relay.sagas") == ["RuntimeError: no bank"]
        assert steer(outbox, "skip", result={"by": "hand"})
        ends(outbox, "waiting")
        assert outbox.column("select step from relay.sagas") == ["parcel.ready"]
        assert steer(outbox, "undo")
        ends(outbox, "stuck")
        assert outbox.column("select error from relay.sagas") == [
            "undo of step reserve: RuntimeError: no refund"
        ]
        (told,) = attention(outbox)
        assert (
            told.line
            == "saga checkout: 1 run is stuck: see `relay saga list checkout --state stuck`"
        )
        broken.clear()
        broken.append(False)
        assert steer(outbox, "resume")
        ends(outbox, "compensated")
        assert not attention(outbox)
        assert not steer(outbox, "give up")
        tell(outbox, "order.placed")
        wait_until(lambda: states(outbox) == ["compensated", "running"])
        assert steer(outbox, "give up")
        ends(outbox, "compensated", "given_up")
        wait_until(lambda: outbox.column("select count(*) from relay.queue_messages") == [0])
    assert done(outbox) == ["reserved", "unreserved", "reserved"]


def test_a_saga_waits_for_a_worker_that_has_its_version_and_for_code_that_fits(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    def first(ctx: Context, event: Message) -> None:
        ctx.step("reserve", note, "one")
        ctx.wait("parcel.ready")
        ctx.step("ship", note, "one ships")

    def renamed(ctx: Context, event: Message) -> None:
        ctx.step("book", note, "two")
        ctx.wait("parcel.ready")

    def patched(ctx: Context, event: Message) -> None:
        ctx.step("reserve", note, "one")
        if ctx.patched("weigh"):
            ctx.step("weigh", note, "weighed")
        ctx.wait("parcel.ready")
        ctx.step("ship", note, "one ships")

    more: dict[str, Any] = {"waits": "parcel.ready"}
    one = checkout_of(first, **more)
    declare(outbox, one)
    tell(outbox, "order.placed", "1")
    tell(outbox, "order.placed", "2")
    with working(Worker(outbox.worker_dsn, one, poll=0.05)):
        ends(outbox, "waiting", "waiting")
    tell(outbox, "parcel.ready", "1")
    with working(Worker(outbox.worker_dsn, checkout_of(renamed, **more), poll=0.05)):
        wait_until(
            lambda: (
                outbox.column("select error from relay.queue_messages where error is not null")
                == [
                    "SagaFault: step 'reserve' was done, and the saga's code comes to 'book' without it: has it been "
                    "renamed or removed? Give the change a version of its own, or ask ctx.patched"
                ]
            )
        )
    two = checkout_of(renamed, **more, version=2)
    tell(outbox, "order.placed", "3")
    with working(Worker(outbox.worker_dsn, two, poll=0.05)):
        ends(outbox, "waiting", "waiting", "waiting")
        wait_until(lambda: "a saga waits for a worker that has its version" in caplog.text)
    assert outbox.column("select version from relay.sagas order by key, id") == [1, 1, 2]
    both = checkout_of(renamed, **more, version=2, earlier=[one])
    with working(Worker(outbox.worker_dsn, both, poll=0.05)):
        wait_until(lambda: states(outbox)[0] == "done")
    tell(outbox, "order.placed", "4")
    tell(outbox, "parcel.ready", "2")
    tell(outbox, "parcel.ready", "4")
    outbox.conn.execute("delete from relay.sagas where version = 2")
    with working(Worker(outbox.worker_dsn, checkout_of(patched, **more), poll=0.05)):
        wait_until(lambda: states(outbox) == ["done", "done", "done"])
    assert sorted(done(outbox)) == sorted(
        ["one", "one", "one ships", "two", "one", "weighed", "one ships", "one ships"]
    )


def test_a_saga_of_many_steps_reads_each_of_its_entries_once(outbox: Outbox) -> None:
    def many(ctx: Context, event: Message) -> None:
        for number in range(200):
            ctx.step(f"step {number}", lambda step: None)

    of = checkout_of(many)
    declare(outbox, of)
    tell(outbox, "order.placed")
    outbox.conn.execute("select pg_stat_reset()")
    with working(Worker(outbox.worker_dsn, of, concurrency=1)):
        ends(outbox, "done")
    assert outbox.column("select count(*) from relay.saga_steps") == [201]
    read = "select idx_tup_fetch from pg_stat_user_tables where relname = 'saga_steps'"
    wait_until(lambda: int(outbox.column(read)[0] or 0) > 0)
    assert int(outbox.column(read)[0]) < 1_000


def test_an_erased_host_and_a_dropped_queue_have_no_sagas_and_ended_ones_are_removed(
    outbox: Outbox,
) -> None:
    def wait(ctx: Context, event: Message) -> None:
        if event.payload["order_id"] != "0":
            ctx.sleep(1_000)

    of = checkout_of(wait, keep=0.1)
    declare(outbox, of)
    for order in ("0", "1"):
        tell(outbox, "order.placed", order)
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        ends(outbox, "done", "waiting")
    settings = outbox.settings()
    with relaying(settings):
        ends(outbox, "waiting")
    assert erase(settings, outbox.conn, outbox.conn, HOST).removed["sagas"] == 1
    assert states(outbox) == []
    tell(outbox, "order.placed", "2")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        ends(outbox, "waiting")
    outbox.worker.execute("select relay.drop_queue('checkout')")
    assert outbox.column("select count(*) from relay.sagas") == [0]
    assert outbox.column("select count(*) from relay.saga_steps") == [0]


def test_commands_list_show_and_act_on_sagas(outbox: Outbox, tmp_path: Path) -> None:
    config = str(outbox.config_file(tmp_path / "relay.yaml"))

    def said(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, ["saga", *arguments, "--config", config])
        assert result.exit_code == status, result.output
        return f"{result.output}{result.exception or ''}"

    def pay(step: SagaStep) -> None:
        raise RuntimeError("no bank")

    def checkout(ctx: Context, event: Message) -> None:
        ctx.step("reserve", note, "reserved", undo=lambda step, what: note(step, f"un{what}"))
        ctx.step("pay", pay, attempts=1_000_000)
        ctx.wait("parcel.ready")

    assert "no such saga" in said("list")
    of = checkout_of(checkout, waits="parcel.ready")
    declare(outbox, of)
    tell(outbox, "order.placed")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: "RuntimeError: no bank" in said("list", "checkout", "--version", "1"))
        (number,) = map(str, outbox.column("select id from relay.sagas"))
        assert "saga" in said("resume", number)
        assert "saga" in said("skip", number, "--result", '{"by": "hand"}', "--reason", "paid")
        ends(outbox, "waiting")
        shown = json.loads(said("show", number, "--json"))
        assert [(each["kind"], each["step"]) for each in shown["entries"]] == [
            ("event", "order.placed"),
            ("step", "reserve"),
            ("act", "resume"),
            ("act", "skip"),
            ("skipped", "pay"),
            ("waits", "parcel.ready"),
        ]
        assert shown["entries"][4]["result"] == {"by": "hand"}
        assert f"saga {number} is " in said("undo", number, "--yes")
        ends(outbox, "compensated")
        assert "nothing to give up" in said("give-up", number, "--yes", status=1)
        assert "is compensated: there is nothing to undo" in said("undo", number, status=1)
    assert done(outbox) == ["reserved", "unreserved"]
    assert "has no saga 99" in said("show", "99", status=1)
    assert outbox.column("select action from relay.actions order by id") == [
        *("saga resume", "saga skip", "saga undo")
    ]


def test_sagas_that_sleep_cost_whoever_looks_for_messages_nothing(outbox: Outbox) -> None:
    def sleep(ctx: Context, event: Message) -> None:
        ctx.sleep(86_400)

    def pages() -> int:
        """How many pages a claim reads, once its plans are made."""
        for _ in range(7):
            plan = outbox.worker.execute(
                "explain (analyze, buffers, format json) select * from relay.claim('checkout')"
            ).fetchone()
        assert plan is not None
        of = plan[0][0]["Plan"]
        return int(of["Shared Hit Blocks"] + of["Shared Read Blocks"])

    declare(outbox, checkout_of(sleep))
    idle = pages()
    outbox.conn.execute(
        """
        insert into relay.queue_messages (queue_id, available_at, event_id, event_type, unique_key)
        select q.id, now() + interval '1 day', g::text, 'relay.saga', 'key ' || g
          from relay.queues as q cross join generate_series(1, 20000) as g
        """
    )
    outbox.conn.execute("vacuum analyze relay.queue_messages")
    assert pages() < idle + 20
    # A key that is held, and more of its messages than a claim looks at first.
    outbox.conn.execute(
        """
        insert into relay.queue_messages (queue_id, key, available_at, event_id, event_type)
        select q.id, 'held', case when g = 0 then now() + interval '1 day' end, g::text, 'order.placed'
          from relay.queues as q cross join generate_series(0, 300) as g
        """
    )
    blocked = pages()
    outbox.conn.execute("delete from relay.queue_messages where key is null")
    outbox.conn.execute("vacuum analyze relay.queue_messages")
    assert blocked < 2 * pages() + 50
