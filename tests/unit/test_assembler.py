"""From messages to whole commits: what belongs together, whatever happens to the table in mid-stream."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from operator import attrgetter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from psycopg.abc import Buffer

from relay.faults import ConfigurationError
from relay.model import tuples
from relay.model.events import FIELDS, Commit, Event, Lsn
from relay.model.transactions import Transactions, Undecoded
from relay.model.tuples import ProtocolError, RowDecoder
from relay.source.decode import layout
from relay.source.decode.assembler import Assembler
from tests.unit import wire

TABLE = ("public", "outbox_message_t")
OUTBOX, OTHER = 16_384, 16_999
UNLIMITED = 1 << 40
MAPPING = {name: name for name in FIELDS}
COLUMNS = ("id", "host_id", "user_id", "payload", "transaction_id", "c_offset")

Cells = Mapping[str, bytes | None]


def new_assembler(max_bytes: int = UNLIMITED, mapped: Mapping[str, str] | None = None) -> Assembler:
    return Assembler(TABLE, MAPPING | dict(mapped or {}), max_bytes)


def described(
    columns: Sequence[str] = COLUMNS, oid: int = OUTBOX, table: tuple[str, str] = TABLE
) -> bytes:
    return wire.relation(oid, *table, "d", [(name == "id", name, 25, -1) for name in columns])


def inserted(columns: Sequence[str] = COLUMNS, oid: int = OUTBOX, **cells: bytes | None) -> bytes:
    return inserted_row(cells, columns, oid)


def inserted_row(cells: Cells, columns: Sequence[str], oid: int = OUTBOX) -> bytes:
    return wire.insert(oid, [cells.get(name) for name in columns])


def committed(*messages: bytes, number: int = 1) -> list[bytes]:
    """The messages as one commit; its number makes its positions."""
    end = number * 1000
    return [wire.begin(end - 8, number, 700 + number), *messages, wire.commit(end - 8, end, number)]


def feed(assembler: Assembler, messages: Iterable[bytes]) -> list[Transactions | Lsn]:
    came: list[Transactions | Lsn] = []
    for message in messages:
        passed = assembler.feed([message])
        came += assembler.fetch()
        if passed is not None:
            came.append(passed)
    return came


def receive(assembler: Assembler, messages: Iterable[bytes]) -> Transactions:
    """Feed one commit with rows."""
    (received,) = feed(assembler, messages)
    assert isinstance(received, Transactions)
    return received


def events(transaction: Undecoded, mapping: dict[str, str] = MAPPING) -> list[Event]:
    decoder = RowDecoder(transaction.columns, mapping)
    return [decoder.event(row, transaction.commit.fields) for row in transaction.tuples]


def ids(received: Transactions) -> list[list[str | None]]:
    """The ids of the events by business transaction."""
    return [[event.text("id") for event in events(each)] for each in received]


# What belongs together.


def test_a_commit_holds_its_events_in_order() -> None:
    received = receive(
        new_assembler(),
        [
            described(),
            *committed(
                inserted(id=b"1", host_id=b"h", transaction_id=b"t", payload=b"{}"),
                inserted(id=b"2", host_id=b"h", transaction_id=b"t", payload=b"[]"),
                number=3,
            ),
        ],
    )
    (transaction,) = received
    assert (transaction.transaction_id, transaction.hosts) == ("t", ("h",))
    assert [(e.text("id"), e.text("payload")) for e in events(transaction)] == [
        ("1", "{}"),
        ("2", "[]"),
    ]
    assert received.events == 2
    assert (received[0].commit.lsn, received[0].commit.end_lsn) == (Lsn(2992), Lsn(3000))
    assert received[0].commit.xid == 703
    assert transaction.commit == received[0].commit


def test_interleaved_business_transactions_of_one_commit_come_apart() -> None:
    received = receive(
        new_assembler(),
        [
            described(),
            *committed(
                inserted(id=b"1", host_id=b"h", transaction_id=b"a"),
                inserted(id=b"2", host_id=b"h", transaction_id=b"b"),
                inserted(id=b"3", host_id=b"i", transaction_id=b"a"),
                inserted(id=b"4", host_id=b"h", transaction_id=b"c"),
                inserted(id=b"5", host_id=b"h", transaction_id=b"b"),
                inserted(id=b"6", host_id=b"h", transaction_id=b"a"),
            ),
        ],
    )
    assert [each.transaction_id for each in received] == ["a", "b", "c"]
    assert ids(received) == [["1", "3", "6"], ["2", "5"], ["4"]]
    assert [each.hosts for each in received] == [("h", "i"), ("h",), ("h",)]


def test_without_transaction_id_host_and_user_make_the_transaction() -> None:
    received = receive(
        new_assembler(),
        [
            described(),
            *committed(
                inserted(id=b"1", host_id=b"h", user_id=b"u"),
                inserted(id=b"2", host_id=b"h", user_id=b"v"),
                inserted(id=b"3", host_id=b"h"),
                inserted(id=b"4", host_id=b"i", user_id=b"u"),
                inserted(id=b"5", host_id=b"h", user_id=b"u", transaction_id=b"t"),
                inserted(id=b"6", host_id=b"h", user_id=b"u"),
                inserted(id=b"7", host_id=b"h"),
            ),
        ],
    )
    assert ids(received) == [["1", "6"], ["2"], ["3", "7"], ["4"], ["5"]]
    assert [each.transaction_id for each in received] == [None, None, None, None, "t"]


def test_an_empty_transaction_id_is_not_null() -> None:
    received = receive(
        new_assembler(),
        [
            described(),
            *committed(
                inserted(id=b"1", host_id=b"h", transaction_id=b""),
                inserted(id=b"2", host_id=b"i", transaction_id=b""),
                inserted(id=b"3", host_id=b"h", transaction_id=None),
            ),
        ],
    )
    assert ids(received) == [["1", "2"], ["3"]]
    assert [each.transaction_id for each in received] == ["", None]


@pytest.mark.parametrize("max_bytes", [UNLIMITED, 0], ids=["in memory", "spooled"])
def test_each_business_transaction_knows_its_last_offset(max_bytes: int) -> None:
    columns = COLUMNS
    offsets = [(b"a", b"7"), (b"b", b"10"), (b"a", b"9"), (b"a", None), (b"b", b"8"), (b"c", None)]
    rows = [
        inserted(columns, id=b"1", host_id=b"h", transaction_id=transaction_id, c_offset=offset)
        for transaction_id, offset in offsets
    ]
    received = receive(new_assembler(max_bytes), [described(columns), *committed(*rows)])
    assert [(each.transaction_id, each.last_offset) for each in received] == [
        ("a", 9),
        ("b", 10),
        ("c", 0),
    ]


def test_one_transaction_id_in_two_commits_makes_two_transactions() -> None:
    row = inserted(id=b"1", host_id=b"h", transaction_id=b"t")
    found = feed(
        new_assembler(), [described(), *committed(row, number=1), *committed(row, number=2)]
    )
    assert [came.end for came in found if isinstance(came, Transactions)] == [1000, 2000]
    assert [ids(came) for came in found if isinstance(came, Transactions)] == [[["1"]], [["1"]]]


def test_rows_of_other_tables_are_passed_over() -> None:
    other = [
        described(("id",), OTHER, ("public", "account")),
        described(("id",), OTHER + 1, ("elsewhere", "outbox_message_t")),
    ]
    noise = [inserted(("id",), OTHER, id=b"x"), inserted(("id",), OTHER + 1, id=b"y")]
    received = receive(
        new_assembler(),
        [
            *other,
            described(),
            *committed(
                *noise, inserted(id=b"1", host_id=b"h"), *noise, inserted(id=b"2", host_id=b"h")
            ),
        ],
    )
    assert ids(received) == [["1", "2"]]
    assert received.events == 2


@pytest.mark.parametrize(
    "rows",
    [[], [inserted(("id",), OTHER, id=b"x")], [wire.delete(OUTBOX, "K", [b"1"])]],
    ids=["empty", "of another table", "of a deletion"],
)
def test_a_commit_without_our_rows_is_only_a_position(rows: list[bytes]) -> None:
    tables = [described(), described(("id",), OTHER, ("public", "account"))]
    (came,) = feed(new_assembler(), [*tables, *committed(*rows, number=5)])
    assert came == Lsn(5000)


def test_messages_that_carry_no_row_change_nothing() -> None:
    received = receive(
        new_assembler(),
        [
            described(),
            *committed(
                wire.origin(5, "elsewhere"),
                wire.type_message(99, "public", "mood"),
                inserted(id=b"1", host_id=b"h"),
                wire.logical_message(1, 5, "prefix", b"content"),
                wire.update(OUTBOX, [b"9"] * len(COLUMNS)),
                wire.truncate([OUTBOX], 0),
                inserted(id=b"2", host_id=b"h"),
            ),
        ],
    )
    assert ids(received) == [["1", "2"]]


def test_open_lasts_from_begin_to_commit() -> None:
    assembler = new_assembler()
    seen = []
    for message in [described(), *committed(inserted(id=b"1", host_id=b"h"))]:
        assembler.feed([message])
        seen.append(assembler.open)
    assert seen == [False, True, True, False]


def test_columns_are_found_under_their_mapped_names() -> None:
    mapped = {"host_id": "tenant", "transaction_id": "saga", "user_id": "actor"}
    columns = ("saga", "id", "tenant", "actor")
    received = receive(
        new_assembler(mapped=mapped),
        [
            described(columns),
            *committed(
                inserted(columns, id=b"1", tenant=b"h", saga=b"t"),
                inserted(columns, id=b"2", tenant=b"h", actor=b"u"),
                inserted(columns, id=b"3", tenant=b"h", actor=b"v"),
            ),
        ],
    )
    assert [each.transaction_id for each in received] == ["t", None, None]
    assert {each.hosts for each in received} == {("h",)}


def test_ids_that_are_not_utf8_survive() -> None:
    """A database in SQL_ASCII hands out whatever bytes its columns hold."""
    row = inserted(id=b"1", host_id=b"h\xff", transaction_id=b"t\xfe")
    received = receive(new_assembler(), [described(), *committed(row)])
    (transaction,) = received
    assert transaction.hosts == ("h\udcff",)
    assert transaction.transaction_id == "t\udcfe"


@pytest.mark.parametrize("max_bytes", [UNLIMITED, 0], ids=["in memory", "spooled"])
@pytest.mark.parametrize("partitioned", [False, True], ids=["one table", "partitioned"])
@pytest.mark.parametrize("copies", [1, 60], ids=["one by one", "together"])
def test_rows_with_the_xid_of_another_transaction_are_left_out_and_counted(
    copies: int, partitioned: bool, max_bytes: int
) -> None:
    columns = (*COLUMNS, "c_xid")
    assembler = new_assembler(max_bytes)
    assembler.reset(partitioned=partitioned)
    own: list[bytes | None] = [b"701", b"%d" % ((1 << 32) + 701), None]
    rows = [
        inserted(columns, id=b"%d" % n, host_id=b"h", transaction_id=b"ab"[n % 2 :], c_xid=xid)
        for n, xid in enumerate(own)
    ]
    copied = [inserted(columns, id=b"x", host_id=b"h", transaction_id=b"c", c_xid=b"650")] * copies
    received = receive(assembler, [described(columns), *committed(*copied, *rows, *copied)])
    assert ids(received) == [["0", "2"], ["1"]]
    assert assembler.foreign() == (0 if partitioned else 2 * copies)
    assert assembler.foreign() == 0


# The table changes.


def test_the_table_is_altered_between_commits() -> None:
    assembler = new_assembler()
    shapes = [
        ("id", "host_id", "payload", "transaction_id"),
        ("id", "host_id", "payload", "transaction_id", "metadata", "unknown"),
        ("id", "host_id", "metadata", "transaction_id"),
        ("transaction_id", "metadata", "host_id", "id"),
    ]
    cells: dict[str, bytes | None]
    cells = {"id": b"1", "host_id": b"h", "payload": b"p", "metadata": b"m", "unknown": b"x"}
    found = []
    for number, columns in enumerate(shapes, start=1):
        row = inserted_row(cells | {"transaction_id": b"t%d" % number}, columns)
        received = receive(assembler, [described(columns), *committed(row, number=number)])
        (transaction,) = received
        (event,) = events(transaction)
        found.append(
            (
                transaction.transaction_id,
                transaction.hosts,
                *(event.text(name) for name in ("id", "payload", "metadata")),
            )
        )
    assert found == [
        ("t1", ("h",), "1", "p", None),
        ("t2", ("h",), "1", "p", "m"),
        ("t3", ("h",), "1", None, "m"),
        ("t4", ("h",), "1", None, "m"),
    ]


@pytest.mark.parametrize("max_bytes", [UNLIMITED, 0], ids=["in memory", "spooled"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (COLUMNS, (*COLUMNS, "unknown")),
        (COLUMNS, ("unknown", *COLUMNS)),
        ((*COLUMNS, "unknown"), COLUMNS),
        (COLUMNS, tuple(reversed(COLUMNS))),
        (COLUMNS, tuple(name for name in COLUMNS if name != "payload")),
        (COLUMNS, (*COLUMNS, "metadata")),
        (COLUMNS, ("metadata", *(name for name in COLUMNS if name != "user_id"))),
    ],
    ids=[
        "unknown column added",
        "unknown column added in front",
        "unknown column dropped",
        "columns reordered",
        "column dropped",
        "column added",
        "column added and another dropped",
    ],
)
def test_the_table_is_altered_in_the_midst_of_a_business_transaction(
    before: tuple[str, ...], after: tuple[str, ...], max_bytes: int
) -> None:
    cells: dict[str, bytes | None] = {
        "host_id": b"h",
        "user_id": b"u",
        "payload": b"p",
        "metadata": b"m",
        "transaction_id": b"t",
        "unknown": b"x",
    }
    received = receive(
        new_assembler(max_bytes),
        [
            described(before),
            *committed(
                inserted_row(cells | {"id": b"1"}, before),
                described(after),
                inserted_row(cells | {"id": b"2"}, after),
                inserted_row(cells | {"id": b"3"}, after),
            ),
        ],
    )
    (transaction,) = received
    found = [{name: event.text(name) for name in FIELDS} for event in events(transaction)]
    expected = [
        dict.fromkeys(FIELDS)
        | {n: v.decode() for n, v in cells.items() if v and n in FIELDS and n in columns}
        | {"id": number}
        for number, columns in (("1", before), ("2", after), ("3", after))
    ]
    assert found == expected


def test_a_table_that_is_renamed_away_is_passed_over_and_its_successor_is_not() -> None:
    assembler = new_assembler()
    receive(assembler, [described(), *committed(inserted(id=b"1", host_id=b"h"))])
    renamed = described(table=("public", "outbox_old"))
    successor = OUTBOX + 1
    received = receive(
        assembler,
        [
            renamed,
            described(oid=successor),
            *committed(
                inserted(id=b"2", host_id=b"h"),
                inserted(oid=successor, id=b"3", host_id=b"h"),
                number=2,
            ),
        ],
    )
    assert ids(received) == [["3"]]


@pytest.mark.parametrize("column", ["host_id", "tenant"])
def test_a_lost_host_column_stops_relay_with_its_name(column: str) -> None:
    assembler = new_assembler(mapped={"host_id": column})
    assembler.feed([described(("id", column))])
    with pytest.raises(ConfigurationError, match=rf"public\.outbox_message_t .*'{column}'"):
        assembler.feed([described(("id", "payload"))])


# Memory.


@dataclass(frozen=True)
class Expected:
    """A business transaction of the model."""

    transaction_id: str | None
    hosts: tuple[str, ...]
    events: list[dict[str, str | None]]


ID = st.sampled_from([None, b"a", b"b", b"c"])
SHAPES = st.permutations([*COLUMNS, "unknown"]).map(tuple)
INSERTS = st.fixed_dictionaries(
    {
        "host_id": st.sampled_from([b"h", b"i"]),
        "user_id": st.sampled_from([None, b"u"]),
        "transaction_id": ID,
        "payload": st.none() | st.binary(max_size=60),
        "unknown": st.just(b"x"),
    }
)
COMMITS = st.lists(st.lists(INSERTS | SHAPES, max_size=12), max_size=5)


def as_messages(
    commits: Sequence[Sequence[Cells | tuple[str, ...] | bytes]],
) -> Iterator[bytes]:
    """Rows, new shapes of the table, and messages as they are."""
    columns: tuple[str, ...] = COLUMNS
    yield described(columns)
    for number, steps in enumerate(commits, start=1):
        inside = []
        for position, step in enumerate(steps):
            if isinstance(step, tuple):
                columns = step
                inside.append(described(columns))
            elif isinstance(step, bytes):
                inside.append(step)
            else:
                inside.append(inserted_row({**step, "id": b"%d.%d" % (number, position)}, columns))
        yield from committed(*inside, number=number)


def as_expected(commits: Sequence[Sequence[Cells | tuple[str, ...]]]) -> list[list[Expected]]:
    """What the design asks for, by the shortest way: grouped by id, else by host and user."""
    expected = []
    for number, steps in enumerate(commits, start=1):
        groups: dict[tuple[object, ...], Expected] = {}
        hosts: dict[tuple[object, ...], dict[str, None]] = {}
        for position, step in enumerate(steps):
            if isinstance(step, tuple):
                continue
            cells = {
                name: None if value is None else value.decode("utf-8", "surrogateescape")
                for name, value in step.items()
            }
            transaction_id, host = cells["transaction_id"], cells["host_id"]
            key = (transaction_id,) if transaction_id else (host, cells["user_id"])
            hosts.setdefault(key, {})[str(host)] = None
            group = groups.setdefault(key, Expected(transaction_id, (), []))
            group.events.append(
                {name: cells.get(name) for name in COLUMNS} | {"id": f"{number}.{position}"}
            )
        if groups:
            expected.append(
                [
                    Expected(group.transaction_id, tuple(hosts[key]), group.events)
                    for key, group in groups.items()
                ]
            )
    return expected


def as_found(received: Iterable[Undecoded]) -> list[Expected]:
    return [
        Expected(
            each.transaction_id,
            each.hosts,
            [{name: event.text(name) for name in COLUMNS} for event in events(each)],
        )
        for each in received
    ]


@given(COMMITS, st.integers(0, 400))
def test_a_spooled_commit_is_the_same_as_one_in_memory(
    commits: list[list[Cells | tuple[str, ...]]], max_bytes: int
) -> None:
    expected = as_expected(commits)
    for limit in (UNLIMITED, max_bytes):
        came = feed(new_assembler(limit), as_messages(commits))
        assert len(came) == len(commits)
        received = [each for each in came if isinstance(each, Transactions)]
        assert [as_found(each) for each in received] == expected
        assert [each.events for each in received] == [
            sum(len(group.events) for group in groups) for groups in expected
        ]


@pytest.mark.parametrize("few", [0, 1_000], ids=["together", "one by one"])
@given(COMMITS, st.integers(0, 400))
def test_commits_that_are_fetched_together_are_the_same(
    few: int, commits: list[list[Cells | tuple[str, ...]]], max_bytes: int
) -> None:
    assembler = new_assembler(max_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "FEW_ROWS", few)
        patch.setattr(tuples, "FEW_ROWS", few)
        assembler.feed(list(as_messages(commits)))
        fetched = chain.from_iterable(assembler.fetch())
        found = [as_found(list(each)) for _, each in groupby(fetched, attrgetter("commit"))]
    assert found == as_expected(commits)


NOISE = st.sampled_from(
    [
        inserted(("id",), OTHER, id=b"x"),
        wire.update(OUTBOX, [b"9"] * len(COLUMNS)),
        wire.logical_message(1, 5, "prefix", b"content"),
    ]
)


@given(
    st.lists(st.lists(INSERTS | SHAPES | NOISE, max_size=6), max_size=6),
    st.integers(0, 400),
    st.sets(st.integers(0, 60)),
    st.integers(0, 30),
)
def test_however_the_stream_is_cut_it_is_the_same(
    commits: list[list[Cells | tuple[str, ...] | bytes]],
    max_bytes: int,
    cuts: set[int],
    header: int,
) -> None:
    stream = [described(("id",), OTHER, ("public", "account")), *as_messages(commits)]
    one_by_one = feed(new_assembler(max_bytes), stream)
    assembler = Assembler(TABLE, MAPPING, max_bytes, header=header)
    came: list[Undecoded] = []
    passed = []
    ends = sorted({len(stream), *(cut for cut in cuts if cut < len(stream))})
    for first, last in pairwise([0, *ends]):
        passed.append(
            assembler.feed([memoryview(bytes(header) + each) for each in stream[first:last]])
        )
        came += chain.from_iterable(assembler.fetch())
    expected = [each for some in one_by_one if isinstance(some, Transactions) for each in some]
    assert as_found(came) == as_found(expected)
    assert [each.commit for each in came] == [each.commit for each in expected]
    empty = [each for each in one_by_one if not isinstance(each, Transactions)]
    assert max(filter(None, passed), default=None) == max(empty, default=None)
    assert assembler.size == 0


@given(COMMITS, st.integers(0, 400))
def test_memory_holds_no_more_than_the_limit_and_what_is_held_is_reported(
    commits: list[list[Cells | tuple[str, ...]]], max_bytes: int
) -> None:
    assembler = new_assembler(max_bytes)
    for message in as_messages(commits):
        assembler.feed([message])
        assert assembler.size <= max_bytes
        for came in assembler.fetch():
            held = sum(len(row) for each in came for row in each.tuples)
            assert (came.spooled is not None) == (held > max_bytes)
            assert came.held == (0 if (came.spooled is not None) else held)
            assert sum(each.size for each in came) == held


def test_what_is_spooled_is_held_in_memory_no_more() -> None:
    assembler = new_assembler(max_bytes=2 << 20)
    assembler.feed([described()])
    assembler.feed([wire.begin(1)])
    tracemalloc.start()
    try:
        for number in range(300):
            payload = bytes([number % 256]) * 20_000
            assembler.feed([inserted(id=b"%d" % number, host_id=b"h", payload=payload)])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 6 MB came; what may remain is the file's buffer of 1 MiB.
    assert held < 1.5 * (1 << 20)


@pytest.mark.parametrize("ours", [1, 50], ids=["one by one", "together"])
def test_rows_of_other_tables_are_held_in_memory_no_more(ours: int) -> None:
    busy = ("id", "payload")
    assembler = new_assembler()
    assembler.feed([described(), described(busy, OTHER, ("public", "busy"))])
    noise = [inserted(busy, OTHER, payload=b"x" * 20_000)] * 50
    rows = [inserted(id=b"1", host_id=b"h", transaction_id=b"t", payload=b"y" * 200)] * ours
    received: list[Transactions] = []
    tracemalloc.start()
    try:
        for number in range(1, 21):
            assembler.feed(list[Buffer](committed(*noise, *rows, number=number)))
            received += assembler.fetch()
        # The last commit stays open.
        begin, *_ = committed(number=21)
        assembler.feed([begin])
        for _ in range(20):
            assembler.feed(list[Buffer]([*noise, *rows]))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counted = assembler.size + sum(came.held for came in received)
    assert counted > 40 * ours * 200
    # 40 MB of another table came; each row of ours costs some objects.
    assert held < 4 * counted + 200_000


def test_after_a_spooled_commit_the_next_is_in_memory_again() -> None:
    assembler = new_assembler(max_bytes=100)
    large = inserted(id=b"1", host_id=b"h", payload=b"x" * 100)
    small = inserted(id=b"2", host_id=b"h")
    first = receive(assembler, [described(), *committed(large)])
    second = receive(assembler, committed(small, number=2))
    assert [each.spooled is not None for each in (first, second)] == [True, False]
    assert (ids(first), ids(second)) == ([["1"]], [["2"]])


def test_a_new_connection_describes_the_table_again() -> None:
    """Its shape may have changed in between, so nothing is read by the old one."""
    assembler = new_assembler()
    assembler.feed([described()])
    assembler.reset()
    with pytest.raises(ProtocolError):
        feed(assembler, committed(inserted(id=b"1", host_id=b"h")))


@pytest.mark.parametrize("max_bytes", [UNLIMITED, 0], ids=["in memory", "spooled"])
def test_a_new_connection_starts_over(max_bytes: int) -> None:
    assembler = new_assembler(max_bytes)
    lost = committed(inserted(id=b"1", host_id=b"h"), inserted(id=b"2", host_id=b"h"))
    feed(assembler, [described(), *lost[:-2]])
    assembler.reset()
    assert not assembler.open
    assert assembler.size == 0
    columns = tuple(reversed(COLUMNS))
    again = committed(
        inserted(columns, id=b"1", host_id=b"h"), inserted(columns, id=b"2", host_id=b"h")
    )
    assert ids(receive(assembler, [described(columns), *again])) == [["1", "2"]]


ALTERED = st.lists(
    st.tuples(
        st.sets(st.sampled_from(["payload", "metadata", "user_id", "c_offset", "unknown"])).flatmap(
            lambda some: st.permutations(["id", "host_id", "transaction_id", *sorted(some)])
        ),
        st.lists(ID, max_size=3),
    ),
    max_size=5,
)


@given(ALTERED, st.integers(0, 300))
def test_however_often_the_table_is_altered_each_event_has_what_its_row_had(
    phases: list[tuple[list[str], list[bytes | None]]], max_bytes: int
) -> None:
    inside = []
    expected: dict[str | None, list[dict[str, str | None]]] = {}
    for number, (columns, transaction_ids) in enumerate(phases):
        inside.append(described(columns))
        for position, transaction_id in enumerate(transaction_ids):
            cells = dict.fromkeys(columns, b"%d" % number) | {
                "id": b"%d.%d" % (number, position),
                "host_id": b"h",
                "transaction_id": transaction_id,
            }
            # Without a transaction_id the user counts, which comes and goes here.
            key = transaction_id.decode() if transaction_id else f"user {cells.get('user_id')!r}"
            inside.append(inserted_row(cells, columns))
            there = {name: value.decode() for name, value in cells.items() if value is not None}
            expected.setdefault(key, []).append({name: there.get(name) for name in FIELDS})
    came = feed(new_assembler(max_bytes), committed(*inside))
    received = [each for each in came if isinstance(each, Transactions)]
    found = [
        [{name: event.text(name) for name in FIELDS} for event in events(transaction)]
        for each in received
        for transaction in each
    ]
    assert found == list(expected.values())


# What PostgreSQL would never send.


@given(st.data())
def test_a_garbled_stream_is_a_protocol_error_and_nothing_else(data: st.DataObject) -> None:
    before = ("id", "host_id", "c_offset", "transaction_id")
    after = ("host_id", "metadata", "id", "transaction_id", "c_offset")
    cells: Cells = {"id": b"1", "host_id": b"h", "transaction_id": b"t", "c_offset": b"77"}
    stream = [
        described(before),
        *committed(
            inserted_row(cells, before),
            inserted_row(cells, before),
            described(after),
            inserted_row(cells, after),
        ),
    ]
    index = data.draw(st.integers(0, len(stream) - 1))
    garbled = bytearray(stream[index])
    for at in data.draw(st.lists(st.integers(0, len(garbled) - 1), min_size=1, max_size=4)):
        garbled[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.just(len(garbled)) | st.integers(0, len(garbled)))
    stream[index] = bytes(garbled[:end])
    # Another name in place of the host's column is as good as its loss.
    with suppress(ProtocolError, ConfigurationError):
        for came in feed(new_assembler(), stream):
            if isinstance(came, Transactions):
                ids(came)


def test_rows_outside_a_transaction_are_not_taken_for_nothing() -> None:
    begin, row, commit = committed(inserted(id=b"1", host_id=b"h"))
    assembler = new_assembler()
    assembler.feed([described()])
    with pytest.raises(ProtocolError):
        feed(assembler, [row, commit, begin])


@given(st.binary(min_size=1, max_size=60).filter(lambda data: data[0] not in b"BCORYIUDTM"))
@example(b"S")  # streaming, which version 1 does not have
def test_a_message_of_an_unknown_kind_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="unknown pgoutput message"):
        feed(new_assembler(), [data])


@given(st.sampled_from(b"OYUDTM"), st.binary(max_size=60))
def test_what_carries_no_rows_is_not_read(kind: int, rest: bytes) -> None:
    first, second = (inserted(id=each, host_id=b"h") for each in (b"1", b"2"))
    noise = bytes([kind]) + rest
    received = receive(new_assembler(), [described(), *committed(first, noise, second)])
    assert ids(received) == [["1", "2"]]


@pytest.mark.parametrize("kind", b"KO")
def test_an_insert_of_an_old_row_is_a_protocol_error(kind: int) -> None:
    row = inserted(id=b"1", host_id=b"h")
    with pytest.raises(ProtocolError, match="insert without a new row"):
        feed(new_assembler(), [described(), *committed(row[:5] + bytes([kind]) + row[6:])])


def test_rows_of_a_table_that_was_never_described_are_not_taken_for_another_s() -> None:
    with pytest.raises(ProtocolError):
        feed(new_assembler(), committed(inserted(id=b"1", host_id=b"h")))


@pytest.mark.parametrize("offset", [b"", b"x", b"7.0", b"1e3", b"NaN", b"\xff"])
def test_an_offset_that_is_no_whole_number_is_reported_and_does_not_crash(offset: bytes) -> None:
    """The column may be mapped, and have any type."""
    columns = COLUMNS
    row = inserted(columns, id=b"1", host_id=b"h", c_offset=offset)
    with pytest.raises((ProtocolError, ConfigurationError)):
        feed(new_assembler(), [described(columns), *committed(row)])


def test_a_row_of_another_shape_than_its_table_is_a_protocol_error() -> None:
    wider = (*COLUMNS, "unknown")
    first = inserted(id=b"1", host_id=b"h")
    second = inserted(id=b"2", host_id=b"h")
    with pytest.raises(ProtocolError):
        feed(new_assembler(), [described(), *committed(first, described(wider), second)])


def test_a_time_beyond_the_calendar_is_a_protocol_error() -> None:
    row = inserted(id=b"1", host_id=b"h")
    with pytest.raises(ProtocolError):
        feed(
            new_assembler(),
            [described(), wire.begin(1), row, wire.commit(1, 2, ts=2**63 - 1)],
        )


def test_a_commit_is_reported_as_its_events_carry_it() -> None:
    received = receive(
        new_assembler(),
        [
            described(),
            wire.begin(0x16_B374D848, 820_454_400_123_450, 4_294_967_295),
            inserted(id=b"1", host_id=b"h"),
            wire.commit(0x16_B374D848, 0x16_B374D880, 820_454_400_123_450),
        ],
    )
    (event,) = events(received[0])
    assert received[0].commit == Commit(
        Lsn.parse("16/B374D848"),
        Lsn.parse("16/B374D880"),
        820_454_400_123_450,
        4_294_967_295,
    )
    assert (event.text("commit_lsn"), event.text("xid")) == ("16/B374D848", "4294967295")
