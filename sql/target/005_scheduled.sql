-- Scheduled events by their ids: services cancel and move them with relay.cancel and relay.reschedule, and messages of queues with
-- relay.cancel_messages, relay.move_messages and relay.edit_message. Needs 001_target.sql and 004_queues.sql.

alter table relay.deferred add column if not exists event_ids text[];
create index if not exists deferred_events on relay.deferred using gin (event_ids);

comment on column relay.deferred.event_ids is
    'the ids of its events, as relay.event_key has them; null where it was deferred by a former edition, or relay.deferred_rows has its rows';

create table if not exists relay.cancellations (
    event_id     text        collate "C" not null,
    group_id     text        not null default '',
    sink         text        not null default '',
    outcome      text        not null,
    host_id      text        not null default '',
    requested_by text        not null,
    noted_at     timestamptz not null default clock_timestamp(),
    primary key (event_id, group_id, sink, host_id)
);
do $$
begin
    -- A former edition kept one request for an event: that for another host replaced the first.
    if not (select attnotnull from pg_attribute where attrelid = 'relay.cancellations'::regclass and attname = 'host_id') then
        update relay.cancellations set host_id = '' where host_id is null;
        alter table relay.cancellations
            alter column host_id set default '', alter column host_id set not null,
            drop constraint cancellations_pkey, add primary key (event_id, group_id, sink, host_id);
    end if;
end
$$;
create index if not exists cancellations_noted on relay.cancellations (noted_at);

comment on table relay.cancellations is
    'events that relay.cancel was asked to cancel, and where they were stopped; kept for seven days, and as long as they are deferred';
comment on column relay.cancellations.group_id is
    'the group that was to deliver it; empty where the row is the request, which holds for what relay reads later';
comment on column relay.cancellations.sink is
    'the sink that it was to be delivered to; empty where it was to be applied to the target';
comment on column relay.cancellations.outcome is
    'requested; cancelled: it was not delivered there; in doubt: a delivery may have been in flight; delivered: it was, and has arrived';
comment on column relay.cancellations.event_id is
    'as relay.event_key has it';
comment on column relay.cancellations.requested_by is
    'the role that asked for it';
comment on column relay.cancellations.noted_at is
    'when it was asked for, or stopped there';
comment on column relay.cancellations.host_id is
    'of a request: only events of this host are meant; empty: whatever their host';

-- How an id of an event is stored and compared: an entry of an index has a limited length.
create or replace function relay.event_key(id text) returns text
language sql stable set search_path = pg_catalog, pg_temp
as $$
    select case when octet_length(id) > 1000 then encode(sha256(convert_to(id, 'UTF8')), 'hex') else id end
$$;

-- Locks the rows of relay.deferred of an event, in the order of their ids. Waits for a transaction that is being applied to the target,
-- whose row relay has locked. is_gone: it was applied, or became a dead letter, meanwhile. was_tried: a sink may have it, or the target
-- has refused it. is_due: its time at a sink has come.
create or replace function relay.lock_deferred(event text, host_id text)
returns table (id bigint, group_id text, sink text, event_ids text[], is_gone boolean, was_tried boolean, is_due boolean, holds boolean)
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
begin
    for id, group_id, sink in
        select d.id, d.group_id, d.sink from relay.deferred as d
         where d.event_ids @> array[lock_deferred.event] and not d.blocked and d.dead_transaction is null
           and (lock_deferred.host_id is null or lock_deferred.host_id = any (d.hosts))
         order by d.id
    loop
        select d.event_ids, d.attempts > 0, d.sink <> '' and d.retry_at <= clock_timestamp(), d.holds
          into event_ids, was_tried, is_due, holds
          from relay.deferred as d where d.id = lock_deferred.id and not d.blocked for update;
        is_gone := not found;
        return next;
    end loop;
end
$$;

-- Cancels an event in the caller's transaction: the business transaction that it belongs to is not delivered, wherever it is deferred
-- in this database. Returns a row for each destination: kind (target or sink), name, and outcome. cancelled: it is not delivered there.
-- in doubt: its time had come, or an attempt has failed, so that the sink may have it. done: it was applied, or became a dead letter,
-- while this waited for it. The request is recorded: events with deliver_at that relay reads within seven days are stopped, too; if
-- nothing else is found, that is the only row, with the outcome requested. With a host_id, only events of that host are cancelled.
create or replace function relay.cancel(event_id text, host_id text default null, call relay.call default relay.this_call())
returns table (kind text, name text, outcome text)
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    wanted text := relay.event_key(cancel.event_id);
    each   record;
begin
    if wanted is null then
        raise null_value_not_allowed using message = 'relay.cancel: event_id must not be null';
    end if;
    insert into relay.cancellations as c (event_id, outcome, host_id, requested_by)
    values (wanted, 'requested', coalesce(cancel.host_id, ''), relay.calling_role(call))
    on conflict (event_id, group_id, sink, host_id) do update set noted_at = excluded.noted_at;
    for each in select * from relay.lock_deferred(wanted, cancel.host_id) loop
        kind := case when each.sink = '' then 'target' else 'sink' end;
        name := each.sink;
        outcome := case when each.is_gone then 'done'
                        when each.sink <> '' and (each.was_tried or each.is_due) then 'in doubt'
                        else 'cancelled' end;
        if not each.is_gone then
            insert into relay.cancellations (event_id, group_id, sink, outcome, requested_by)
            select distinct own.id, each.group_id, each.sink, cancel.outcome, relay.calling_role(call)
              from unnest(each.event_ids) as own (id)
            on conflict do nothing;
            delete from relay.deferred as d where d.id = each.id;
        end if;
        return next;
    end loop;
    if kind is null then
        outcome := 'requested';
        return next;
    end if;
end
$$;

-- Gives a scheduled event, with the business transaction that it belongs to, another time, in the caller's transaction. Returns a row
-- for each destination, as relay.cancel does, with the outcome moved; due: its time has come, or it has been tried, so that it is not
-- moved; or done. The only row has the outcome unknown where relay has not read the event yet, or it is done.
create or replace function relay.reschedule(event_id text, at timestamptz, host_id text default null)
returns table (kind text, name text, outcome text)
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    each record;
begin
    if reschedule.event_id is null or reschedule.at is null then
        raise null_value_not_allowed using message = 'relay.reschedule: event_id and at must not be null';
    end if;
    for each in select * from relay.lock_deferred(relay.event_key(reschedule.event_id), reschedule.host_id) loop
        kind := case when each.sink = '' then 'target' else 'sink' end;
        name := each.sink;
        outcome := case when each.is_gone then 'done' when each.holds or each.was_tried or each.is_due then 'due' else 'moved' end;
        if outcome = 'moved' then
            update relay.deferred as d set retry_at = reschedule.at where d.id = each.id;
        end if;
        return next;
    end loop;
    if kind is null then
        outcome := 'unknown';
        return next;
    end if;
end
$$;

-- Messages of a queue that wait for a time or a retry; one that is leased is not in the index.
create index if not exists queue_messages_later_events on relay.queue_messages (event_id)
    where available_at is not null and not leased;

-- Cancels messages of a queue in the caller's transaction, those that meet every condition which is given: the id of relay.enqueue, the id of
-- an event, a key, a type, a host, a part of the error, states; returns how many. One that a worker has is left to it, and not
-- counted. relay.purge_queue cancels all.
create or replace function relay.cancel_messages(
    queue text, event_id text default null, key text default null, id bigint default null, event_type text default null,
    host_id text default null, error text default null, states text[] default null, call relay.call default relay.this_call()
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set plan_cache_mode = force_custom_plan
as $$
declare
    q record;
begin
    q := relay.require_queue(cancel_messages.queue, call);
    if num_nonnulls(event_id, key, id, event_type, host_id, error, states) = 0 then
        raise null_value_not_allowed using message = 'relay.cancel_messages: give a condition, such as the id of a message or of an event';
    end if;
    return relay.remove_messages(
        relay.lock_selected(q.id, q.due_mark, id, event_id, key, event_type, host_id, error, states));
end
$$;

-- Gives messages of a queue that wait for their time another one, also for that of a retry, in the caller's transaction; returns how many.
-- They are chosen as in relay.cancel_messages. now() lets them run. Those whose time has come, or that a worker has, are left as they are.
create or replace function relay.move_messages(
    queue text, at timestamptz, event_id text default null, id bigint default null, key text default null,
    event_type text default null, host_id text default null, error text default null, states text[] default null,
    call relay.call default relay.this_call()
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set plan_cache_mode = force_custom_plan
as $$
declare
    q     record;
    these tid[];
    moved bigint;
begin
    q := relay.require_queue(move_messages.queue, call);
    if at is null or num_nonnulls(event_id, key, id, event_type, host_id, error, states) = 0 then
        raise null_value_not_allowed using
            message = 'relay.move_messages: give a time, and a condition, such as the id of a message or of an event';
    end if;
    perform relay.begin_times();
    these := relay.lock_selected(q.id, q.due_mark, id, event_id, key, event_type, host_id, error, states, waiting => true);
    begin
        update relay.queue_messages as m
           set available_at = greatest(move_messages.at, clock_timestamp(), q.due_mark)
         where m.ctid = any (these);
        get diagnostics moved = row_count;
    exception when others then
        raise; -- a transaction within: see relay.was_aborted
    end;
    if moved > 0 and move_messages.at <= clock_timestamp() then
        perform relay.wake_workers(q.id);
    end if;
    return moved;
end
$$;

-- Gives a message of a queue that nobody has, or a dead letter of it, another payload, in the caller's transaction; returns whether there is
-- one. Of a dead letter, relay.dead_letters keeps the first payload, and the edit is recorded with the reason; relay.requeue brings it back.
create or replace function relay.edit_message(
    queue text, id bigint, payload jsonb, reason text default null, call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set plan_cache_mode = force_custom_plan
as $$
declare
    q     record;
    these tid[];
begin
    q := relay.require_queue(edit_message.queue, call);
    if id is null or payload is null then
        raise null_value_not_allowed using message = 'relay.edit_message: id and payload must not be null';
    end if;
    these := relay.lock_selected(q.id, q.due_mark, id);
    begin
        update relay.queue_messages as m set payload = edit_message.payload where m.ctid = any (these);
    exception when others then
        raise; -- a transaction within: see relay.was_aborted
    end;
    if these <> '{}' then
        return true;
    end if;
    with edited as (
        update relay.queue_dead_letters as d
           set original_payload = coalesce(d.original_payload, d.payload), payload = edit_message.payload
         where d.queue_id = q.id and d.id = edit_message.id returning d.*)
    insert into relay.dead_letter_actions (group_id, consumer, dead_transaction, letters, transaction_id, action, reason, acted_by)
    select d.group_id, 'queue:' || d.name, e.dead_transaction, array[e.id], e.transaction_id, 'edit', edit_message.reason,
           relay.calling_role(call)
      from edited as e join relay.queues as d on d.id = e.queue_id;
    return found;
end
$$;

select relay.replace_functions();

revoke all on function relay.event_key(text), relay.lock_deferred(text, text), relay.cancel(text, text, relay.call),
                       relay.reschedule(text, timestamptz, text),
                       relay.cancel_messages(text, text, text, bigint, text, text, text, text[], relay.call),
                       relay.move_messages(text, timestamptz, text, bigint, text, text, text, text, text[], relay.call),
                       relay.edit_message(text, bigint, jsonb, text, relay.call) from public;

do $$
begin
    if to_regrole('relay') is not null then
        grant select, insert, update, delete on relay.cancellations to relay;
        grant execute on function relay.event_key(text), relay.cancel(text, text, relay.call), relay.reschedule(text, timestamptz, text),
            relay.cancel_messages(text, text, text, bigint, text, text, text, text[], relay.call),
            relay.move_messages(text, timestamptz, text, bigint, text, text, text, text, text[], relay.call),
            relay.edit_message(text, bigint, jsonb, text, relay.call) to relay;
    end if;
    if to_regrole('relay_worker') is not null then
        grant execute on function relay.cancel_messages(text, text, text, bigint, text, text, text, text[], relay.call),
            relay.move_messages(text, timestamptz, text, bigint, text, text, text, text, text[], relay.call),
            relay.edit_message(text, bigint, jsonb, text, relay.call) to relay_worker;
    end if;
end
$$;

do $$
declare
    each regprocedure;
begin
    if to_regrole('relay_owner') is null then
        return;
    end if;
    grant select, insert, update on relay.cancellations to relay_owner;
    grant select, update, delete on relay.deferred to relay_owner;
    -- For the triggers of relay.deferred.
    grant select, delete on relay.deferred_keys to relay_owner;
    grant execute on function relay.event_key(text), relay.lock_deferred(text, text), relay.release_keys() to relay_owner;
    grant create on schema relay to relay_owner;
    for each in select p.oid from pg_proc as p
                 where p.pronamespace = 'relay'::regnamespace and p.prosecdef and p.proname in ('cancel', 'reschedule', 'cancel_messages', 'move_messages', 'edit_message') loop
        execute format('alter function %s owner to relay_owner', each);
    end loop;
    revoke create on schema relay from relay_owner;
exception when insufficient_privilege then
    raise notice 'relay: this role may not give functions to relay_owner; they stay its own';
end
$$;

insert into relay.migrations (name) values ('target/005_scheduled.sql') on conflict do nothing;
