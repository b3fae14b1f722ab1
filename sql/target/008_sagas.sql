-- Sagas: steps, undo and time on the queues. A saga is a queue that is ordered by the saga's key; what drives one is a message of that
-- queue, in the transaction that has claimed it. Needs 004_queues.sql. How: docs/how-to/sagas.md.

create table if not exists relay.sagas (
    id         bigint      generated always as identity primary key,
    saga       text        not null references relay.queues (name) on delete cascade,
    key        text        collate "C" not null,
    event_id   text        not null,
    host_id    text,
    version    int         not null,
    state      text        not null,
    entries    int         not null,
    step       text,
    next_at    timestamptz,
    error      text,
    started_at timestamptz not null default clock_timestamp(),
    since      timestamptz not null default clock_timestamp(),
    ended_at   timestamptz
) with (fillfactor = 70);
create unique index if not exists sagas_open on relay.sagas (saga, key) where ended_at is null;
create index if not exists sagas_events on relay.sagas (saga, key, event_id);
create index if not exists sagas_ended on relay.sagas (saga, ended_at) where ended_at is not null;

comment on table relay.sagas is
    'the sagas that run, and those that have ended, for the keep_done of their queue';
comment on column relay.sagas.saga is
    'the name of the saga, and of its queue';
comment on column relay.sagas.key is
    'what its events have in common, as relay.queue_items has it';
comment on column relay.sagas.event_id is
    'the event that has started it';
comment on column relay.sagas.version is
    'the version of its code that runs it to its end';
comment on column relay.sagas.state is
    'running, waiting, undoing, stuck; at the end done, compensated or given_up';
comment on column relay.sagas.entries is
    'how many rows of relay.saga_steps it has';
comment on column relay.sagas.step is
    'the type of the event that it waits for, or sleep; else the step that has failed, or whose undo has, and is tried again';
comment on column relay.sagas.next_at is
    'until when it waits; null: for ever';
comment on column relay.sagas.error is
    'why its step fails, or it has failed or is stuck';
comment on column relay.sagas.since is
    'since when it has its state';
comment on column relay.sagas.ended_at is
    'when it ended; null: it has not';

create table if not exists relay.saga_steps (
    saga_id bigint      not null references relay.sagas on delete cascade,
    number  int         not null,
    kind    text        not null,
    step    text        not null,
    result  json,
    at      timestamptz not null default clock_timestamp(),
    primary key (saga_id, number)
);

comment on table relay.saga_steps is
    'what has happened in a saga, in order; rows are only added';
comment on column relay.saga_steps.kind is
    'event: it was taken in; step: done; failed: given up; undone; waits: a wait has begun; wait: it is over; patched; fail: the saga has failed; act: of an operator';
comment on column relay.saga_steps.step is
    'the name of the step or of the wait, the type of the event, or the act';
comment on column relay.saga_steps.result is
    'what the step has returned, the event, or why it has failed';

-- So that whoever looks which keys are held does not read the messages that sleep, which have none.
create index if not exists queue_messages_later_keys on relay.queue_messages (queue_id, available_at)
    where available_at is not null and key is not null;

-- What a worker needs to know of the saga that a message is for, whose row it locks: as JSON, with the entries from a number on where the
-- worker knows those before. pending: the types of its first 100 events that nobody has taken in yet, in order. busy: another message
-- drives the saga right now. known: the saga that this event has started, or one of
-- this key that has ended, is there.
create or replace function relay.begin_saga(
    queue text, id bigint, saga bigint default null, entries int default 0, at timestamptz default null,
    call relay.call default relay.this_call()
) returns json
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan
as $$
declare
    q     record;
    m     record;
    open  relay.sagas;
    since int := 0;
begin
    select * into q from relay.queue_state(begin_saga.queue, call);
    if q.id is null then
        q := relay.require_queue(begin_saga.queue, call);
    end if;
    select coalesce(r.key, r.unique_key) as key, r.event_id, r.interruptions, r.error into m
      from relay.saga_message(q.id, begin_saga.id) as r;
    select s.* into open from relay.sagas as s
     where s.saga = begin_saga.queue and s.key = m.key and s.ended_at is null for update skip locked;
    if open.id is null then
        return json_build_object(
            'key', m.key, 'now', clock_timestamp(), 'interruptions', m.interruptions, 'failure', m.error,
            'busy', exists (select from relay.sagas as s where s.saga = begin_saga.queue and s.key = m.key and s.ended_at is null),
            'started', exists (select from relay.sagas as s
                                where s.saga = begin_saga.queue and s.key = m.key and s.event_id = m.event_id),
            'ended', exists (select from relay.sagas as s where s.saga = begin_saga.queue and s.key = m.key));
    end if;
    -- Of a database that has lost commits, as after a failover, the worker may know entries that are others here.
    if open.id = begin_saga.saga and exists (
        select from relay.saga_steps as s
         where s.saga_id = open.id and s.number = begin_saga.entries and s.at = begin_saga.at) then
        since := begin_saga.entries;
    end if;
    return json_build_object(
        'key', m.key, 'now', clock_timestamp(), 'interruptions', m.interruptions, 'failure', m.error,
        -- With the order that only one index has each, as in relay.lock_messages.
        'pending', (select coalesce(json_agg(e.event_type order by e.id), '[]') from (
            (select n.id, n.event_type from relay.queue_messages as n
              where n.queue_id = q.id and n.available_at is null and n.key >= m.key and n.key <= m.key and n.id <> begin_saga.id
              order by n.key, n.id limit 100)
            union all
            (select n.id, n.event_type from relay.queue_messages as n
              where n.queue_id = q.id and n.available_at is not null and n.key >= m.key and n.key <= m.key and n.id <> begin_saga.id
              order by n.key, n.available_at limit 100)
            union all
            (select n.id, n.event_type from relay.queue_messages as n
              where n.queue_id = q.id and n.unique_key >= m.key and n.unique_key <= m.key and n.key is null and n.id <> begin_saga.id
              order by n.unique_key limit 100)) as e
             where e.event_type <> 'relay.saga'),
        'at', (select s.at from relay.saga_steps as s where s.saga_id = open.id and s.number = open.entries),
        'saga', open.id, 'version', open.version, 'state', open.state, 'step', open.step, 'error', open.error, 'known', since,
        'entries', (select coalesce(json_agg(json_build_array(e.kind, e.step, e.result)), '[]')
                      from (select s.kind, s.step, s.result from relay.saga_steps as s
                             where s.saga_id = open.id and s.number > since order by s.number) as e));
end
$$;

-- The message with an id of a queue, whether it waits or not.
create or replace function relay.saga_message(the_queue bigint, the_id bigint) returns setof relay.queue_messages
language sql stable
as $$
    select * from relay.queue_messages as m where m.queue_id = the_queue and m.id = the_id and m.available_at is null
    union all
    select * from relay.queue_messages as m
     where m.queue_id = the_queue and m.id >= the_id and m.id <= the_id and m.available_at is not null
$$;

-- Adds entries to a saga, an array of [kind, step, result], and gives it a state, in the transaction of its worker. A saga that is
-- running or undoing goes on with this message, whose event it has taken in: at once or, after a failure, as relay.retry says. In any
-- other state the message is done. One that waits until a time gets a message for then, beside the order of its key. Returns false,
-- and changes no saga, where the message is another worker's, or the saga has changed since it was read: then the message has all its
-- attempts again.
create or replace function relay.advance_saga(
    queue text, id bigint, attempt int, saga bigint, known int, added json, state text, version int,
    step text default null, next_at timestamptz default null, error text default null, failure text default null,
    after interval default null, call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan
as $$
declare
    q        record;
    m        record;
    location tid;
    the_saga bigint := saga;
    former   timestamptz;
    goes_on  boolean := advance_saga.state in ('running', 'undoing');
    has_ended boolean := advance_saga.state in ('done', 'compensated', 'given_up');
begin
    select * into q from relay.queue_state(queue, call);
    if not found then
        q := relay.require_queue(queue, call);
    end if;
    location := relay.lock_message(q.id, advance_saga.id, advance_saga.attempt, false);
    if location is null then
        return false;
    end if;
    select coalesce(r.key, r.unique_key) as key, r.event_id, r.event_type, r.host_id, r.attempts, r.interruptions into m
      from relay.queue_messages as r where r.ctid = location;
    if the_saga is null then
        insert into relay.sagas as s (saga, key, event_id, host_id, version, state, entries, step, next_at, error, ended_at)
        values (queue, m.key, m.event_id, m.host_id, advance_saga.version, advance_saga.state, json_array_length(added),
                advance_saga.step, advance_saga.next_at, advance_saga.error, case when has_ended then clock_timestamp() end)
        returning s.id into the_saga;
        -- What came before it, and is held.
        perform relay.begin_times();
        update relay.queue_messages as r set available_at = greatest(clock_timestamp(), q.due_mark)
         where r.ctid = any (array(select o.ctid from relay.queue_messages as o
                                    where o.queue_id = q.id and o.unique_key = m.key and o.key is null
                                      for update skip locked));
    else
        select s.next_at into former from relay.sagas as s
         where s.id = the_saga and s.saga = queue and s.key = m.key and s.entries = advance_saga.known and s.ended_at is null
           for update;
        if not found then
            update relay.queue_messages as r set attempts = 0, interruptions = 0, error = null
             where r.ctid = location and r.event_type = 'relay.saga';
            return false;
        end if;
        update relay.sagas as s
           set entries = s.entries + json_array_length(added), state = advance_saga.state, step = advance_saga.step,
               next_at = advance_saga.next_at, error = advance_saga.error,
               ended_at = case when has_ended then clock_timestamp() end,
               since = case when s.state = advance_saga.state then s.since else clock_timestamp() end
         where s.id = the_saga;
    end if;
    if has_ended or former is distinct from advance_saga.next_at then
        -- What it no longer waits for.
        perform relay.remove_messages(array(
            select o.ctid from relay.queue_messages as o
             where o.queue_id = q.id and o.unique_key = m.key and o.key is null and o.event_type = 'relay.saga'
               and o.id <> advance_saga.id and (has_ended or o.available_at = former)
               for update skip locked));
    end if;
    insert into relay.saga_steps (saga_id, number, kind, step, result)
    select the_saga, advance_saga.known + e.number, e.entry ->> 0, e.entry ->> 1, e.entry -> 2
      from json_array_elements(added) with ordinality as e (entry, number);
    if attempt > 1 and failure is null then
        perform relay.note_attempt(location, attempt, 'delivered', null);
    end if;
    if goes_on then
        -- The event is the saga's now.
        if m.event_type <> 'relay.saga' or m.attempts > 0 or m.interruptions > 0 then
            update relay.queue_messages as r
               set event_type = 'relay.saga', payload = null, interruptions = 0, error = null,
                   attempts = case when failure is null then 0 else r.attempts end
             where r.ctid = location;
        end if;
        if failure is not null then
            -- Of two that drive it, as after an operator's act, one is enough.
            perform relay.remove_saga_messages(q.id, m.key, advance_saga.id);
            perform relay.retry(queue, advance_saga.id, advance_saga.attempt, after, failure, call);
        end if;
        return true;
    end if;
    if q.keeps then
        perform relay.keep_messages(array[location], attempt);
    end if;
    delete from relay.queue_messages as r where r.ctid = location;
    if has_ended then
        if not q.keeps then
            delete from relay.sagas as s where s.id = the_saga;
        end if;
    elsif advance_saga.next_at is not null then
        perform relay.wake_saga(q, m.key, m.host_id, advance_saga.next_at);
    end if;
    return true;
end
$$;

-- Removes what drives or wakes a saga, but for one message and what workers have.
create or replace function relay.remove_saga_messages(the_queue bigint, the_key text, but bigint default null) returns void
language plpgsql
as $$
begin
    perform relay.remove_messages(
        array(select o.ctid from relay.queue_messages as o
               where o.queue_id = the_queue and o.available_at is null and o.key = the_key and o.event_type = 'relay.saga'
                 and o.id is distinct from but for update skip locked)
        || array(select o.ctid from relay.queue_messages as o
                  where o.queue_id = the_queue and o.available_at is not null and o.key = the_key and o.event_type = 'relay.saga'
                    and o.id is distinct from but for update skip locked)
        || array(select o.ctid from relay.queue_messages as o
                  where o.queue_id = the_queue and o.unique_key = the_key and o.key is null and o.event_type = 'relay.saga'
                    and o.id is distinct from but for update skip locked));
end
$$;

-- Puts a message into a saga's queue, beside the order of its key, for which the saga is looked at again: at a time, where no such
-- message is there, or now.
create or replace function relay.wake_saga(q record, the_key text, host text, at timestamptz default null) returns void
language plpgsql
as $$
begin
    perform relay.begin_messages();
    perform relay.begin_times();
    if not exists (select from relay.queue_messages as o
                    where o.queue_id = q.id and o.unique_key = the_key and o.key is null and o.event_type = 'relay.saga'
                      and o.available_at = at) then
        insert into relay.queue_messages (queue_id, available_at, event_id, event_type, host_id, unique_key)
        values (q.id, greatest(at, clock_timestamp(), q.due_mark), gen_random_uuid()::text, 'relay.saga', host, the_key);
    end if;
    if at is null then
        perform relay.wake_workers(q.id);
    end if;
end
$$;

-- Holds an event for which there is no saga yet, out of the order of its key, so that it does not block the event that starts one. It is
-- looked at again after an interval, and when a saga of its key begins. Returns whether it was still this worker's.
create or replace function relay.hold_event(
    queue text, id bigint, attempt int, after interval, error text default null, call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan
as $$
declare
    q     record;
    taken boolean;
begin
    taken := relay.release(queue, id, attempt, after, error, call);
    if taken then
        q := relay.require_queue(queue, call);
        update relay.queue_messages as m set unique_key = coalesce(m.key, m.unique_key), key = null
         where m.queue_id = q.id and m.id >= hold_event.id and m.id <= hold_event.id and m.available_at is not null;
    end if;
    return taken;
end
$$;

-- What an operator does to a saga that has not ended. undo: it fails, and what it has done is undone. skip: the step that fails, or
-- whose undo does, counts as done; `result` is what it returns. give up: it ends, and nothing is undone. resume: it is looked at now, and
-- one that is stuck goes on. What follows has all its attempts. Returns whether there is such a saga, and something to do. Waits at most
-- five seconds for a step.
create or replace function relay.steer_saga(
    saga text, id bigint, act text, reason text default null, result json default null, call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s'
as $$
declare
    q     record;
    open  relay.sagas;
    next  text;
begin
    q := relay.require_queue(steer_saga.saga, call);
    if act is null or act not in ('undo', 'skip', 'give up', 'resume') then
        raise invalid_parameter_value using message = format('relay.steer_saga: %L is not undo, skip, give up or resume', act);
    end if;
    select s.* into open from relay.sagas as s where s.saga = steer_saga.saga and s.id = steer_saga.id for update;
    next := case when open.ended_at is not null then null
                 when act = 'give up' then 'given_up'
                 when act = 'resume' then case open.state when 'stuck' then 'undoing' else open.state end
                 when act = 'undo' then case when open.state in ('running', 'waiting') then 'undoing' end
                 when open.step is null or open.state = 'waiting' then null
                 when open.state = 'running' then 'running' else 'undoing' end;
    if open.id is null or next is null then
        return false;
    end if;
    insert into relay.saga_steps (saga_id, number, kind, step, result)
    select open.id, open.entries + row_number() over (), e.kind, e.step, e.result
      from (values ('act', act, json_build_object('by', relay.calling_role(call), 'reason', reason)),
                   (case when act = 'undo' then 'fail' when act = 'skip' and next = 'running' then 'skipped'
                         when act = 'skip' then 'undone' end,
                    case when act = 'skip' then open.step else '' end,
                    case when act = 'undo' then to_json(coalesce('undone by an operator: ' || reason, 'undone by an operator'))
                         when next = 'running' then result end)) as e (kind, step, result)
     where e.kind is not null;
    update relay.sagas as s
       set state = next, entries = s.entries + case when act in ('undo', 'skip') then 2 else 1 end,
           step = case when act = 'resume' then s.step end, next_at = case when act = 'resume' then s.next_at end,
           error = case when act = 'undo' then coalesce('undone by an operator: ' || reason, 'undone by an operator') else s.error end,
           since = case when s.state = next then s.since else clock_timestamp() end,
           ended_at = case when act = 'give up' then clock_timestamp() end
     where s.id = open.id;
    -- What it went on with, or was to be woken by: that has the attempts of another step. A worker that has it waits for this one.
    perform relay.remove_saga_messages(q.id, open.key);
    if act <> 'give up' then
        perform relay.wake_saga(q, open.key, open.host_id);
    end if;
    return true;
exception when lock_not_available then
    raise lock_not_available using message = format('saga %s of %L is in a step: try again when that has ended', id, saga);
end
$$;

do $$
declare
    each regprocedure;
begin
    for each in select p.oid from pg_proc as p
                 where p.pronamespace = 'relay'::regnamespace
                   and p.proname in ('steer_saga', 'begin_saga', 'saga_message', 'advance_saga', 'wake_saga', 'hold_event',
                                     'remove_saga_messages') loop
        execute format('revoke all on function %s from public', each);
    end loop;
    if to_regrole('relay_worker') is not null then
        grant execute on function relay.begin_saga(text, bigint, bigint, int, timestamptz, relay.call),
            relay.advance_saga(text, bigint, int, bigint, int, json, text, int, text, timestamptz, text, text, interval, relay.call),
            relay.hold_event(text, bigint, int, interval, text, relay.call),
            relay.steer_saga(text, bigint, text, text, json, relay.call) to relay_worker;
    end if;
    if to_regrole('relay') is not null then
        -- To show them, to remove those that have ended, and to erase a host.
        grant select, delete on relay.sagas, relay.saga_steps to relay;
        grant execute on function relay.steer_saga(text, bigint, text, text, json, relay.call) to relay;
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
    grant select, insert, update, delete on relay.sagas, relay.saga_steps to relay_owner;
    grant execute on function relay.saga_message(bigint, bigint), relay.wake_saga(record, text, text, timestamptz),
        relay.remove_saga_messages(bigint, text, bigint) to relay_owner;
    grant create on schema relay to relay_owner;
    for each in select p.oid from pg_proc as p where p.pronamespace = 'relay'::regnamespace and p.prosecdef
                   and p.proname in ('begin_saga', 'advance_saga', 'hold_event', 'steer_saga') loop
        execute format('alter function %s owner to relay_owner', each);
    end loop;
    revoke create on schema relay from relay_owner;
exception when insufficient_privilege then
    raise notice 'relay: this role may not give functions to relay_owner; they stay its own';
end
$$;

insert into relay.migrations (name) values ('target/008_sagas.sql') on conflict do nothing;
