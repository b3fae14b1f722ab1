"""Timeline histories: the file is read as PostgreSQL reads it, and two histories tell what they share."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.model.events import Lsn
from relay.source.server import TimelineHistory, TimelineSwitch

POSITIONS = st.integers(0, 2**64 - 1).map(Lsn)


@st.composite
def histories(draw: st.DrawFn) -> TimelineHistory:
    timelines = sorted(draw(st.sets(st.integers(1, 2**31 - 1), min_size=1, max_size=6)))
    positions = sorted(
        draw(st.lists(POSITIONS, min_size=len(timelines) - 1, max_size=len(timelines) - 1))
    )
    switches = tuple(map(TimelineSwitch, timelines, positions))
    return TimelineHistory(timelines[-1], switches)


@dataclass(frozen=True)
class Server:
    """A model of WAL: which server wrote the bytes from each position on."""

    history: TimelineHistory
    writers: tuple[tuple[Lsn, int], ...]

    def wrote(self, position: int) -> int:
        """Who wrote the byte before a position."""
        return next(writer for start, writer in reversed(self.writers) if start < position)


@st.composite
def families(draw: st.DrawFn) -> list[Server]:
    """Servers that were promoted from each other at random positions; siblings may take the same number."""
    servers = [Server(TimelineHistory(1), ((Lsn(-1), 0),))]
    for number in range(1, draw(st.integers(1, 6))):
        parent = draw(st.sampled_from(servers))
        least = max(parent.writers[-1][0], 0)
        # No two promotions at one position write the same WAL under the same number.
        position = Lsn(least + 10 * draw(st.integers(0, 20)) + number)
        history = TimelineHistory(
            parent.history.timeline + 1,
            (*parent.history.switches, TimelineSwitch(parent.history.timeline, position)),
        )
        servers.append(Server(history, (*parent.writers, (position, number))))
    return servers


@given(
    histories(),
    st.text("abc\t 0/1", max_size=20),
    st.sampled_from(["", "\n", "# 9 x\n", "  \n"]),
    st.booleans(),
)
def test_a_history_file_is_read_as_it_was_written(
    history: TimelineHistory, reason: str, between: str, padded: bool
) -> None:
    text = between.join(
        f"{each.timeline}\t{each.position >> 32:X}/{each.position & 0xFFFFFFFF:0{8 if padded else 1}X}\t{reason}\n"
        for each in history.switches
    )
    assert TimelineHistory.parse(history.timeline, text) == history
    assert TimelineHistory.parse(history.timeline, str(history)) == history


@given(families(), st.data())
def test_what_two_servers_share_is_what_one_of_them_wrote(
    servers: list[Server], data: st.DataObject
) -> None:
    one, other = data.draw(st.sampled_from(servers)), data.draw(st.sampled_from(servers))
    shared = one.history.shared_until(other.history)
    assert shared == other.history.shared_until(one.history)
    assert (shared is None) is (one is other)
    for position in {
        start + step for each in (one, other) for start, _ in each.writers for step in (0, 1)
    }:
        same = shared is None or position <= shared
        assert (one.wrote(max(position, 0)) == other.wrote(max(position, 0))) is same


def test_servers_that_took_the_same_number_are_told_apart() -> None:
    one, other = (TimelineHistory(2, (TimelineSwitch(1, Lsn(at)),)) for at in (100, 90))
    assert one.shared_until(other) == 90
    assert TimelineHistory(1).shared_until(one) == 100
    assert TimelineHistory(3, (*one.switches, TimelineSwitch(2, Lsn(120)))).shared_until(one) == 120
    assert one.shared_until(one) is None
    # The history file is missing.
    assert TimelineHistory(2).shared_until(one) == 0


@pytest.mark.parametrize(
    "text",
    [
        "1\n",
        "one\t0/1\tno\n",
        "1\t0-1\tno\n",
        "2\t0/1\n1\t0/2\n",
        "3\t0/1\n",
        "1\t0/1x\n",
        "1 0/1\n1 0/2\n",
    ],
)
def test_what_is_no_history_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="history"):
        TimelineHistory.parse(3, text)


def test_of_what_led_to_a_timeline_nothing_may_be_known() -> None:
    whole = TimelineHistory(6, (TimelineSwitch(1, Lsn(10)), TimelineSwitch(5, Lsn(30))))
    assert TimelineHistory(5).shared_until(whole.since(5)) == Lsn(30)
    assert TimelineHistory(6).shared_until(whole.since(6)) is None
    assert TimelineHistory(4).shared_until(whole.since(4)) == Lsn(0)
    assert whole.since(1) == whole
