"""Undecoded rows: values column by column, one by one or together, what a commit holds, and rows as events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from relay.faults import ConfigurationError
from relay.model import tuples
from relay.model.events import FIELDS, Commit, Event, Lsn
from relay.model.transactions import Rows
from relay.model.tuples import ProtocolError, RowDecoder, Walked, values
from relay.source.decode import layout
from relay.source.decode.grouping import Grouping
from relay.source.decode.layout import Layout, polled
from tests.unit import wire

COMMIT_FIELDS = ("0/10", "2000-01-01 00:00:00+00", "7")
PEEKED = ("host_id", "transaction_id", "c_offset")


def one_event(row: Sequence[wire.Cell], columns: Sequence[str], mapping: dict[str, str]) -> Event:
    return RowDecoder(columns, mapping).event(wire.tuple_data(row), COMMIT_FIELDS)


@pytest.fixture(params=[0, 1_000], ids=["together", "one by one"])
def _way_of_walking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuples, "FEW_ROWS", request.param)


@pytest.mark.usefixtures("_way_of_walking")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 5).flatmap(
        lambda width: st.lists(
            st.lists(
                st.none() | st.just(wire.Toast.UNCHANGED) | st.binary(max_size=300),
                min_size=width,
                max_size=width,
            ),
            min_size=1,
        )
    ),
    st.data(),
)
def test_the_values_of_many_rows_are_what_decoding_finds(
    rows: list[list[wire.Cell]], data: st.DataObject
) -> None:
    indices = data.draw(st.lists(st.integers(0, len(rows[0]) - 1)))
    expected = [[cell if isinstance(cell, bytes) else None for cell in row] for row in rows]
    found = values(Rows.of([wire.tuple_data(row) for row in rows]), indices)
    assert {index: list(column) for index, column in found.items()} == {
        index: [row[index] for row in expected] for index in indices
    }


@pytest.mark.usefixtures("_way_of_walking")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wire.ROWS.filter(bool), wire.ROWS.filter(bool), st.data())
def test_a_cut_row_never_yields_another_value(
    row: list[wire.Cell], following: list[wire.Cell], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, min(len(row), len(following)) - 1))
    sent = wire.tuple_data(row)
    cut = sent[: data.draw(st.integers(0, len(sent) - 1))]
    try:
        found = values(Rows.of([cut, wire.tuple_data(following)]), [index])
    except ProtocolError:
        return
    assert found[index][0] == row[index]


# Commits.

FEW_TEXTS = st.sampled_from(
    [b"a", b"b", b"0123456789abcdef", b"0123456789abcdeF", b"x123456789abcdef"]
)
OFFSETS = st.integers(-10, 10**20).map(lambda number: b"%d" % number)
PEEKED_ROW = st.tuples(
    st.none() | FEW_TEXTS, st.none() | FEW_TEXTS, st.none() | OFFSETS | st.just(b"0")
)
COMMITS = st.lists(
    st.lists(PEEKED_ROW, min_size=1, max_size=4)
    | st.builds(lambda row, count: [row] * count, PEEKED_ROW, st.integers(1, 4)),
    min_size=1,
    max_size=6,
)


def expected_of(rows: Sequence[tuple[bytes | None, ...]]) -> tuple[object, ...] | None:
    hosts, ids, offsets = (set(column) for column in zip(*rows, strict=True))
    if len(hosts) > 1 or len(ids) > 1 or None in ids:
        return None
    numbers = {int(offset or 0) for offset in offsets}
    return *hosts, *ids, min(numbers - {0}, default=0), max(numbers)


@pytest.fixture
def _no_row_is_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "FEW_ROWS", 0)


def survey(
    commits: Sequence[Sequence[tuple[bytes | None, ...]]], columns: Sequence[str] = PEEKED
) -> list[tuple[object, ...] | None]:
    rows = Rows.of([wire.tuple_data(row) for commit in commits for row in commit])
    ends = polled([(end, 0) for end in accumulate(map(len, commits))])
    found = Layout.of(columns, {}, "outbox").survey(rows, ends)
    assert found is not None
    assert found.old is None
    assert not found.forged
    return [tuple(facts) if uniform else None for uniform, *facts in zip(*found[:-2], strict=True)]


OWN, OTHER = 7 | 3 << 32, 8 | 3 << 32
STAMPED_ROW = st.tuples(st.sampled_from([None, OWN, OTHER]), st.integers(0, 5))


@pytest.mark.parametrize("few_rows", [0, 1000])
@pytest.mark.parametrize("partitioned", [True, False])
@pytest.mark.parametrize("max_bytes", [1 << 20, 150])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(commits=st.lists(st.lists(STAMPED_ROW, min_size=1, max_size=6), min_size=1, max_size=4))
def test_rows_of_another_transaction_and_repeated_ones_are_no_events(
    monkeypatch: pytest.MonkeyPatch,
    few_rows: int,
    partitioned: bool,
    max_bytes: int,
    commits: list[list[tuple[int | None, int]]],
) -> None:
    """However they are looked at: together, one by one, or on their way to a spool file."""
    monkeypatch.setattr(layout, "FEW_ROWS", few_rows)
    columns = Layout.of(("c_xid", *PEEKED), {}, "outbox", partitioned)
    taken = Grouping({}, max_bytes)
    expected: list[list[int]] = []
    for number, commit in enumerate(commits, 1):
        rows = [
            wire.tuple_data(
                [b"%d" % xid if xid else None, b"h", b"t", b"%d" % offset if offset else None]
            )
            for xid, offset in commit
        ]
        middle = len(rows) // 2
        taken.take(columns, Rows.of(rows[:middle]), polled([]), OWN & 0xFFFFFFFF)
        end = polled([(len(rows) - middle, OWN)])
        end["end_lsn"] = number
        taken.take(columns, Rows.of(rows[middle:]), end)
        own: list[int] = []
        for xid, offset in commit:
            if xid != OTHER and not (partitioned and offset and offset in own):
                own.append(offset)
        expected.append(own)
    found = {
        int(each.commit.end_lsn): [
            int(values(Rows.of([row]), [3])[3][0] or 0) for row in each.tuples
        ]
        for transactions in taken.fetch()
        for each in transactions
    }
    assert found == {number: own for number, own in enumerate(expected, 1) if own}


@pytest.mark.usefixtures("_no_row_is_few")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(COMMITS)
def test_a_commit_of_one_transaction_and_host_is_uniform(
    commits: list[list[tuple[bytes | None, ...]]],
) -> None:
    assert survey(commits) == [expected_of(commit) for commit in commits]


@pytest.mark.usefixtures("_no_row_is_few")
@pytest.mark.parametrize("offset", [b"", b"x", b"1x", b"1.5", b" 1", b"-", b"0x10", b"\xb2"])
def test_an_offset_that_is_no_number_is_said(offset: bytes) -> None:
    with pytest.raises(ConfigurationError, match="c_offset"):
        survey([[(b"h", b"t", b"7")], [(b"h", b"t", offset)]])


@pytest.mark.usefixtures("_no_row_is_few")
def test_an_outbox_without_offsets_has_commits_that_are_uniform_too() -> None:
    assert survey([[(b"h", b"t")] * 2, [(b"h", b"u")]], PEEKED[:2]) == [
        (b"h", b"t", 0, 0),
        (b"h", b"u", 0, 0),
    ]


@given(st.lists(st.none() | st.integers(0, 10**18 - 1), min_size=1))
def test_columns_of_digits_are_read_together(numbers: list[int | None]) -> None:
    rows = [
        wire.tuple_data([None if number is None else b"%d" % number, b"9"]) for number in numbers
    ]
    found = Walked(Rows.of(rows), [0]).numbers(0)
    assert found is not None
    assert found.tolist() == [number or 0 for number in numbers]


# Events.


@given(st.data())
def test_fields_are_found_by_name_in_any_order_of_columns(data: st.DataObject) -> None:
    present = data.draw(st.sets(st.sampled_from(FIELDS)))
    extra = data.draw(st.sets(wire.NAMES.filter(lambda name: name not in FIELDS), max_size=3))
    columns = data.draw(st.permutations(sorted(present | extra)))
    row = data.draw(st.lists(st.none() | wire.NAMES, min_size=len(columns), max_size=len(columns)))
    event = one_event([None if text is None else text.encode() for text in row], columns, {})
    sent = dict(zip(columns, row, strict=True))
    assert {name: event.text(name) for name in FIELDS} == {name: sent.get(name) for name in FIELDS}


def test_fields_are_found_under_the_names_that_the_mapping_gives() -> None:
    mapping = {name: name for name in FIELDS} | {"id": "event_id", "payload": "body"}
    event = one_event(
        [b"{}", b"not the id", b"7", b"not the payload"],
        ["body", "id", "event_id", "payload"],
        mapping,
    )
    assert event.text("id") == "7"
    assert event.text("payload") == "{}"


def test_two_fields_may_share_a_column() -> None:
    event = one_event([b"7"], ["key"], {"id": "key", "aggregate_id": "key"})
    assert (event.text("id"), event.text("aggregate_id")) == ("7", "7")


def test_null_and_the_empty_text_are_different() -> None:
    event = one_event([None, b""], ["aggregate_id", "aggregate_type"], {})
    assert event.text("aggregate_id") is None
    assert event.text("aggregate_type") == ""


def test_a_value_that_is_not_in_the_stream_is_none() -> None:
    assert one_event([wire.Toast.UNCHANGED], ["payload"], {}).text("payload") is None


@given(st.binary(max_size=40))
@example("Zoë, \N{GRINNING FACE} \\ \t\n\x01".encode())
@example(b"caf\xe9")
def test_any_bytes_survive_as_text(value: bytes) -> None:
    text = one_event([value], ["aggregate_id"], {}).text("aggregate_id")
    assert text is not None
    assert text.encode("utf-8", "surrogateescape") == value


@given(wire.NAMES)
def test_utf8_is_read_as_what_it_says(value: str) -> None:
    assert one_event([value.encode()], ["aggregate_id"], {}).text("aggregate_id") == value


@given(wire.ROWS.filter(bool), st.data())
def test_a_cut_row_is_a_protocol_error_and_no_shorter_event(
    row: list[wire.Cell], data: st.DataObject
) -> None:
    sent = wire.tuple_data(row)
    cut = sent[: data.draw(st.integers(0, len(sent) - 1))]
    decoder = RowDecoder([f"c{index}" for index in range(len(row))], {"payload": "c0"})
    with pytest.raises(ProtocolError):
        decoder.event(cut, COMMIT_FIELDS)


def test_events_carry_their_commit() -> None:
    commit = Commit(Lsn(0x10), Lsn(0x20), 0, 7)
    rows = [wire.tuple_data([b"1"]), wire.tuple_data([b"2"])]
    decoder = RowDecoder(["id"], {})
    found = [decoder.event(row, commit.fields) for row in rows]
    assert [event.text("id") for event in found] == ["1", "2"]
    assert {
        (event.text("commit_lsn"), event.text("commit_ts"), event.text("xid")) for event in found
    } == {COMMIT_FIELDS}
