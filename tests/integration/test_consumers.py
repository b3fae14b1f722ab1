"""The consumers' contract: what each kind of consumer promises, whatever happens to it, to publishers and the source.

`tests/consumers.py` has the kinds; a new one is one class there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from relay.spark.session import Session
from tests.consumers import KINDS, Consumer, Places, wait_further, wait_read
from tests.log_histories import History, id_of
from tests.outbox import Outbox, event, host, wait_until
from tests.postgres import Server

pytestmark = pytest.mark.timeout(180)

KILLS = 2


@pytest.fixture
def target(server: Server, outbox: Outbox) -> Iterator[Outbox]:
    """A database for the targets of groups, which is not the source."""
    with Outbox(server.create_database(f"{outbox.slot}_target")) as made:
        yield made
    server.drop_database(f"{outbox.slot}_target")


@pytest.fixture(params=KINDS)
def consumer(
    request: pytest.FixtureRequest, outbox: Outbox, target: Outbox, tmp_path: Path
) -> Iterator[Consumer]:
    """A consumer of each kind, at the beginning of the log."""

    def session() -> Session:
        return cast(Session, request.getfixturevalue("spark_session"))

    made: Consumer = request.param(Places(outbox, target, tmp_path, session))
    outbox.install_again(outbox.settings(retention={"keep": "7d"}))
    # No other group holds what it has not read.
    outbox.conn.execute("delete from relay.streams; delete from relay.readers")
    made.prepare()
    yield made
    made.close()


def remove_read(outbox: Outbox) -> None:
    """Remove what every reader has read, however new it is."""
    # A reader that advances notes its position for retention every five seconds.
    outbox.conn.execute("update relay.readers set noted_at = noted_at - interval '1 minute'")
    outbox.conn.execute(
        "select relay.delete_portion('public.outbox_message_t', now() + interval '1 hour', 100, '0')"
    )


def removes_some(consumer: Consumer, history: History, outbox: Outbox) -> bool:
    """Go on until all is read, and tell whether something of it is removed."""
    history.steps(5)
    history.end_all()
    wait_read(consumer, set(history.committed))
    remove_read(outbox)
    return bool(outbox.value("select count(*) from outbox_message_t") < len(history.committed))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(each, marks=pytest.mark.rare) for each in (1, 2))]
)
def test_each_committed_event_comes_once_and_in_order(
    outbox: Outbox, consumer: Consumer, seed: int
) -> None:
    """Whatever publishers do, owners are killed, two work at once, and retention removes what is read."""
    with History(outbox, seed) as history:
        history.steps(consumer.steps // 4)
        owners = [consumer.start() for _ in range(consumer.owners)]
        for _ in range(KILLS):
            before = len(consumer.read())
            for _ in range(5):
                history.steps(consumer.steps // 4 // KILLS // 5 + 1)
                remove_read(outbox)
                consumer.cut()
            wait_further(consumer, before, set(history.committed))
            history.steps(consumer.steps // 4 // KILLS)
            owners.pop(0).kill()
            owners.append(consumer.start())
        history.end_all()
        remove_read(outbox)
        wait_read(consumer, set(history.committed))
        # In another history a transaction may be open to the end, and hold all rows.
        if consumer.is_noted_at_once and seed == 0:
            wait_until(lambda: removes_some(consumer, history, outbox), 90)
        for each in owners:
            each.kill()
        history.require_read(consumer.read(), consumer.order)


def _publish(outbox: Outbox, *numbers: int) -> None:
    for number in numbers:
        outbox.publish(host(number), event(number, id=id_of(number)))


def test_in_another_history_nothing_comes(outbox: Outbox, consumer: Consumer) -> None:
    """As after a dump, or a failover with a loss: the server does not have the witnesses of what was read."""
    _publish(outbox, *range(1, 6))
    owner = consumer.start()
    wait_read(consumer, set(range(1, 6)))
    owner.kill()
    had = consumer.read()
    outbox.conn.execute("update relay.witnesses set taken_at = taken_at")
    _publish(outbox, 6, 7)
    said = consumer.refusal()
    assert any(word in said for word in ("witness", "history", "replaced")), said
    assert consumer.read() == had


def test_what_is_moved_to_the_beginning_has_all_of_it_again(
    outbox: Outbox, consumer: Consumer
) -> None:
    numbers = set(range(1, 6))
    _publish(outbox, *numbers)
    owner = consumer.start()
    wait_read(consumer, numbers)
    owner.kill()
    assert sorted(consumer.read()) == sorted(numbers)
    had = len(consumer.read())
    consumer.seek()
    owner = consumer.start()
    _publish(outbox, 6)
    wait_until(
        lambda: (
            6 in consumer.read() and len(consumer.read()[had if consumer.appends else 0 :]) >= 6
        ),
        90,
    )
    owner.kill()
    again = consumer.read()[had if consumer.appends else 0 :]
    assert sorted(again) == [*sorted(numbers), 6]
