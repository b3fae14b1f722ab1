"""Statements with named placeholders: what the server parses, and what psycopg is given to run."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer

from relay import handlers
from relay.config.handlers import PythonHandler, SqlHandler
from relay.faults import ConfigurationError
from relay.handlers.python import Python
from relay.handlers.relation import bound
from relay.handlers.sql import SqlBatch, SqlEvent
from relay.model.events import EVENT_FIELDS, SQL_TYPES


def compiled(statement: str) -> SqlEvent:
    return SqlEvent("h", SqlHandler(type="sql", statement=statement))


def run(statement: str) -> tuple[str, list[str]]:
    """The statement that psycopg sends, and the fields of its numbered parameters."""
    query = PostgresQuery(Transformer())
    query.convert(compiled(statement)._statement, {name: name for name in EVENT_FIELDS})
    return query.query.decode(), [str(bytes(p or b""), "utf-8") for p in query.params or ()]


def parsed(statement: str) -> str:
    """The statement as the server is asked to parse it by `relay check`."""
    return compiled(statement)._numbered


@pytest.mark.parametrize("field", EVENT_FIELDS)
def test_a_placeholder_has_the_type_of_its_field(field: str) -> None:
    statement = f"select %({field})s"
    assert run(statement) == (f"select ($1::{SQL_TYPES[field]})", [field])
    assert parsed(statement) == f"select ($1::{SQL_TYPES[field]})"


def test_the_type_binds_closer_than_an_operator() -> None:
    sent, _ = run("select %(payload)s->>'amount', %(payload)s::text")
    assert sent == "select ($1::jsonb)->>'amount', ($1::jsonb)::text"


def test_a_field_that_stands_twice_is_one_parameter() -> None:
    sent, fields = run("select %(id)s, %(host_id)s, %(id)s")
    assert sent == "select ($1::uuid), ($2::uuid), ($1::uuid)"
    assert fields == ["id", "host_id"]


@pytest.mark.parametrize(
    ("statement", "sent"),
    [
        ("select '100%%'", "select '100%'"),
        ("select 5 %% 2", "select 5 % 2"),
        ("select %%(id)s", "select %(id)s"),
        ("select %%%(id)s", "select %($1::uuid)"),
        ("select '%%%%'", "select '%%'"),
        ("select 1", "select 1"),
    ],
)
def test_a_doubled_percent_sign_is_one(statement: str, sent: str) -> None:
    assert run(statement)[0] == parsed(statement) == sent


@given(
    st.lists(
        st.one_of(
            st.text(st.characters(exclude_characters="%\0", exclude_categories=["Cs"]), max_size=8),
            st.just("%%"),
            st.sampled_from(EVENT_FIELDS).map("%({})s".format),
        )
    ).filter(any)
)
def test_what_is_checked_is_what_is_run(parts: list[str]) -> None:
    """The same numbers, and every other character as it was written."""
    statement = "".join(parts)
    names = list(dict.fromkeys(part[2:-2] for part in parts if part.startswith("%(")))
    expected = "".join(
        f"(${names.index(part[2:-2]) + 1}::{SQL_TYPES[part[2:-2]]})"
        if part.startswith("%(")
        else part.replace("%%", "%")
        for part in parts
    )
    assert run(statement) == (expected, names)
    assert parsed(statement) == expected


@pytest.mark.parametrize(
    ("statement", "shown"),
    [
        ("select 100%", "'%'"),
        ("select 5 % 2", "'% '"),
        ("select '50%'", '"%\'"'),
        ("select %s", "'%s'"),
        ("select %(id)", "'%('"),
        ("select %(id)d", "'%('"),
        ("select %(id) s", "'%('"),
        ("select %(pay-load)s", "'%('"),
        ("select %%%", "'%'"),
        ("select %\n", "'%\\n'"),
    ],
)
def test_a_bare_percent_sign_is_refused_with_what_to_write(statement: str, shown: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        compiled(statement)
    line = str(raised.value)
    assert line.startswith(f"handlers.h.statement: {shown} is not a placeholder")
    assert "%(field)s" in line
    assert "%%" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("statement", "command"),
    [
        ("commit", "COMMIT"),
        ("-- all of it\n Rollback to savepoint a", "ROLLBACK"),
        ("/* a */ /* b\n */ prepare  transaction 'x'", "PREPARE  TRANSACTION"),
        ("END", "END"),
        ("savepoint a", "SAVEPOINT"),
    ],
)
def test_a_command_on_the_transaction_is_refused(statement: str, command: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        compiled(statement)
    assert str(raised.value).startswith(f"handlers.h.statement: {command}: a handler runs in")


@pytest.mark.parametrize("statement", ["call commit()", "select 'commit'", "-- commit\nselect 1"])
def test_the_name_of_such_a_command_elsewhere_is_none(statement: str) -> None:
    compiled(statement)


@pytest.mark.parametrize("field", ["paylaod", "Payload", "", "amount", "batch"])
def test_an_unknown_field_is_refused_with_the_fields_there_are(field: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        compiled(f"select %(id)s, %({field})s")
    line = str(raised.value)
    assert line.startswith(f"handlers.h.statement: %({field})s is not a field")
    assert all(re.search(rf"\b{name}\b", line) for name in EVENT_FIELDS)


def test_handlers_are_built_in_their_order_by_their_kind() -> None:
    built = handlers.build(
        {
            "b": SqlHandler(type="sql", each="batch", statement="select 1"),
            "p": PythonHandler(type="python", callable="tests.callables:record"),
            "a": SqlHandler(type="sql", statement="select 1"),
        },
        SQL_TYPES,
    )
    kinds = [(name, type(handler), handler.name) for name, handler in built.items()]
    assert kinds == [("b", SqlBatch, "b"), ("p", Python, "p"), ("a", SqlEvent, "a")]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no.such.module:f", "importing 'no.such.module' failed: ModuleNotFoundError"),
        ("json:no_such_function", "'json' has no 'no_such_function'"),
        ("json:decoder.no_such", "'json' has no 'decoder.no_such'"),
        ("json:__name__", "'json:__name__' is not callable"),
        ("asyncio:sleep", "'asyncio:sleep' is async"),
    ],
)
def test_a_callable_that_cannot_be_called_is_refused(path: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        handlers.build({"p": PythonHandler(type="python", callable=path)}, SQL_TYPES)
    assert str(raised.value).startswith(f"handlers.p.callable: {problem}")


def test_every_pair_of_fields_gets_its_own_numbers() -> None:
    for first, second in product(EVENT_FIELDS, repeat=2):
        _, fields = run(f"select %({first})s, %({second})s")
        assert fields == list(dict.fromkeys((first, second)))


BATCH = "batch as not materialized (select * from pg_temp.relay_batch)"


@pytest.mark.parametrize(
    ("statement", "sent"),
    [
        ("insert into t select id from batch", f"with {BATCH} insert into t select id from batch"),
        ("\n(select 1)", f"\nwith {BATCH} (select 1)"),
        ("with a as (select 1) table a", f"with {BATCH}, a as (select 1) table a"),
        ("With Recursive a as (", f"With Recursive {BATCH}, a as ("),
        ("with--x\n recursive\ta as (", f"with--x\n recursive {BATCH},\ta as ("),
        ("/* with */ -- with\nVALUES (1)", f"/* with */ -- with\nwith {BATCH} VALUES (1)"),
        ("/* a /* b */ c */values (1)", f"/* a /* b */ c */with {BATCH} values (1)"),
        ("with /**/ /*/**/*/ recursive a", f"with /**/ /*/**/*/ recursive {BATCH}, a"),
        (";-- a\r;with a as (", f";-- a\r;with {BATCH}, a as ("),
        ("/* a /* b */ insert", "/* a /* b */ insert"),
        ("with recursively as (", f"with {BATCH}, recursively as ("),
        ("call f()", "call f()"),
        ("do $$ begin end $$", "do $$ begin end $$"),
        ("selekt 1", "selekt 1"),
        ("", ""),
    ],
)
def test_batch_is_a_with_query_of_the_statement(statement: str, sent: str) -> None:
    assert bound(statement) == sent
