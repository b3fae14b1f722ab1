"""The SQL that installs relay's own outbox, or the inbox of a consumer, for the migrations of frameworks."""

from __future__ import annotations

from pathlib import Path

_PIN_PATH = """
    select pg_catalog.set_config('relay.search_path', pg_catalog.current_setting('search_path'), true),
           pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    select set_config('relay.extra_errors',
                      coalesce(nullif(current_setting('plpgsql.extra_errors', true), ''), 'none'), true),
           set_config('plpgsql.extra_errors', 'none', true);
"""
"""Names without a schema mean PostgreSQL's own objects: others could run code of whoever may create objects.

PL/pgSQL's further errors are for functions of the user's own.
"""
_USERS_PATH = """
    select pg_catalog.set_config('search_path', pg_catalog.current_setting('relay.search_path'), true),
           pg_catalog.set_config('plpgsql.extra_errors', pg_catalog.current_setting('relay.extra_errors'), true);
"""
_REMOVE = """
    do $$
    declare
        each regprocedure;
    begin
        for each in select p.oid from pg_proc as p
                     where p.pronamespace = 'relay'::regnamespace
                       and p.proname in ('declare_reader', 'read', 'advance', 'seek', 'drop_reader', 'claim_reader',
                                         'keep_reader', 'watch_log', 'log_is_quiet', 'wake_readers', 'expire_readers',
                                         'share_lanes', 'move_reader', 'reader_names', 'log_reader', 'log_start',
                                         'log_origin', 'log_position', 'present_history', 'require_history',
                                         'lane_condition', 'event_satisfies', 'event_condition',
                                         'match_condition', 'glob_expression', 'declare_subscriber', 'subscribers_of',
                                         'drop_subscriber', 'expire_subscribers', 'event_texts',
                                         'next_transactions', 'read_log') loop
            execute format('drop function %s', each);
        end loop;
    end
    $$;
    drop table if exists relay.log_subscribers, relay.log_conditions, relay.log_positions, relay.log_readers;
    drop table if exists relay.api_tokens;
    delete from relay.readers where target = 'relay.declare_reader';
    drop function if exists relay.publish(uuid, uuid, jsonb, uuid);
    drop function if exists relay.limit_event_bytes(bigint);
    drop table if exists public.outbox_message_t;
    drop function if exists relay.max_event_bytes(), relay.next_offset();
    delete from relay.migrations where name like 'outbox/%';
"""


def install() -> list[str]:
    """Return the scripts in order. Each has several statements, and may be run again."""
    return [script for folder in ("source", "both", "outbox") for script in _scripts(folder)]


def install_inbox() -> str:
    """Return the script that creates relay.inbox, for `relay.client.inbox`. It may be run again."""
    return "".join(_scripts("inbox"))


def remove_inbox() -> str:
    """Return the script that drops relay.inbox."""
    return "drop table if exists relay.inbox"


def _scripts(folder: str) -> list[str]:
    package = Path(__file__).resolve().parent.parent
    shipped = package / "sql"
    folders = shipped if shipped.is_dir() else package.parent / "sql"
    return [
        _PIN_PATH + file.read_text(encoding="utf-8") + _USERS_PATH
        for file in sorted((folders / folder).glob("*.sql"))
    ]


def remove() -> str:
    """Return the script that drops the outbox and its events. The tables of relay's groups stay."""
    return _PIN_PATH + _REMOVE + _USERS_PATH
