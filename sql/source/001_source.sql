-- The gapless offset of the outbox and the triggers that keep it. Installs in the database that publishes events.
-- Applied once by `relay init`; `psql -v ON_ERROR_STOP=1 -1 -f` does the same, but does not examine what is there already.

create schema if not exists relay;

create table if not exists relay.migrations (
    name       text primary key,
    digest     text,
    applied_at timestamptz not null default now()
);

comment on column relay.migrations.digest is
    'SHA-256 of the file, in hexadecimal; null where psql applied it';

create table if not exists relay.log_counter (
    id          int primary key,
    next_offset bigint not null default 1
);
insert into relay.log_counter (id, next_offset) values (1, 1) on conflict do nothing;

-- The slots and publications that read this database, so that uninstalling leaves none behind.
create table if not exists relay.streams (
    slot        text primary key,
    group_id    text not null,
    publication text
);

comment on column relay.streams.publication is
    'the publication that relay made for it; null where it was there before';

-- The row lock that this update takes is held to the end of the publisher's transaction: offsets are therefore in
-- commit order and come back with a rollback.
create or replace function relay.reserve_offsets(how_many bigint) returns bigint
language sql set search_path = pg_catalog, pg_temp
as $$
    update relay.log_counter set next_offset = next_offset + how_many where id = 1
    returning next_offset - how_many
$$;

-- Gives a row that comes without an offset the next one. The argument is the name of the offset column.
-- The counter's row is locked at the first such row of a statement, counted in a transaction-local setting, and written
-- back once by relay.write_back_offset: one update a row would make a statement of n rows cost n squared.
create or replace function relay.fill_offset() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    given   bigint;
    current bigint;
begin
    if tg_argv[0] = 'c_offset' then
        given := new.c_offset;
    else
        given := (to_jsonb(new) ->> tg_argv[0])::bigint;
    end if;
    if given is not null then
        return new;
    end if;
    current := nullif(current_setting('relay.pending_offset', true), '')::bigint;
    if current is null then
        select next_offset into strict current from relay.log_counter where id = 1 for update;
    end if;
    perform set_config('relay.pending_offset', (current + 1)::text, true);
    if tg_argv[0] = 'c_offset' then
        new.c_offset := current;
    else
        new := jsonb_populate_record(new, jsonb_build_object(tg_argv[0], current));
    end if;
    return new;
end
$$;

create or replace function relay.write_back_offset() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    pending bigint := nullif(current_setting('relay.pending_offset', true), '')::bigint;
begin
    if pending is not null then
        update relay.log_counter set next_offset = pending where id = 1;
        perform set_config('relay.pending_offset', '', true);
    end if;
    return null;
end
$$;

-- Puts relay's triggers on an outbox table, its own or one that was there before.
create or replace function relay.attach(outbox regclass, offset_column text default 'c_offset') returns void
language plpgsql
as $$
begin
    -- Without a default at first, so that the rows that are there are not rewritten: theirs stays null.
    if not exists (select from pg_attribute where attrelid = outbox and attname = 'c_xid' and not attisdropped) then
        execute format('alter table %s add column c_xid xid8', outbox);
        execute format('alter table %s alter column c_xid set default pg_current_xact_id()', outbox);
    end if;
    -- To create a trigger is to wait for every transaction that has published, while all others wait, too.
    if (select count(*) = 2 from pg_trigger
         where tgrelid = outbox and tgenabled <> 'D'
           and (tgfoid, tgargs) in (
               ('relay.fill_offset()'::regprocedure, convert_to(offset_column, getdatabaseencoding()) || '\x00'),
               ('relay.write_back_offset()'::regprocedure, ''))) then
        return;
    end if;
    execute format('create or replace trigger relay_fill_offset before insert on %s'
                   ' for each row execute function relay.fill_offset(%L)', outbox, offset_column);
    execute format('create or replace trigger relay_write_back_offset after insert on %s'
                   ' for each statement execute function relay.write_back_offset()', outbox);
end
$$;

-- Installs the trigger that sends a notification for each statement that inserts into an outbox (poll.listen), or removes
-- it; returns whether it changed anything. Where it changes nothing, it locks nothing.
-- The server sends notifications in commit order: commits of all databases that notify take turns, and PREPARE TRANSACTION
-- is refused after one.
create or replace function relay.set_notify(outbox regclass, wanted boolean) returns boolean
language plpgsql
as $set$
declare
    state "char" := (select tgenabled from pg_trigger
                      where tgrelid = outbox and tgname = 'relay_notify_event'
                        and tgfoid = to_regprocedure('relay.notify_event()'));
begin
    if wanted then
        if state in ('O', 'A') then
            return false;
        end if;
        if to_regprocedure('relay.notify_event()') is null then
            create function relay.notify_event() returns trigger language plpgsql
            as $$ begin
                perform pg_notify('event_channel', '');
                return null;
            end $$;
            revoke all on function relay.notify_event() from public;
        end if;
        execute format('create or replace trigger relay_notify_event after insert on %s'
                       ' for each statement execute function relay.notify_event()', outbox);
        return true;
    end if;
    if state is not null then
        execute format('drop trigger relay_notify_event on %s', outbox);
    end if;
    if not exists (select from pg_trigger where tgfoid = to_regprocedure('relay.notify_event()')) then
        drop function if exists relay.notify_event();
    end if;
    return state is not null;
end
$set$;

-- Least privilege: three roles without login. The first two are to be granted or given a password by the administrator:
--   relay_publisher   may publish, and nothing else
--   relay             runs the service: reads the outbox, owns nothing; `relay init` adds REPLICATION unless it polls
--   relay_owner       owns the functions that run with the rights of their owner: insert into the outbox, move the counter
-- Where the installing role may not create roles (managed servers), the grants are left to the administrator, and the
-- functions belong to the installing role.

revoke all on all functions in schema relay from public;

do $$
begin
    if not exists (select from pg_roles where rolname = 'relay_publisher') then
        create role relay_publisher nologin;
    end if;
    if not exists (select from pg_roles where rolname = 'relay') then
        create role relay nologin;
    end if;
    if not exists (select from pg_roles where rolname = 'relay_owner') then
        create role relay_owner nologin;
    end if;
exception when insufficient_privilege then
    raise notice 'relay: this role may not create roles; create relay_publisher, relay and relay_owner yourself, '
                 'then run this file again';
end
$$;

do $$
begin
    if not exists (select from pg_roles where rolname = 'relay_owner') then
        return;
    end if;
    if not exists (select from pg_roles where rolname = current_user and rolsuper) then
        execute format('grant relay_owner to %I', current_user);
    end if;
    -- A function's new owner must have the right to create in its schema.
    grant usage, create on schema relay to relay_owner;
    grant select, update (next_offset) on relay.log_counter to relay_owner;
    alter function relay.reserve_offsets(bigint) owner to relay_owner;
    alter function relay.fill_offset() owner to relay_owner;
    alter function relay.write_back_offset() owner to relay_owner;
    revoke create on schema relay from relay_owner;
exception when insufficient_privilege then
    raise notice 'relay: this role may not give functions to relay_owner; they stay its own';
end
$$;

do $$
begin
    if exists (select from pg_roles where rolname = 'relay_publisher') then
        grant usage on schema relay to relay_publisher;
    end if;
    if exists (select from pg_roles where rolname = 'relay') then
        grant usage on schema relay to relay;
        grant select on relay.log_counter, relay.migrations to relay;
        -- relay creates a lost slot again.
        grant select, insert on relay.streams to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('source/001_source.sql') on conflict do nothing;
