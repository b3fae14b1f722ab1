-- What relay needs of the database that publishes events: columns of the outbox, roles, names of slots.
-- Applied once by `relay init`; `psql -v ON_ERROR_STOP=1 -1 -f` does the same, but does not examine what is there already.

create schema if not exists relay;

create table if not exists relay.migrations (
    name       text primary key,
    digest     text,
    applied_at timestamptz not null default now()
);

comment on column relay.migrations.digest is
    'SHA-256 of the file, in hexadecimal; null where psql applied it';

-- The slots and publications that read this database, so that uninstalling leaves none behind.
create table if not exists relay.streams (
    slot        text primary key,
    group_id    text not null,
    publication text
);

comment on column relay.streams.publication is
    'the publication that relay made for it; null where it was there before';

-- The order in which rows are inserted; gaps mean nothing. Whoever inserts into an outbox takes the next number, and can do
-- nothing else with it.
create sequence if not exists relay.offsets;
grant usage on sequence relay.offsets to public;

-- Fails where the numbers after the greatest one would soon end: then nobody could publish.
create or replace function relay.require_room(outbox regclass, offset_column text, newest bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    if newest >= 4611686018427387904 then
        raise object_not_in_prerequisite_state using
            message = format('source.table: a row of %s has the %s %s, after which too few numbers are left: give it '
                             'another number', outbox, offset_column, newest);
    end if;
end
$$;

-- Gives an outbox table, relay's own or one that was there before, the columns that polling needs, without rewriting it: of
-- the rows that are there, a column that is new stays null. Changes nothing that is there already, and locks nothing then.
create or replace function relay.attach(outbox regclass, offset_column text default 'c_offset') returns void
language plpgsql set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    found  pg_attribute;
    newest bigint;
begin
    if not exists (select from pg_attribute where attrelid = outbox and attname = 'c_xid' and not attisdropped) then
        execute format('alter table %s add column c_xid xid8', outbox);
    end if;
    if not exists (select from pg_attribute where attrelid = outbox and attname = 'c_xid' and atthasdef) then
        execute format('alter table %s alter column c_xid set default pg_current_xact_id()', outbox);
    end if;
    select * into found from pg_attribute where attrelid = outbox and attname = offset_column and not attisdropped;
    if found.attname is null then
        execute format('alter table %s add column %I bigint', outbox, offset_column);
    elsif found.atthasdef or found.attidentity <> '' then
        return;
    else
        -- Those that are given from now on are greater. Nobody inserts between this and the default.
        execute format('lock table %s in share row exclusive mode', outbox);
        execute format('select max(%I) from %s', offset_column, outbox) into newest;
        perform relay.require_room(outbox, offset_column, newest);
        perform setval('relay.offsets', newest) from relay.offsets where newest >= last_value;
    end if;
    execute format('alter table %s alter column %I set default nextval(''relay.offsets'')', outbox, offset_column);
end
$$;

-- The counters of tables whose numbers have no gaps. A publisher locks its table's row to the end of its transaction.
create table if not exists relay.log_counter (
    id          bigint generated always as identity primary key,
    next_offset bigint not null,
    outbox      text unique
);

alter table relay.log_counter add column if not exists outbox text unique;

comment on column relay.log_counter.next_offset is
    'the number of the next event';
comment on column relay.log_counter.outbox is
    'relay''s own outbox, of whose events relay.publish takes all numbers at once; null: another table';

-- Lets a counter number the rows of a table: each that is inserted takes the next number. relay.publish takes those of more than
-- ten events at once, and inserts them with the rights of relay_owner, which nobody else's insert has.
create or replace function relay.count_offsets(relation regclass, counter bigint, offset_column text) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    is_own boolean := relation = to_regclass('public.outbox_message_t');
begin
    if is_own then
        update relay.log_counter set outbox = 'public.outbox_message_t' where id = counter and outbox is null;
    end if;
    execute format('create or replace trigger relay_fill_offset before insert on %s for each row %s'
                   ' execute function relay.fill_offset(%L, %L)', relation,
                   case when is_own then 'when (current_user <> ''relay_owner'' or (new.transaction_count > 10) is not true)' end,
                   counter, offset_column);
end
$$;

-- Switches between numbers from a sequence and numbers without gaps (source.offsets); returns whether it changed anything.
-- Without gaps, numbers come from a counter of the table's own: publishers take turns. relay has no use for it.
create or replace function relay.set_gapless(outbox regclass, offset_column text, wanted boolean) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set row_security = off
as $set$
declare
    state   "char";
    counter bigint;
    numbers text;
    newest  bigint;
begin
    select tgenabled, split_part(encode(tgargs, 'escape'), '\000', 1) into state, counter
      from pg_trigger
     where tgrelid = outbox and tgname = 'relay_fill_offset' and tgfoid = to_regprocedure('relay.fill_offset()');
    if wanted = coalesce(state in ('O', 'A'), false) then
        return false;
    end if;
    numbers := coalesce(pg_get_serial_sequence(outbox::text, offset_column), 'relay.offsets');
    execute format('lock table %s in share row exclusive mode', outbox);
    execute format('select coalesce(max(%I), 0) from %s', offset_column, outbox) into newest;
    perform relay.require_room(outbox, offset_column, newest);
    if not wanted then
        execute format('drop trigger relay_fill_offset on %s', outbox);
        delete from relay.log_counter where id = counter;
        perform setval(numbers, greatest(newest, nextval(numbers)));
        return true;
    end if;
    update relay.log_counter set next_offset = greatest(next_offset, newest + 1) where id = counter;
    if not found then
        insert into relay.log_counter (next_offset) values (newest + 1) returning id into counter;
    end if;
    create or replace function relay.fill_offset() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    as $$
    declare
        given bigint;
    begin
        -- Which counter is an argument: a partition's trigger does not know the table that was inserted into.
        update relay.log_counter set next_offset = next_offset + 1
         where id = tg_argv[0]::bigint returning next_offset - 1 into strict given;
        return jsonb_populate_record(new, jsonb_build_object(tg_argv[1], given));
    end
    $$;
    revoke all on function relay.fill_offset() from public;
    begin
        -- Whoever runs this may have more rights than a publisher's insert is to borrow.
        if to_regrole('relay_owner') is not null then
            grant create on schema relay to relay_owner;
            alter function relay.fill_offset() owner to relay_owner;
            revoke create on schema relay from relay_owner;
        end if;
    exception when insufficient_privilege then
        raise notice 'relay: this role may not give relay.fill_offset to relay_owner; it stays its own';
    end;
    perform relay.count_offsets(outbox, counter, offset_column);
    return true;
end
$set$;

-- Installs the trigger that sends a notification for each statement that inserts into an outbox (poll.listen), or removes
-- it; returns whether it changed anything. Where it changes nothing, it locks nothing.
-- The server sends notifications in commit order: commits of all databases that notify take turns, and PREPARE TRANSACTION
-- is refused after one.
create or replace function relay.set_notify(outbox regclass, wanted boolean) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp
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
                perform pg_catalog.pg_notify('event_channel', '');
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
--   relay_owner       owns the functions that run with the rights of their owner: insert into the outbox
-- Where the installing role may not create roles (managed servers), the grants are left to the administrator, and the
-- functions belong to the installing role.

-- By name: others of the schema, of other files, are for everybody.
revoke all on function relay.require_room(regclass, text, bigint), relay.attach(regclass, text),
                       relay.count_offsets(regclass, bigint, text),
                       relay.set_gapless(regclass, text, boolean), relay.set_notify(regclass, boolean) from public;

do $$
declare
    name text;
begin
    foreach name in array array ['relay_publisher', 'relay', 'relay_owner'] loop
        begin
            if not exists (select from pg_roles where rolname = name) then
                execute format('create role %I nologin', name);
            end if;
        exception when duplicate_object or unique_violation then
            null; -- an installation in another database of the server has just created it
        end;
    end loop;
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
    grant usage on schema relay to relay_owner;
    grant select, update on relay.log_counter to relay_owner;
    if exists (select from pg_roles where rolname = current_user and rolsuper) then
        return;
    end if;
    begin
        begin
            execute format('grant relay_owner to %I', current_user);
        exception when internal_error or unique_violation then
            -- An installation in another database of the server has just granted it.
            execute format('grant relay_owner to %I', current_user);
        end;
    exception when insufficient_privilege then
        -- An administrator may have made this role a member, which suffices.
        if not pg_has_role(current_user, 'relay_owner', 'member') then
            raise notice 'relay: this role may not give functions to relay_owner; they stay its own';
        end if;
    end;
end
$$;

do $$
begin
    if exists (select from pg_roles where rolname = 'relay_publisher') then
        grant usage on schema relay to relay_publisher;
    end if;
    if exists (select from pg_roles where rolname = 'relay') then
        grant usage on schema relay to relay;
        grant select on relay.migrations to relay;
        -- relay creates a lost slot again.
        grant select, insert on relay.streams to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('source/001_source.sql') on conflict do nothing;
