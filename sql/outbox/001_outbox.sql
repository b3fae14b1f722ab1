-- The transactional outbox and relay.publish, for databases that do not have an outbox of their own. Needs
-- source/001_source.sql and source/003_causes.sql.

create table if not exists public.outbox_message_t (
    id                  uuid primary key default gen_random_uuid(),
    host_id             uuid not null,
    user_id             uuid,
    aggregate_id        text,
    aggregate_version   bigint,
    aggregate_type      text,
    event_type          text not null,
    event_ts            timestamptz not null default now(),
    payload             jsonb not null,
    metadata            jsonb,
    c_xid               xid8 default pg_current_xact_id(),
    c_offset            bigint,
    transaction_id      uuid,
    transaction_ordinal int,
    transaction_count   int,
    deliver_at          timestamptz
);

-- A table of this name may have been there before.
alter table public.outbox_message_t add column if not exists deliver_at timestamptz;

-- An unreleased edition had a unique c_offset and another index for polling, which publishers would go on paying for.
alter table public.outbox_message_t drop constraint if exists outbox_message_t_c_offset_key;
do $$
declare
    former regclass;
begin
    for former in select indexrelid::regclass from pg_index join pg_class as c on c.oid = indexrelid
                   where indrelid = 'public.outbox_message_t'::regclass and c.relname ~ '^outbox_message_t_relay_\d+$'
    loop
        execute format('drop index %s', former);
    end loop;
end
$$;

comment on column public.outbox_message_t.deliver_at is
    'when the event is to be delivered; null: at once';

select relay.attach('public.outbox_message_t');

comment on column public.outbox_message_t.c_xid is
    'the transaction that inserted the event; null: from before relay came';

-- The next number of an event that has one from a sequence: the default of the column.
do $$
begin
    execute (select format('create or replace function relay.next_offset() returns bigint language sql as %L',
                           'select ' || pg_get_expr(d.adbin, d.adrelid))
               from pg_attrdef as d join pg_attribute as a on a.attrelid = d.adrelid and a.attnum = d.adnum
              where d.adrelid = 'public.outbox_message_t'::regclass and a.attname = 'c_offset');
    revoke all on function relay.next_offset() from public;
end
$$;

-- Of a former edition, in which relay.publish took one number for each event.
do $$
declare
    counter       bigint;
    offset_column text;
begin
    select split_part(encode(tgargs, 'escape'), '\000', 1), split_part(encode(tgargs, 'escape'), '\000', 2)
      into counter, offset_column
      from pg_trigger
     where tgrelid = 'public.outbox_message_t'::regclass and tgname = 'relay_fill_offset' and tgqual is null
       and tgfoid = to_regprocedure('relay.fill_offset()');
    if found then
        perform relay.count_offsets('public.outbox_message_t', counter, offset_column);
    end if;
end
$$;

-- Limits the texts of an event together, in bytes (source.max_event_bytes): what is read, not what is stored. A number such as
-- 1e131071 has a few bytes as jsonb and 131,072 as text. The constraint makes the text of each value, which costs a single
-- insert some 30 to 45 microseconds, and 100 kB no more than 1.2 times as much as without.
create or replace function relay.limit_event_bytes(bytes bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $limit$
begin
    execute format('create or replace function relay.max_event_bytes() returns bigint language sql immutable '
                   'as $$ select %s::bigint $$', bytes);
    alter table public.outbox_message_t drop constraint if exists relay_max_event_bytes;
    execute format('alter table public.outbox_message_t add constraint relay_max_event_bytes check '
                   '(octet_length(payload::text) + coalesce(octet_length(metadata::text), 0) + octet_length(event_type)'
                   ' + coalesce(octet_length(aggregate_type), 0) + coalesce(octet_length(aggregate_id), 0) <= %s) not valid',
                   bytes);
end
$limit$;

revoke all on function relay.limit_event_bytes(bigint) from public;

select relay.limit_event_bytes(16 * 1024 * 1024);

-- Events of one business transaction, written inside the caller's own database transaction.
create or replace function relay.publish(
    host_id        uuid,
    user_id        uuid,
    events         jsonb,
    transaction_id uuid default null
) returns uuid
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    business_id uuid := coalesce(publish.transaction_id, gen_random_uuid());
    how_many    int;
    first       bigint;
    -- UUIDs of version 7: the time first, so that they go to the right end of the index.
    prefix      constant text := lpad(to_hex(floor(extract(epoch from clock_timestamp()) * 1000)::bigint), 12, '0') || '7';
    malformed   bigint;
    too_large   record;
    -- What relay calls a handler of `publishes: true` with, in that transaction only.
    cause       jsonb := nullif(current_setting('relay.cause', true), '');
begin
    if jsonb_typeof(publish.events) is distinct from 'array' or jsonb_array_length(publish.events) = 0 then
        raise invalid_parameter_value using
            message = 'relay.publish: events must be a JSON array of at least one event',
            hint = 'Pass [{"event_type": ..., "aggregate_type": ..., "aggregate_id": ..., "payload": {...}}, ...].';
    end if;

    select min(ordinal) into malformed
      from jsonb_array_elements(publish.events) with ordinality as element (event, ordinal)
     where jsonb_typeof(event) <> 'object'
        or not (event ?& array['event_type', 'aggregate_type', 'aggregate_id', 'payload'])
        or event ->> 'event_type' is null;
    if malformed is not null then
        raise invalid_parameter_value using
            message = format('relay.publish: event %s of the array lacks one of event_type, aggregate_type, '
                             'aggregate_id, payload', malformed),
            hint = 'Each event is an object with these four keys; event_type may not be null.';
    end if;

    if pg_column_size(publish.events) > relay.max_event_bytes() then
        select ordinal, bytes into too_large
          from jsonb_array_elements(publish.events) with ordinality as element (event, ordinal),
               lateral (select pg_column_size(event -> 'payload') + coalesce(pg_column_size(event -> 'metadata'), 0))
                       as sized (bytes)
         where bytes > relay.max_event_bytes()
         order by ordinal limit 1;
        if found then
            raise invalid_parameter_value using
                message = format('relay.publish: event %s of the array has %s bytes of payload and metadata, the limit '
                                 'is %s', too_large.ordinal, too_large.bytes, relay.max_event_bytes()),
                hint = 'Store large content elsewhere and publish where it is, or raise source.max_event_bytes and run '
                       '`relay init`.';
        end if;
    end if;

    if cause is not null then
        -- Not in the INSERT, which would be planned at each call.
        select jsonb_agg(event || jsonb_build_object('metadata', relay.with_cause(event -> 'metadata', cause, ordinal))
                         order by ordinal) into publish.events
          from jsonb_array_elements(publish.events) with ordinality as element (event, ordinal);
    end if;

    how_many := jsonb_array_length(publish.events);

    if how_many > 10 and current_user = 'relay_owner' then
        -- Where numbers have no gaps, those of all events at once. Whoever switches that has done so, or waits.
        lock table only public.outbox_message_t in row exclusive mode;
        update relay.log_counter as c set next_offset = c.next_offset + how_many
         where c.outbox = 'public.outbox_message_t' returning c.next_offset - how_many into first;
    end if;

    insert into public.outbox_message_t (
        c_offset, id, host_id, user_id, aggregate_id, aggregate_version, aggregate_type, event_type, event_ts,
        payload, metadata, transaction_id, transaction_ordinal, transaction_count, deliver_at)
    select coalesce(first + ordinal - 1, relay.next_offset()),
           coalesce((event ->> 'id')::uuid, (prefix || substr(gen_random_uuid()::text, 16))::uuid),
           publish.host_id,
           publish.user_id,
           event ->> 'aggregate_id',
           (event ->> 'aggregate_version')::bigint,
           event ->> 'aggregate_type',
           event ->> 'event_type',
           coalesce((event ->> 'event_ts')::timestamptz, clock_timestamp()),
           event -> 'payload',
           nullif(event -> 'metadata', 'null'),
           business_id,
           ordinal::int,
           how_many,
           (event ->> 'deliver_at')::timestamptz
      from jsonb_array_elements(publish.events) with ordinality as element (event, ordinal)
     order by ordinal;

    return business_id;
end
$$;

comment on function relay.publish(uuid, uuid, jsonb, uuid) is
    'Publishes the events of one business transaction and returns its transaction_id. Commits with the caller.';

-- Least privilege on relay's own outbox; the roles come from source/001_source.sql.

revoke all on function relay.publish(uuid, uuid, jsonb, uuid) from public;

do $$
begin
    if exists (select from pg_roles where rolname = 'relay_publisher') then
        grant execute on function relay.publish(uuid, uuid, jsonb, uuid) to relay_publisher;
        grant insert (id, host_id, user_id, aggregate_id, aggregate_version, aggregate_type, event_type, event_ts, payload,
                      metadata, transaction_id, transaction_ordinal, transaction_count, deliver_at)
            on public.outbox_message_t to relay_publisher;
        -- Which an administrator may have taken from PUBLIC.
        if not has_schema_privilege('relay_publisher', 'public', 'usage') then
            grant usage on schema public to relay_publisher;
        end if;
    end if;
    if exists (select from pg_roles where rolname = 'relay') then
        if not has_schema_privilege('relay', 'public', 'usage') then
            grant usage on schema public to relay;
        end if;
        grant select on public.outbox_message_t to relay;
    end if;
end
$$;

do $$
begin
    if to_regrole('relay_owner') is null then
        return;
    end if;
    if not has_schema_privilege('relay_owner', 'public', 'usage') then
        grant usage on schema public to relay_owner;
    end if;
    grant insert on public.outbox_message_t to relay_owner;
    -- To the role that calls it: an administrator may take functions from PUBLIC.
    grant execute on function relay.max_event_bytes() to relay_owner;
    grant execute on function relay.next_offset() to relay_owner;
    grant execute on function relay.with_cause(jsonb, jsonb, bigint), relay.hops_of(jsonb) to relay_owner;
    grant create on schema relay to relay_owner;
    -- A function's new owner must have the right to create in its schema.
    alter function relay.publish(uuid, uuid, jsonb, uuid) owner to relay_owner;
    revoke create on schema relay from relay_owner;
exception when insufficient_privilege then
    raise notice 'relay: this role may not give relay.publish to relay_owner; it stays its own';
end
$$;

insert into relay.migrations (name) values ('outbox/001_outbox.sql') on conflict do nothing;
