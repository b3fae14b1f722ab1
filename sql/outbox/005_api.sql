-- The tokens of the HTTP API, and how it reads the log. Needs 003_readers.sql.

create table if not exists relay.api_tokens (
    id           bigint      generated always as identity primary key,
    name         text        not null,
    digest       bytea       not null unique check (octet_length(digest) = 32),
    rights       text[]      not null check (rights <> '{}' and rights <@ array['read', 'publish']),
    hosts        text[]      not null,
    types        text[]      not null,
    created_at   timestamptz not null default now(),
    expires_at   timestamptz,
    revoked_at   timestamptz,
    last_used_at timestamptz
);

create unique index if not exists api_tokens_name on relay.api_tokens (name) where revoked_at is null;

comment on table relay.api_tokens is
    'the tokens of the HTTP API; those that are revoked stay, so that it is known who had one';
comment on column relay.api_tokens.id is
    'its number';
comment on column relay.api_tokens.name is
    'its name; a second token may have that of one that is revoked';
comment on column relay.api_tokens.digest is
    'the SHA-256 of the token, which is stored nowhere';
comment on column relay.api_tokens.rights is
    'what it gives a right to: read, publish';
comment on column relay.api_tokens.hosts is
    'the tenants that it is for, or *';
comment on column relay.api_tokens.types is
    'the event types that it is for, as globs';
comment on column relay.api_tokens.created_at is
    'when it was created';
comment on column relay.api_tokens.expires_at is
    'from when on it is refused; null: never';
comment on column relay.api_tokens.revoked_at is
    'when it was revoked; null while it was not';
comment on column relay.api_tokens.last_used_at is
    'when it was last used, to the minute';

-- The next events after a snapshot, of about "max" rows of the outbox, in whole database transactions, in order; of those that
-- "present" sees, by default what is committed now. Each row has the snapshot that is reached when all of them are done, and its
-- origin: the server, its timeline, and an LSN up to which the WAL has the end of each transaction that was read. An only row
-- without c_xid: there are none. Of a transaction that has more events than "max", the first max + 1.
-- With "within", a transaction that the snapshot sees: the next max + 1 of its events at most, those after the c_offset "past".
-- Only for relay, which looks itself whether retention has removed any.
create or replace function relay.read_log(after pg_snapshot, max int, present pg_snapshot default null, within xid8 default null,
                                          past bigint default null)
returns table (reached text, origin text, c_xid xid8, c_offset bigint, host_id uuid, event_type text, aggregate_type text,
               aggregate_id text, event text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set row_security = off set timezone = 'UTC'
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
as $$
#variable_conflict use_column
declare
    current pg_snapshot := relay.log_start('now');
    lsn     pg_lsn := pg_current_wal_insert_lsn();
    taken   xid8[];
begin
    if pg_snapshot_xmax(read_log.after) > pg_snapshot_xmax(current) then
        raise invalid_parameter_value using
            message = format('relay.read_log: the position %s is ahead of this server: it is of another server', read_log.after);
    end if;
    if read_log.within is null then
        select n.next_xids, n.reached into taken, reached
          from relay.next_transactions(read_log.after, coalesce(read_log.present, current), read_log.max) as n;
    else
        taken := array[read_log.within];
        reached := read_log.after;
    end if;
    select format('%s.%s.%s', system_identifier, ('x' || left(pg_walfile_name(lsn), 8))::bit(32)::int, lsn - '0/0'::pg_lsn)
      into origin from pg_control_system();
    -- The texts are made of the rows that are left.
    return query
        select read_log.reached, read_log.origin, o.c_xid, o.c_offset, o.host_id, o.event_type, o.aggregate_type, o.aggregate_id,
               json_build_object(
                   'id', o.id, 'host_id', o.host_id, 'user_id', o.user_id, 'aggregate_type', o.aggregate_type,
                   'aggregate_id', o.aggregate_id, 'aggregate_version', o.aggregate_version, 'event_type', o.event_type,
                   'event_ts', o.event_ts, 'payload', o.payload, 'metadata', o.metadata, 'transaction_id', o.transaction_id,
                   'transaction_ordinal', o.transaction_ordinal, 'transaction_count', o.transaction_count,
                   'deliver_at', o.deliver_at)::text
          from (select t.number as taken_number, r.* from unnest(taken) with ordinality as t (xid, number)
                  join public.outbox_message_t as r on r.c_xid = t.xid
                 where read_log.past is null or r.c_offset > read_log.past
                 order by t.number, r.c_offset limit read_log.max + 1) as o
         order by o.taken_number, o.c_offset;
    if not found then
        return next;
    end if;
end
$$;

revoke all on function relay.read_log(pg_snapshot, int, pg_snapshot, xid8, bigint) from public;

do $$
begin
    if to_regrole('relay') is not null then
        grant execute on function relay.read_log(pg_snapshot, int, pg_snapshot, xid8, bigint), relay.watch_log() to relay;
        grant select, insert on relay.api_tokens to relay;
        grant update (revoked_at, last_used_at) on relay.api_tokens to relay;
    end if;
end
$$;

do $$
begin
    if to_regrole('relay_owner') is null then
        return;
    end if;
    grant create on schema relay to relay_owner;
    -- A function's new owner must have the right to create in its schema.
    alter function relay.read_log(pg_snapshot, int, pg_snapshot, xid8, bigint) owner to relay_owner;
    revoke create on schema relay from relay_owner;
exception when insufficient_privilege then
    raise notice 'relay: this role may not give functions to relay_owner; they stay its own';
end
$$;

insert into relay.migrations (name) values ('outbox/005_api.sql') on conflict do nothing;
