-- Named readers of relay's own outbox, for every language: relay.read returns the next events and changes nothing, and
-- relay.advance moves the position in the caller's transaction. Needs 001_outbox.sql, source/002_retention.sql and
-- source/004_witnesses.sql.

create table if not exists relay.log_readers (
    id         bigint      generated always as identity primary key,
    name       text        not null unique,
    owner      name        not null,
    match      jsonb       not null,
    expires    interval,
    max_lag    interval,
    created_at timestamptz not null default now(),
    expired_at timestamptz,
    condition  jsonpath,
    params     jsonb,
    lane_of    text,
    lane       int,
    lanes      int,
    lane_key   text,
    history    uuid
);
alter table relay.log_readers
    add column if not exists condition jsonpath, add column if not exists params jsonb,
    add column if not exists lane_of text, add column if not exists lane int, add column if not exists lanes int,
    add column if not exists lane_key text, add column if not exists history uuid;
create index if not exists log_readers_lanes on relay.log_readers (lane_of) where lane_of is not null;

comment on table relay.log_readers is
    'the readers of relay.declare_reader';
comment on column relay.log_readers.id is
    'its number';
comment on column relay.log_readers.name is
    'its name';
comment on column relay.log_readers.created_at is
    'when it was declared';
comment on column relay.log_readers.owner is
    'the role whose members may read and advance';
comment on column relay.log_readers.match is
    'which events it gets: values, globs or lists of them by field or path; {}: all';
comment on column relay.log_readers.expires is
    'after how long without a sign of life retention no longer keeps events for it; null: never';
comment on column relay.log_readers.max_lag is
    'the age of an unread event from which on retention no longer keeps events for it; null: retention.max_lag';
comment on column relay.log_readers.expired_at is
    'when it expired; null while it has not';
comment on column relay.log_readers.condition is
    'where: of the events that match, it gets those that satisfy this path; null: all';
comment on column relay.log_readers.params is
    'the variables of the path';
comment on column relay.log_readers.lane_of is
    'the name that was declared with lanes, of which this reader is one; null: it has no lanes';
comment on column relay.log_readers.lane is
    'the number of the lane, from 1';
comment on column relay.log_readers.lanes is
    'how many lanes there are';
comment on column relay.log_readers.lane_key is
    'what each value of is in one lane: host or aggregate';
comment on column relay.log_readers.history is
    'the witness of the history of the database that its position is of; a copy of the database does not have it';

-- The newest row is the position. Appended, since a row that is updated in place is slower while anybody holds a snapshot.
create table if not exists relay.log_positions (
    reader   bigint      not null references relay.log_readers on delete cascade,
    number   bigint      not null,
    snapshot pg_snapshot not null,
    moved_at timestamptz not null default now(),
    primary key (reader, number)
);

comment on table relay.log_positions is
    'where the readers of relay.declare_reader are; the newest row counts';
comment on column relay.log_positions.reader is
    'the id of the reader';
comment on column relay.log_positions.moved_at is
    'when it moved there';
comment on column relay.log_positions.number is
    'counts moves, from another number for each reader; two sessions cannot insert the same one';
comment on column relay.log_positions.snapshot is
    'everything that it sees is read';

-- The regular expression that a pattern stands for: *, ?, [abc], [a-c], [!abc], as fnmatch of Python has them. A [ without an
-- end is itself.
create or replace function relay.glob_expression(glob text) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
declare
    parts     text[] := '{}';
    items     text;
    rest      text := glob;
    class     text;
    inverted  boolean;
    character text;
begin
    while rest <> '' loop
        class := substring(rest from '^\[(!?\]?[^\]]*)\]');
        if class is null or class in ('', '!') then
            character := left(rest, 1);
            rest := substr(rest, 2);
            parts := parts || case when character = '*' then '.*' when character = '?' then '.'
                                   when character ~ '[[:alnum:]]' then character else '\' || character end;
            continue;
        end if;
        rest := substr(rest, length(class) + 3);
        inverted := class like '!%';
        class := case when inverted then substr(class, 2) else class end;
        items := '';
        while class <> '' loop
            if class like '_-_%' then
                -- A range that ends before it begins is empty.
                if left(class, 1) collate "C" <= substr(class, 3, 1) collate "C" then
                    items := items || regexp_replace(left(class, 1), '([][\\^-])', '\\\1') || '-'
                             || regexp_replace(substr(class, 3, 1), '([][\\^-])', '\\\1');
                end if;
                class := substr(class, 4);
            else
                items := items || regexp_replace(left(class, 1), '([][\\^-])', '\\\1');
                class := substr(class, 2);
            end if;
        end loop;
        parts := parts || case when items <> '' then format('[%s%s]', case when inverted then '^' else '' end, items)
                               when inverted then '.' else '(?!.)(?=.)' end;
    end loop;
    return '^(?:' || array_to_string(parts, '') || ')$';
end
$$;

-- The condition on the rows o of the outbox that a match stands for. Fails for a match that cannot be.
create or replace function relay.match_condition(match jsonb) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
declare
    field     text;
    given     jsonb;
    item      jsonb;
    value     text;
    any_of    text[];
    condition text := 'true';
begin
    if jsonb_typeof(match) is distinct from 'object' then
        raise invalid_parameter_value using
            message = 'relay.declare_reader: match must be an object, such as {"event_type": "order.*"}';
    end if;
    for field, given in select key, m.value from jsonb_each(match) as m loop
        if field in ('id', 'event_type', 'host_id', 'user_id', 'aggregate_type', 'aggregate_id', 'aggregate_version',
                     'transaction_id') then
            value := format('to_jsonb(o.%I)', field);
        elsif field ~ '^(payload|metadata)([.][^.]+)+$' then
            value := format('(o.%I #> %L::text[])', split_part(field, '.', 1), (string_to_array(field, '.'))[2:]);
        else
            raise invalid_parameter_value using
                message = format('relay.declare_reader: match: %L is neither a field of an event nor a path such as '
                                 'payload.customer.tier', field);
        end if;
        any_of := '{}';
        for item in select e from jsonb_array_elements(case jsonb_typeof(given) when 'array' then given
                                                            else jsonb_build_array(given) end) as e loop
            if jsonb_typeof(item) = 'string' then
                any_of := any_of || format('%s #>> ''{}'' ~ %L', value, relay.glob_expression(item #>> '{}'));
            elsif jsonb_typeof(item) in ('number', 'boolean') then
                any_of := any_of || format('%s = %L::jsonb', value, item);
                if jsonb_typeof(item) = 'number' then
                    any_of := any_of || format('%s = to_jsonb(%L::text)', value, item);
                end if;
            else
                any_of := '{}';
                exit;
            end if;
        end loop;
        if any_of = '{}' then
            raise invalid_parameter_value using
                message = format('relay.declare_reader: match: the value of %s must be a value, a pattern such as order.*, '
                                 'or a list of them', field);
        end if;
        condition := condition || ' and (' || array_to_string(any_of, ' or ') || ') is true';
    end loop;
    return condition;
end
$$;

-- The condition on the rows o of the outbox that are in a lane.
create or replace function relay.lane_condition(key text, lane int, lanes int) returns text
language sql immutable
as $$
    select format('(hashtextextended(%s collate "C", 0) & 9223372036854775807) %% %s = %s',
                  case key when 'host' then 'coalesce(o.host_id::text, '''')'
                           else 'concat_ws('':'', o.host_id, o.aggregate_type, o.aggregate_id)' end, lanes, lane - 1)
$$;

-- Whether an event satisfies a path of SQL/JSON, as relay.declare_reader says. One that fails for the event, in whatever way, is not
-- satisfied. relay.satisfies is the same in the target's database.
create or replace function relay.event_satisfies(event jsonb, path jsonpath, params jsonb) returns boolean
language plpgsql stable
as $$
begin
    return coalesce(jsonb_path_query_first_tz(event, path, coalesce(params, '{}'), true) not in ('null', 'false'), false);
exception when others then
    return false;
end
$$;

-- The condition on the rows o of the outbox that satisfy a path: two parameters of a statement.
create or replace function relay.event_condition(path text, params text) returns text
language sql immutable
as $$
    select 'relay.event_satisfies(jsonb_build_object(' || string_agg(format('%1$L, o.%1$I', f), ', ') || format('), %s, %s)', path, params)
      from unnest(array['id', 'event_type', 'host_id', 'user_id', 'aggregate_type', 'aggregate_id', 'aggregate_version', 'event_ts',
                        'transaction_id', 'payload', 'metadata']) as f
$$;

-- Of a former edition.
drop function if exists relay.log_start(text);

-- The reader, if the caller is a member of its owner, or of relay, and where it is; an error otherwise.
create or replace function relay.log_reader(asked text, call relay.call, out reader bigint, out number bigint, out snapshot pg_snapshot,
                                            out given_up_at timestamptz, out expired_at timestamptz,
                                            out declared relay.log_readers)
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    found relay.log_readers;
begin
    select * into found from relay.log_readers as r where r.name = asked;
    -- Nobody is told the names of others' readers.
    if found.id is null or not relay.may_act_as(found.owner, call) then
        raise insufficient_privilege using
            message = format('relay: there is no reader %L of the role %s', asked, relay.calling_role(call)),
            hint = 'Declare it with relay.declare_reader, or be a member of the role that has declared it. Of a reader with '
                   'lanes, read each lane: the first one of billing is billing/1.';
    end if;
    reader := found.id;
    declared := found;
    expired_at := found.expired_at;
    select p.number, p.snapshot into number, snapshot
      from relay.log_positions as p where p.reader = found.id order by p.number desc limit 1;
    select r.given_up_at into given_up_at
      from relay.readers as r where (r.group_id, r.target, r.reader) = ('', 'relay.declare_reader', asked);
end
$$;

-- The witness of the present history of the database; an error where there is none yet.
create or replace function relay.present_history() returns uuid
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    present uuid := relay.history();
begin
    if present is null then
        raise object_not_in_prerequisite_state using
            message = 'relay: this database has no history yet, as after a dump was restored into it: run `relay init`';
    end if;
    return present;
end
$$;

-- What tells the positions of this server from others: the history of the database, and the server's timeline.
create or replace function relay.log_origin(history uuid) returns text
language sql stable set search_path = pg_catalog, pg_temp
as $$
    select left(history::text, 8) || '.'
           || case when pg_is_in_recovery() then 0
                   else ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int end
$$;

-- The parts of a position as text: number/snapshot@origin. Fails for any other text.
create or replace function relay.log_position(given text, out number bigint, out snapshot pg_snapshot, out origin text)
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
declare
    parts text[] := regexp_match(given, '^(\d{1,19})/(\d+:\d+:[\d,]*)(?:@([0-9a-f]{8}[.]\d+))?$');
begin
    if parts is null then
        raise invalid_parameter_value using
            message = format('relay: %L is neither now, beginning, nor a position that relay.read has returned', given);
    end if;
    if parts[3] is null then
        raise invalid_parameter_value using
            message = format('relay: the position %L does not say which history of the database it is of: it is from before '
                             '`relay init` brought relay''s schema up to date', given),
            hint = 'Read again, or say with relay.seek where the reader goes on: now, or beginning.';
    end if;
    number := parts[1]::bigint;
    snapshot := parts[2]::pg_snapshot;
    origin := parts[3];
end
$$;

-- Fails for a reader whose position is of another history of the database: what this one has may be missing in it.
create or replace function relay.require_history(declared relay.log_readers) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
    if declared.history is not null and relay.holds_witness(declared.history) then
        return;
    end if;
    raise object_not_in_prerequisite_state using
        message = format('relay: the position of the reader %L is of another history of this database, such as from before '
                         'a dump was restored: events that this one has could be skipped', declared.name),
        hint = case when relay.history() is null then 'Run `relay init`. Where the reader is refused after it, too, say' else 'Say' end
               || ' with relay.seek where the reader goes on: now, or beginning.',
        constraint = 'relay_reader_history';
end
$$;

-- The snapshot that a start stands for: now, beginning (rows that have a c_xid), or a position of this server. One that was
-- kept elsewhere may be of transactions that a failover has lost: it has to be of the present timeline.
create or replace function relay.log_start(start text, history uuid default null) returns pg_snapshot
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    present pg_snapshot := pg_current_snapshot();
    given   record;
begin
    if pg_is_in_recovery() then
        raise object_not_in_prerequisite_state using
            message = 'relay: readers are of the primary: this server is a standby', constraint = 'relay_reader_standby';
    elsif start = 'now' then
        return present;
    elsif start = 'beginning' then
        return '3:3:';
    end if;
    select * into given from relay.log_position(start);
    if given.origin is distinct from relay.log_origin(history) or pg_snapshot_xmax(given.snapshot) > pg_snapshot_xmax(present) then
        raise invalid_parameter_value using
            message = format('relay: the position %L is of another server: it was read before a dump was restored, or a standby '
                             'promoted, and may have events that this one does not have', start),
            hint = 'Give now, or beginning, or a position that relay.read has returned since.';
    end if;
    return given.snapshot;
end
$$;

-- Declares a reader of the calling role; returns whether it is new. A second call sets its match, "where", params, "expires" and
-- "max_lag", does not move it, and is a sign of life. From its commit on, retention keeps what it has not read, up to "max_lag", by
-- default retention.max_lag, and until it has given no sign of life for as long as "expires" says. After that relay.read fails, until
-- relay.seek says where it goes on; a reader that is expired for seven days is dropped.
-- "where" is a path of SQL/JSON into an event, such as '$.payload.amount >= $least', with its variables in params; it is true where it
-- yields anything but false or null first, and false where it fails. An event has the fields id, event_type, host_id, user_id,
-- aggregate_type, aggregate_id, aggregate_version, event_ts, transaction_id, payload and metadata.
-- With "lanes", it declares as many readers, name/1 and so on: the events of one host, or one aggregate, as "lane_key" says, are in one
-- of them, in order. No other new reader has such a name. It waits at most five seconds for a transaction that declares, changes or drops
-- a reader of the same name.
create or replace function relay.declare_reader(
    name text, match jsonb default '{}', start text default 'now', expires interval default null, max_lag interval default null,
    "where" text default null, params jsonb default null, lanes int default null, lane_key text default 'host',
    call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set lock_timeout = '5s'
as $$
declare
    caller name        := relay.calling_role(call);
    bound  uuid        := relay.present_history();
    first  pg_snapshot := relay.log_start(declare_reader.start, bound);
    path   jsonpath;
    others record;
    each   text;
    new_id bigint;
    is_new boolean := false;
begin
    if declare_reader.name is null or declare_reader.name !~ '^[^[:cntrl:]]{1,100}$' then
        raise invalid_parameter_value using message = 'relay.declare_reader: name must have 1 to 100 characters';
    end if;
    perform relay.require_bounded(declare_reader.match, 20000, 'relay.declare_reader: match');
    perform relay.match_condition(declare_reader.match);
    path := relay.condition_path(declare_reader."where", declare_reader.params, 'relay.declare_reader');
    -- Signs of life are given once a minute.
    if declare_reader.expires < interval '5 minutes' or declare_reader.max_lag < interval '5 minutes' then
        raise invalid_parameter_value using message = 'relay.declare_reader: expires and max_lag must be at least five minutes';
    end if;
    if declare_reader.expires > interval '36500 days' or declare_reader.max_lag > interval '36500 days' then
        raise invalid_parameter_value using message = 'relay.declare_reader: expires and max_lag must be at most 36500 days';
    end if;
    if declare_reader.lanes not between 1 and 256 then
        raise invalid_parameter_value using message = 'relay.declare_reader: lanes must be 1 to 256, or null';
    end if;
    if declare_reader.lane_key is null or declare_reader.lane_key not in ('host', 'aggregate') then
        raise invalid_parameter_value using message = 'relay.declare_reader: lane_key must be host or aggregate';
    end if;
    -- Who declares a single lane would keep everybody else from declaring the reader.
    if declare_reader.name ~ '/[1-9][0-9]{0,2}$'
       and not exists (select from relay.log_readers as r where r.name = declare_reader.name) then
        raise invalid_parameter_value using
            message = format('relay.declare_reader: name: %L would be that of a lane of another reader: leave out the number after '
                             'the /', declare_reader.name);
    end if;
    -- How many readers the name stands for: two sessions cannot make it one with lanes and one without.
    if not exists (select from relay.log_readers as r where r.name = declare_reader.name)
       and not exists (select from relay.log_readers as r where r.lane_of = declare_reader.name) then
        perform pg_advisory_xact_lock(x'7264726c'::int, hashtext(declare_reader.name));
    end if;
    select r.lanes, r.lane_key, r.name into others
      from (select * from relay.log_readers as r where r.name = declare_reader.name
             union all
            select * from relay.log_readers as r where r.lane_of = declare_reader.name) as r
     where (r.lane_of, r.lanes, r.lane_key) is distinct from
           (case when declare_reader.lanes is not null then declare_reader.name end, declare_reader.lanes,
            case when declare_reader.lanes is not null then declare_reader.lane_key end) limit 1;
    if found then
        perform relay.log_reader(others.name, call);
        raise invalid_parameter_value using
            message = format('relay.declare_reader: lanes: the reader %L has %s: to change that, drop it and declare it again',
                             declare_reader.name, coalesce(others.lanes || ' lanes by ' || others.lane_key, 'no lanes'));
    end if;
    for each in select case when declare_reader.lanes is null then declare_reader.name else declare_reader.name || '/' || n end
                  from generate_series(1, coalesce(declare_reader.lanes, 1)) as n order by n loop
        insert into relay.log_readers (name, owner, match, expires, max_lag, condition, params, lane_of, lane, lanes, lane_key,
                                       history)
        select each, caller, declare_reader.match, declare_reader.expires, declare_reader.max_lag, path, declare_reader.params,
               l.lane_of, substr(each, length(l.lane_of) + 2)::int, declare_reader.lanes,
               case when l.lane_of is not null then declare_reader.lane_key end, bound
          from (select case when declare_reader.lanes is not null then declare_reader.name end as lane_of) as l
            on conflict on constraint log_readers_name_key do nothing returning id into new_id;
        if new_id is null then
            perform relay.log_reader(each, call);
            if not exists (select from relay.log_readers as r where r.name = each
                              and r.lanes is not distinct from declare_reader.lanes) then
                raise invalid_parameter_value using
                    message = format('relay.declare_reader: there is a reader %L that is no lane: drop it first', each);
            end if;
            update relay.log_readers as r
               set match = declare_reader.match, expires = declare_reader.expires, max_lag = declare_reader.max_lag,
                   condition = path, params = declare_reader.params
             where r.name = each
               and (r.match, r.expires, r.max_lag, r.condition::text, r.params)
                   is distinct from (declare_reader.match, declare_reader.expires, declare_reader.max_lag, path::text,
                                     declare_reader.params);
            update relay.readers as r set noted_at = now()
             where (r.group_id, r.target, r.reader) = ('', 'relay.declare_reader', each)
               and r.noted_at < now() - interval '5 seconds';
            continue;
        end if;
        is_new := true;
        insert into relay.log_positions (reader, number, snapshot) values (new_id, (new_id << 32) + 1, first);
        insert into relay.readers (group_id, target, reader, snapshot, outbox)
        values ('', 'relay.declare_reader', each, first, 'public.outbox_message_t');
    end loop;
    return is_new;
exception when lock_not_available then
    raise lock_not_available using
        message = format('relay.declare_reader: another session declares, changes or drops the reader %L in a transaction that it '
                         'has not ended', declare_reader.name),
        hint = 'Declare readers in transactions of their own.';
end
$$;

-- The next transactions after a snapshot that "present" sees, of about "max" rows of the outbox, in order, and the snapshot after
-- them. None: everything is read, and "reached" is "present".
-- Transactions are ordered by the greatest c_offset of their rows, so one that inserts after another has committed comes later.
-- Rows are found along the index on c_xid, in which that one may be earlier. Transactions that come later than all others that
-- were found are therefore left for the next time, as many as can be open at once: whatever is committed, not found, and earlier than
-- a transaction before these began after all of them, when each of them was still open. More rows are looked for until there are
-- "max" without these.
create or replace function relay.next_transactions(after pg_snapshot, present pg_snapshot, max int, out next_xids xid8[], out reached text)
language plpgsql stable set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
    late    xid8[] := array(select pg_snapshot_xip(after));
    lowest  xid8   := pg_snapshot_xmax(after);
    open_at int := current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int
                   + current_setting('max_worker_processes')::int + current_setting('max_wal_senders')::int + 10;
    most    bigint := next_transactions.max::bigint + 2 * open_at;
    highest xid8;
    xids    xid8[];
    offsets bigint[];
    counts  int[];
    average bigint;
    fitting int;
    rest    int;
    ends    xid8;
    missing xid8[];
begin
    loop
        -- The last one of a full portion may have more rows: the next portion begins with it.
        with newer as materialized (
            select c_xid, c_offset from public.outbox_message_t
             where c_xid >= lowest and c_xid < pg_snapshot_xmax(present) and pg_visible_in_snapshot(c_xid, present)
             order by c_xid limit most),
        last as (
            select case when (select count(*) from newer) = most then (select c_xid from newer order by c_xid desc limit 1) end as xid),
        found as (
            select c_xid, pg_catalog.max(c_offset) as last_offset, count(*)::int as events
              from (select c_xid, c_offset from public.outbox_message_t
                     where c_xid = any (case when xids is null then late end) and pg_visible_in_snapshot(c_xid, present)
                     union all
                    select c_xid, c_offset from newer, last where last.xid is null or c_xid < last.xid) as r
             group by c_xid
             union all
            select * from unnest(xids, offsets, counts)),
        ordered as (
            select *, sum(events) over (order by last_offset rows unbounded preceding) as through from found order by last_offset)
        select (select xid from last), array_agg(c_xid), array_agg(last_offset), array_agg(events), sum(events) / count(*),
               count(*) filter (where through <= next_transactions.max)
          into highest, xids, offsets, counts, average, fitting from ordered;
        rest := coalesce(cardinality(xids), 0) - case when highest is not null then open_at else 0 end;
        exit when highest is null or fitting < rest;
        -- So many rows as are lacking, if the next transactions are like those that were found.
        most := case when xids is null or highest = lowest then 4 * most
                     else greatest(next_transactions.max + (2 - rest) * average, average) * 5 / 4 end;
        lowest := highest;
    end loop;
    next_xids := coalesce(xids[:least(rest, greatest(fitting, 1))], '{}');
    if next_xids = '{}' then
        reached := present;
        return;
    end if;
    -- PostgreSQL 14 has no max(xid8).
    ends := (select x from unnest(next_xids) as x order by x desc limit 1);
    ends := greatest(pg_snapshot_xmax(after), ((ends::text::bigint + 1)::text)::xid8);
    select coalesce(array_agg(x order by x), '{}') into missing
      from (select x from unnest(late) as x where not pg_visible_in_snapshot(x, present)
             union select x from unnest(xids[cardinality(next_xids) + 1:]) as x where x < ends
             union select x from pg_snapshot_xip(present) as x where x < ends and x >= pg_snapshot_xmax(after)) as m;
    reached := format('%s:%s:%s', coalesce(missing[1], ends), ends, array_to_string(missing, ','));
end
$$;

-- The next events of a reader, of about "max" rows of the outbox, in whole database transactions; it changes nothing. Each row has
-- the position that relay.advance is to be given when all of them are done. An only row without id: nothing of what is new
-- matches. No row: nothing is new.
-- It reads on from "after", a position that it has returned and that is not advanced to yet, instead of from where the reader is.
create or replace function relay.read(
    reader text, max int default 1000, after text default null, call relay.call default relay.this_call()
)
returns table ("position" text, id uuid, host_id uuid, user_id uuid, aggregate_type text, aggregate_id text,
               aggregate_version bigint, event_type text, event_ts timestamptz, payload jsonb, metadata jsonb,
               transaction_id uuid, transaction_ordinal int, transaction_count int, deliver_at timestamptz, c_offset bigint,
               c_xid xid8)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set row_security = off
set timezone = 'UTC' set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = on set enable_mergejoin = off
set enable_nestloop = off set jit = off
as $$
#variable_conflict use_column
declare
    its     record;
    present pg_snapshot;
    xids    xid8[];
    reached text;
    origin  text;
    given   record;
    chosen  text;
begin
    if read.max is null or read.max < 1 then
        raise invalid_parameter_value using message = 'relay.read: max must be 1 or more';
    end if;
    select * into its from relay.log_reader(read.reader, call);
    if its.given_up_at is not null then
        raise object_not_in_prerequisite_state using
            message = format('relay.read: the reader %L was given up by retention (%s) at %s, and events that it has not read '
                             'may be gone', read.reader,
                             case when its.expired_at is null then 'max_lag' else 'expires' end, its.given_up_at),
            hint = 'Say with relay.seek where it goes on.', constraint = 'relay_reader_given_up';
    end if;
    -- As relay.log_start: not on a standby, whose snapshots do not say what is in progress.
    present := relay.log_start('now');
    perform relay.require_history(its.declared);
    origin := relay.log_origin((its.declared).history);
    if read.after is not null then
        select * into given from relay.log_position(read.after);
        if (given.number, given.origin) is distinct from (its.number, origin) then
            raise object_not_in_prerequisite_state using
                message = format('relay.read: another session has moved the reader %L since this position was read', read.reader),
                hint = 'Read again, without "after".', constraint = 'relay_reader_moved';
        end if;
        its.snapshot := given.snapshot;
    end if;
    if pg_snapshot_xmax(its.snapshot) > pg_snapshot_xmax(present) then
        raise object_not_in_prerequisite_state using
            message = format('relay.read: the transaction is older than the position of the reader %L', read.reader),
            hint = 'Read in a transaction of the isolation level READ COMMITTED.';
    end if;
    select n.next_xids, n.reached into xids, reached
      from relay.next_transactions(its.snapshot, present, read.max) as n;
    if xids = '{}' then
        return;
    end if;
    chosen := relay.match_condition((its.declared).match);
    if (its.declared).lanes is not null then
        chosen := chosen || ' and '
                  || relay.lane_condition((its.declared).lane_key, (its.declared).lane, (its.declared).lanes);
    end if;
    if (its.declared).condition is not null then
        chosen := chosen || ' and ' || relay.event_condition('$3', '$4');
    end if;
    -- A condition may be costly: it is not evaluated for what is between, and left for later.
    return query execute
        'select $2, o.id, o.host_id, o.user_id, o.aggregate_type, o.aggregate_id, o.aggregate_version, o.event_type, o.event_ts, '
        'o.payload, o.metadata, o.transaction_id, o.transaction_ordinal, o.transaction_count, o.deliver_at, o.c_offset, '
        'o.c_xid '
        'from unnest($1) with ordinality as taken (xid, number) join ('
        'select * from public.outbox_message_t where c_xid >= $5 and c_xid < $6 and pg_visible_in_snapshot(c_xid, $8) '
        'union all select * from public.outbox_message_t where c_xid = any ($7)) as o on o.c_xid = taken.xid '
        'where ' || chosen || ' order by taken.number, o.c_offset'
        using xids, format('%s/%s@%s', its.number, reached, origin), (its.declared).condition, (its.declared).params, pg_snapshot_xmax(its.snapshot),
              pg_snapshot_xmax(reached::pg_snapshot), array(select x from unnest(xids) as x where x < pg_snapshot_xmax(its.snapshot)),
              reached::pg_snapshot;
    if not found then
        "position" := format('%s/%s@%s', its.number, reached, origin);
        return next;
    end if;
end
$$;

-- The readers that a name stands for: itself, or its lanes in their order.
create or replace function relay.reader_names(asked text) returns setof text
language sql stable
as $$
    select r.name from (select name, lane from relay.log_readers where lane_of = asked
                         union all
                        select asked, null where not exists (select from relay.log_readers where lane_of = asked)) as r
     order by r.lane
$$;

-- Moves a reader that the caller owns; from is the number of the position that it must be at, null: any. Then it goes on in the
-- present history. "origin" is that of a position that was read before.
create or replace function relay.move_reader(
    reader text, call relay.call, from_number bigint, snapshot pg_snapshot, origin text default null
)
returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    its   record;
    bound uuid;
begin
    select * into its from relay.log_reader(move_reader.reader, call);
    if from_number is null then
        bound := relay.present_history();
    else
        perform relay.require_history(its.declared);
        if move_reader.origin <> relay.log_origin((its.declared).history) then
            raise object_not_in_prerequisite_state using
                message = format('relay.advance: the server has been replaced since this position of the reader %L was read: what '
                                 'was read may be lost', reader),
                hint = 'Roll back, and read again.', constraint = 'relay_reader_moved';
        end if;
    end if;
    begin
        if from_number <> its.number then
            raise unique_violation;
        end if;
        insert into relay.log_positions (reader, number, snapshot) values (its.reader, its.number + 1, move_reader.snapshot);
    exception when unique_violation then
        raise object_not_in_prerequisite_state using
            message = format('relay.advance: another session has moved the reader %L since this position was read', reader),
            hint = 'Roll back, and read again.', constraint = 'relay_reader_moved';
    end;
    if its.number % 100 = 0 then
        -- Those before were deleted before: whoever looked for them would walk over all of them while a snapshot is held.
        delete from relay.log_positions as p
         where p.reader = its.reader and p.number between its.number - 200 and its.number - 1;
    end if;
    -- A note that is late keeps rows for longer. A reader that is given up remains so until relay.seek.
    update relay.readers as r
       set snapshot = move_reader.snapshot, moved_at = now(), noted_at = now(),
           given_up_at = case when from_number is not null then r.given_up_at end
     where (r.group_id, r.target, r.reader) = ('', 'relay.declare_reader', move_reader.reader)
       and (from_number is null or r.noted_at < now() - interval '5 seconds');
    if from_number is null then
        update relay.log_readers as r set expired_at = null, history = bound
         where r.id = its.reader and (r.expired_at is not null or r.history is distinct from bound);
    end if;
end
$$;

-- Gives up the readers that have expired, and drops those for which that is seven days ago; returns the names of those given up. It
-- leaves those that another session has in a transaction for the next call: whoever reads may keep nobody else's rows from being removed.
create or replace function relay.expire_readers(call relay.call default relay.this_call()) returns setof text
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    free text[] := array(
        select l.name
          from relay.log_readers as l
          join relay.readers as n on (n.group_id, n.target, n.reader) = ('', 'relay.declare_reader', l.name)
         where l.expired_at < now() - interval '7 days'
           for update of l, n skip locked);
begin
    perform relay.drop_reader(d.name, call)
       from (select coalesce(l.lane_of, l.name) as name from relay.log_readers as l left join unnest(free) as f (name) on f.name = l.name
              group by 1 having bool_and(f.name is not null)) as d;
    return query
        with expired as (
            select r.id, n.ctid as noted
              from relay.readers as n
              join relay.log_readers as r on (n.group_id, n.target, n.reader) = ('', 'relay.declare_reader', r.name)
             where n.given_up_at is null and n.noted_at < now() - least(r.expires, interval '36500 days')
               for update of n, r skip locked),
        given_up as (
            update relay.readers as n set given_up_at = now() from expired as e where n.ctid = e.noted returning e.id)
        update relay.log_readers as r set expired_at = now() from given_up as g where g.id = r.id returning r.name;
end
$$;

-- Moves a reader to a position that relay.read has returned, in the caller's transaction. Fails where another session has moved
-- it since; one that has moved it and not committed yet is waited for.
create or replace function relay.advance(reader text, "position" text, call relay.call default relay.this_call()) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    given record;
begin
    if advance."position" is null or advance."position" in ('now', 'beginning') then
        raise invalid_parameter_value using message = 'relay.advance: give a position that relay.read has returned, or use relay.seek';
    end if;
    select * into given from relay.log_position(advance."position");
    if pg_snapshot_xmax(given.snapshot) > pg_snapshot_xmax(relay.log_start('now')) then
        raise invalid_parameter_value using
            message = format('relay.advance: the position %L is ahead of this server', advance."position");
    end if;
    perform relay.move_reader(advance.reader, call, from_number => given.number, snapshot => given.snapshot, origin => given.origin);
end
$$;

-- Moves a reader, or all lanes of a name, to now, to the beginning, or to a position. One that retention has given up goes on from
-- there.
create or replace function relay.seek(reader text, "to" text, call relay.call default relay.this_call()) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
begin
    perform relay.move_reader(n.name, call, from_number => null, snapshot => relay.log_start(seek."to", relay.present_history()))
       from relay.reader_names(seek.reader) as n (name);
end
$$;

-- Lets this session read alone, until it ends: returns where the reader is, as a position for "after" and for relay.advance, or null
-- while another session has it. Whoever had it before can no longer advance.
create or replace function relay.claim_reader(reader text, call relay.call default relay.this_call()) returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    its record;
begin
    select * into its from relay.log_reader(claim_reader.reader, call);
    if not pg_try_advisory_lock(x'72647263'::int, (its.reader % 2147483648)::int) then
        return null;
    end if;
    begin
        select * into its from relay.log_reader(claim_reader.reader, call);
        perform relay.move_reader(claim_reader.reader, call, from_number => its.number, snapshot => its.snapshot);
    exception when others then
        perform pg_advisory_unlock(x'72647263'::int, (its.reader % 2147483648)::int);
        raise;
    end;
    return format('%s/%s@%s', its.number + 1, its.snapshot, relay.log_origin((its.declared).history));
end
$$;

-- Whether there is nothing new for a reader that has read all that the snapshot of a position shows, neither an event nor a move of the
-- reader from the position's number: what an idle reader asks before relay.read, which costs twenty times as much. It looks at no more
-- than 100 events that are newer than the oldest transaction that was running, and then says no.
create or replace function relay.log_is_quiet("position" text) returns boolean
language sql stable security definer set search_path = pg_catalog, pg_temp set row_security = off set enable_seqscan = off
set enable_bitmapscan = off
as $$
    -- The upper half of a number is the reader's id.
    select coalesce((select max(p.number) from relay.log_positions as p
                      where p.reader = m.number >> 32 and p.number >= m.number) = m.number, false)
           and not coalesce((select bool_or(not pg_visible_in_snapshot(n.c_xid, m.since)) or count(*) = 100
                               from (select o.c_xid from public.outbox_message_t as o
                                      where o.c_xid >= pg_snapshot_xmin(m.since) order by o.c_xid limit 100) as n), false)
      from (select split_part("position", '/', 1)::bigint, split_part(split_part("position", '/', 2), '@', 1)::pg_snapshot) as m (number, since)
$$;

-- Says that this session waits for new events, until it ends, and returns the channel that it is notified on: relay sends a
-- notification there, from a connection of its own, when events are committed. One may be lost, so ask from time to time as well.
create or replace function relay.watch_log() returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
begin
    perform pg_advisory_lock_shared(x'72647277'::int, 0);
    return 'relay_readers';
end
$$;

-- Says that a reader is in use, so that it does not expire, and moves nothing; relay.advance and relay.declare_reader say so, too.
-- Of one without "expires" it notes nothing: readers that only wait would keep the database from being quiet.
create or replace function relay.keep_reader(reader text, call relay.call default relay.this_call()) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    its record;
begin
    select * into its from relay.log_reader(keep_reader.reader, call);
    if (its.declared).expires is null then
        return;
    end if;
    -- A transaction that has advanced it, and is still open, has said so.
    update relay.readers as r set noted_at = now()
      from (select n.ctid from relay.readers as n
             where (n.group_id, n.target, n.reader) = ('', 'relay.declare_reader', keep_reader.reader)
               and n.noted_at < now() - interval '5 seconds' for update skip locked) as found
     where r.ctid = found.ctid;
end
$$;

-- Notifies the sessions that wait for new events; returns whether there are any.
create or replace function relay.wake_readers() returns boolean
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    if pg_try_advisory_lock(x'72647277'::int, 0) then
        perform pg_advisory_unlock(x'72647277'::int, 0);
        return false;
    end if;
    -- A full queue would be an error.
    if pg_notification_queue_usage() < 0.5 then
        perform pg_notify('relay_readers', '');
    end if;
    return true;
end
$$;

-- The lanes of a name, the server's process of the session that has claimed each, how many sessions share them, and how many of these
-- come before this one. A session that "joins" is one of them until it ends: the others leave lanes for it.
create or replace function relay.share_lanes(reader text, joins boolean default false, call relay.call default relay.this_call())
returns table (lane text, pid int, members int, rank int)
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    first oid;
    here  oid := (select d.oid from pg_database as d where d.datname = current_database());
begin
    perform relay.log_reader(n.name, call) from relay.reader_names(share_lanes.reader) as n (name);
    select (min(r.id) % 2147483648)::oid into first from relay.log_readers as r where r.lane_of = share_lanes.reader;
    if first is null then
        raise invalid_parameter_value using message = format('relay: the reader %L has no lanes', share_lanes.reader);
    end if;
    if joins and not exists (select from pg_locks as l where l.locktype = 'advisory' and l.database = here and l.objsubid = 2 and l.granted
                      and l.classid = x'7264726d'::int::oid and l.objid = first and l.pid = pg_backend_pid()) then
        perform pg_advisory_lock_shared(x'7264726d'::int, first::bigint::int);
    end if;
    return query
        with locks as materialized (
            select l.classid, l.objid, l.pid from pg_locks as l
             where l.locktype = 'advisory' and l.database = here and l.objsubid = 2 and l.granted
               and l.classid in (x'72647263'::int::oid, x'7264726d'::int::oid))
        select r.name, (select max(k.pid) from locks as k
                         where k.classid = x'72647263'::int::oid and k.objid = (r.id % 2147483648)::oid),
               (select count(*)::int from locks as k where k.classid = x'7264726d'::int::oid and k.objid = first),
               (select count(*)::int from locks as k where k.classid = x'7264726d'::int::oid and k.objid = first
                   and k.pid < pg_backend_pid())
          from relay.log_readers as r where r.lane_of = share_lanes.reader order by r.lane;
end
$$;

-- Drops a reader, or all lanes of a name: retention no longer keeps rows for it.
create or replace function relay.drop_reader(name text, call relay.call default relay.this_call()) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    each text;
begin
    for each in select n from relay.reader_names(drop_reader.name) as n loop
        perform relay.log_reader(each, call);
        if each = drop_reader.name and exists (select from relay.log_readers as r where r.name = each and r.lane is not null) then
            raise invalid_parameter_value using
                message = format('relay.drop_reader: %L is a lane, whose events no other lane would get: drop all of them', each);
        end if;
        delete from relay.log_readers as r where r.name = each;
        delete from relay.readers as r where (r.group_id, r.target, r.reader) = ('', 'relay.declare_reader', each);
    end loop;
end
$$;

select relay.replace_functions();

do $$
declare
    each text;
begin
    begin
        if to_regrole('relay_reader') is null then
            create role relay_reader nologin;
        end if;
    exception when duplicate_object or unique_violation then
        null; -- an installation in another database of the server has just created it
              when insufficient_privilege then
        raise notice 'relay: this role may not create roles; create relay_reader yourself, then run this file again';
    end;
    foreach each in array array['relay.glob_expression(text)', 'relay.match_condition(jsonb)', 'relay.log_reader(text, relay.call)',
                                'relay.log_start(text, uuid)',
                                'relay.present_history()', 'relay.log_origin(uuid)', 'relay.log_position(text)',
                                'relay.require_history(relay.log_readers)',
                                'relay.next_transactions(pg_snapshot, pg_snapshot, int)',
                                'relay.move_reader(text, relay.call, bigint, pg_snapshot, text)', 'relay.reader_names(text)',
                                'relay.lane_condition(text, int, int)', 'relay.event_satisfies(jsonb, jsonpath, jsonb)',
                                'relay.condition_path(text, jsonb, text)', 'relay.event_condition(text, text)',
                                'relay.declare_reader(text, jsonb, text, interval, interval, text, jsonb, int, text, relay.call)',
                                'relay.share_lanes(text, boolean, relay.call)',
                                'relay.read(text, int, text, relay.call)', 'relay.advance(text, text, relay.call)',
                                'relay.seek(text, text, relay.call)',
                                'relay.drop_reader(text, relay.call)', 'relay.claim_reader(text, relay.call)',
                                'relay.keep_reader(text, relay.call)', 'relay.watch_log()',
                                'relay.log_is_quiet(text)',
                                'relay.wake_readers()', 'relay.expire_readers(relay.call)'] loop
        execute format('revoke all on function %s from public', each);
    end loop;
    if to_regrole('relay_reader') is not null then
        grant usage on schema relay to relay_reader;
        grant execute on function relay.declare_reader(text, jsonb, text, interval, interval, text, jsonb, int, text, relay.call),
                                  relay.read(text, int, text, relay.call), relay.advance(text, text, relay.call),
                                  relay.share_lanes(text, boolean, relay.call),
                                  relay.seek(text, text, relay.call), relay.drop_reader(text, relay.call),
                                  relay.claim_reader(text, relay.call), relay.keep_reader(text, relay.call),
                                  relay.watch_log(), relay.log_is_quiet(text)
            to relay_reader;
    end if;
    if to_regrole('relay') is not null then
        grant select on relay.log_readers, relay.log_positions to relay;
        grant execute on function relay.wake_readers(), relay.expire_readers(relay.call), relay.seek(text, text, relay.call),
                                  relay.drop_reader(text, relay.call), relay.log_origin(uuid) to relay;
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
    grant select on public.outbox_message_t to relay_owner;
    grant select, insert, update, delete on relay.log_readers, relay.log_positions, relay.readers to relay_owner;
    grant execute on function relay.glob_expression(text), relay.match_condition(jsonb), relay.log_reader(text, relay.call),
        relay.log_start(text, uuid),
                              relay.present_history(), relay.log_origin(uuid), relay.log_position(text),
                              relay.require_history(relay.log_readers),
                              relay.next_transactions(pg_snapshot, pg_snapshot, int),
                              relay.move_reader(text, relay.call, bigint, pg_snapshot, text), relay.reader_names(text),
                              relay.lane_condition(text, int, int), relay.event_satisfies(jsonb, jsonpath, jsonb),
                              relay.condition_path(text, jsonb, text), relay.event_condition(text, text) to relay_owner;
    grant create on schema relay to relay_owner;
    -- A function's new owner must have the right to create in its schema.
    foreach each in array array['declare_reader(text, jsonb, text, interval, interval, text, jsonb, int, text, relay.call)',
                                'share_lanes(text, boolean, relay.call)',
                                'read(text, int, text, relay.call)', 'advance(text, text, relay.call)',
                                'seek(text, text, relay.call)', 'drop_reader(text, relay.call)', 'claim_reader(text, relay.call)',
                                'keep_reader(text, relay.call)',
                                'watch_log()', 'log_is_quiet(text)', 'expire_readers(relay.call)'] loop
        execute format('alter function relay.%s owner to relay_owner', each);
    end loop;
    revoke create on schema relay from relay_owner;
exception when insufficient_privilege then
    raise notice 'relay: this role may not give functions to relay_owner; they stay its own';
end
$$;

insert into relay.migrations (name) values ('outbox/003_readers.sql') on conflict do nothing;
