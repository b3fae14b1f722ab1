-- Schedules: events that relay publishes into its own outbox at given times. Needs 001_outbox.sql.
-- relay computes the times; what it publishes, and the move to the next time, are one statement, relay.tick.

create table if not exists relay.schedules (
    name           text          primary key check (length(name) between 1 and 100),
    id             uuid          not null default gen_random_uuid(),
    cron           text,
    every          interval,
    at             timestamptz,
    timezone       text          not null,
    missed         text          not null check (missed in ('latest', 'all', 'skip')),
    jitter         interval      not null,
    publish        jsonb         not null,
    configured_by  text,
    owner          name,
    since          timestamptz   not null default clock_timestamp(),
    paused_at      timestamptz,
    next_at        timestamptz,
    due_at         timestamptz,
    passed_at      timestamptz,
    last           timestamptz[] not null default '{}',
    last_event_id  uuid,
    published      bigint        not null default 0,
    missed_ticks   bigint        not null default 0,
    fault          text,
    version        bigint        not null default 1,
    check (num_nonnulls(cron, every, at) = 1)
);
alter table relay.schedules add column if not exists owner name;
-- For the least time, which is asked for every two seconds and after each one.
create index if not exists schedules_due on relay.schedules (due_at) where paused_at is null;

comment on table relay.schedules is
    'events that relay publishes at given times; relay.declare_schedule writes it';
comment on column relay.schedules.id is
    'the namespace of the ids of its events; another one after it was dropped and declared again';
comment on column relay.schedules.name is
    'its name';
comment on column relay.schedules.cron is
    'minute, hour, day of month, month and day of week, or an alias such as @daily';
comment on column relay.schedules.every is
    'an interval, which is counted from the beginning of 1970 in UTC';
comment on column relay.schedules.at is
    'a single time';
comment on column relay.schedules.paused_at is
    'since when it is paused';
comment on column relay.schedules.last_event_id is
    'the id of its newest event';
comment on column relay.schedules.published is
    'how many events it has published';
comment on column relay.schedules.timezone is
    'the time zone of cron';
comment on column relay.schedules.missed is
    'which of several times that have passed are published: the latest, all, or none';
comment on column relay.schedules.jitter is
    'each event is published so much later at most';
comment on column relay.schedules.publish is
    'the event, as in relay.publish, with host_id and user_id';
comment on column relay.schedules.configured_by is
    'the group whose configuration has it; null where SQL declared it';
comment on column relay.schedules.owner is
    'the role that declared it in SQL; null where a configuration has it, and where a former edition of relay declared it';
comment on column relay.schedules.since is
    'when it was declared, changed or resumed: earlier times are not missed';
comment on column relay.schedules.next_at is
    'its next time; null until relay has computed it, and where there is none';
comment on column relay.schedules.due_at is
    'when relay looks at it again: next_at and the jitter of that time; infinity where there is no next time';
comment on column relay.schedules.passed_at is
    'the newest of its times that was published or passed over: nothing is published for earlier ones';
comment on column relay.schedules.last is
    'the times of its ten newest events, the newest last';
comment on column relay.schedules.missed_ticks is
    'the times for which nothing was published within a minute';
comment on column relay.schedules.fault is
    'why it has no next time';
comment on column relay.schedules.version is
    'counts the changes of the row, so that of two instances one publishes';

-- Raises an error where another role than relay's gives the group whose configuration has a schedule.
create or replace function relay.require_configuring(configured_by text, call relay.call) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
    if configured_by is not null and to_regrole('relay') is not null and not relay.may_act_as('relay', call) then
        raise insufficient_privilege using message = 'configured_by: only a member of the role relay may give it';
    end if;
end
$$;

-- Raises an error unless the calling role is a member of a schedule's owner, or of relay. A schedule of a configuration is
-- relay's. One of a former edition has no owner: who may publish may change it, until it is declared again.
create or replace function relay.require_owner(schedule relay.schedules, called text, call relay.call) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
    if to_regrole('relay') is null or relay.may_act_as('relay', call) then
        return;
    elsif schedule.configured_by is not null then
        raise insufficient_privilege using message = format(
            '%s: %s is in the configuration of group %s: only a member of the role relay may change it', called, schedule.name,
            schedule.configured_by);
    elsif schedule.owner is not null and not relay.may_act_as(schedule.owner, call) then
        raise insufficient_privilege using message = format(
            '%s: %s belongs to the role %s: only its members, and those of relay, may change it', called, schedule.name,
            schedule.owner);
    end if;
end
$$;

-- Declares a schedule, or changes it; returns whether that changed anything. One of cron, every and at is given. Other times
-- than before begin now. publish is an event as in relay.publish, with host_id: {"host_id": ..., "event_type": ..., "payload": {}}.
create or replace function relay.declare_schedule(
    name          text,
    publish       jsonb,
    cron          text        default null,
    every         interval    default null,
    at            timestamptz default null,
    timezone      text        default 'UTC',
    missed        text        default 'latest',
    jitter        interval    default '0 s',
    configured_by text        default null,
    call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s'
as $$
#variable_conflict use_variable
declare
    caller  name := relay.calling_role(call);
    fault   text;
    unknown text;
    former  relay.schedules;
begin
    if jsonb_typeof(publish) = 'object' then
        select min(key) into unknown from jsonb_object_keys(publish) as key
         where key <> all (array['host_id', 'user_id', 'event_type', 'aggregate_type', 'aggregate_id', 'aggregate_version',
                                 'payload', 'metadata']);
    end if;
    fault := case
        when name is null or length(name) not between 1 and 100 then 'name: must have 1 to 100 characters'
        when name ~ '[[:cntrl:]]' then 'name: must not have control characters'
        when num_nonnulls(cron, every, at) <> 1 then 'give one of cron, every and at'
        when length(cron) > 1000 then 'cron: must have at most 1000 characters'
        when cron !~ '^\s*(@\w+|\S+(\s+\S+){4})\s*$' then 'cron: must have five fields: 0 3 * * *'
        when at not between '1970-01-01Z' and '9000-01-01Z' then 'at: must be a time from 1970 to 9000'
        when every < '1 s' then 'every: must be at least a second'
        when extract(year from every) <> 0 or extract(month from every) <> 0
             or extract(epoch from every) <> floor(extract(epoch from every))
            then 'every: must be whole seconds, without months: use cron'
        when every > '36500 days' then 'every: must be at most 36500 days'
        when jitter is null or jitter < '0 s' or jitter > '1 day' then 'jitter: must be from 0 to 1 day'
        when missed is null or missed not in ('latest', 'all', 'skip') then 'missed: must be latest, all or skip'
        when timezone is null then 'timezone: must be the name of a time zone'
        when jsonb_typeof(publish) is distinct from 'object' then 'publish: must be an object'
        when unknown is not null then format('publish: %s is not a key of a schedule''s event', unknown)
        when coalesce(publish ->> 'event_type', '') = '' then 'publish: has no event_type'
        when coalesce(publish ->> 'host_id', '') !~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
            then 'publish: host_id must be a UUID'
        when publish ->> 'user_id' !~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then 'publish: user_id must be a UUID'
        when coalesce(jsonb_typeof(publish -> 'metadata'), 'null') not in ('object', 'null')
            then 'publish: metadata must be an object'
        end;
    if fault is not null then
        raise invalid_parameter_value using message = 'relay.declare_schedule: ' || fault;
    end if;
    perform relay.require_bounded(publish, 100000, 'relay.declare_schedule: publish');
    -- What PostgreSQL takes for a time zone beside these, such as CEST or UTC+3, has no changes of clocks, and relay does
    -- not know it. The list is read from files: not for a name that another schedule has.
    if timezone <> 'UTC' and not exists (select from relay.schedules as s where s.timezone = declare_schedule.timezone and s.fault is null)
       and (timezone ~ '^(posix|right)/|^(localtime|posixrules|Factory)$'
            or not exists (select from pg_timezone_names as z where z.name = timezone)) then
        raise invalid_parameter_value using
            message = format('relay.declare_schedule: timezone: %L is not a time zone such as Europe/Paris', timezone);
    end if;
    perform relay.require_configuring(configured_by, call);

    insert into relay.schedules as s (name, cron, every, at, timezone, missed, jitter, publish, configured_by, owner)
    values (name, cron, every, at, timezone, missed, jitter, publish, configured_by,
            case when configured_by is null then caller end)
    on conflict do nothing;
    if found then
        return true;
    end if;
    select * into former from relay.schedules as s where s.name = declare_schedule.name for update;
    if former.configured_by is distinct from configured_by then
        raise object_not_in_prerequisite_state using message = format(
            'relay.declare_schedule: ' || case when former.configured_by is null then '%s is declared in SQL: drop it there first'
                                               else '%s is in the configuration of group %s: give one of the two another name' end, name, former.configured_by);
    end if;
    if (former.cron, former.every, former.at, former.timezone, former.missed, former.jitter, former.publish)
       is not distinct from (cron, every, at, timezone, missed, jitter, publish) then
        return false;
    end if;
    perform relay.require_owner(former, 'relay.declare_schedule', call);
    update relay.schedules as s
       set cron = declare_schedule.cron, every = declare_schedule.every, at = declare_schedule.at,
           timezone = declare_schedule.timezone, missed = declare_schedule.missed, jitter = declare_schedule.jitter,
           publish = declare_schedule.publish, next_at = null, due_at = null, fault = null, version = s.version + 1,
           owner = coalesce(s.owner, case when configured_by is null then caller end),
           since = case when (s.cron, s.every, s.at, s.timezone) is not distinct from (cron, every, at, timezone)
                        then s.since else clock_timestamp() end
     where s.name = declare_schedule.name;
    return true;
exception when lock_not_available then
    raise lock_not_available using
        message = format('relay.declare_schedule: another session declares, changes or drops the schedule %L in a transaction that it '
                         'has not ended', name),
        hint = 'Declare schedules in transactions of their own.';
end
$$;

-- Drops a schedule that SQL declared; returns whether there was one. configured_by: one of a group's configuration.
create or replace function relay.drop_schedule(
    name text, configured_by text default null, call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    s relay.schedules;
begin
    perform relay.require_configuring(configured_by, call);
    select * into s from relay.schedules as r where r.name = drop_schedule.name for update;
    if not found or s.configured_by is null and configured_by is not null then
        return false;
    elsif s.configured_by is distinct from configured_by then
        raise object_not_in_prerequisite_state using message = format(
            'relay.drop_schedule: %s is in the configuration of group %s: remove it there', name, s.configured_by);
    end if;
    perform relay.require_owner(s, 'relay.drop_schedule', call);
    delete from relay.schedules as r where r.name = drop_schedule.name;
    return true;
end
$$;

-- Pauses a schedule or lets it go on; returns whether that changed anything. Times of a pause are not missed.
create or replace function relay.pause_schedule(
    name text, paused boolean, call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    s relay.schedules;
begin
    select * into s from relay.schedules as r where r.name = pause_schedule.name for update;
    if not found then
        return false;
    end if;
    perform relay.require_owner(s, 'relay.pause_schedule', call);
    update relay.schedules as r
       set paused_at = case when paused then clock_timestamp() end, since = clock_timestamp(), next_at = null,
           due_at = null, version = r.version + 1
     where r.name = pause_schedule.name and (r.paused_at is not null) <> paused;
    return found;
end
$$;

-- The event of a schedule for relay.publish.
create or replace function relay.schedule_event(schedule relay.schedules, event_id uuid, more jsonb) returns jsonb
language sql immutable set search_path = pg_catalog, pg_temp
as $$
    select jsonb_build_array(
               '{"aggregate_type": null, "aggregate_id": null, "payload": {}}'
               || (schedule.publish - array['host_id', 'user_id'])
               || jsonb_build_object('id', event_id, 'metadata',
                      coalesce(nullif(schedule.publish -> 'metadata', 'null'), '{}')
                      || jsonb_build_object('schedule', schedule.name) || more))
$$;

-- Publishes a schedule's event now, beside its times; returns the event's id, null if there is no such schedule.
create or replace function relay.run_schedule(name text, call relay.call default relay.this_call()) returns uuid
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    s        relay.schedules;
    event_id uuid := gen_random_uuid();
begin
    select * into s from relay.schedules as r where r.name = run_schedule.name;
    if not found then
        return null;
    end if;
    perform relay.require_owner(s, 'relay.run_schedule', call);
    perform relay.publish((s.publish ->> 'host_id')::uuid, (s.publish ->> 'user_id')::uuid,
                          relay.schedule_event(s, event_id, '{}'));
    return event_id;
end
$$;

-- Publishes a schedule's events of some times, with their ids, and moves it on; returns whether it did. It does nothing where
-- the row is another one, or has another version, than that for which that was computed, or another session has it now. An event that
-- relay.declare_schedule would refuse now is not published: the schedule stands still, by its fault.
create or replace function relay.tick(
    name         text,
    id           uuid,
    version      bigint,
    times        timestamptz[],
    ids          uuid[],
    passed_at    timestamptz,
    next_at      timestamptz,
    due_at       timestamptz,
    missed_ticks bigint,
    fault        text default null
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    s     relay.schedules;
    given timestamptz[] := times;
    gone  text          := fault;
begin
    select * into s from relay.schedules as r
     where r.name = tick.name and r.id = tick.id and r.version = tick.version and r.paused_at is null
       for update skip locked;
    if not found then
        return false;
    end if;
    begin
        perform relay.require_bounded(s.publish, 100000, 'publish');
    exception when invalid_parameter_value then
        given := '{}';
        gone := sqlerrm;
    end;
    for i in 1 .. cardinality(given) loop
        perform relay.publish(
            (s.publish ->> 'host_id')::uuid, (s.publish ->> 'user_id')::uuid,
            relay.schedule_event(s, ids[i], jsonb_build_object(
                'scheduled_at', to_char(given[i] at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))));
    end loop;
    update relay.schedules as r
       set passed_at = greatest(r.passed_at, tick.passed_at),
           next_at = case when gone is null then tick.next_at end,
           due_at = case when gone is null then tick.due_at else 'infinity' end,
           published = r.published + cardinality(given), missed_ticks = r.missed_ticks + tick.missed_ticks,
           last = (r.last || given)[greatest(cardinality(r.last) + cardinality(given) - 9, 1):],
           last_event_id = coalesce(ids[cardinality(given)], r.last_event_id), fault = gone, version = r.version + 1
     where r.name = tick.name;
    return true;
end
$$;

select relay.replace_functions();

comment on function relay.declare_schedule(text, jsonb, text, interval, timestamptz, text, text, interval, text, relay.call) is
    'Declares a schedule, or changes it; returns whether that changed anything.';

revoke all on function relay.declare_schedule(text, jsonb, text, interval, timestamptz, text, text, interval, text, relay.call),
    relay.drop_schedule(text, text, relay.call), relay.pause_schedule(text, boolean, relay.call), relay.run_schedule(text, relay.call),
    relay.schedule_event(relay.schedules, uuid, jsonb), relay.require_configuring(text, relay.call),
    relay.require_owner(relay.schedules, text, relay.call), relay.require_bounded(jsonb, int, text),
    relay.calling_role(relay.call), relay.may_act_as(text, relay.call),
    relay.tick(text, uuid, bigint, timestamptz[], uuid[], timestamptz, timestamptz, timestamptz, bigint, text) from public;

do $$
begin
    if to_regrole('relay_publisher') is not null then
        grant execute on function
            relay.declare_schedule(text, jsonb, text, interval, timestamptz, text, text, interval, text, relay.call),
            relay.drop_schedule(text, text, relay.call), relay.pause_schedule(text, boolean, relay.call),
            relay.run_schedule(text, relay.call)
            to relay_publisher;
    end if;
    if to_regrole('relay') is not null then
        grant select on relay.schedules to relay;
        grant execute on function relay.declare_schedule(text, jsonb, text, interval, timestamptz, text, text, interval, text, relay.call) to relay;
        grant execute on function relay.drop_schedule(text, text, relay.call), relay.pause_schedule(text, boolean, relay.call) to relay;
        grant execute on function relay.run_schedule(text, relay.call) to relay;
        grant execute on function relay.tick(text, uuid, bigint, timestamptz[], uuid[], timestamptz, timestamptz, timestamptz, bigint, text) to relay;
    end if;
end
$$;

do $$
declare
    called text;
begin
    if to_regrole('relay_owner') is null then
        return;
    end if;
    grant select, insert, update, delete on relay.schedules to relay_owner;
    grant execute on function relay.schedule_event(relay.schedules, uuid, jsonb), relay.require_configuring(text, relay.call),
        relay.require_owner(relay.schedules, text, relay.call), relay.require_bounded(jsonb, int, text),
        relay.calling_role(relay.call), relay.may_act_as(text, relay.call) to relay_owner;
    grant create on schema relay to relay_owner;
    foreach called in array array[
        'declare_schedule(text, jsonb, text, interval, timestamptz, text, text, interval, text, relay.call)',
        'drop_schedule(text, text, relay.call)',
        'pause_schedule(text, boolean, relay.call)', 'run_schedule(text, relay.call)',
        'tick(text, uuid, bigint, timestamptz[], uuid[], timestamptz, timestamptz, timestamptz, bigint, text)'] loop
        execute format('alter function relay.%s owner to relay_owner', called);
    end loop;
    revoke create on schema relay from relay_owner;
exception when insufficient_privilege then
    raise notice 'relay: this role may not give the functions of schedules to relay_owner; they stay its own';
end
$$;

insert into relay.migrations (name) values ('outbox/002_schedules.sql') on conflict do nothing;
