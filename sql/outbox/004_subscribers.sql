-- Subscribers of a reader: conditions, thousands of them, that one position serves. Those that differ only in the exact texts of their
-- match share one condition, which is evaluated once for an event; the texts are looked up in an index. Needs 003_readers.sql.

create table if not exists relay.log_conditions (
    id        bigint   generated always as identity primary key,
    reader    bigint   not null references relay.log_readers on delete cascade,
    fields    text[]   not null,
    match     jsonb    not null,
    condition text     not null,
    digest    text     not null,
    unique (reader, digest)
);

comment on table relay.log_conditions is
    'what subscribers of readers have in common';
comment on column relay.log_conditions.id is
    'its number';
comment on column relay.log_conditions.reader is
    'the id of the reader';
comment on column relay.log_conditions.fields is
    'the fields for which the match of each has an exact text';
comment on column relay.log_conditions.match is
    'the rest of the match';
comment on column relay.log_conditions.condition is
    'where; empty: none';
comment on column relay.log_conditions.digest is
    'of what it is, which may be too long for an index';

create table if not exists relay.log_subscribers (
    reader        bigint      not null references relay.log_readers on delete cascade,
    name          text        not null,
    condition_id  bigint      not null references relay.log_conditions on delete cascade,
    texts         text[]      not null,
    params        jsonb,
    expires       interval,
    noted_at      timestamptz not null default now(),
    primary key (reader, name)
);
create index if not exists log_subscribers_texts on relay.log_subscribers (condition_id, texts);
create index if not exists log_subscribers_expire on relay.log_subscribers ((noted_at at time zone 'UTC' + expires))
    where expires is not null;

comment on table relay.log_subscribers is
    'the subscribers of relay.declare_subscriber';
comment on column relay.log_subscribers.reader is
    'the id of the reader';
comment on column relay.log_subscribers.name is
    'its name';
comment on column relay.log_subscribers.condition_id is
    'the id of its condition';
comment on column relay.log_subscribers.texts is
    'the texts of its match, in the order of the fields of the condition';
comment on column relay.log_subscribers.params is
    'the variables of its where';
comment on column relay.log_subscribers.expires is
    'how long after noted_at it is dropped; null: never';
comment on column relay.log_subscribers.noted_at is
    'when it was declared last';

-- Declares a subscriber of a reader that the caller may read; returns whether it is new. A second call sets its match, "where", params
-- and "expires", and is a sign of life: without one for as long as "expires" says, the subscriber is dropped. match, "where" and params
-- are those of relay.declare_reader. The fields for which match has an exact text, without *, ? and [, are looked up in an index.
create or replace function relay.declare_subscriber(
    reader text, name text, match jsonb default '{}', "where" text default null, params jsonb default null,
    expires interval default null,
    call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set lock_timeout = '5s'
as $$
declare
    its     bigint := (relay.log_reader(declare_subscriber.reader, call)).reader;
    path    text   := coalesce(relay.condition_path(declare_subscriber."where", declare_subscriber.params,
                                                    'relay.declare_subscriber')::text, '');
    exact   text[];
    asked   text[];
    rest    jsonb;
    known   text;
    shared  bigint;
    is_new  boolean;
begin
    if declare_subscriber.name is null or declare_subscriber.name !~ '^[^[:cntrl:]]{1,100}$' then
        raise invalid_parameter_value using message = 'relay.declare_subscriber: name must have 1 to 100 characters';
    end if;
    if declare_subscriber.expires < interval '5 minutes' then
        raise invalid_parameter_value using message = 'relay.declare_subscriber: expires must be at least five minutes';
    end if;
    if declare_subscriber.expires > interval '36500 days' then
        raise invalid_parameter_value using message = 'relay.declare_subscriber: expires must be at most 36500 days';
    end if;
    perform relay.require_bounded(declare_subscriber.match, 20000, 'relay.declare_subscriber: match');
    perform relay.match_condition(declare_subscriber.match);
    select coalesce(array_agg(m.key order by m.key) filter (where e.is_exact), '{}'),
           coalesce(array_agg(m.value #>> '{}' order by m.key) filter (where e.is_exact), '{}'),
           coalesce(jsonb_object_agg(m.key, m.value) filter (where not e.is_exact), '{}')
      into exact, asked, rest
      from jsonb_each(declare_subscriber.match) as m,
           lateral (select jsonb_typeof(m.value) = 'string' and m.value #>> '{}' !~ '[*?[]'
                           -- An entry of an index has at most 2,700 bytes.
                           and octet_length(m.value #>> '{}') * (select count(*) from jsonb_each(declare_subscriber.match)) < 2000
                   ) as e (is_exact);
    known := md5(jsonb_build_array(exact, rest, path)::text);
    loop
        -- With the lock that a reference takes: one that nobody has any more is just being dropped.
        select c.id into shared from relay.log_conditions as c where (c.reader, c.digest) = (its, known) for key share;
        exit when found;
        insert into relay.log_conditions (reader, fields, match, condition, digest)
        values (its, exact, rest, path, known) on conflict do nothing;
    end loop;
    insert into relay.log_subscribers as s (reader, name, condition_id, texts, params, expires)
    values (its, declare_subscriber.name, shared, asked, declare_subscriber.params, declare_subscriber.expires)
        on conflict on constraint log_subscribers_pkey do update
       set condition_id = excluded.condition_id, texts = excluded.texts, params = excluded.params, expires = excluded.expires,
           noted_at = now()
     where (s.condition_id, s.texts, s.params, s.expires)
           is distinct from (excluded.condition_id, excluded.texts, excluded.params, excluded.expires)
        or s.noted_at < now() - interval '1 minute'
    returning xmax = 0 into is_new;
    return coalesce(is_new, false);
exception when lock_not_available then
    raise lock_not_available using
        message = format('relay.declare_subscriber: another session declares, changes or drops the subscriber %L, or the first one with '
                         'such a condition, in a transaction that it has not ended', declare_subscriber.name),
        hint = 'Declare subscribers in transactions of their own.';
end
$$;

-- The subscribers of a reader whose conditions events satisfy, for each of the events, which are of relay's own outbox.
create or replace function relay.subscribers_of(
    reader text, events uuid[], call relay.call default relay.this_call()
) returns table (event uuid, subscriber text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set timezone = 'UTC' set row_security = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
as $$
declare
    its bigint := (relay.log_reader(subscribers_of.reader, call)).reader;
    c   relay.log_conditions;
begin
    for c in select * from relay.log_conditions as d where d.reader = its loop
        return query execute
            'select o.id, s.name from (select * from public.outbox_message_t as o where o.id = any ($1) and '
            || relay.match_condition(c.match)
            || case when c.condition <> '' and c.condition !~ '\$"' then ' and ' || relay.event_condition('$3', '''{}''') else '' end
            || ' offset 0) as o join relay.log_subscribers as s on s.condition_id = $2 and s.texts = '
            || relay.event_texts(c.fields)
            || case when c.condition ~ '\$"' then ' where ' || relay.event_condition('$3', 's.params') else '' end
            using subscribers_of.events, c.id, nullif(c.condition, '')::jsonpath;
    end loop;
end
$$;

-- The texts that the rows o of the outbox have in fields of events, as an array.
create or replace function relay.event_texts(fields text[]) returns text
language sql immutable
as $$
    select 'array[' || coalesce(string_agg(
               case when strpos(f, '.') = 0 then format('to_jsonb(o.%I) #>> ''{}''', f)
                    else format('o.%I #>> %L::text[]', split_part(f, '.', 1), (string_to_array(f, '.'))[2:]) end, ', ' order by n), '')
           || ']::text[]'
      from unnest(fields) with ordinality as u (f, n)
$$;

-- Drops a subscriber; returns whether there was one.
create or replace function relay.drop_subscriber(
    reader text, name text, call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
begin
    delete from relay.log_subscribers as s
     where s.reader = (relay.log_reader(drop_subscriber.reader, call)).reader and s.name = drop_subscriber.name;
    return found;
end
$$;

-- Drops the subscribers that have expired, and the conditions that nobody has any more; returns the number of subscribers. It leaves
-- those that another session has in a transaction for the next call.
create or replace function relay.expire_subscribers() returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    expired bigint;
    unused  tid[];
begin
    delete from relay.log_subscribers where ctid = any (array(
        select s.ctid from relay.log_subscribers as s
         where s.expires is not null and s.noted_at at time zone 'UTC' + s.expires < now() at time zone 'UTC'
           for update skip locked));
    get diagnostics expired = row_count;
    unused := array(select c.ctid from relay.log_conditions as c
                     where not exists (select from relay.log_subscribers as s where s.condition_id = c.id)
                       for update skip locked);
    -- One who got it before the lock was taken is seen by this statement only.
    delete from relay.log_conditions as c
     where c.ctid = any (unused) and not exists (select from relay.log_subscribers as s where s.condition_id = c.id);
    return expired;
end
$$;

select relay.replace_functions();

do $$
declare
    each text;
begin
    foreach each in array array['event_texts(text[])', 'declare_subscriber(text, text, jsonb, text, jsonb, interval, relay.call)',
                                'subscribers_of(text, uuid[], relay.call)', 'drop_subscriber(text, text, relay.call)',
                                'expire_subscribers()'] loop
        execute format('revoke all on function relay.%s from public', each);
    end loop;
    if to_regrole('relay_reader') is not null then
        grant execute on function relay.declare_subscriber(text, text, jsonb, text, jsonb, interval, relay.call),
                                  relay.subscribers_of(text, uuid[], relay.call),
                                  relay.drop_subscriber(text, text, relay.call) to relay_reader;
    end if;
    if to_regrole('relay') is not null then
        grant select on relay.log_conditions, relay.log_subscribers to relay;
        grant execute on function relay.expire_subscribers() to relay;
    end if;
end
$$;

do $$
declare
    each text;
begin
    if to_regrole('relay_owner') is null then
        return;
    end if;
    grant select, insert, update, delete on relay.log_conditions, relay.log_subscribers to relay_owner;
    grant execute on function relay.event_texts(text[]) to relay_owner;
    grant create on schema relay to relay_owner;
    foreach each in array array['declare_subscriber(text, text, jsonb, text, jsonb, interval, relay.call)',
                                'subscribers_of(text, uuid[], relay.call)',
                                'drop_subscriber(text, text, relay.call)', 'expire_subscribers()'] loop
        execute format('alter function relay.%s owner to relay_owner', each);
    end loop;
    revoke create on schema relay from relay_owner;
exception when insufficient_privilege then
    raise notice 'relay: this role may not give functions to relay_owner; they stay its own';
end
$$;

insert into relay.migrations (name) values ('outbox/004_subscribers.sql') on conflict do nothing;
