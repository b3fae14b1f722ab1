"""Whoever calls is who the call runs as: workers, readers and owners of schedules do not act as each other.

Functions of others run in sessions of superusers: autovacuum, ANALYZE, REINDEX and REFRESH evaluate what an index or a
view of somebody calls (CVE-2020-25695, CVE-2022-1552, CVE-2024-0985 are of it), and triggers
run in the session of whoever changes the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from relay.faults import ConfigurationError
from relay.store import migrations
from relay.store.connections import connect
from relay.store.positions import sinks
from relay.web.sessions import acting
from tests.field.test_upgrades import LANDED
from tests.outbox import Outbox, initialise, wait_until
from tests.pgbouncer import pooled
from tests.roles import PASSWORD, Role

ACTS = {
    "take": "relay.take('theirs')",
    "claim": "relay.claim('theirs')",
    "lease": "relay.lease('theirs')",
    "complete": "relay.complete('theirs', 1, 1)",
    "extend": "relay.extend('theirs', 1, 1)",
    "release": "relay.release('theirs', 1, 1)",
    "retry": "relay.retry('theirs', 1, 1)",
    "fail": "relay.fail('theirs', 1, 1)",
    "requeue": "relay.requeue('theirs')",
    "enqueue": "relay.enqueue('theirs', '{}', host_id => 'h')",
    "declare a queue": "relay.declare_queue('theirs', null, attempts => 1)",
    "pause a queue": "relay.pause_queue('theirs')",
    "purge": "relay.purge_queue('theirs')",
    "rebuild": "relay.rebuild_queue('theirs')",
    "drop a queue": "relay.drop_queue('theirs')",
    "watch": "relay.watch_queue('theirs')",
    "watchers": "relay.queue_watchers('theirs')",
    "cancel": "relay.cancel_messages('theirs', id => 1)",
    "move": "relay.move_messages('theirs', now(), id => 1)",
    "edit": "relay.edit_message('theirs', 1, '{}')",
    "declare a reader": "relay.declare_reader('theirs', expires => '1 hour')",
    "read": "relay.read('theirs')",
    "advance": "relay.advance('theirs', relay.claim_reader('mine'))",
    "seek": "relay.seek('theirs', 'now')",
    "claim a reader": "relay.claim_reader('theirs')",
    "keep": "relay.keep_reader('theirs')",
    "lanes": "relay.share_lanes('theirs')",
    "declare a subscriber": "relay.declare_subscriber('theirs', 's')",
    "subscribers": "relay.subscribers_of('theirs', '{}')",
    "drop a subscriber": "relay.drop_subscriber('theirs', 'one')",
    "drop a reader": "relay.drop_reader('theirs')",
    "declare a schedule": "relay.declare_schedule('theirs', PUBLISH, every => '2 hours')",
    "pause a schedule": "relay.pause_schedule('theirs', true)",
    "run a schedule": "relay.run_schedule('theirs')",
    "drop a schedule": "relay.drop_schedule('theirs')",
}
"""What one role tries on another's things."""
PUBLISH = (
    """'{"host_id": "00000000-0000-4000-8000-000000000001", "event_type": "nightly"}'::jsonb"""
)
STATE = """
    select (select jsonb_agg(to_jsonb(q) order by id) from relay.queues as q),
           (select jsonb_agg(to_jsonb(m) order by id) from relay.queue_messages as m),
           (select jsonb_agg(to_jsonb(f) order by queue_id) from relay.queue_fills as f),
           (select jsonb_agg(to_jsonb(r) order by id) from relay.log_readers as r),
           (select jsonb_agg(to_jsonb(p) order by number) from relay.log_positions as p
             where p.reader = (select r.id from relay.log_readers as r where r.name = 'theirs')),
           (select jsonb_agg(to_jsonb(s) order by name) from relay.log_subscribers as s),
           (select jsonb_agg(to_jsonb(s) - 'next_at' order by name) from relay.schedules as s),
           (select count(*) from outbox_message_t)
"""


@dataclass(frozen=True)
class Roles:
    """Two roles that may do the same, each with what it has declared."""

    outbox: Outbox
    mallory: str
    victim: str

    def session(self, role: str) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn(role), autocommit=True)

    def dsn(self, role: str) -> str:
        return self.outbox.dsn_as(role)

    def run(self, role: str, statements: str) -> None:
        with self.session(role) as conn:
            conn.execute(statements.encode())

    def said(self) -> dict[str, str]:
        """What each act of Mallory's functions has come to: the SQLSTATE."""
        return dict(self.outbox.conn.execute("select act, state from public.said").fetchall())

    def state(self) -> Any:
        """All that belongs to the victim."""
        return self.outbox.conn.execute(STATE).fetchone()

    def assert_refused(self, before: Any) -> None:
        assert self.said() == dict.fromkeys(ACTS, psycopg.errors.InsufficientPrivilege.sqlstate)
        assert self.state() == before


@pytest.fixture
def roles(outbox: Outbox) -> Iterator[Roles]:
    mallory, victim = f"{outbox.slot}_mallory", f"{outbox.slot}_victim"
    for name in (mallory, victim):
        outbox.conn.execute(
            f"create role {name} login password '{PASSWORD}' in role relay_worker, relay_reader, relay_publisher;"
            f"grant create, usage on schema public to {name}".encode()
        )
    outbox.conn.execute(
        "create table said (act text, state text); grant insert, delete on said to public"
    )
    found = Roles(outbox, mallory, victim)
    try:
        found.run(
            victim,
            f"""
            select relay.declare_queue('theirs', null);
            select relay.enqueue('theirs', '{{}}', host_id => 'h') from generate_series(1, 3);
            select relay.declare_reader('theirs');
            select relay.declare_subscriber('theirs', 'one');
            select relay.declare_schedule('theirs', {PUBLISH}, every => '1 hour');
            """,
        )
        found.run(mallory, f"select relay.declare_reader('mine'); {attack()}")
        yield found
    finally:
        outbox.conn.execute(
            f"reset role; drop owned by {mallory}, {victim} cascade; drop role {mallory}, {victim}".encode()
        )


def attack(definer: bool = False) -> str:
    """A function of Mallory's that tries each act, and notes what it comes to."""
    tried = "".join(
        f"""
        begin
            perform {"from " if call.split("(")[0] in SETS else ""}{call.replace("PUBLISH", PUBLISH)};
            insert into public.said values ('{act}', 'done');
        exception when others then
            insert into public.said values ('{act}', sqlstate);
        end;
        """
        for act, call in ACTS.items()
    )
    return f"""
        create or replace function public.attack(given int) returns int language plpgsql
        {"security definer" if definer else ""} as $attack$
        begin {tried} return given; end $attack$;
        create or replace function public.harmless(given int) returns int language plpgsql immutable as
            $$ begin perform public.attack(given); return given; end $$;
    """


SETS = (
    *("relay.take", "relay.claim", "relay.lease", "relay.read", "relay.share_lanes"),
    *("relay.subscribers_of", "relay.queue_watchers"),
)
"""Functions that return rows."""

INDEXED = """
    create table public.bait (number int);
    insert into public.bait select generate_series(1, 2);
    create index bait_attack on public.bait (public.harmless(number));
    delete from public.said;
"""


def test_nobody_acts_for_another(roles: Roles) -> None:
    """In a session of one's own."""
    before = roles.state()
    roles.run(roles.mallory, "select public.attack(1)")
    roles.assert_refused(before)


@pytest.mark.parametrize(
    "work",
    [
        "analyze public.bait",
        "reindex table public.bait",
        "vacuum full public.bait",
        "cluster public.bait using bait_attack",
    ],
)
def test_a_function_of_an_index_is_its_owner(roles: Roles, work: str) -> None:
    """A superuser looks after the tables of all: the messages of another's queue were taken,"
    " and its reader dropped."""
    roles.run(roles.mallory, INDEXED)
    before = roles.state()
    roles.outbox.conn.execute(work.encode())
    said = roles.outbox.conn.execute("select distinct act, state from public.said").fetchall()
    assert len(said) == len(ACTS)
    roles.assert_refused(before)


def test_a_materialized_view_is_its_owner(roles: Roles) -> None:
    roles.run(
        roles.mallory,
        "create materialized view public.bait as select public.attack(1); delete from public.said",
    )
    before = roles.state()
    roles.outbox.conn.execute("refresh materialized view public.bait")
    roles.assert_refused(before)


@pytest.mark.rare
def test_autovacuum_is_the_owner_of_the_index(roles: Roles) -> None:
    roles.run(roles.mallory, INDEXED)
    before = roles.state()
    conn = roles.outbox.conn
    conn.execute("alter system set autovacuum_naptime = 1")
    conn.execute("select pg_reload_conf()")
    try:
        roles.run(
            roles.mallory,
            """
            alter table public.bait set (autovacuum_analyze_threshold = 1, autovacuum_analyze_scale_factor = 0);
            insert into public.bait select generate_series(1, 1000);
            delete from public.said;
            """,
        )
        wait_until(lambda: len(roles.said()) == len(ACTS), 120)
    finally:
        conn.execute("alter system reset autovacuum_naptime")
        conn.execute("select pg_reload_conf()")
    roles.assert_refused(before)


TRIGGERED = """
    create function public.note() returns trigger language plpgsql {} as $$
    begin perform public.attack(1); return new; end $$;
    create table public.bait (number int);
    grant insert on public.bait to public;
    create trigger bait before insert on public.bait for each row execute function public.note();
"""


@pytest.mark.parametrize("victim", ["the victim", "a superuser", "relay"])
def test_a_trigger_with_its_owners_rights_is_its_owner(roles: Roles, victim: str) -> None:
    roles.run(roles.mallory, TRIGGERED.format("security definer"))
    before = roles.state()
    insert = "insert into public.bait values (1)"
    if victim == "a superuser":
        roles.outbox.conn.execute(insert)
    else:
        dsn = roles.dsn(roles.victim) if victim == "the victim" else roles.outbox.dsn_of(Role.RELAY)
        with psycopg.connect(dsn) as conn:
            conn.execute(insert)
    roles.assert_refused(before)


def test_a_trigger_without_is_who_fires_it(roles: Roles) -> None:
    """PostgreSQL's own rule, as docs/security.md says: it may do all that whoever changes the table may."""
    roles.run(roles.mallory, TRIGGERED.format(""))
    roles.run(roles.mallory, "insert into public.bait values (1)")
    assert set(roles.said().values()) == {psycopg.errors.InsufficientPrivilege.sqlstate}
    roles.run(roles.victim, "delete from public.said; insert into public.bait values (1)")
    assert roles.said()["take"] == "done"
    assert roles.said()["drop a queue"] == "done"


def test_a_function_with_its_owners_rights_acts_as_its_owner(roles: Roles) -> None:
    """An application's function of its own: whoever may call it needs no right to the queue."""
    outbox, guest = roles.outbox, f"{roles.outbox.slot}_guest"
    roles.run(
        roles.victim,
        """
        create function public.next_of_ours() returns bigint language plpgsql security definer as
        $$ begin return (select id from relay.take('theirs')); end $$
        """,
    )
    outbox.conn.execute(f"create role {guest} login password '{PASSWORD}'".encode())
    try:
        with roles.session(guest) as conn:
            assert conn.execute("select public.next_of_ours()").fetchone() is not None
    finally:
        outbox.conn.execute(f"drop owned by {guest}; drop role {guest}".encode())
    assert outbox.value("select count(*) from relay.queue_messages") == 2
    # So the rights of whoever calls are of no use to it.
    roles.run(roles.mallory, attack(definer=True))
    before = roles.state()
    roles.run(roles.victim, "select public.attack(1)")
    roles.assert_refused(before)


def test_a_role_that_is_set_acts(roles: Roles) -> None:
    take = "select from relay.take('theirs')"
    conn = roles.outbox.conn
    conn.execute("set plan_cache_mode = force_generic_plan")
    for _ in range(2):
        conn.execute(f"set role {roles.victim}".encode())
        assert conn.execute(take, prepare=True).rowcount == 1
        conn.execute(f"set role {roles.mallory}".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(take, prepare=True)
        conn.execute("reset role")
    # The owner of the reader, too.
    conn.execute(f"grant {roles.victim} to {roles.mallory}".encode())
    with roles.session(roles.mallory) as session:
        session.execute(f"set role {roles.victim}".encode())
        session.execute("select relay.declare_reader('ours')")
    assert conn.execute("select owner from relay.log_readers where name = 'ours'").fetchall() == [
        (roles.victim,)
    ]


@pytest.mark.parametrize(
    "call",
    [
        "relay.declare_queue('mine', null, configured => true)",
        f"relay.declare_schedule('mine', {PUBLISH}, every => '1 hour', configured_by => 'default')",
    ],
)
def test_only_relay_says_what_its_configuration_has(roles: Roles, call: str) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="configured"):
        roles.run(roles.mallory, f"select {call}")
    with psycopg.connect(roles.outbox.dsn_of(Role.RELAY)) as conn:
        conn.execute(f"select {call}".encode())


STAMP = "pg_backend_pid() || ' ' || extract(epoch from now()) || ' {victim}'"
"""What the victim's call would have."""
RECORD = """
    create or replace function public.told() returns {} language {} as $$ {} $$;
"""
LIKE = "create or replace function public.alike(anyelement, text) returns anyelement language {} as $$ {} $$;"
FORGERIES = {
    "a text": "select from relay.take('theirs', 1, {stamp})",
    "a cast": "select from relay.take('theirs', 1, ({stamp})::relay.call)",
    "a named argument": "select from relay.take('theirs', call => {stamp})",
    "null": "select from relay.take('theirs', 1, null)",
    "an empty text": "select from relay.take('theirs', 1, '')",
    "an array": "select from unnest(array[{stamp}]::relay.call[]) as c, relay.take('theirs', 1, c)",
    "an array literal": "select from unnest(('{{\"' || {stamp} || '\"}}')::relay.call[]) as c,"
    " relay.take('theirs', 1, c)",
    "json": "select from json_to_record(json_build_object('c', {stamp})) as t (c relay.call),"
    " relay.take('theirs', 1, c)",
    "rows of json": "select from jsonb_to_recordset(jsonb_build_array(jsonb_build_object('c', {stamp})))"
    " as t (c relay.call),"
    " relay.take('theirs', 1, c)",
    "xml": "select from xmltable('/c' passing xmlelement(name c, {stamp}) columns c relay.call path '.') as t,"
    " relay.take('theirs', 1, t.c)",
    "a record of SQL": RECORD.format("record", "sql", "select {stamp}")
    + "select from public.told() as t (c relay.call), relay.take('theirs', 1, c)",
    "a record of PL/pgSQL": RECORD.format(
        "record", "plpgsql", "declare r record; begin select {stamp} into r; return r; end"
    )
    + "select from public.told() as t (c relay.call), relay.take('theirs', 1, c)",
    "records of PL/pgSQL": RECORD.format(
        "setof record", "plpgsql", "begin return query select {stamp}; end"
    )
    + "select from public.told() as t (c relay.call), relay.take('theirs', 1, c)",
    "any element of SQL": LIKE.format("sql", "select $2")
    + "select from relay.take('theirs', 1, public.alike(null::relay.call, {stamp}))",
    "any element of PL/pgSQL": LIKE.format("plpgsql", "begin return $2; end")
    + "select from relay.take('theirs', 1, public.alike(null::relay.call, {stamp}))",
    "a variable": "do $$ declare c relay.call := {stamp}; begin perform from relay.take('theirs', 1, c); end $$",
    "a field of a record": "do $$ declare r record; begin select null::relay.call as c into r; r.c := {stamp};"
    " perform from relay.take('theirs', 1, r.c); end $$",
    "an element of an array": "do $$ declare a relay.call[]; begin a[1] := {stamp}; perform from"
    " relay.take('theirs', 1, a[1]); end $$",
    "a prepared statement": "prepare p (relay.call) as select from relay.take('theirs', 1, $1); execute p"
    " ({stamp})",
    "a statement of PL/pgSQL": "do $$ begin execute 'select from relay.take(''theirs'', 1, $1)' using {stamp}; end"
    " $$",
    "a common table expression": "with recursive c as (select {stamp} as s) select from c, relay.take('theirs', 1,"
    " c.s::relay.call)",
    "one of a case": "select from relay.take('theirs', 1, case when true then {stamp} else null::relay.call end)",
    "the one that is there, or another": "select from relay.take('theirs', 1, coalesce(null::relay.call, {stamp}))",
    "a table": "create temporary table t (c relay.call); insert into t values ({stamp});"
    "select from t, relay.take('theirs', 1, t.c)",
    "a type": "create type public.held as (c relay.call); select from relay.take('theirs', 1,"
    " (row({stamp})::public.held).c)",
    "a domain": "create domain public.held as relay.call; select from relay.take('theirs', 1,"
    " ({stamp})::public.held)",
    "a range": "create type public.held as range (subtype = relay.call);"
    "select from relay.take('theirs', 1, lower(public.held({stamp}, null)))",
    "a range's text": "create type public.held as range (subtype = relay.call);"
    "select from relay.take('theirs', 1, lower(('[\"' || {stamp} || '\",)')::public.held))",
    "a function of its own": "create function public.own(c relay.call default {stamp}) returns bigint language sql"
    " as"
    " $$ select count(*) from relay.take('theirs', 1, c) $$; select public.own()",
    "a view": "create view public.held as select ({stamp})::relay.call as c; select from"
    " public.held, relay.take('theirs', 1, c)",
    "a cast of its own": "create cast (varchar as relay.call) with inout as implicit;"
    "select from relay.take('theirs', 1, ({stamp})::varchar)",
    "an element like others": "create function public.alike(anycompatible, anycompatible) returns anycompatible"
    " language sql as $$ select $2 $$; select from relay.take('theirs', 1, public.alike(null::relay.call, {stamp}))",
    "an aggregate": LIKE.format("plpgsql", "begin return $2; end")
    + "create aggregate public.last_of(text) (sfunc = public.alike, stype = relay.call);"
    "select from relay.take('theirs', 1, (select public.last_of({stamp})))",
    "a purge": "select relay.purge_queue('theirs', {stamp})",
    "a reader": "select relay.drop_reader('theirs', {stamp})",
    "what is read": "select from relay.read('theirs', 1, null, {stamp})",
    "a schedule": "select relay.drop_schedule('theirs', null, {stamp})",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_who_calls_is_not_forged(roles: Roles, forgery: str) -> None:
    before = roles.state()
    stamp = STAMP.format(victim=roles.victim)
    with roles.session(roles.mallory) as conn, pytest.raises(psycopg.Error) as refused:
        conn.execute(FORGERIES[forgery].format(stamp=stamp).encode())
    assert roles.state() == before
    if isinstance(refused.value, psycopg.errors.CheckViolation) and "stamp" in FORGERIES[forgery]:
        # It is not refused for another reason: the victim may.
        roles.run(roles.victim, FORGERIES[forgery].format(stamp=stamp))
    assert isinstance(
        refused.value,
        psycopg.errors.InsufficientPrivilege
        | psycopg.errors.CheckViolation
        | psycopg.errors.DatatypeMismatch
        | psycopg.errors.FeatureNotSupported,
    ), refused.value


def test_the_planner_calls_nothing_with_who_is_not_checked(roles: Roles) -> None:
    """Its estimates call STABLE functions of constants, and leave out the checks of domains."""
    assert (
        roles.outbox.column(
            """
            select p.oid::regprocedure::text from pg_proc as p
             where p.pronamespace = 'relay'::regnamespace and 'relay.call'::regtype = any (p.proargtypes::oid[])
               and not p.proretset and p.provolatile <> 'v' and p.prosecdef
            """
        )
        == []
    )
    before = roles.state()
    forged = STAMP.format(victim=roles.victim)
    for call in ("relay.purge_queue('theirs', {})", "relay.cancel_messages('theirs', call => {})"):
        with roles.session(roles.mallory) as conn, conn.transaction():
            (stamp,) = conn.execute(f"select {forged}".encode()).fetchone() or ("",)
            literal = psycopg.sql.Literal(stamp).as_string(conn)
            called = call.format(f"{literal}::relay.call")
            conn.execute(
                f"explain select from generate_series(1, 1000) as n where n > {called}".encode()
            )
    assert roles.state() == before


def test_what_was_stored_is_worth_nothing_later(roles: Roles) -> None:
    """A trigger that the victim fires has the victim's call, and may keep it: on PostgreSQL 14 to 16 in a range."""
    roles.run(
        roles.mallory,
        """
        create table public.kept (c text);
        grant insert on public.kept to public;
        create function public.keep() returns trigger language plpgsql as
            $$ begin new.c := relay.this_call(); return new; end $$;
        create trigger keep before insert on public.kept for each row execute function public.keep();
        """,
    )
    with roles.session(roles.mallory) as conn, roles.session(roles.victim) as victim:
        ranged = True
        try:
            conn.execute(
                """
                create type public.calls as range (subtype = relay.call);
                create table public.ranges (c public.calls);
                grant insert on public.ranges to public;
                create function public.keep_range() returns trigger language plpgsql as
                    $$ begin insert into public.ranges values (public.calls(relay.this_call(), null));
                       return new; end $$;
                create trigger keep_range after insert on public.kept
                    for each row execute function public.keep_range();
                """
            )
        except psycopg.errors.InsufficientPrivilege:
            ranged = False
        assert ranged == (roles.outbox.conn.info.server_version < 17_00_00)
        victim.execute("insert into public.kept values (null)")
        before = roles.state()
        tries = ["select from public.kept, relay.take('theirs', 1, c)"]
        if ranged:
            tries.append("select from public.ranges, relay.take('theirs', 1, lower(c))")
        for each in tries:
            with pytest.raises(
                (psycopg.errors.CheckViolation, psycopg.errors.InsufficientPrivilege)
            ):
                conn.execute(each.encode())
            # In a later transaction of the same session, too.
            if "ranges" in each:
                victim.execute("set extra_float_digits = -15; set timezone = 'Asia/Tokyo'")
                roles.outbox.conn.execute(
                    f"grant select on public.ranges to {roles.victim}".encode()
                )
                with pytest.raises(psycopg.errors.InsufficientPrivilege, match="who calls"):
                    victim.execute(each.encode())
        assert roles.state() == before


def test_functions_of_others_do_not_say_who_calls(roles: Roles) -> None:
    """Who calls is looked up in the session's search_path by nobody."""
    before = roles.state()
    with roles.session(roles.mallory) as conn:
        conn.execute(
            f"""
            create function public.equal(text, text) returns boolean language sql as 'select true';
            create operator public.= (leftarg = text, rightarg = text, function = public.equal);
            create function public.pg_backend_pid() returns int language sql as 'select 1';
            create function public.starts_with(text, text) returns boolean language sql as 'select true';
            create function public.joined(text, text) returns text language sql as $$ select '{roles.victim}' $$;
            create operator public.|| (leftarg = text, rightarg = text, function = public.joined);
            set search_path = public, pg_catalog
            """.encode()
        )
        for call in ("relay.take('theirs')", f"relay.take('theirs', 1, '{roles.victim}')"):
            with pytest.raises(
                (psycopg.errors.CheckViolation, psycopg.errors.InsufficientPrivilege)
            ):
                conn.execute(f"select from {call}".encode())
    assert roles.state() == before


IN_A_LOOP = """
    create function public.drained() returns int language plpgsql as $$
    declare
        done int := 0;
        them bigint;
    begin
        loop
            select id into them from relay.claim('theirs');
            exit when not found;
            perform relay.complete('theirs', them, 1);
            done := done + 1;
        end loop;
        return done;
    end $$;
    create procedure public.drain() language plpgsql as $$
    begin
        while exists (select from relay.take('theirs')) loop
            commit;
        end loop;
    end $$;
"""


def test_a_call_is_what_it_is_however_it_is_made(roles: Roles) -> None:
    """now() is the transaction's beginning, and statements and functions keep their plans."""
    left = "select count(*) from relay.queue_messages"
    fill = "select relay.enqueue('theirs', '{}', host_id => 'h') from generate_series(1, 10)"
    take = "select id from relay.take('theirs')"
    roles.run(roles.victim, IN_A_LOOP)
    with roles.session(roles.victim) as conn:

        def remain(number: int) -> None:
            assert roles.outbox.value(left) == number

        conn.execute(fill)
        for _ in range(3):
            assert conn.execute(take, prepare=True).rowcount == 1
        remain(10)
        with conn.transaction():
            for _ in range(2):
                conn.execute("select pg_sleep(0.01)")
                assert conn.execute(take, prepare=True).rowcount == 1
        remain(8)
        with conn.pipeline():
            found = [conn.execute(take, prepare=True) for _ in range(2)]
        assert [each.rowcount for each in found] == [1, 1]
        remain(6)
        conn.execute(
            "do $$ begin for i in 1..2 loop perform from relay.take('theirs'); end loop; end $$"
        )
        remain(4)
        assert conn.execute("select public.drained()").fetchone() == (4,)
        conn.execute(fill)
        assert conn.execute("select public.drained()").fetchone() == (10,)
        conn.execute(fill)
        conn.execute("call public.drain()")
        remain(0)
        conn.execute(fill)
        conn.execute("begin; declare c cursor for select id from relay.take('theirs', 2)")
        assert conn.execute("fetch all from c").rowcount == 2
        conn.execute("commit")
        remain(8)
        conn.execute(
            "prepare again as select id from relay.take('theirs'); set plan_cache_mode = force_generic_plan"
        )
        for _ in range(2):
            assert conn.execute("execute again").rowcount == 1
        remain(6)


def test_a_call_behind_a_pooler(roles: Roles) -> None:
    """Each transaction may have another session of the server."""
    with (
        pooled(roles.dsn(roles.victim)) as dsn,
        psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as conn,
        psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as other,
    ):
        for each in (conn, other, conn):
            assert each.execute("select from relay.take('theirs')").rowcount == 1


def test_who_acts_is_not_what_the_session_says(roles: Roles) -> None:
    """`relay.operator` is a setting that anybody may set: it was all that was known of who paused a sink."""
    outbox = roles.outbox
    outbox.begin_sink("hook")
    with acting("anna"), connect(outbox.dsn_of(Role.RELAY)) as conn:
        assert sinks.pause(conn, "default", "hook", True, "maintenance")
    assert outbox.value("select paused_by from relay.sinks") == "anna (as app_relay)"
    with psycopg.connect(outbox.dsn_of(Role.RELAY)) as conn:
        conn.execute("set relay.operator = 'anna'")
        conn.execute("select relay.cancel('7')")
        conn.execute(
            "insert into relay.actions (group_id, sink, action) values ('default', '', 'x')"
        )
        for forged in ("acted_by", "operator"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
                conn.execute(
                    f"insert into relay.actions (group_id, action, {forged}) values ('default', 'x', 'boss')".encode()
                )
    assert outbox.column("select requested_by from relay.cancellations") == ["app_relay"]
    assert outbox.column("select acted_by from relay.actions") == ["app_relay"]
    # As whom a function of its owner's rights runs, whoever has opened the session.
    outbox.conn.execute(
        """
        create function act() returns void language sql security definer set search_path = pg_catalog as
            $$ insert into relay.actions (group_id, sink, action) values ('default', '', 'y') $$;
        alter function act() owner to app_relay;
        select act()
        """
    )
    acted = outbox.value("select acted_by from relay.actions where action = 'y'")
    assert acted == "app_relay (in a session of postgres)"


@pytest.mark.parametrize("said", ["yes", "9223372036854775807", "100", "0", "-1"])
def test_a_setting_does_not_say_that_marks_wait(roles: Roles, said: str) -> None:
    """A trigger of anybody may set it: a message was below the mark when it came, and nobody ever took it."""
    conn = roles.outbox.conn
    enqueue = "select relay.enqueue('theirs', '{}', host_id => 'h')"
    with roles.session(roles.victim) as other:
        other.execute("select from relay.take('theirs', 9)")
        other.execute(f"set relay.inserts_messages = '{said}'".encode())
        other.execute("begin")
        # The second call of a transaction asks for no other lock.
        numbers = [other.execute(enqueue).fetchone() for _ in range(2)]
        roles.run(roles.victim, f"{enqueue}; select from relay.take('theirs', 9)")
        conn.execute("update relay.queue_marks set noted_at = noted_at - interval '1 minute'")
        conn.execute(
            "select relay.move_marks(q.id, s.mark, s.due_mark, s.noted_at)"
            " from relay.queues as q, relay.queue_state(q.name, relay.this_call()) as s"
        )
        held = "select count(*) from pg_locks where locktype = 'advisory' and pid = %s"
        assert roles.outbox.value(held, (other.info.backend_pid,)) == 1
        other.execute("commit")
        found = other.execute("select id from relay.take('theirs', 9)").fetchall()
    assert found == numbers


FORMER = """
    create or replace function pg_temp.give() returns void language plpgsql as $$
    declare
        each regprocedure;
    begin
        for each in select oid from pg_proc
                     where pronamespace = 'relay'::regnamespace and proowner = current_user::regrole loop
            execute format('alter function %s owner to relay_owner', each);
        end loop;
    end $$;
    create function relay.take(queue text, max int default 1) returns bigint language sql as 'select 1::bigint';
    create function relay.cancel(event_id text, host_id text default null) returns bigint language sql
        as 'select 1::bigint';
    create function relay.calling_role() returns name language sql as 'select session_user';
    create function relay.drop_reader(name text) returns void language sql as '';
    create function relay.drop_subscriber(reader text, name text) returns boolean language sql as 'select true';
    create function relay.run_schedule(name text) returns uuid language sql as 'select gen_random_uuid()';
    select pg_temp.give();
    grant execute on function relay.cancel(text, text) to {booking};
    grant execute on function relay.drop_reader(text) to {booking} with grant option;
"""


def test_functions_of_a_former_edition_are_replaced(roles: Roles) -> None:
    """A call would be ambiguous; and who was granted one by its name may call what has replaced it."""
    outbox, booking = roles.outbox, roles.mallory
    outbox.conn.execute(FORMER.format(booking=booking).encode())
    outbox.conn.execute("alter table relay.actions alter acted_by set default session_user")
    names = [name for name in LANDED if not name.startswith("source/")]
    for name in names:
        outbox.conn.execute(
            "update relay.migrations set digest = %s where name = %s", (LANDED[name], name)
        )
    outbox.conn.execute("create view waiting as select relay.calling_role()")
    with pytest.raises(ConfigurationError, match=r"view public\.waiting depends on function relay"):
        initialise(outbox.settings())
    outbox.conn.execute("drop view waiting")
    assert initialise(outbox.settings()) == [f"schema file {name}" for name in names]
    with roles.session(roles.victim) as conn:
        assert conn.execute("select from relay.take('theirs')").rowcount == 1
    with roles.session(booking) as conn:
        assert conn.execute("select outcome from relay.cancel('7')").fetchall() == [("requested",)]
        conn.execute("grant execute on function relay.drop_reader to relay_worker")
    assert outbox.column(
        "select oid::regprocedure::text from pg_proc where proname = 'calling_role'"
    ) == ["relay.calling_role(relay.call)"]
    assert initialise(outbox.settings()) == []


def test_no_function_asks_who_opened_the_session() -> None:
    for file in migrations.sql_directory().rglob("*.sql"):
        # But where both are told.
        code = re.sub(r"--.*|relay\.acting_role\(\) returns[^;]*;", "", file.read_text())
        assert "session_user" not in code, file.name
        assert "current_setting('role')" not in code, file.name
