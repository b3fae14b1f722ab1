"""What is told to PostgreSQL: a state machine against a model that keeps every commit it has seen."""

from __future__ import annotations

from struct import unpack
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from relay.model.events import Lsn
from relay.source.stream.confirmation import Confirmation

STEPS = st.integers(0, 1000)


class Stream(RuleBasedStateMachine):
    """A slot, its stream and the service that acknowledges.

    The model knows where the stream is, which commits are not acknowledged, and what the slot was last told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.confirmation = Confirmation()
        self.connected = False
        self.known = False
        self.position = 0
        self.pending: list[int] = []
        self.confirmed = 0
        self.last_flushed = 0

    @initialize(confirmed=st.none() | st.integers(1, 10_000))
    def a_slot(self, confirmed: int | None) -> None:
        """A slot that was never read, or one with a position."""
        if confirmed is not None:
            self.confirmed = confirmed

    # The receiver.

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        """The server resumes after the slot's confirmed position or the client's, whichever is later."""
        self.connected = True
        if self.confirmed:
            self.known = True
            self.confirmation.start(Lsn(self.confirmed))
        self.position = max(self.position, self.confirmed)
        assert self.confirmation.received == self.position

    @precondition(lambda self: self.connected)
    @rule()
    def lose_the_connection(self) -> None:
        self.connected = False

    @precondition(lambda self: self.connected)
    @rule(step=STEPS)
    def keepalive_or_empty_commit(self, step: int) -> None:
        self.position += step
        self.known = self.known or self.position > 0
        self.confirmation.nothing_until(Lsn(self.position))

    @precondition(lambda self: self.connected)
    @rule(back=STEPS)
    def keepalive_from_the_past(self, back: int) -> None:
        self.confirmation.nothing_until(Lsn(max(0, self.position - back)))

    @precondition(lambda self: self.connected)
    @rule(step=st.integers(1, 1000))
    def commit(self, step: int) -> None:
        self.position += step
        self.pending.append(self.position)
        self.confirmation.commit(Lsn(self.position))

    # The service.

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def acknowledge_a_batch(self, data: st.DataObject) -> None:
        taken = data.draw(st.integers(1, len(self.pending)))
        end = self.pending[taken - 1]
        del self.pending[:taken]
        self.known = True
        self.confirmation.ack(Lsn(end))

    # The slot.

    @precondition(lambda self: self.connected)
    @rule()
    def report(self) -> None:
        status = self.confirmation.status(0)
        if status is not None:
            self.confirmed = max(self.confirmed, self._fields(status)["flushed"])

    # What always holds.

    @invariant()
    def the_flushed_position_never_moves_back(self) -> None:
        assert self.confirmation.flushed >= self.last_flushed
        self.last_flushed = self.confirmation.flushed

    @invariant()
    def it_never_passes_a_commit_that_is_not_acknowledged(self) -> None:
        assert all(self.confirmation.flushed < end for end in self.pending)

    @invariant()
    def it_follows_the_stream_when_nothing_is_pending(self) -> None:
        if self.known and not self.pending:
            assert self.confirmation.flushed == self.position

    @invariant()
    def the_stream_resumes_where_it_was(self) -> None:
        assert self.confirmation.received == self.position

    @invariant()
    def nothing_is_reported_before_a_position_is_known(self) -> None:
        status = self.confirmation.status(0)
        if self.confirmation.flushed == 0:
            assert status is None
        else:
            assert self.known
            assert status is not None
            fields = self._fields(status)
            assert fields["flushed"] == fields["applied"] == self.confirmation.flushed
            assert fields["written"] == max(self.position, self.confirmation.flushed)

    @staticmethod
    def _fields(status: bytes) -> dict[str, Any]:
        """PostgreSQL documentation, "Streaming Replication Protocol", Standby status update."""
        names = ("kind", "written", "flushed", "applied", "clock", "reply")
        fields = dict(zip(names, unpack(">cQQQqB", status), strict=True))
        assert fields["kind"] == b"r"
        return fields


TestStream = Stream.TestCase


def test_an_unacknowledged_commit_holds_back_everything_after_it() -> None:
    confirmation = Confirmation()
    confirmation.start(Lsn(10))
    confirmation.commit(Lsn(20))
    confirmation.nothing_until(Lsn(30))
    confirmation.commit(Lsn(40))
    confirmation.nothing_until(Lsn(50))
    assert confirmation.flushed == 10
    confirmation.ack(Lsn(20))
    assert confirmation.flushed == 20
    confirmation.ack(Lsn(40))
    assert confirmation.flushed == 50


def test_a_slot_that_was_moved_from_outside_does_not_make_pending_work_durable() -> None:
    confirmation = Confirmation()
    confirmation.start(Lsn(10))
    confirmation.commit(Lsn(20))
    confirmation.start(Lsn(30))
    assert confirmation.flushed == 10
    assert confirmation.received == 30
    confirmation.ack(Lsn(20))
    assert confirmation.flushed == 30


def test_the_status_carries_clock_and_the_wish_for_a_reply() -> None:
    confirmation = Confirmation()
    confirmation.start(Lsn(0x16_B374D848))
    status = confirmation.status(clock=-5, reply=True)
    assert status is not None
    assert unpack(">cQQQqB", status)[4:] == (-5, 1)
    assert status[1:9].hex() == "00000016b374d848"
