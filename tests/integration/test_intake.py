"""What others send is published once, many requests with one commit, and each with an answer of its own."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.api.shared_commits import CommitWriter
from relay.intake.messages import IncomingEvents, MessageReader, derived
from relay.intake.publishing import Accepted, Conflict, NotCommitted, Publisher, Refused
from tests.outbox import Outbox, host, initialise, wait_until
from tests.postgres import Server

READER = MessageReader()


def placed(amount: Any = 1, **more: Any) -> dict[str, Any]:
    return {
        "host_id": str(host(1)),
        "event_type": "order.placed",
        "payload": {"amount": amount},
        **more,
    }


def sent(*events: dict[str, Any], key: str | None = None) -> IncomingEvents:
    document = events[0] if len(events) == 1 else list(events)
    if key is None:
        return READER.read(json.dumps(document).encode())
    return READER.read(json.dumps(document).encode(), id_of=derived("shop", key))


@pytest.fixture(autouse=True)
def _relay_may_publish(outbox: Outbox) -> None:
    outbox.let_handlers_publish()


@pytest.fixture
def publisher(outbox: Outbox) -> Iterator[Publisher]:
    with closing(Publisher(outbox.relay_dsn)) as found:
        yield found


@pytest.fixture
def writer(outbox: Outbox) -> Iterator[CommitWriter]:
    found = CommitWriter(outbox.relay_dsn)
    found.start()
    yield found
    found.close()


def published(publisher: Publisher, *submissions: IncomingEvents) -> list[Any]:
    return publisher.publish(submissions, time.monotonic() + 30)


def ids(outbox: Outbox) -> list[str]:
    return outbox.column("select id::text from outbox_message_t order by c_offset")


def test_an_event_has_all_its_fields(outbox: Outbox, publisher: Publisher) -> None:
    fields = {
        "user_id": str(uuid.UUID(int=7)),
        "aggregate_type": "Order",
        "aggregate_id": 42,
        "aggregate_version": 3,
        "metadata": {"version": 1},
        "event_ts": "2026-11-27T09:30:00+00:00",
        "deliver_at": "2099-01-01T00:00:00+00:00",
    }
    submission = sent(placed(0.5, **fields), placed(2, user_id=fields["user_id"]))
    (outcome,) = published(publisher, submission)
    assert outcome == Accepted(submission.transaction_id)
    first, second = outbox.conn.execute(
        "select to_jsonb(o) - 'c_xid' - 'c_offset' from outbox_message_t as o order by c_offset"
    ).fetchall()
    assert first[0] == {
        **placed(0.5, **fields),
        "aggregate_id": "42",
        "id": submission.ids[0],
        "transaction_id": submission.transaction_id,
        "transaction_ordinal": 1,
        "transaction_count": 2,
    }
    assert (second[0]["id"], second[0]["transaction_ordinal"]) == (submission.ids[1], 2)


def test_a_repetition_is_not_published_again(outbox: Outbox, publisher: Publisher) -> None:
    batch = placed(1, metadata={"a": 1, "traceparent": "00-1"}), placed(2.0)
    (first,) = published(publisher, sent(*batch, key="k"))
    again = placed(1, metadata={"traceparent": "00-2", "a": 1}), placed(2)
    assert published(publisher, sent(*again, key="k")) == [Accepted(first.transaction_id, True)]
    user = {"user_id": str(uuid.UUID(int=1))}
    marked = placed(1, metadata={"a": 1})
    for other, ordinals in (
        ((placed(1), placed(3)), [1, 2]),
        ((marked, placed(3)), [2]),
        ((marked,), [1]),
        ((marked, placed(2), placed(3)), [1, 2]),
        (({**marked, **user}, {**placed(2), **user}), [1, 2]),
        (({**marked, "deliver_at": "2099-01-01T00:00:00Z"}, placed(2)), [1]),
    ):
        (outcome,) = published(publisher, sent(*other, key="k"))
        assert isinstance(outcome, Conflict)
        assert list(outcome.ordinals) == ordinals
    assert len(ids(outbox)) == 2


def test_a_repetition_in_the_same_group_is_found(outbox: Outbox, publisher: Publisher) -> None:
    group = [
        sent(placed(), key="k"),
        sent(placed(2)),
        sent(placed(), key="k"),
        sent(placed(9), key="k"),
    ]
    first, _, third, fourth = published(publisher, *group)
    assert first == Accepted(group[0].transaction_id)
    assert third == Accepted(first.transaction_id, True)
    assert isinstance(fourth, Conflict)
    assert ids(outbox) == [group[0].ids[0], group[1].ids[0]]
    assert publisher.commits == 1


def test_a_refused_submission_harms_itself_only(outbox: Outbox, publisher: Publisher) -> None:
    # More digits than jsonb has.
    huge = f'{{"host_id": "{host(1)}", "event_type": "t", "payload": 1e200000}}'.encode()
    group = [sent(placed(n)) for n in range(20)]
    group[7] = group[13] = READER.read(huge)
    outcomes = published(publisher, *group)
    refused = [n for n, each in enumerate(outcomes) if isinstance(each, Refused)]
    assert refused == [7, 13]
    good = [each.ids[0] for n, each in enumerate(group) if n not in refused]
    assert ids(outbox) == good


def test_an_event_that_is_too_large(outbox: Outbox, publisher: Publisher) -> None:
    limited = {**outbox.config()["source"], "max_event_bytes": 50_000}
    outbox.install_again(outbox.settings(source=limited))
    # jsonb compresses the first.
    for text in ("x" * 60_000, "".join(map(str, range(20_000)))):
        first, second = published(publisher, sent(placed(text)), sent(placed()))
        assert isinstance(first, Refused)
        assert first.is_too_large
        assert isinstance(second, Accepted)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 1)),
            min_size=1,
            max_size=3,
            unique_by=lambda e: e[0],
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 5),
)
def test_outcomes_are_those_of_one_after_the_other(
    outbox: Outbox, publisher: Publisher, batches: list[list[tuple[int, int]]], size: int
) -> None:
    outbox.conn.execute("truncate outbox_message_t")
    salt = uuid.uuid4()
    group = [
        sent(*(placed(amount, id=str(uuid.uuid5(salt, str(number)))) for number, amount in batch))
        for batch in batches
    ]
    known: dict[int, list[tuple[int, int]]] = {}
    expected = []
    for batch in batches:
        of_ids = [known.get(number) for number, _ in batch]
        if not any(of_ids):
            known |= {number: batch for number, _ in batch}
            expected.append("new")
        else:
            expected.append("same" if all(each == batch for each in of_ids) else "conflict")
    outcomes = []
    for start in range(0, len(group), size):
        outcomes += published(publisher, *group[start : start + size])
    assert [
        "conflict" if isinstance(each, Conflict) else "same" if each.is_repeated else "new"
        for each in outcomes
    ] == expected
    assert len(ids(outbox)) == len(known)


def test_requests_share_commits(outbox: Outbox, writer: CommitWriter) -> None:
    with ThreadPoolExecutor(16) as pool:
        submissions = [sent(placed(n)) for n in range(400)]
        outcomes = list(pool.map(lambda each: writer.submit(each).result(30), submissions))
    assert [each.transaction_id for each in outcomes] == [
        each.transaction_id for each in submissions
    ]
    assert outbox.value("select count(*) from outbox_message_t") == 400
    assert writer.published == 400
    assert writer.commits < 400


def test_two_writers_publish_an_id_once(outbox: Outbox, writer: CommitWriter) -> None:
    other = CommitWriter(outbox.relay_dsn)
    other.start()
    try:
        futures: list[Future[Accepted]] = []
        for number in range(200):
            for each in (writer, other):
                futures.append(each.submit(sent(placed(number), key=str(number))))
        outcomes = [each.result(30) for each in futures]
    finally:
        other.close()
    assert sum(not each.is_repeated for each in outcomes) == 200
    assert len(set(ids(outbox))) == outbox.value("select count(*) from outbox_message_t") == 200


def test_another_publishers_id(outbox: Outbox, writer: CommitWriter) -> None:
    taken = str(uuid.uuid4())
    with psycopg.connect(outbox.publisher_dsn) as rival:
        rival.execute(
            "insert into outbox_message_t (id, host_id, event_type, payload) values (%s, %s, 'x', '{}')",
            (taken, host(1)),
        )
        waiting = writer.submit(sent(placed(id=taken)))
        # Others do not wait for that transaction for long.
        assert not writer.submit(sent(placed())).result(30).is_repeated
        with suppress(NotCommitted):
            waiting.result(30)
        rival.commit()
    with pytest.raises(Conflict):
        writer.submit(sent(placed(id=taken))).result(30)


def test_a_lost_session_costs_nobody_an_answer(outbox: Outbox, writer: CommitWriter) -> None:
    submissions = [sent(placed(n)) for n in range(300)]
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(lambda each: writer.submit(each).result(60), each) for each in submissions
        ]
        for kills in range(8):
            outbox.conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            wait_until(partial(_has_published, writer, kills * 20))
        outcomes = [each.result() for each in futures]
    assert not any(each.is_repeated for each in outcomes)
    assert outbox.value("select count(*) from outbox_message_t") == 300


def test_an_outage_is_bounded_in_time_and_in_memory(killable_server: Server) -> None:
    with Outbox(killable_server.create_database("relay")) as outbox:
        source = {**outbox.config()["source"], "mode": "poll"}
        outbox.install(source=source)
        initialise(outbox.settings(source=source), handlers_publish=True)
        writer = CommitWriter(outbox.relay_dsn, wait_seconds=3.0)
        writer.start()
        try:
            writer.submit(sent(placed())).result(30)
            killable_server.stop("immediate")
            futures: list[Future[Accepted]] = []
            with pytest.raises(NotCommitted, match="too many"):
                _fill(writer, futures)
            # Where nobody waits for an answer any more, nothing fails any more.
            wait_until(lambda: _fails(writer))
            for each in futures:
                with pytest.raises(NotCommitted):
                    each.result(60)
            killable_server.start()
            wait_until(lambda: _is_accepted(writer))
            assert not _fails(writer)
        finally:
            writer.close()
        with pytest.raises(NotCommitted, match="stops"):
            writer.submit(sent(placed()))


def _fill(writer: CommitWriter, futures: list[Future[Accepted]]) -> None:
    submission = sent(placed())
    while len(futures) < 20_000:
        futures.append(writer.submit(submission))


def _fails(writer: CommitWriter) -> bool:
    return writer.condition.fault is not None


def _has_published(writer: CommitWriter, least: int) -> bool:
    return writer.published > least


def _is_accepted(writer: CommitWriter) -> bool:
    try:
        return not writer.submit(sent(placed())).result(30).is_repeated
    except NotCommitted:
        return False
