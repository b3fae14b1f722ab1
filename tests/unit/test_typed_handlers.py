"""What handlers read where event types are declared: rows, columns and whole transactions. No database."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.event_types import current_version
from relay.event_types.upcasting import Upcasting
from relay.faults import InvalidEvent
from relay.handlers import Typed
from relay.model.events import Commit, Event, Events, Lsn, Transaction
from relay.model.transactions import FACTS, Routed, Rows, Transactions
from relay.model.tuples import RowDecoder
from relay.sinks import TypedSink
from tests.event_types import registry
from tests.unit import wire

COLUMNS = ("event_type", "payload", "metadata", "id")
FIELDS = ("id", "metadata", "payload", "event_type", "host_id")
DECODER = RowDecoder(COLUMNS, {})
COMMIT = Commit(Lsn(1), Lsn(2), 0, 7)

Row = tuple[str, str, str | None]
ROWS = st.lists(
    st.sampled_from(
        [
            ("order.placed", '{"amount": 1}', None),
            ("order.placed", '{"amount": 2, "currency": "SEK"}', '{"version": 2}'),
            ("order.placed", '{"items": [], "amount": 3, "currency": "DKK"}', '{"version":3}'),
            ("order.shipped", '{"amount":  4}', '{"version":  1}'),
        ]
    ),
    min_size=1,
    max_size=8,
)
INVALID: Row = ("order.placed", "{}", '{"version": 3}')


def raw(rows: Sequence[Row]) -> list[bytes]:
    """Rows as the stream has them; each id is the row's index."""
    cells = [[*row, str(index)] for index, row in enumerate(rows)]
    return [
        wire.tuple_data([None if cell is None else cell.encode() for cell in row]) for row in cells
    ]


def routed(rows: Sequence[Row]) -> Routed:
    """One transaction with these rows."""
    facts = np.zeros(1, FACTS)
    facts["events"] = len(rows)
    return Routed(Transactions(COLUMNS, facts, [None], [("h",)], Rows.of(raw(rows))), DECODER)


class Reads:
    """A handler and a sink that note what they read, the handler as rows and as columns."""

    name = "h"

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.columns: list[list[bytes | None]] = []
        self.routed: list[Routed] = []

    def configure(self, conn: Any) -> None:
        """Nothing to prepare."""

    def check(self, conn: Any) -> None:
        """Nothing to check."""

    def apply(self, conn: Any, given: Routed) -> None:
        self.routed.append(given)
        for transaction in given:
            self.events += transaction.events
        for rows in given.transactions.portions(3, 1_000_000):
            self.columns += map(list, zip(*given.decoder.columns(rows, FIELDS), strict=True))

    def resume(self, series: str) -> None:
        pass

    async def deliver(self, transaction: Transaction) -> None:
        self.events += transaction.events

    async def close(self) -> None:
        """Nothing to close."""


def apply(rows: Sequence[Row], handler: Reads) -> Reads:
    Typed(handler, Upcasting(registry)).apply(None, routed(rows))  # type: ignore[arg-type]
    return handler


@given(ROWS)
def test_rows_and_columns_are_the_same_events(rows: list[Row]) -> None:
    handler = apply(rows, Reads())
    assert [[event.text(field) for field in FIELDS] for event in handler.events] == [
        [None if value is None else value.decode() for value in row] for row in handler.columns
    ]
    assert [event.text("id") for event in handler.events] == [str(n) for n in range(len(rows))]
    for event, (kind, payload, metadata) in zip(handler.events, rows, strict=True):
        if kind == "order.placed":
            assert event.metadata == {"version": 3}
            assert event.model.amount == json.loads(payload)["amount"]
        else:
            assert (event.text("payload"), event.text("metadata")) == (payload, metadata)


def test_without_a_declared_type_a_handler_gets_what_it_got_before() -> None:
    given = routed([("order.shipped", "not JSON", None)])
    handler = Reads()
    Typed(handler, Upcasting(registry)).apply(None, given)  # type: ignore[arg-type]
    assert handler.routed == [given]


@pytest.mark.parametrize("held", [0, 1_000_000])
def test_nothing_of_a_transaction_is_read_before_all_of_it_is_valid(
    held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_version, "_KEPT_BYTES", held)
    valid: Row = ("order.placed", '{"amount": 1}', None)
    assert len(apply([valid] * 3, Reads()).events) == 3
    handler, sink = Reads(), Reads()
    wrapped = TypedSink(sink, Upcasting(registry))
    with pytest.raises(InvalidEvent, match=r"order.placed 3: payload.amount: Field required"):
        apply([valid] * 3 + [INVALID], handler)
    assert not handler.events
    for tuples in (raw([valid] * 3 + [INVALID]), Rows.of(raw([valid] * 3 + [INVALID]))):
        with pytest.raises(InvalidEvent):
            asyncio.run(wrapped.deliver(Transaction(None, COMMIT, Events(tuples, DECODER, COMMIT))))
    assert not sink.events
    events = Events(Rows.of(raw([valid] * 3)), DECODER, COMMIT)
    asyncio.run(wrapped.deliver(Transaction(None, COMMIT, events)))
    assert [event.payload["currency"] for event in sink.events] == ["EUR"] * 3


@pytest.fixture
def short_turns() -> Iterator[None]:
    """Let the threads of this process change more often than a fast machine validates 1,000 events."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("short_turns")
def test_other_deliveries_get_their_turn_while_a_large_transaction_is_validated() -> None:
    valid: Row = ("order.placed", '{"amount": 1}', None)
    turns = 0

    async def deliver() -> None:
        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        running = asyncio.create_task(others())
        events = Events(raw([valid] * 1_000), DECODER, COMMIT)
        await TypedSink(Reads(), Upcasting(registry)).deliver(Transaction(None, COMMIT, events))
        running.cancel()

    asyncio.run(deliver())
    assert turns >= 10
