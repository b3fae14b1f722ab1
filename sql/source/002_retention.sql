-- Retention: how far each reader of the outbox is, and functions that remove what all of them have read.
-- Needs 001_source.sql. A policy that would hide rows from a function here is an error: what it does not see could be unread.

-- Groups may keep their positions in other databases, so each notes here how far its readers are.
create table if not exists relay.readers (
    group_id     text        not null,
    target       text        not null,
    reader       text        not null default '',
    snapshot     pg_snapshot,
    by_reference bigint[]    not null default '{}',
    moved_at     timestamptz not null default now(),
    noted_at     timestamptz not null default now(),
    given_up_at  timestamptz,
    outbox       text,
    primary key (group_id, target, reader)
);

-- A schema of the edition in which a database had one outbox.
alter table relay.readers add column if not exists outbox text;
drop function if exists relay.retention_floor(), relay.is_held(regclass, text);

comment on table relay.readers is
    'how far each reader of the outbox is; rows that one of them has not read are not removed';
comment on column relay.readers.target is
    'the database that has the positions: the server''s system identifier and the name; empty for a reader without one';
comment on column relay.readers.reader is
    'a sink, or another reader that has a name; empty for the target of the group';
comment on column relay.readers.snapshot is
    'everything that it sees is read; null where the outbox is not read as a table (source.mode: wal)';
comment on column relay.readers.by_reference is
    'c_offset of events that only the outbox has: dead letters that were too large to be received';
comment on column relay.readers.outbox is
    'the table that it reads; null where nobody said, which holds rows of every outbox';
comment on column relay.readers.given_up_at is
    'since when rows are removed that it has not read (retention.max_lag)';

-- The outboxes from which relay may remove rows.
create table if not exists relay.retained (
    outbox        text primary key,
    offset_column text not null,
    every         interval
);

comment on column relay.retained.every is
    'how long the range of a new partition is; null where the outbox is not partitioned';

-- What was removed, so that a reader that nobody knows, such as a Spark query without a name, can find out that it has lost
-- events. Appended, with the rows that it replaces deleted: the state of an outbox is the greatest of its rows, mostly of one.
create table if not exists relay.removed (
    outbox   text        not null,
    number   bigint      generated always as identity,
    newest   xid8        not null,
    snapshot pg_snapshot not null,
    at       timestamptz not null default now(),
    primary key (outbox, number)
);

comment on column relay.removed.outbox is
    'the table';
comment on column relay.removed.number is
    'counts removals';
comment on column relay.removed.at is
    'when retention last removed events';
comment on column relay.removed.newest is
    'the newest transaction of which retention has removed events';
comment on column relay.removed.snapshot is
    'taken at the last removal: it sees all transactions of which events were removed';

-- What may be removed of an outbox: rows with a c_xid below "xid" (any where it is null), those without c_xid unless
-- "beginning", and none of "offsets". A group that has a slot and has not noted its readers yet holds everything.
create or replace function relay.retention_floor(outbox text, out xid xid8, out beginning boolean, out offsets bigint[])
language sql stable set search_path = pg_catalog, pg_temp
as $$
    select case when unknown then '0'::xid8 else least_xid end, unknown or from_beginning, held
           -- PostgreSQL 14 has no min(xid8).
      from (select min(pg_snapshot_xmin(snapshot)::text::bigint)::text::xid8 as least_xid,
                   coalesce(bool_or(pg_snapshot_xmax(snapshot) <= '1'::xid8), false) as from_beginning,
                   (select coalesce(array_agg(number), '{}') from relay.readers, unnest(by_reference) as number
                     where given_up_at is null
                       and (readers.outbox is null or readers.outbox = retention_floor.outbox)) as held,
                   exists (select from relay.streams as s
                            where not exists (select from relay.readers as r where r.group_id = s.group_id)) as unknown
              from relay.readers
             where given_up_at is null
               and (readers.outbox is null or readers.outbox = retention_floor.outbox)) as of_outbox
$$;

-- The partitions of a table with their ranges, the default partition with none.
create or replace function relay.partitions(outbox regclass)
returns table (partition regclass, lower timestamptz, upper timestamptz, is_default boolean)
language sql stable set search_path = pg_catalog, pg_temp
as $$
    select c.oid::regclass,
           case when bound ~ 'FROM \(MINVALUE\)' then '-infinity'::timestamptz
                else substring(bound from 'FROM \(''([^'']+)''\)')::timestamptz end,
           substring(bound from 'TO \(''([^'']+)''\)')::timestamptz,
           bound = 'DEFAULT'
      from pg_inherits as i join pg_class as c on c.oid = i.inhrelid,
           lateral pg_get_expr(c.relpartbound, c.oid) as bound
     where i.inhparent = outbox and c.relispartition
$$;

-- The registered outbox, or an error.
create or replace function relay.retained_outbox(outbox text, out relation regclass, out offset_column text, out every interval)
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
    select to_regclass(format('%I.%I', split_part(r.outbox, '.', 1), split_part(r.outbox, '.', 2))), r.offset_column, r.every
      into relation, offset_column, every
      from relay.retained as r where r.outbox = retained_outbox.outbox;
    if relation is null then
        raise insufficient_privilege using message = format('%s is not given to retention', outbox),
            hint = 'Run `relay init` with the section retention in the configuration.';
    end if;
end
$$;

-- Whether a partition of an outbox has rows that somebody has still to read.
create or replace function relay.is_held(outbox text, partition regclass, offset_column text) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp set row_security = off set enable_seqscan = off
as $$
declare
    floor record;
    held  boolean;
begin
    select * into floor from relay.retention_floor(outbox);
    execute format('select coalesce((select c_xid from %s where c_xid is not null order by c_xid desc limit 1) >= $1, false)',
                   partition) into held using floor.xid;
    if not held and floor.beginning then
        execute format('select exists (select from %s where c_xid is null)', partition) into held;
    end if;
    if not held and floor.offsets <> '{}' then
        execute format('select exists (select from %s where %I = any ($1))', partition, offset_column)
           into held using floor.offsets;
    end if;
    return held;
end
$$;

-- A partition's name: of the table and of the beginning of its range, in UTC.
create or replace function relay.partition_name(outbox regclass, lower timestamptz, every interval) returns text
language plpgsql stable set search_path = pg_catalog, pg_temp set timezone = 'UTC'
as $$
declare
    digits text := case when lower <> date_trunc('minute', lower) then 'YYYYMMDDHH24MISS'
                        when lower <> date_trunc('hour', lower) then 'YYYYMMDDHH24MI'
                        when every < interval '1 day' or lower <> date_trunc('day', lower) then 'YYYYMMDDHH24'
                        else 'YYYYMMDD' end;
begin
    return (select left(relname, 40) from pg_class where oid = outbox) || '_p' || to_char(lower, digits);
end
$$;

-- Adds a partition for a range that has no rows yet. Publishers that insert through the table are not blocked.
create or replace function relay.add_partition(outbox regclass, lower timestamptz, upper timestamptz, every interval)
returns text
language plpgsql set search_path = pg_catalog, pg_temp set timezone = 'UTC'
as $$
declare
    its_schema name := (select nspname from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
                        where c.oid = outbox);
    its_name   text := case when lower is null then relay.partition_name(outbox, upper, every) || '_before'
                            else relay.partition_name(outbox, lower, every) end;
begin
    -- Attached, since CREATE TABLE ... PARTITION OF would block whoever inserts.
    execute format('create table %I.%I (like %s including defaults including generated including constraints '
                   'including storage including compression including comments)', its_schema, its_name, outbox);
    execute format('alter table %I.%I owner to %I', its_schema, its_name,
                   (select pg_get_userbyid(relowner) from pg_class where oid = outbox));
    execute format('alter table %s attach partition %I.%I for values from (%s) to (%L)', outbox, its_schema, its_name,
                   coalesce(quote_literal(lower), 'minvalue'), upper);
    return its_name;
end
$$;

-- Adds the next partition that is missing up to a time; returns its name, null where none is missing or the default partition
-- has rows that belong there.
create or replace function relay.create_ahead(outbox text, present timestamptz, upto timestamptz)
returns text
language plpgsql set search_path = pg_catalog, pg_temp set row_security = off set timezone = 'UTC'
as $$
declare
    found    record;
    spare    regclass;
    last     timestamptz;
    waiting  boolean;
    step     interval;
begin
    select * into found from relay.retained_outbox(outbox);
    step := found.every;
    select max(p.upper) filter (where p.lower is null or p.lower < upto), max(p.partition::oid) filter (where p.is_default)::regclass into last, spare
      from relay.partitions(found.relation) as p;
    if last is null then
        return relay.add_partition(found.relation, null, date_bin(step, present, '2000-01-03') + step, step);
    end if;
    if last >= upto then
        return null;
    end if;
    if spare is not null then
        execute format('select exists (select from %s where c_ts >= $1)', spare) into waiting using last;
        if waiting then
            return null;
        end if;
    end if;
    return relay.add_partition(found.relation, last,
                               greatest(date_bin(step, last, '2000-01-03'), date_bin(step, present, '2000-01-03')) + step,
                               step);
end
$$;

-- The default partition has rows, since no partition was made for their time: it becomes a partition for the range from the
-- last one up to a time. First its range is a constraint that is checked while publishers go on.
create or replace function relay.enclose_default(outbox text, upto timestamptz) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set row_security = off set timezone = 'UTC'
as $$
declare
    found  record;
    spare  regclass;
    last   timestamptz;
    filled boolean;
begin
    select * into found from relay.retained_outbox(outbox);
    select max(p.upper) filter (where p.lower is null or p.lower < upto), max(p.partition::oid) filter (where p.is_default)::regclass into last, spare
      from relay.partitions(found.relation) as p;
    if spare is null then
        return false;
    end if;
    execute format('select exists (select from %s where c_ts >= $1) and not exists (select from %1$s where c_ts < $1)', spare)
       into filled using last;
    if filled then
        execute format('alter table %s drop constraint if exists relay_range', spare);
        execute format('alter table %s add constraint relay_range check (c_ts >= %L and c_ts < %L) not valid',
                       spare, last, upto);
    elsif exists (select from pg_constraint where conrelid = spare and conname = 'relay_range') then
        -- A run that was killed has left it.
        execute format('alter table %s drop constraint relay_range', spare);
    end if;
    return filled;
end
$$;

create or replace function relay.validate_default(outbox text) returns void
language plpgsql set search_path = pg_catalog, pg_temp set timezone = 'UTC'
as $$
declare
    found record;
begin
    select * into found from relay.retained_outbox(outbox);
    execute (select format('alter table %s validate constraint relay_range', p.partition)
               from relay.partitions(found.relation) as p where p.is_default);
end
$$;

-- Makes the default partition a partition of its range, and a new default partition. Publishers wait meanwhile, and for no
-- row to be read.
create or replace function relay.exchange_default(outbox text, upto timestamptz) returns text
language plpgsql set search_path = pg_catalog, pg_temp set timezone = 'UTC'
as $$
declare
    found  record;
    spare  regclass;
    former text;
    last   timestamptz;
    called text;
begin
    select * into found from relay.retained_outbox(outbox);
    execute format('lock table only %s in access exclusive mode', found.relation);
    select max(p.upper) filter (where p.lower is null or p.lower < upto), max(p.partition::oid) filter (where p.is_default)::regclass into last, spare
      from relay.partitions(found.relation) as p;
    select relname into former from pg_class where oid = spare;
    called := relay.partition_name(found.relation, last, found.every);
    execute format('alter table %s detach partition %s', found.relation, spare);
    execute format('alter table %s rename to %I', spare, called);
    execute format('alter table %s attach partition %s for values from (%L) to (%L)', found.relation, spare, last, upto);
    execute format('alter table %s drop constraint relay_range', spare);
    perform relay.add_default(found.relation, former);
    return called;
end
$$;

create or replace function relay.add_default(outbox regclass, its_name text) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    its_schema name := (select nspname from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
                        where c.oid = outbox);
begin
    execute format('create table %I.%I (like %s including defaults including generated including constraints '
                   'including storage including compression including comments)', its_schema, its_name, outbox);
    execute format('alter table %I.%I owner to %I', its_schema, its_name,
                   (select pg_get_userbyid(relowner) from pg_class where oid = outbox));
    execute format('alter table %s attach partition %I.%I default', outbox, its_schema, its_name);
end
$$;

-- Notes that events were removed, in the transaction that removes them; "newest" is null where they had no c_xid. A row from
-- another cluster, which a dump has brought, is forgotten.
create or replace function relay.note_removed(outbox text, newest xid8) returns void
language sql set search_path = pg_catalog, pg_temp
as $$
    with replaced as (
        delete from relay.removed as r where r.outbox = note_removed.outbox and note_removed.newest is not null
        returning r.newest
    )
    insert into relay.removed (outbox, newest, snapshot)
    select note_removed.outbox,
           -- PostgreSQL 14 has no max(xid8).
           greatest(note_removed.newest, (select r.newest from replaced as r
                                           where r.newest < pg_snapshot_xmax(pg_current_snapshot())
                                           order by r.newest desc limit 1)),
           pg_current_snapshot()
     where note_removed.newest is not null
$$;

-- Drops a partition whose range ends at a time at the latest, if all readers have read it; returns whether it did. One that was
-- filled from the archive after that time stays.
create or replace function relay.drop_partition(outbox text, partition text, older_than timestamptz) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set row_security = off set timezone = 'UTC' set enable_seqscan = off
as $$
declare
    found  record;
    chosen regclass;
    newest xid8;
begin
    select * into found from relay.retained_outbox(outbox);
    select p.partition into chosen from relay.partitions(found.relation) as p
     where p.partition = to_regclass(drop_partition.partition) and not p.is_default and p.upper <= older_than
       and coalesce(substring(obj_description(p.partition, 'pg_class') from '^restored by relay at (.*)$')::timestamptz
                    <= older_than, true);
    if chosen is null or relay.is_held(outbox, chosen, found.offset_column) then
        return false;
    end if;
    -- In the order in which publishers lock. Nobody can insert between the second look and the end.
    execute format('lock table only %s in access exclusive mode', found.relation);
    execute format('lock table only %s in access exclusive mode', chosen);
    if relay.is_held(outbox, chosen, found.offset_column) then
        return false;
    end if;
    execute format('select c_xid from %s where c_xid is not null order by c_xid desc limit 1', chosen) into newest;
    perform relay.note_removed(outbox, newest);
    execute format('drop table %s', chosen);
    return true;
end
$$;

drop function if exists relay.delete_portion(text, timestamptz, int);

-- Deletes a portion of the rows that are older and that all readers have read. Of a partitioned outbox, those of the default
-- partition from before the first range: of transactions that were open for long. It looks at rows from the transaction "since"
-- on: while somebody holds a snapshot, the rows that were deleted before it would be walked again. Returns how many it deleted,
-- the transaction that the next portion begins with and, where rows of this portion were kept, that of the first one.
create or replace function relay.delete_portion(outbox text, older_than timestamptz, portion int, since xid8,
                                                out deleted bigint, out reached xid8, out kept xid8)
language plpgsql set search_path = pg_catalog, pg_temp set row_security = off set timezone = 'UTC' set enable_seqscan = off
-- In the order of the index: without statistics, all rows that are left would be read and sorted for each portion.
set enable_bitmapscan = off
as $$
declare
    found   record;
    floor   record;
    chosen  regclass;
    oldest  timestamptz := older_than;
    newest  xid8;
begin
    deleted := 0;
    reached := since;
    select * into found from relay.retained_outbox(outbox);
    select * into floor from relay.retention_floor(outbox);
    chosen := found.relation;
    if (select relkind = 'p' from pg_class where oid = found.relation) then
        select max(p.partition::oid) filter (where p.is_default)::regclass, least(older_than, min(p.lower))
          into chosen, oldest from relay.partitions(found.relation) as p;
        if chosen is null or oldest = '-infinity' then
            return;
        end if;
    end if;
    -- The first by c_xid are the oldest, so it is enough to look at one portion.
    execute format('with first as materialized ('
                   'select ctid, c_xid, (c_ts < $2 and (%2$I = any ($3)) is not true) is true as is_old from %1$s '
                   'where c_xid >= $5 and c_xid < coalesce($1, ''18446744073709551615''::xid8) order by c_xid limit $4), '
                   'gone as (delete from %1$s where ctid = any (array(select ctid from first where is_old)) returning c_xid) '
                   'select (select count(*) from gone), (select c_xid from first order by c_xid desc limit 1), '
                   '(select c_xid from first where not is_old order by c_xid limit 1), '
                   '(select c_xid from gone order by c_xid desc limit 1)', chosen, found.offset_column)
       into deleted, reached, kept, newest
      using floor.xid, oldest, floor.offsets, portion + cardinality(floor.offsets), since;
    reached := coalesce(reached, since);
    perform relay.note_removed(outbox, newest);
    if deleted = 0 and not floor.beginning then
        execute format('delete from %1$s where ctid = any (array('
                       'select ctid from (select ctid, c_ts, %2$I as c_offset from %1$s where c_xid is null limit $3) as first '
                       'where c_ts < $1 and (c_offset = any ($2)) is not true))', chosen, found.offset_column)
          using oldest, floor.offsets, portion;
        get diagnostics deleted = row_count;
    end if;
end
$$;

drop function if exists relay.maintain_step(text, interval, interval, text, xid8);

-- A step of relay.maintain, and of an instance of relay that runs: what it has done, or why it could not, with the SQLSTATE of that.
-- "step" becomes the next one, null after the last one, or while another session maintains the outbox. One that fails, or does not
-- get its lock at once, is left for the next call, and the others are done. "since", "portion" and "kept" are of delete_portion.
create or replace function relay.maintain_step(
    outbox text, present timestamptz, keep interval, ahead interval, inout step text, inout since xid8, inout portion int,
    out kept xid8, out done text, out fault text, out state text)
language plpgsql set search_path = pg_catalog, pg_temp set timezone = 'UTC' set lock_timeout = '40ms'
as $$
#variable_conflict use_variable
declare
    following text        := case step when 'readers' then 'partitions' when 'drop' then 'witnesses'
                                       when 'witnesses' then 'delete' when 'delete' then null else 'drop' end;
    what      text        := case step when 'readers' then 'readers' when 'drop' then 'dropping partitions' when 'witnesses' then 'witnesses'
                                       when 'delete' then 'deleting events' else 'creating partitions' end;
    found_one record;
    deleted   bigint;
    reached   xid8;
    upto      timestamptz;
    called    text;
begin
    -- The lock of an instance of relay that does this.
    if not pg_try_advisory_xact_lock(1919251553, hashtext(outbox)) then
        step := null;
        return;
    end if;
    select r.every into found_one from relay.retained as r where r.outbox = maintain_step.outbox;
    if step <> 'readers' and not found or step in ('drop', 'witnesses', 'delete') and keep is null then
        step := null;
        return;
    end if;
    upto := date_bin(found_one.every, present + ahead, '2000-01-03') + found_one.every;
    case step
    when 'readers' then
        if outbox = 'public.outbox_message_t' and to_regclass('relay.log_conditions') is not null then
            perform relay.expire_subscribers();
            done := (select string_agg(reader, chr(10)) from relay.expire_readers() as reader);
        end if;
    when 'partitions' then
        if found_one.every is not null then
            done := relay.create_ahead(outbox, present, present + ahead);
            following := case when done is null then 'default' else step end;
        end if;
    when 'default' then
        if relay.enclose_default(outbox, upto) then
            following := 'validate';
        end if;
    when 'validate' then
        perform relay.validate_default(outbox);
        following := 'exchange';
    when 'exchange' then
        done := relay.exchange_default(outbox, upto);
        following := 'partitions';
    when 'drop' then
        for called in select p.partition::text
                        from relay.partitions(to_regclass(format('%I.%I', split_part(outbox, '.', 1), split_part(outbox, '.', 2)))) as p
                       where p.upper <= present - keep order by p.upper loop
            begin
                if relay.drop_partition(outbox, called, present - keep) then
                    -- Its locks end with the transaction.
                    done := called;
                    following := step;
                    exit;
                end if;
            exception when others then
                fault := format('partition %s: %s', called, sqlerrm);
                state := sqlstate;
            end;
        end loop;
    when 'witnesses' then
        perform relay.remove_witnesses();
    when 'delete' then
        select d.deleted, d.reached, d.kept into deleted, reached, kept
          from relay.delete_portion(outbox, present - keep, portion, since) as d;
        done := nullif(deleted, 0);
        if deleted >= portion / 2 then
            following := step;
            -- The rows of one transaction, and those without one, have no other order in which to pass over dead rows.
            portion := case when reached > since then 5000 else least(2 * portion, 160000) end;
            since := reached;
        end if;
    end case;
    step := following;
exception when others then
    fault := format('%s: %s', what, sqlerrm);
    state := sqlstate;
    step := following;
end
$$;

-- What relay does each minute for an outbox while it runs, for a database whose log is read in SQL alone: gives up readers and
-- drops subscribers that have expired, creates partitions up to "ahead" from now, and removes the events that are older than
-- "keep" and that every reader is past; null: none. Call it as a member of relay, such as by pg_cron, each minute.
-- Each step is a transaction of its own, so that no lock of one lasts for the next.
create or replace procedure relay.maintain(
    keep   interval default null,
    ahead  interval default '14 days',
    outbox text     default 'public.outbox_message_t'
)
language plpgsql
-- A procedure with settings of its own may not commit, so nothing here is looked up by the caller's search_path.
as $$
declare
    step    text       := 'readers';
    since   pg_catalog.xid8 := '0';
    portion int        := 5000;
    fault   text;
begin
    while step is not null loop
        select s.step, s.since, s.portion, s.fault into step, since, portion, fault
          from relay.maintain_step(maintain.outbox, pg_catalog.clock_timestamp(), maintain.keep, maintain.ahead, step, since, portion) as s;
        if fault is not null then
            raise warning 'relay.maintain: %', fault;
        end if;
        commit;
    end loop;
end
$$;

-- Lets relay remove rows of an outbox: with the rights of the outbox's owner, by the functions of this file and no others.
create or replace function relay.retain(relation regclass, outbox text, offset_column text) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    owner    name := (select pg_get_userbyid(relowner) from pg_class where oid = relation);
    called   text;
    creating boolean;
    other    record;
begin
    -- A function has one owner, whose rights must not be lent to the triggers of another one's table.
    select r.outbox, pg_get_userbyid(c.relowner) as relowner into other
      from relay.retained as r
      join pg_class as c on c.oid = to_regclass(format('%I.%I', split_part(r.outbox, '.', 1), split_part(r.outbox, '.', 2)))::oid
     where c.relowner <> (select relowner from pg_class where oid = relation) limit 1;
    if found then
        raise object_not_in_prerequisite_state using message = format(
            'retention.keep: %s belongs to %s, and %s, whose rows relay removes too, to %s: give both tables to one role, '
            'or take retention out of one of the configurations', retain.outbox, owner, other.outbox, other.relowner);
    end if;
    if not exists (select from pg_attribute where attrelid = relation and attname = 'c_ts' and not attisdropped) then
        execute format('alter table %s add column c_ts timestamptz not null default now()', relation);
    end if;
    insert into relay.retained (outbox, offset_column) values (outbox, offset_column)
        on conflict on constraint retained_pkey do update set offset_column = excluded.offset_column;
    creating := has_schema_privilege(owner, 'relay', 'create');
    execute format('grant usage%s on schema relay to %I', case when creating then '' else ', create' end, owner);
    execute format('grant select on relay.retained, relay.readers, relay.streams to %I', owner);
    execute format('grant select, insert, delete on relay.removed to %I', owner);
    -- Whoever may read the outbox, or some of its columns, may find out what it no longer has.
    for called in select distinct case when grantee = 0 then 'public' else quote_ident(pg_get_userbyid(grantee)) end
                    from (select relacl from pg_class where oid = relation
                          union all select attacl from pg_attribute where attrelid = relation) as granted (acl),
                         aclexplode(acl) where privilege_type = 'SELECT' loop
        execute format('grant usage on schema relay to %s', called);
        execute format('grant select on relay.removed to %s', called);
    end loop;
    foreach called in array array['create_ahead(text, timestamptz, timestamptz)',
                                  'enclose_default(text, timestamptz)', 'validate_default(text)',
                                  'exchange_default(text, timestamptz)',
                                  'drop_partition(text, text, timestamptz)', 'delete_portion(text, timestamptz, int, xid8)'] loop
        execute format('alter function relay.%s owner to %I', called, owner);
        execute format('alter function relay.%s security definer', called);
        if to_regrole('relay') is not null then
            execute format('grant execute on function relay.%s to relay', called);
        end if;
    end loop;
    foreach called in array array['retention_floor(text)', 'retained_outbox(text)', 'is_held(text, regclass, text)', 'partitions(regclass)',
                                  'partition_name(regclass, timestamptz, interval)', 'add_default(regclass, text)',
                                  'note_removed(text, xid8)',
                                  'add_partition(regclass, timestamptz, timestamptz, interval)'] loop
        execute format('grant execute on function relay.%s to %I', called, owner);
    end loop;
    if not creating then
        execute format('revoke create on schema relay from %I', owner);
    end if;
end
$$;

revoke all on function relay.retention_floor(text), relay.partitions(regclass), relay.retained_outbox(text),
                       relay.is_held(text, regclass, text), relay.partition_name(regclass, timestamptz, interval),
                       relay.add_partition(regclass, timestamptz, timestamptz, interval),
                       relay.create_ahead(text, timestamptz, timestamptz), relay.enclose_default(text, timestamptz),
                       relay.validate_default(text), relay.exchange_default(text, timestamptz), relay.add_default(regclass, text),
                       relay.note_removed(text, xid8), relay.drop_partition(text, text, timestamptz),
                       relay.delete_portion(text, timestamptz, int, xid8), relay.retain(regclass, text, text),
                       relay.maintain_step(text, timestamptz, interval, interval, text, xid8, int) from public;
revoke all on procedure relay.maintain(interval, interval, text) from public;

-- A schema that has outboxes already: functions that were written again have lost the rights of the outbox's owner.
do $$
declare
    outbox   record;
    relation regclass;
begin
    for outbox in select r.outbox as name, r.offset_column from relay.retained as r loop
        relation := to_regclass(format('%I.%I', split_part(outbox.name, '.', 1), split_part(outbox.name, '.', 2)));
        if relation is not null then
            perform relay.retain(relation, outbox.name, outbox.offset_column);
        end if;
    end loop;
end
$$;

do $$
begin
    if to_regrole('relay') is not null then
        grant select, insert, update, delete on relay.readers to relay;
        grant select on relay.retained, relay.removed to relay;
        grant execute on function relay.partitions(regclass), relay.retention_floor(text),
                                  relay.maintain_step(text, timestamptz, interval, interval, text, xid8, int) to relay;
        grant execute on procedure relay.maintain(interval, interval, text) to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('source/002_retention.sql') on conflict do nothing;
