"""Examines existing objects with the names of relay's: `relay init` uses none that may run an untrusted role's code.

relay.publish inserts into relay's own outbox with the rights of relay_owner, and `relay init` runs with those of an
administrator. A schema, table or role of the same name, planted by another role, would lend these rights to that role.

Sources: PostgreSQL documentation, "Writing SECURITY DEFINER Functions Safely", and the chapter "System Catalogs".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import LiteralString

from relay.faults import ConfigurationError
from relay.store.connections import Connection

_SAFE = frozenset(
    {
        "abs",
        "char_length",
        "clock_timestamp",
        "gen_random_uuid",
        "hashtext",
        "jsonb_typeof",
        "length",
        "lower",
        "mod",
        "nextval",
        "now",
        "octet_length",
        "pg_column_compression",
        "pg_column_size",
        "pg_current_xact_id",
        "statement_timestamp",
        "transaction_timestamp",
        "upper",
        "uuidv4",
        "uuidv7",
    }
)
"""Functions that expressions of the outbox may call. Others, such as query_to_xml, run SQL that they are given."""

_HINT = "drop it, or rename the table so that relay creates its own, or name your own table as source.table"

_LITERAL = re.compile(r"""("(?:[^"]|"")*")|'(?:[^']|'')*'""")
"""A string, or a quoted name, in which an apostrophe begins no string."""
_TYPE = re.compile(r"::(?:[a-z_]+ ?)+\([\d,]+\)")
_CALL = re.compile(r'((?:"(?:[^"]|"")*"|[\w.])+)\(')
_FOREIGN = re.compile(r"OPERATOR\((?!pg_catalog\.)|::\"?\w+\"?\.")


def claim_schema(conn: Connection, key: str) -> bool:
    """Create the schema relay, or examine the existing one; returns whether it was created.

    Call it in the database transaction that installs the rest. `key` is the configuration key of the database. Raises
    ConfigurationError with a line for each object that relay does not create.
    """
    faults = [*_owner_role(conn)]
    row = conn.execute("select to_regnamespace('relay') is not null").fetchone()
    exists = bool(row and row[0])
    if exists:
        tables = _oids(conn, "select oid from pg_class where relnamespace = 'relay'::regnamespace")
        faults += [*_untrusted(conn), *_creators(conn), *_content(conn), *_attached(conn, tables)]
    _refuse(faults, key)
    if not exists:
        # Without IF NOT EXISTS, this fails if another session creates the schema at the same time.
        conn.execute("create schema relay")
    return not exists


def require_adoptable(conn: Connection, table: str, key: str) -> None:
    """Examine relay's own outbox and its partitions, which may be older than the installation.

    `table` is its qualified name. Raises ConfigurationError with a line for each object that relay does not create.
    """
    tables = _oids(
        conn,
        "select %(table)s::regclass::oid union select relid::oid from pg_partition_tree(%(table)s::regclass)",
        {"table": table},
    )
    faults = [
        *_owners(conn, tables),
        *_attached(conn, tables),
        *_types(conn, tables),
        *_expressions(conn, tables),
    ]
    _refuse(faults, key)


def _oids(
    conn: Connection, query: LiteralString, parameters: Mapping[str, str] | None = None
) -> list[int]:
    return [oid for (oid,) in conn.execute(query, parameters)]


def _trusted(conn: Connection) -> list[int]:
    """List the oids of trusted roles: the installing one and its groups, superusers, the owner of the database."""
    return _oids(
        conn,
        """
        select role.oid from pg_roles as role
         where role.rolname in (current_user, 'relay_owner', 'pg_database_owner') or role.rolsuper
            or role.oid = (select datdba from pg_database where datname = current_database())
            or (pg_has_role(current_user, role.oid, 'member')
                and not (select rolsuper from pg_roles where rolname = current_user))
        """,
    )


def _refuse(faults: list[str], key: str) -> None:
    if faults:
        raise ConfigurationError("\n".join(f"{key}: {line}" for line in faults))


def _owner_role(conn: Connection) -> Iterator[str]:
    row = conn.execute(
        """
        select rolcanlogin or rolsuper or rolcreaterole or rolcreatedb or rolreplication or rolbypassrls
               or exists (select from pg_auth_members where member = r.oid)
          from pg_roles as r where rolname = 'relay_owner'
        """
    ).fetchone()
    if row and row[0]:
        yield (
            "the role relay_owner has more rights than relay needs: revoke login, its other attributes and its "
            "memberships in other roles, or drop it"
        )


def _untrusted(conn: Connection) -> Iterator[str]:
    """Find the schema relay and objects in it that belong to a role that is not trusted."""
    for kind, name, owner in conn.execute(
        """
        with object (kind, name, owner) as (
            select 'schema', nspname::text, nspowner from pg_namespace where nspname = 'relay'
            union all
            select case relkind when 'S' then 'sequence' when 'v' then 'view' else 'table' end,
                   oid::regclass::text, relowner
              from pg_class where relnamespace = 'relay'::regnamespace and relkind in ('r', 'p', 'v', 'm', 'f', 'S')
            union all
            select 'function', oid::regprocedure::text, proowner
              from pg_proc where pronamespace = 'relay'::regnamespace
               and not (prosecdef and proowner = any (%s))
            union all
            select 'type', oid::regtype::text, typowner from pg_type
             where typnamespace = 'relay'::regnamespace and typtype in ('d', 'e', 'r')
        )
        select kind, name, pg_get_userbyid(owner) from object where owner <> all (%s) order by 1, 2
        """,
        (_retained_owners(conn), _trusted(conn)),
    ):
        yield _belongs(f"the {kind}", name, owner)


def _retained_owners(conn: Connection) -> list[int]:
    """List the owners of outboxes with retention; its functions run with their rights."""
    # Names are looked up in the catalog: who planted a schema does not let others use it.
    if not _oids(
        conn,
        """
        select oid from pg_class
         where relnamespace = 'relay'::regnamespace and relname = 'retained'
           and has_schema_privilege(relnamespace, 'usage') and has_table_privilege(oid, 'select')
        """,
    ):
        return []
    return _oids(
        conn,
        "select relowner from relay.retained join pg_class on pg_class.oid = to_regclass(outbox)::oid",
    )


def _creators(conn: Connection) -> Iterator[str]:
    for (grantee,) in conn.execute(
        """
        select case when a.grantee = 0 then 'public' else pg_get_userbyid(a.grantee) end
          from pg_namespace, aclexplode(nspacl) as a
         where nspname = 'relay' and a.privilege_type = 'CREATE' and a.grantee <> all (%s)
        """,
        (_trusted(conn),),
    ):
        yield (
            f"{grantee} may create objects in the schema relay: "
            f"run `revoke create on schema relay from {grantee}`"
        )


def _content(conn: Connection) -> Iterator[str]:
    """Find objects in a schema of the name relay that relay did not create."""
    row = conn.execute(
        """
        select min(relname) from pg_class
         where relnamespace = 'relay'::regnamespace and relkind in ('r', 'p', 'v', 'm', 'f')
           and not exists (
               select from pg_class where relnamespace = 'relay'::regnamespace and relname = 'migrations')
        """
    ).fetchone()
    if row and row[0]:
        yield (
            f"the schema relay is not relay's: it holds {row[0]}, but no table migrations: rename the schema, "
            "or use another database"
        )


def _owners(conn: Connection, tables: list[int]) -> Iterator[str]:
    for table, owner in conn.execute(
        """
        select oid::regclass::text, pg_get_userbyid(relowner) from pg_class
         where oid = any (%s) and relowner <> all (%s) order by 1
        """,
        (tables, _trusted(conn)),
    ):
        yield f"{_belongs('the table', table, owner)}, or run `relay init` as {owner}"


def _belongs(kind: str, name: str, owner: str) -> str:
    return (
        f"{kind} {name} belongs to {owner}, a role that is not trusted: drop it, or change its owner to the installing "
        "role, a role of which that is a member, a superuser, or the owner of the database"
    )


def _attached(conn: Connection, tables: list[int]) -> Iterator[str]:
    """Find triggers, rules, policies and inheritance of tables that relay does not create."""
    for table, what in conn.execute(
        """
        with t as (select oid, relkind, relispartition, relrowsecurity from pg_class where oid = any (%s))
        select t.oid::regclass::text, what from t cross join lateral (
            select 'the trigger ' || tgname from pg_trigger join pg_proc as p on p.oid = tgfoid
             where tgrelid = t.oid and not tgisinternal and p.pronamespace <> 'relay'::regnamespace
            union all
            select 'the rule ' || rulename from pg_rewrite where ev_class = t.oid and rulename <> '_RETURN'
            union all
            select 'the row security policy ' || polname from pg_policy where polrelid = t.oid
            union all
            select 'row level security' where t.relrowsecurity
            union all
            select 'the parent ' || inhparent::regclass::text from pg_inherits
             where inhrelid = t.oid and not t.relispartition
            union all
            select 'the child ' || inhrelid::regclass::text from pg_inherits
             where inhparent = t.oid and t.relkind = 'r'
        ) as attached (what)
        order by 1, 2
        """,
        (tables,),
    ):
        yield f"{table} has {what}, which relay does not create: {_HINT}"


def _types(conn: Connection, tables: list[int]) -> Iterator[str]:
    for table, column, kind in conn.execute(
        """
        select c.oid::regclass::text, a.attname, format_type(a.atttypid, a.atttypmod)
          from pg_class as c join pg_attribute as a on a.attrelid = c.oid join pg_type as y on y.oid = a.atttypid
         where c.oid = any (%s) and a.attnum > 0 and not a.attisdropped and y.typnamespace <> 'pg_catalog'::regnamespace
         order by 1, 2
        """,
        (tables,),
    ):
        yield (
            f"{table} has the column {column} of the type {kind}, which is not PostgreSQL's own: {_HINT}"
        )


def _expressions(conn: Connection, tables: list[int]) -> Iterator[str]:
    """Examine the expressions that an insert evaluates: defaults, generated columns, constraints, indexes."""
    for table, name, expression in conn.execute(
        """
        with t as (select oid from pg_class where oid = any (%s))
        select t.oid::regclass::text, name, expression from t cross join lateral (
            select 'the default or generated value of ' || attname, pg_get_expr(adbin, adrelid)
              from pg_attrdef join pg_attribute on attrelid = adrelid and attnum = adnum where adrelid = t.oid
            union all
            select 'the constraint ' || conname, pg_get_expr(conbin, conrelid)
              from pg_constraint where conrelid = t.oid and conbin is not null
            union all
            select 'the index ' || indexrelid::regclass::text,
                   concat_ws(' ', pg_get_expr(indexprs, indrelid), pg_get_expr(indpred, indrelid))
              from pg_index where indrelid = t.oid and (indexprs is not null or indpred is not null)
        ) as computed (name, expression)
        order by 1, 2
        """,
        (tables,),
    ):
        called = foreign_calls(expression)
        if called:
            yield (
                f"{table}: {name} calls {', '.join(sorted(called))}, which relay does not use: {_HINT}"
            )


def foreign_calls(expression: str) -> set[str]:
    """Return the functions that an expression calls and `_SAFE` lacks; it is printed with an empty search path."""
    plain = _TYPE.sub("", _LITERAL.sub(lambda match: match[1] or "''", expression))
    # PostgreSQL prints keywords in capitals, and quotes names that contain capitals.
    calls = {name for name in _CALL.findall(plain) if not name.isupper() or '"' in name} - _SAFE
    return calls | ({"a user-defined operator or type"} if _FOREIGN.search(plain) else set())
