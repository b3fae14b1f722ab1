-- Progress and dead letters. Installs in the database that the handlers write to, because effects, dead letters and
-- offsets commit in one transaction.

-- A schema of an edition in which positions were updated in place: those of partitions in relay.consumer_offsets, or those of
-- sinks in relay.sinks. Instances of that edition must not run meanwhile; one that was not found fails with its next statement,
-- and nothing of it is stored.
do $$
declare
    in_place text[] := array(select relname from pg_class
                              where oid in (to_regclass('relay.consumer_offsets'), to_regclass('relay.sinks')) and relkind = 'r');
    running  text;
begin
    if in_place = '{}' then
        return;
    end if;
    select string_agg(distinct coalesce(nullif(a.application_name, ''), 'process ' || l.pid), ', ') into running
      from pg_locks as l left join pg_stat_activity as a using (pid)
     -- The lock of a running instance: relay/store/locks.py.
     where l.locktype = 'advisory' and l.granted and l.classid::bigint = x'72656C79'::int and l.objsubid = 2
       and l.database = (select oid from pg_database where datname = current_database()) and l.mode = 'ShareLock';
    if running is not null then
        raise exception using errcode = 'restrict_violation', message = format(
            'an instance of relay runs (%s), and from this edition on positions are stored in other tables: stop every '
            'instance, then run `relay init` again', running);
    end if;
    if 'consumer_offsets' = any (in_place) then
        alter table relay.applied_commits add column if not exists rows int[];
        alter table relay.applied_commits rename to former_applied_commits;
        alter table relay.consumer_offsets rename to former_consumer_offsets;
    end if;
    if 'sinks' = any (in_place) then
        alter table relay.sinks rename to sink_claims;
        alter index relay.sinks_pkey rename to sink_claims_pkey;
        alter table relay.sink_commits rename to former_sink_commits;
    end if;
end
$$;

-- One row for each partition of a group, which says that it exists and is locked by whoever moves it. It is never updated: a
-- lock makes no new version of a row.
create table if not exists relay.group_partitions (
    group_id     text not null,
    topic_id     int  not null,
    partition_id int  not null,
    primary key (group_id, topic_id, partition_id)
);

-- Where every reader of the group stands: the partitions of its target, and its sinks, which have one part each. Positions are
-- appended, under the lock of the partition's row in relay.group_partitions or of the sink's in relay.sink_claims: the one with
-- the greatest number is the state. Rows that are updated in place would leave dead versions, which nobody can remove while
-- somebody holds a snapshot (a pg_dump, an analyst), and everybody who looks for the living one would walk through them.
create table if not exists relay.positions (
    group_id      text        not null,
    topic_id      int         not null,
    partition_id  int         not null,
    number        bigint      not null,
    applied_lsn   pg_lsn      not null default '0/0',
    snapshot_id   bigint,
    polled_offset bigint      not null default -9223372036854775808,
    next_offset   bigint      not null default 1,
    partitions    int[],
    xids          xid8[],
    rows          int[],
    updated_at    timestamptz not null default now(),
    owner         text        not null default '',
    snapshot      pg_snapshot,
    following     pg_snapshot,
    delivered_lsn pg_lsn,
    notes_from    bigint,
    primary key (group_id, owner, topic_id, partition_id, number)
);

-- A schema of the edition in which sinks had positions elsewhere.
alter table relay.positions add column if not exists owner text not null default '',
                            add column if not exists snapshot pg_snapshot,
                            add column if not exists following pg_snapshot,
                            add column if not exists delivered_lsn pg_lsn,
                            add column if not exists notes_from bigint;
do $$
begin
    if (select indnkeyatts from pg_index where indexrelid = 'relay.positions_pkey'::regclass) = 4 then
        alter table relay.positions drop constraint positions_pkey,
                                    add primary key (group_id, owner, topic_id, partition_id, number);
    end if;
end
$$;

comment on column relay.positions.owner is
    'the sink whose position it is; empty for a partition of the target';
comment on column relay.positions.number is
    'counts the positions of the partition or sink; two that move it at once would append the same number, which the key refuses';
comment on column relay.positions.applied_lsn is
    'end of the last WAL commit applied in this partition, and where only the WAL is read in this sink; commits up to here are '
    'recognised as redelivered';
comment on column relay.positions.snapshot_id is
    'everything that this snapshot of relay.snapshots sees is applied, which all partitions share; null in a sink, and where only '
    'the WAL is read (source.mode: wal)';
comment on column relay.positions.snapshot is
    'of a sink, which shares it with nobody: everything that it sees is delivered, deferred or dead-lettered; null where only the '
    'WAL is read (source.mode: wal)';
comment on column relay.positions.following is
    'of a sink: the end of the difference that is polled now';
comment on column relay.positions.delivered_lsn is
    'of a sink: no transaction that is delivered ends after this position';
comment on column relay.positions.notes_from is
    'of a sink: the number of the first position whose transactions still count; relay.snapshots has those of partitions';
comment on column relay.positions.polled_offset is
    'of the difference to the next snapshot, what is applied: the transactions whose greatest c_offset is not above';
comment on column relay.positions.next_offset is
    'one more than the greatest c_offset applied in this partition; nothing depends on it';
comment on column relay.positions.partitions is
    'the partitions of the task, on the position of one of them; null where nothing is noted, and on those of the others';
comment on column relay.positions.xids is
    'the transactions of the source that the task applied in these partitions, or that are done in the sink: since the last '
    'snapshot, polling leaves them out';
comment on column relay.positions.rows is
    'how many rows of each of these transactions the task applied; null where a former edition noted them';

-- A chain of snapshots of the source for each group. Between two of them lies a difference, which polling applies. While
-- the WAL is read, there is one, which is replaced from time to time.
-- A number is never used again: a task that comes late finds that its snapshot is no longer there.
create sequence if not exists relay.snapshot_ids;

create table if not exists relay.snapshots (
    group_id   text        not null,
    id         bigint      not null,
    snapshot   pg_snapshot not null,
    polled_lsn pg_lsn      not null default '0/0',
    taken_at   timestamptz not null default now(),
    version    bigint      not null default 0,
    notes_from bigint[]    not null default '{}',
    primary key (group_id, id, version)
);

-- A schema of the edition in which a snapshot was replaced in place.
alter table relay.snapshots add column if not exists version bigint not null default 0,
                            add column if not exists notes_from bigint[] not null default '{}';
do $$
begin
    if (select indnkeyatts from pg_index where indexrelid = 'relay.snapshots_pkey'::regclass) = 2 then
        alter table relay.snapshots drop constraint snapshots_pkey, add primary key (group_id, id, version);
    end if;
end
$$;

comment on column relay.snapshots.version is
    'how often the snapshot was replaced by a newer one, which takes its place under the same number';
comment on column relay.snapshots.notes_from is
    'for each partition in order the number of the first position whose transactions still count, in the row with the greatest id';
comment on column relay.snapshots.polled_lsn is
    'the commits that were polled up to the snapshot lie below this position of the source''s WAL; 0/0 where none were';

-- What proves that the source has what the positions of a group see: rows of its relay.witnesses. Each is noted before a snapshot
-- that it covers is stored; the newest counts, earlier ones tell how much of a source is left that has lost something.
create table if not exists relay.noted_witnesses (
    group_id text        not null,
    number   bigint      generated always as identity,
    witness  uuid        not null,
    snapshot pg_snapshot not null,
    lsn      pg_lsn      not null,
    noted_at timestamptz not null default now(),
    primary key (group_id, number)
);

comment on table relay.noted_witnesses is
    'the witnesses of the source that cover the positions of a group: those of the target, sinks, batches and fills';
comment on column relay.noted_witnesses.number is
    'counts notes';
comment on column relay.noted_witnesses.witness is
    'the id of a row of relay.witnesses in the source';
comment on column relay.noted_witnesses.snapshot is
    'its snapshot: it covers every snapshot that the group stored before the next note';
comment on column relay.noted_witnesses.lsn is
    'all that the snapshot sees ends at or before this position of the source''s WAL';
comment on column relay.noted_witnesses.noted_at is
    'when it was noted';

-- Where each partition stands, as the tables of the seeds have it.
create or replace view relay.consumer_offsets as
select p.group_id, p.topic_id, p.partition_id, n.applied_lsn, n.snapshot_id, n.polled_offset, n.next_offset, n.updated_at, n.number
  from relay.group_partitions as p
 cross join lateral (
       select s.applied_lsn, s.snapshot_id, s.polled_offset, s.next_offset, s.updated_at, s.number
         from relay.positions as s
        where s.group_id = p.group_id and s.owner = '' and s.topic_id = p.topic_id and s.partition_id = p.partition_id
        order by s.number desc limit 1) as n;

comment on view relay.consumer_offsets is
    'how far each partition of a group has applied the log: its newest position; read it, relay.positions is what relay writes';

-- What was applied from the WAL since the last snapshot: polling leaves it out.
create or replace view relay.applied_commits as
select p.group_id, n.partitions, n.xids, n.rows
  from relay.group_partitions as p
 cross join lateral (
       select coalesce((select s.notes_from[p.partition_id + 1] from relay.snapshots as s
                         where s.group_id = p.group_id order by s.id desc, s.version desc limit 1), 0) as number
       offset 0) as first
 cross join lateral (
       select s.partitions, s.xids, s.rows
         from relay.positions as s
        where s.group_id = p.group_id and s.owner = '' and s.topic_id = p.topic_id and s.partition_id = p.partition_id
          and s.number >= first.number and s.xids is not null
       offset 0) as n;

comment on view relay.applied_commits is
    'the transactions of the source that a task applied in these partitions, as far as polling has to leave them out';

do $$
declare
    detail text;
    reader record;
begin
    if to_regclass('relay.former_consumer_offsets') is null then
        return;
    end if;
    insert into relay.group_partitions select group_id, topic_id, partition_id from relay.former_consumer_offsets;
    insert into relay.positions (group_id, topic_id, partition_id, number, applied_lsn, snapshot_id, polled_offset, next_offset,
                                 partitions, xids, rows, updated_at)
    select o.group_id, o.topic_id, o.partition_id, row_number() over (partition by o.group_id, o.topic_id, o.partition_id),
           o.applied_lsn, o.snapshot_id, o.polled_offset, o.next_offset, a.partitions, a.xids, a.rows, o.updated_at
      from relay.former_consumer_offsets as o
      join relay.former_applied_commits as a on a.group_id = o.group_id and a.partitions[1] = o.partition_id;
    insert into relay.positions (group_id, topic_id, partition_id, number, applied_lsn, snapshot_id, polled_offset, next_offset,
                                 updated_at)
    select o.group_id, o.topic_id, o.partition_id,
           1 + (select count(*) from relay.positions as s
                 where (s.group_id, s.topic_id, s.partition_id) = (o.group_id, o.topic_id, o.partition_id)),
           o.applied_lsn, o.snapshot_id, o.polled_offset, o.next_offset, o.updated_at
      from relay.former_consumer_offsets as o;
    for reader in
        select distinct replace(relname, 'former_', '') as relation,
               case when grantee = 0 then 'public' else quote_ident(pg_get_userbyid(grantee)) end as name
          from pg_class, aclexplode(relacl)
         where oid in ('relay.former_consumer_offsets'::regclass, 'relay.former_applied_commits'::regclass)
           and privilege_type = 'SELECT' and grantee <> relowner
    loop
        execute format('grant select on relay.%I to %s', reader.relation, reader.name);
    end loop;
    drop table relay.former_consumer_offsets, relay.former_applied_commits;
exception when dependent_objects_still_exist then
    get stacked diagnostics detail = pg_exception_detail;
    raise exception using errcode = 'restrict_violation', message = format(
        'relay.consumer_offsets and relay.applied_commits become views, and other objects depend on the tables (%s): drop them, '
        'run `relay init` again, and create them again', replace(replace(detail, 'former_', ''), chr(10), '; '));
end
$$;

-- The sinks of each group, which are delivered to beside the target's transactions, at their own pace: who works each, and whether
-- it may. Whoever stores its position locks the row. It is updated only where one of its columns changes, which is seldom.
create table if not exists relay.sink_claims (
    group_id      text        not null,
    sink          text        not null,
    state         text        not null default 'new',
    epoch         int         not null default 0,
    series        uuid        not null default gen_random_uuid(),
    claim         bigint      not null default 0,
    paused_at     timestamptz,
    paused_by     text,
    reason        text,
    fault         text,
    fault_since   timestamptz,
    instance      text,
    updated_at    timestamptz not null default now(),
    primary key (group_id, sink)
);

alter table relay.sink_claims add column if not exists series uuid not null default gen_random_uuid(),
                              add column if not exists claim bigint not null default 0;

-- A schema of the edition in which a sink that nobody had worked counted as caught up.
alter table relay.sink_claims alter column state set default 'new';
update relay.sink_claims set state = 'new' where state = 'caught up' and instance is null;

comment on table relay.sink_claims is
    'the sinks of each group: who works each, and whether it may; the view relay.sinks shows where each stands, too';
comment on column relay.sink_claims.state is
    'new (not worked yet), attached (fed from the stream), lagging (polling the log), caught up (left to the instance that '
    'reads the stream) or left out (source.mode: wal, read without the sink since updated_at)';
comment on column relay.sink_claims.epoch is
    'counts how often an operator has moved the sink, or the source has changed: what was read before no longer counts';
comment on column relay.sink_claims.claim is
    'counts how often a process has claimed the sink: one whose claim is not the newest can store nothing';
comment on column relay.sink_claims.series is
    'part of the ids by which brokers drop repetitions; a new one whenever an operator moves the sink';
comment on column relay.sink_claims.fault is
    'why nothing is delivered now, while the circuit breaker is open or the brake is on';
comment on column relay.sink_claims.updated_at is
    'since when it has this state';

-- Where each sink is in the log.
create or replace view relay.sinks as
select c.group_id, c.sink, n.snapshot, n.following, n.polled_offset, n.applied_lsn, n.delivered_lsn, c.state, c.epoch, c.series,
       c.claim, c.paused_at, c.paused_by, c.reason, c.fault, c.fault_since, c.instance, n.updated_at, n.number, n.notes_from
  from relay.sink_claims as c
 cross join lateral (
       select s.snapshot, s.following, s.polled_offset, s.applied_lsn, s.delivered_lsn, s.number, s.notes_from,
              greatest(c.updated_at, s.updated_at) as updated_at
         from relay.positions as s
        where s.group_id = c.group_id and s.owner = c.sink and s.topic_id = 1 and s.partition_id = 0
        order by s.number desc limit 1) as n;

comment on view relay.sinks is
    'how far each sink has delivered the log, and who works it: its row of relay.sink_claims with its newest position';

-- What a sink has done beyond its position: neither the stream nor polling delivers it again.
create or replace view relay.sink_commits as
select c.group_id, c.sink, n.xids
  from relay.sinks as c
 cross join lateral (
       select s.xids from relay.positions as s
        where s.group_id = c.group_id and s.owner = c.sink and s.topic_id = 1 and s.partition_id = 0
          and s.number >= c.notes_from and s.xids is not null
       offset 0) as n;

comment on view relay.sink_commits is
    'transactions of the source whose deliveries to a sink are done, which its position does not tell';

-- A schema of the edition in which the position of a sink was in its row, and what was done after it in a table of its own.
do $$
declare
    detail text;
    reader record;
begin
    if to_regclass('relay.former_sink_commits') is null then
        return;
    end if;
    insert into relay.positions (group_id, owner, topic_id, partition_id, number, applied_lsn, snapshot, following, polled_offset,
                                 delivered_lsn, notes_from, xids, updated_at)
    select c.group_id, c.sink, 1, 0, 1, c.applied_lsn, c.snapshot, c.following, c.polled_offset, c.delivered_lsn, 1,
           (select array_agg(xid) from relay.former_sink_commits as d, unnest(d.xids) as xid
             where (d.group_id, d.sink) = (c.group_id, c.sink)),
           c.updated_at
      from relay.sink_claims as c;
    for reader in
        select distinct case relname when 'sink_claims' then 'sinks' else 'sink_commits' end as relation,
               case when grantee = 0 then 'public' else quote_ident(pg_get_userbyid(grantee)) end as name
          from pg_class, aclexplode(relacl)
         where oid in ('relay.sink_claims'::regclass, 'relay.former_sink_commits'::regclass)
           and privilege_type = 'SELECT' and grantee <> relowner
    loop
        execute format('grant select on relay.%I to %s', reader.relation, reader.name);
    end loop;
    alter table relay.sink_claims drop column snapshot, drop column following, drop column polled_offset, drop column applied_lsn,
                                  drop column delivered_lsn;
    drop table relay.former_sink_commits;
exception when dependent_objects_still_exist then
    get stacked diagnostics detail = pg_exception_detail;
    raise exception using errcode = 'restrict_violation', message = format(
        'relay.sinks and relay.sink_commits become views, and other objects depend on the tables (%s): drop them, '
        'run `relay init` again, and create them again',
        replace(replace(replace(detail, 'sink_claims', 'sinks'), 'former_', ''), chr(10), '; '));
end
$$;

-- What functions have completed in transactions of their own: effects and record are committed together.
create table if not exists relay.sink_completions (
    group_id     text   not null,
    sink         text   not null,
    series       uuid   not null,
    key          text   not null,
    xid          xid8,
    end_lsn      pg_lsn not null,
    first_offset bigint not null,
    primary key (group_id, sink, series, key)
);

comment on table relay.sink_completions is
    'deliveries that a function has completed with delivery.transaction(), as long as they might come again';
comment on column relay.sink_completions.series is 'that of relay.sinks: an operator who moves the sink begins another one';
comment on column relay.sink_completions.key is
    'the same for each attempt to deliver a transaction';
comment on column relay.sink_completions.end_lsn is 'the end of the commit in the WAL; 0/0 for one that was polled';
comment on column relay.sink_completions.first_offset is 'the least c_offset of the delivery';
comment on column relay.sink_completions.xid is
    'the transaction of the source; null for a deferred one, which the position of the sink does not bring again';

-- The endpoints of sinks whose endpoints are chosen by data (type: http) that have failed for a while, or are disabled.
create table if not exists relay.endpoints (
    group_id      text        not null,
    sink          text        not null,
    endpoint      text        not null,
    address       text        not null,
    host_id       text,
    failing_since timestamptz,
    fault         text,
    disabled_at   timestamptz,
    disabled_by   text,
    reason        text,
    changed_at    timestamptz not null default clock_timestamp(),
    primary key (group_id, sink, endpoint)
);
alter table relay.endpoints add column if not exists waits boolean not null default false;
create index if not exists endpoints_changed on relay.endpoints (group_id, sink, changed_at);

comment on table relay.endpoints is
    'endpoints chosen by data that have failed for a minute or longer, or are disabled or paused';
comment on column relay.endpoints.waits is
    'whether what is for it while it is disabled waits, since it is paused, and does not become dead letters';
comment on column relay.endpoints.endpoint is
    'what endpoints.id of the handler has of it; without that, the first digits of the SHA-256 of its URL, which may be secret';
comment on column relay.endpoints.address is
    'scheme, host and port of the URL';
comment on column relay.endpoints.host_id is
    'the host of one of the events that were for it';
comment on column relay.endpoints.disabled_by is
    'the role of the operator; null where relay has disabled it, because of the fault';
comment on column relay.endpoints.changed_at is
    'the process that works the sink reads what has changed';

create sequence if not exists relay.dead_transactions;

-- What became of a sink's delivery attempts in each of the last minutes.
create table if not exists relay.sink_activity (
    group_id      text        not null,
    sink          text        not null,
    minute        timestamptz not null,
    confirmed     int         not null default 0,
    events        int         not null default 0,
    failed        int         not null default 0,
    seconds       float8      not null default 0,
    slowest       float8      not null default 0,
    fault         text,
    noted_at      timestamptz not null default clock_timestamp(),
    polled_offset bigint,
    primary key (group_id, sink, minute)
);

comment on column relay.sink_activity.seconds is
    'the sum over the attempts that succeeded';
comment on column relay.sink_activity.polled_offset is
    'where the sink stood in the difference that it polled at noted_at: how fast it reads';

create table if not exists relay.dead_letter_queue (
    id             bigint generated always as identity primary key,
    group_id       text        not null,
    dead_transaction bigint    not null default nextval('relay.dead_transactions'),
    sink           text        not null default '',
    undelivered    boolean     not null default false,
    host_id        text,
    user_id        text,
    c_offset       bigint,
    transaction_id text,
    event_id       text,
    event_type     text,
    payload        jsonb,
    original_payload jsonb,
    metadata       jsonb,
    headers        jsonb,
    endpoint       text,
    handler        text,
    exception      text        not null,
    attempts       int         not null default 1,
    status         text        not null default 'dead',
    commit_lsn     pg_lsn,
    aggregate_id        text,
    aggregate_type      text,
    aggregate_version   bigint,
    event_ts            timestamptz,
    transaction_ordinal int,
    transaction_count   int,
    commit_ts           timestamptz,
    xid                 bigint,
    deliver_at          timestamptz,
    refused             json,
    by_reference        boolean     not null default false,
    created_dt     timestamptz not null default now()
);

-- A schema of the edition before sinks had their own cursors. Of what was dead or deferred then, no sink has had anything.
do $$
begin
    if not exists (select from pg_attribute
                    where attrelid = 'relay.dead_letter_queue'::regclass and attname = 'sink' and not attisdropped) then
        alter table relay.dead_letter_queue add column sink text not null default '',
                                            add column undelivered boolean not null default true;
        alter table relay.dead_letter_queue alter column undelivered set default false;
    end if;
    if exists (select from pg_attribute
                where attrelid = 'relay.dead_letter_queue'::regclass and attname = 'host_id' and atttypid = 'uuid'::regtype) then
        alter table relay.dead_letter_queue alter column host_id type text, alter column user_id type text,
                                            alter column transaction_id type text, alter column event_id type text;
        alter table relay.dead_letter_actions alter column transaction_id type text;
    end if;
    alter table relay.dead_letter_queue add column if not exists headers jsonb, add column if not exists endpoint text;
    if to_regclass('relay.deferred') is not null
       and not exists (select from pg_attribute
                        where attrelid = to_regclass('relay.deferred') and attname = 'sink' and not attisdropped) then
        drop index if exists relay.deferred_due, relay.deferred_keys, relay.deferred_hosts;
        alter table relay.deferred add column sink text not null default '',
                                   add column predecessor bigint,
                                   add column sizes int[],
                                   add column data bytea,
                                   add column undelivered boolean not null default true;
        alter table relay.deferred alter column undelivered set default false;
        update relay.deferred
           set keys = array(select regexp_replace(key, '^(host|user|aggregate) (\S*)(.*)$', '\2 \1\3')
                              from unnest(keys) as key order by 1);
    end if;
end
$$;

comment on column relay.dead_letter_queue.sink is
    'the sink that it could not be delivered to, to which alone a replay delivers it; empty where it could not be applied to the target';
comment on column relay.dead_letter_queue.endpoint is
    'of a sink with several endpoints of a host: that to which alone a replay delivers it; null where it was not known yet';
comment on column relay.dead_letter_queue.undelivered is
    'no sink has had it either (no route matched, or its events could not be read): a replay goes to the sinks as well';
comment on column relay.dead_letter_queue.dead_transaction is
    'number of the dead business transaction: the same for all of its events, and for no others';
comment on column relay.dead_letter_queue.refused is
    'the text of each value that its column did not take as it was; a replay uses it';
comment on column relay.dead_letter_queue.by_reference is
    'the event was too large to be received: payload and metadata are only in the outbox, at c_offset';
comment on column relay.dead_letter_queue.original_payload is
    'the payload as it was published, where it was edited';
comment on column relay.dead_letter_queue.headers is
    'the extra columns that source.headers names, as an object of texts; null where it names none';
comment on column relay.dead_letter_queue.status is
    'dead, replaying, replayed or discarded: the same for all events of a transaction';

-- A hash, since an entry of a btree holds at most 2,704 bytes. An edition had a btree.
drop index if exists relay.dead_letter_queue_transaction;
create index if not exists dead_letter_queue_transaction_hash on relay.dead_letter_queue using hash (transaction_id);
create index if not exists dead_letter_queue_dead on relay.dead_letter_queue (dead_transaction);
create index if not exists dead_letter_queue_undelivered on relay.dead_letter_queue (group_id, xid)
    where undelivered and sink = '';

-- Who acts: the role as which the statement runs, and who opened the session where that is another one: neither `set role` nor a
-- function in somebody else's session hides it.
create or replace function relay.acting_role() returns text
language sql stable
return case when current_user = session_user then current_user::text
            else current_user || ' (in a session of ' || session_user || ')' end;

create table if not exists relay.dead_letter_actions (
    id             bigint generated always as identity primary key,
    group_id       text        not null,
    dead_transaction bigint,
    letters        bigint[]    not null,
    transaction_id text,
    action         text        not null,
    reason         text,
    acted_by       text        not null default relay.acting_role(),
    acted_at       timestamptz not null default clock_timestamp()
);
create index if not exists dead_letter_actions_dead on relay.dead_letter_actions (dead_transaction);

comment on table relay.dead_letter_actions is
    'one row for each action on a dead transaction: replay, replayed, died again, edit, discard, purge, cancel';

create table if not exists relay.actions (
    id       bigint generated always as identity primary key,
    group_id text        not null,
    sink     text        not null default '',
    action   text        not null,
    reason   text,
    detail   jsonb,
    acted_by text        not null default relay.acting_role(),
    acted_at timestamptz not null default clock_timestamp()
);
create index if not exists actions_group on relay.actions (group_id, sink, id);

-- A former edition took who opened the session.
alter table relay.dead_letter_actions alter column acted_by set default relay.acting_role();
alter table relay.actions alter column acted_by set default relay.acting_role();

comment on table relay.actions is
    'one row for each thing that somebody did to a running group, such as deferred run; what, to how much of it: detail';
comment on column relay.actions.sink is
    'the sink that it was done to; empty for the target';

-- What a group remembers of its source, so that a change of server or a lost slot is recognised.

create table if not exists relay.groups (
    group_id          text primary key,
    system_identifier text,
    timeline          int,
    timeline_history  text,
    source_epoch      int           not null default 0,
    slot_recreations  timestamptz[] not null default '{}',
    running           boolean       not null default false,
    instances         text[]        not null default '{}',
    source_mode       text,
    source_reason     text,
    source_since      timestamptz,
    instance          text,
    confirmed_lsn     pg_lsn,
    reading           uuid,
    configuration_digest text,
    configuration     jsonb
);

comment on column relay.groups.configuration is
    'what decides the group''s effects, key by key, long values as digests, no secrets; the digest is that of all of it';

comment on column relay.groups.timeline is
    'of the server that applied_lsn of this group''s offsets belongs to, with system_identifier';
comment on column relay.groups.timeline_history is
    'which timelines led to it, and where each was left, as in the server''s history file';
comment on column relay.groups.source_epoch is
    'counts the histories that the group has followed: what was read in an earlier one is no longer applied';
comment on column relay.groups.slot_recreations is
    'when relay had to recreate the slot within the last hour';

comment on column relay.groups.source_mode is
    'how events come, wal or poll, with the reason, since when, and to which instance: the last to change it';

comment on column relay.groups.confirmed_lsn is
    'how far the slot was confirmed when it was last left: further, somebody has advanced it; 0/0 until a difference is polled '
    'of which the slot may lack something; null while it is read';

-- A schema of the edition in which any instance that ended stored how far the slot was confirmed.
alter table relay.groups add column if not exists reading uuid;

comment on column relay.groups.reading is
    'the stream that was begun last: only the instance that reads it, or was the last to read, sets confirmed_lsn when it ends';

comment on column relay.groups.running is
    'set when an instance starts and reset when the last one ends';
comment on column relay.groups.instances is
    'host:pid of each instance that has started and not ended: one that does not live has died';

create table if not exists relay.suspects (
    group_id text        not null,
    suspect  text        not null,
    attempts int         not null default 1,
    noted_at timestamptz not null default now(),
    primary key (group_id, suspect)
);

comment on table relay.suspects is
    'transactions that a process had in flight when it died, and how often; written only after a crash';

create table if not exists relay.brakes (
    group_id  text not null,
    handler   text not null,
    fault     text not null,
    deaths    int  not null default 0,
    braked_at timestamptz,
    primary key (group_id, handler)
);

alter table relay.brakes add column if not exists failed int not null default 0,
                         add column if not exists sample_transaction text,
                         add column if not exists sample_hosts text[],
                         add column if not exists sample_exception text;

comment on table relay.brakes is
    'handlers that fail: the kind of fault, and how many transactions in a row were dead-lettered for it';
comment on column relay.brakes.braked_at is
    'since when no more of them are dead-lettered, and the handler''s progress is stopped';

comment on column relay.brakes.failed is
    'how many transactions failed in a task that the brake stopped: it is rolled back, so they are no dead letters';
comment on column relay.brakes.sample_transaction is
    'one of these transactions, with its hosts and the first line of its exception';

-- What relay.brakes says of a group, in one row: the one with the greatest number. Each task reads it. The rows of relay.brakes come
-- and go with each dead letter, and who looks for one would walk through those that are dead.
create table if not exists relay.streaks (
    group_id text   not null,
    number   bigint not null,
    streaks  jsonb,
    primary key (group_id, number)
);

comment on column relay.streaks.number is
    'counts the changes';
comment on column relay.streaks.streaks is
    'for each handler that fails, the kind of fault, how many transactions in a row, and whether it is stopped; null if none fails';

-- Before a session locks a row of relay.brakes, so that two do not wait for each other.
create or replace function relay.lock_streaks() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    perform pg_advisory_xact_lock(x'7374726b'::int, 0);
    return null;
end
$$;

create or replace function relay.note_streaks() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
    changed text;
    former  bigint;
begin
    if tg_op = 'TRUNCATE' then
        delete from relay.streaks;
        return null;
    end if;
    for changed in select distinct c.group_id from changes as c loop
        select s.number into former from relay.streaks as s where s.group_id = changed order by s.number desc limit 1;
        insert into relay.streaks (group_id, number, streaks)
        select changed, coalesce(former, 0) + 1,
               jsonb_object_agg(b.handler, jsonb_build_array(b.fault, b.deaths, b.braked_at is not null))
          from relay.brakes as b where b.group_id = changed;
        delete from relay.streaks as s where s.group_id = changed and s.number = former;
    end loop;
    return null;
end
$$;

do $$
begin
    if not exists (select from pg_trigger where tgrelid = 'relay.brakes'::regclass and tgname = 'lock_streaks') then
        create trigger lock_streaks before insert or update or delete on relay.brakes
            for each statement execute function relay.lock_streaks();
        create trigger note_added_streaks after insert on relay.brakes
            referencing new table as changes for each statement execute function relay.note_streaks();
        create trigger note_changed_streaks after update on relay.brakes
            referencing new table as changes for each statement execute function relay.note_streaks();
        create trigger note_removed_streaks after delete on relay.brakes
            referencing old table as changes for each statement execute function relay.note_streaks();
        create trigger note_no_streaks after truncate on relay.brakes
            for each statement execute function relay.note_streaks();
        update relay.brakes set deaths = deaths;
    end if;
end
$$;

create table if not exists relay.part_faults (
    group_id text        not null,
    instance text        not null,
    part     text        not null,
    fault    text        not null,
    since    timestamptz not null,
    primary key (group_id, instance, part)
);

comment on table relay.part_faults is
    'the background parts of each instance that do not do their work, and why; without a row a part works';

create table if not exists relay.engines (
    group_id   text        not null,
    engine     text        not null,
    reason     text        not null,
    batches      bigint      not null,
    events       bigint      not null,
    transactions bigint      not null default 0,
    since        timestamptz not null default now(),
    updated_at   timestamptz not null default now(),
    primary key (group_id, engine, reason)
);

-- A schema of the edition in which transactions were not counted.
alter table relay.engines add column if not exists transactions bigint not null default 0;

comment on table relay.engines is
    'how many batches each engine has applied, by the reason for which it was chosen; written every few seconds';

-- Business transactions that are deferred: to a time, to another attempt, or since an earlier one of the same ordering key is.

create table if not exists relay.deferred (
    id              bigint generated always as identity primary key,
    group_id        text        not null,
    sink            text        not null default '',
    keys            text[]      not null,
    holds           boolean     not null,
    blocked         boolean     not null default false,
    predecessor     bigint,
    retry_at        timestamptz not null,
    attempts        int         not null default 0,
    first_failed_at timestamptz,
    handler         text,
    reason          text,
    dead_transaction bigint,
    undelivered     boolean     not null default false,
    transaction_id  text,
    hosts           text[]      not null,
    columns         text[]      not null,
    commit_lsn      pg_lsn      not null,
    end_lsn         pg_lsn      not null,
    commit_ts       bigint      not null,
    xid             bigint      not null,
    first_offset    bigint      not null,
    last_offset     bigint      not null,
    events          bigint      not null,
    size            bigint      not null,
    sizes           int[],
    data            bytea,
    deferred_at     timestamptz not null default now()
);
alter table relay.deferred add column if not exists endpoint text;
-- Whose turn it is: those that are not known to be blocked, replays of dead letters apart, and what may be blocked by these.
-- An edition had replays among the others.
drop index if exists relay.deferred_ready;
create index if not exists deferred_others on relay.deferred (group_id, sink, retry_at, id)
    where not blocked and predecessor is null and dead_transaction is null;
create index if not exists deferred_replayed on relay.deferred (group_id, sink, retry_at, id)
    where not blocked and predecessor is null and dead_transaction is not null;
create index if not exists deferred_waiting on relay.deferred (group_id, sink, retry_at, id)
    where not blocked and predecessor is not null and dead_transaction is null;
create index if not exists deferred_predecessor on relay.deferred (predecessor) where predecessor is not null;
create index if not exists deferred_dead on relay.deferred (dead_transaction) where dead_transaction is not null;

comment on column relay.deferred.sink is
    'the sink that it is to be delivered to; empty where it is to be applied to the target';
comment on column relay.deferred.endpoint is
    'of a sink with several endpoints of a host: that to which alone it is delivered; null where it is not known yet which take it';
comment on column relay.deferred.keys is
    'what its handlers order by, each beginning with the host_id and a space, and ending with U+001F and the endpoint where it has one; '
    'it waits for every older row that holds one of them';
comment on column relay.deferred.holds is
    'whether later transactions of its keys wait for it; one that only waits for its time is overtaken';
comment on column relay.deferred.blocked is
    'its attempts are exhausted: it is a dead letter, and holds its keys until that is replayed or discarded';
comment on column relay.deferred.predecessor is
    'an older row that holds one of its keys: it is not looked at before that is gone; null where none is known';
comment on column relay.deferred.dead_transaction is
    'number of the dead transaction that it replays or, where it is blocked, that it is';
comment on column relay.deferred.undelivered is
    'no sink has had it either: once it is applied to the target, it goes to the sinks that the routes name';
comment on column relay.deferred.commit_ts is
    'in microseconds since 2000-01-01';
comment on column relay.deferred.data is
    'the rows of the outbox as the WAL brought them (TupleData messages), one after the other, of the lengths in sizes; null where '
    'relay.deferred_rows has them in portions';

-- The collation orders by octets, so that the keys of a host are a range.
create table if not exists relay.deferred_keys (
    group_id    text             not null,
    sink        text             not null,
    key         text collate "C" not null,
    deferred_id bigint           not null,
    primary key (group_id, sink, key, deferred_id)
);

comment on table relay.deferred_keys is
    'the keys of the rows of relay.deferred that hold them, kept by triggers';

create or replace function relay.hold_keys() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    insert into relay.deferred_keys (group_id, sink, key, deferred_id)
    select d.group_id, d.sink, own.key, d.id
      from added as d, unnest(d.keys) as own (key)
     where d.holds;
    return null;
end
$$;

-- Each row is looked up by index, whatever the tables looked like when the plan was made: OFFSET 0 keeps subqueries apart.
create or replace function relay.release_keys() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
begin
    if tg_op = 'TRUNCATE' then
        delete from relay.deferred_keys;
        return null;
    end if;
    delete from relay.deferred_keys
     where ctid = any (array(
           select held.ctid
             from removed as d
            cross join unnest(d.keys) as own (key)
            cross join lateral (
                  select k.ctid from relay.deferred_keys as k
                   where k.group_id = d.group_id and k.sink = d.sink and k.key = own.key and k.deferred_id = d.id
                  offset 0) as held));
    update relay.deferred set predecessor = null
     where id = any (array(
           select next.id
             from removed as d
            cross join lateral (select n.id from relay.deferred as n where n.predecessor = d.id offset 0) as next));
    return null;
end
$$;

do $$
begin
    if not exists (select from pg_trigger where tgrelid = 'relay.deferred'::regclass and tgname = 'hold_keys') then
        insert into relay.deferred_keys (group_id, sink, key, deferred_id)
        select d.group_id, d.sink, own.key, d.id from relay.deferred as d, unnest(d.keys) as own (key) where d.holds;
        create trigger hold_keys after insert on relay.deferred
            referencing new table as added for each statement execute function relay.hold_keys();
        create trigger release_keys after delete on relay.deferred
            referencing old table as removed for each statement execute function relay.release_keys();
        create trigger release_all_keys after truncate on relay.deferred
            for each statement execute function relay.release_keys();
    end if;
end
$$;

create table if not exists relay.deferred_rows (
    deferred_id bigint not null references relay.deferred on delete cascade,
    portion     int    not null,
    sizes       int[]  not null,
    data        bytea  not null,
    primary key (deferred_id, portion)
);

comment on table relay.deferred_rows is
    'the rows of the outbox as the WAL brought them (TupleData messages), one behind the other';

-- A schema of the edition in which events were staged for Spark. Those that are staged still are written by that edition only.
do $$
begin
    if to_regclass('relay.spark_portions') is not null then
        if exists (select from relay.spark_portions) then
            raise exception using errcode = 'restrict_violation',
                message = 'events are staged for Spark in relay.spark_events, which only the former edition of relay writes: '
                          'let it run until `relay status` shows none, then run `relay init` again';
        end if;
        drop table if exists relay.spark_events;
        drop table relay.spark_portions;
        drop sequence if exists relay.spark_batches;
    end if;
end
$$;

-- What Spark writes for each sink and destination: the batch that is begun, or else the last one. A batch is stored before
-- anything of it is written and never changes, so it is the same however often it is written.
create table if not exists relay.spark_batches (
    group_id      text        not null,
    sink          text        not null,
    target        text        not null,
    server        text        not null,
    application   uuid        not null default gen_random_uuid(),
    number        bigint      not null default 1,
    batch         uuid        default gen_random_uuid(),
    epoch         int         not null,
    before        pg_snapshot not null,
    after         pg_snapshot not null,
    polled_offset bigint      not null,
    left_out      xid8[]      not null,
    delivered_lsn pg_lsn      not null,
    rows_read     bigint      not null,
    partition_by  text[]      not null,
    host_buckets  int         not null,
    deferred      bigint[]    not null,
    data          bytea,
    files         text[],
    complete_before timestamptz,
    begun_at      timestamptz not null default clock_timestamp(),
    last_epoch    int,
    last_batch    jsonb,
    primary key (group_id, sink, target)
);
alter table relay.spark_batches add column if not exists files text[],
                                add column if not exists complete_before timestamptz,
                                add column if not exists last_epoch int,
                                add column if not exists last_batch jsonb;

comment on column relay.spark_batches.application is
    'whose numbers these are: once the server of this database was promoted, restored or started again (server), it is another one';
comment on column relay.spark_batches.batch is
    'the column relay_batch of what is written; null once the batch is written or given up';
comment on column relay.spark_batches.epoch is
    'that of the sink when the batch was begun: once somebody has moved the sink, the batch is given up';
comment on column relay.spark_batches.before is
    'the batch has the rows of the outbox that "after" sees and this does not';
comment on column relay.spark_batches.polled_offset is
    'of these transactions, those whose greatest c_offset is not above are not in the batch, and neither are those of left_out';
comment on column relay.spark_batches.deferred is
    'the rows of relay.deferred that are written with the batch; data has their events, as an Arrow stream';
comment on column relay.spark_batches.files is
    'the staged files that are the batch''s, whoever moves them to their destination; null until an attempt has written all of its own';

comment on column relay.spark_batches.complete_before is
    'the destination has every event that was committed before this time once it has the batch; null where no such time is known';
comment on column relay.spark_batches.last_epoch is
    'that of the sink when it last finished a batch here: once somebody has moved the sink, the destination may be another one; -1 where it has not finished one, null where an edition that did not note it may have';
comment on column relay.spark_batches.last_batch is
    'what tells that the destination still has the batch that was finished last, which is looked for before the next one is written';

-- Up to where each reader has everything. relay.watermarks shows it.
create table if not exists relay.completeness (
    group_id        text        not null,
    reader          text        not null,
    since           pg_snapshot not null,
    snapshot        pg_snapshot not null,
    complete_before timestamptz,
    noted_at        timestamptz not null default clock_timestamp(),
    lost            boolean     not null default false,
    primary key (group_id, reader)
);
alter table relay.completeness add column if not exists lost boolean not null default false;

comment on column relay.completeness.reader is
    'a sink; empty for the target';
comment on column relay.completeness.since is
    'from where: what this snapshot sees was before the reader''s beginning, or before an operator moved it';
comment on column relay.completeness.snapshot is
    'everything that this snapshot of the source sees is delivered, deferred or dead-lettered';
comment on column relay.completeness.complete_before is
    'it sees every event whose COMMIT had returned before this time, by the clock of the source; null where no such time is known';
comment on column relay.completeness.noted_at is
    'when that was stored, by the clock of this database';
comment on column relay.completeness.lost is
    'the destination was found without what the reader had written to it, and has not been found with it since';

create or replace view relay.watermarks as
select c.group_id, c.reader, c.complete_before, c.since, c.snapshot, c.noted_at, dead.dead_letters, later.deferred, proof.witness
  from relay.completeness as c
 cross join lateral (
       select count(*) as dead_letters from relay.dead_letter_queue as d
        where d.group_id = c.group_id and d.status in ('dead', 'replaying')
          and (d.sink = c.reader or d.sink = '' and d.undelivered)) as dead
 cross join lateral (
       select count(*) as deferred from relay.deferred as d
        where d.group_id = c.group_id and (d.sink = c.reader or d.sink = '' and d.undelivered)) as later
  left join lateral (
       select w.witness from relay.noted_witnesses as w
        where w.group_id = c.group_id order by w.number desc limit 1) as proof on true;

comment on view relay.watermarks is
    'for each reader: all events committed before complete_before, and not seen by since, are there, but for dead_letters events '
    'and deferred transactions';

drop function if exists relay.lock_partitions(text, int, int[], text[]);

-- The chain of a group's snapshots, in order, from the oldest that a partition needs. Neither the rows of snapshots that no
-- partition needs any more nor former versions are walked, which somebody's snapshot may keep.
create or replace function relay.chain(the_group text) returns setof relay.snapshots
language plpgsql stable set search_path = pg_catalog, pg_temp
set enable_seqscan = off set plan_cache_mode = force_generic_plan
as $$
declare
    link   relay.snapshots;
    oldest bigint := (select min(o.snapshot_id) from relay.consumer_offsets as o where o.group_id = the_group);
begin
    select s.* into link from relay.snapshots as s
     where s.group_id = the_group and s.id = oldest order by s.version desc limit 1;
    if not found then
        select s.* into link from relay.snapshots as s
         where s.group_id = the_group and s.id > coalesce(oldest, -9223372036854775808) order by s.id, s.version limit 1;
    end if;
    if not found then
        -- One of the tables was restored without the other, which whoever reads the chain finds out.
        select s.* into link from relay.snapshots as s
         where s.group_id = the_group order by s.id desc, s.version desc limit 1;
    end if;
    while link.id is not null loop
        return next link;
        select s.* into link from relay.snapshots as s
         where s.group_id = the_group and s.id > link.id order by s.id, s.version limit 1;
    end loop;
end
$$;

-- For each partition in order, the number of the first position that has a transaction which a snapshot of the source does not
-- see; where there is none, the number of the next position.
create or replace function relay.notes_after(the_group text, seen pg_snapshot) returns bigint[]
language plpgsql stable set search_path = pg_catalog, pg_temp
set enable_seqscan = off set plan_cache_mode = force_generic_plan
as $$
declare
    former bigint[] := (select s.notes_from from relay.snapshots as s
                         where s.group_id = the_group order by s.id desc, s.version desc limit 1);
begin
    return (
        select coalesce(array_agg(coalesce(unseen.number, o.number + 1) order by o.partition_id), '{}')
          from relay.consumer_offsets as o
          left join lateral (
               select s.number from relay.positions as s
                where s.group_id = o.group_id and s.owner = '' and s.topic_id = o.topic_id and s.partition_id = o.partition_id
                  and s.number >= coalesce(former[o.partition_id + 1], 0) and s.number <= o.number
                  and exists (select from unnest(s.xids) as xid where not pg_visible_in_snapshot(xid, seen))
                order by s.number limit 1) as unseen on true
         where o.group_id = the_group);
end
$$;

-- Locks partitions to the end of the transaction, in order. Returns where each stands, and in a row of its own the group's
-- last snapshot, those of the hosts of which a deferred transaction holds a key in the target's cursor, the handlers that
-- fail, and the epoch of the group's source. Each statement of the function sees what was committed while the one before
-- waited for a lock; a single statement would not. Each host is looked up by index, whatever the table looked like when the
-- plan was made.
create or replace function relay.lock_positions(the_group text, the_topic int, partitions int[], asked text[])
returns table (partition_id int, number bigint, applied_lsn text, snapshot_id bigint, polled_offset bigint, next_offset bigint,
               snapshot text, holding text[], streaks jsonb, source_epoch int)
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off set plan_cache_mode = force_generic_plan
as $$
begin
    perform from relay.group_partitions as p
      where p.group_id = the_group and p.topic_id = the_topic and p.partition_id = any (partitions)
      order by p.partition_id for update;
    return query
        select o.partition_id, o.number, o.applied_lsn::text, o.snapshot_id, o.polled_offset, o.next_offset, null::text,
               '{}'::text[], null::jsonb, null::int
          from relay.consumer_offsets as o
         where o.group_id = the_group and o.topic_id = the_topic and o.partition_id = any (partitions);
    return query
        select null::int, null::bigint, null::text, last.id, null::bigint, null::bigint, last.snapshot::text,
               -- Whether there is any, many hosts ask first; the answer walks the dead rows of all.
               case when cardinality(asked) <= 8
                      or (select true from relay.deferred_keys as k where k.group_id = the_group and k.sink = '' limit 1) then
                   (select array_agg(host) from unnest(asked) as host
                     where (select true from relay.deferred_keys as k
                             where k.group_id = the_group and k.sink = ''
                               and k.key >= (host || ' ') collate "C" and k.key < (host || '!') collate "C" limit 1))
               end,
               (select s.streaks from relay.streaks as s where s.group_id = the_group order by s.number desc limit 1),
               (select g.source_epoch from relay.groups as g where g.group_id = the_group)
          from (select) as one
          left join lateral (
               select s.id, s.snapshot from relay.snapshots as s
                where s.group_id = the_group order by s.id desc, s.version desc limit 1) as last on true;
end
$$;

-- Locks partitions to the end of the transaction, in order, and returns where each stands; nothing if another session has locked
-- one of them, or there is one less.
create or replace function relay.claim_positions(the_group text, the_topic int, partitions int[])
returns table (partition_id int, number bigint, applied_lsn text, snapshot_id bigint, polled_offset bigint, next_offset bigint)
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off set plan_cache_mode = force_generic_plan
as $$
declare
    free int;
begin
    perform from relay.group_partitions as p
      where p.group_id = the_group and p.topic_id = the_topic and p.partition_id = any (partitions)
      order by p.partition_id for update skip locked;
    get diagnostics free = row_count;
    if free < cardinality(partitions) then
        return;
    end if;
    return query
        select o.partition_id, o.number, o.applied_lsn::text, o.snapshot_id, o.polled_offset, o.next_offset
          from relay.consumer_offsets as o
         where o.group_id = the_group and o.topic_id = the_topic and o.partition_id = any (partitions);
end
$$;

-- Appends a position to each of some sinks, under the locks of their rows; returns those that have it, and whether each is paused.
-- The others were moved, removed or claimed by somebody else meanwhile or, unless it waits, their rows are locked by another
-- session. The transactions that were noted and that a new snapshot does not see are noted again with it: earlier notes no longer
-- count. Each statement sees what was committed while the one before waited for a lock.
create or replace function relay.store_sinks(the_group text, waits boolean, has_faults boolean, sinks text[], claims bigint[],
    epochs int[], states text[], faults text[], snapshots text[], followings text[], polled bigint[], applied text[],
    delivered text[], dones text[])
returns table (sink text, is_paused boolean)
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    held     text[];
    paused   boolean[];
    is_other boolean;
    appended bigint;
begin
    if waits then
        perform from relay.sink_claims as c where c.group_id = the_group and c.sink = any (sinks) order by c.sink for no key update;
    end if;
    -- What is locked already is not skipped.
    select array_agg(l.sink), array_agg(l.is_paused), bool_or(l.is_other) into held, paused, is_other
      from (select c.sink, c.paused_at is not null as is_paused,
                   c.state <> g.state or has_faults and c.fault is distinct from g.fault as is_other
              from relay.sink_claims as c
              join unnest(sinks, claims, epochs, states, faults) as g (sink, claim, epoch, state, fault) using (sink)
             where c.group_id = the_group and (c.claim, c.epoch) = (g.claim, g.epoch)
             order by c.sink for no key update of c skip locked) as l;
    if held is null then
        return;
    end if;
    if is_other then
        update relay.sink_claims as c
           set state = g.state, updated_at = case when c.state = g.state then c.updated_at else now() end,
               fault = case when has_faults then g.fault else c.fault end,
               fault_since = case when not has_faults then c.fault_since
                                  when g.fault is not null then coalesce(c.fault_since, now()) end
          from unnest(sinks, states, faults) as g (sink, state, fault)
         where c.group_id = the_group and c.sink = g.sink and c.sink = any (held)
           and (c.state <> g.state or has_faults and c.fault is distinct from g.fault);
    end if;
    insert into relay.positions (group_id, owner, topic_id, partition_id, number, applied_lsn, snapshot, following, polled_offset,
                                 delivered_lsn, notes_from, xids)
    select the_group, g.sink, 1, 0, n.number + 1, g.applied::pg_lsn, g.snapshot::pg_snapshot, g.following::pg_snapshot, g.polled,
           g.delivered::pg_lsn, case when o.is_moved then n.number + 1 else n.notes_from end,
           nullif(case when o.is_moved and g.snapshot is not null then
                           array(select xid from relay.positions as s, unnest(s.xids) as xid
                                  where s.group_id = the_group and s.owner = g.sink and s.topic_id = 1 and s.partition_id = 0
                                    and s.number >= n.notes_from and not pg_visible_in_snapshot(xid, g.snapshot::pg_snapshot))
                       else '{}' end || g.done::xid8[], '{}')
      from unnest(sinks, snapshots, followings, polled, applied, delivered, dones)
           as g (sink, snapshot, following, polled, applied, delivered, done)
     cross join lateral (
           select s.number, s.snapshot, s.notes_from from relay.positions as s
            where s.group_id = the_group and s.owner = g.sink and s.topic_id = 1 and s.partition_id = 0
            order by s.number desc limit 1) as n
     cross join lateral (select g.snapshot is null or n.snapshot::text is distinct from g.snapshot) as o (is_moved)
     where g.sink = any (held);
    get diagnostics appended = row_count;
    if appended < cardinality(held) then
        raise data_exception using message = format(
            'relay.positions lacks that of a sink (one of %s of group %L), which relay.sink_claims has: one of them was restored '
            'without the other', held, the_group);
    end if;
    return query select * from unnest(held, paused);
end
$$;

-- Deletes positions of the parts of some owners, from a number on and before another one, but for those with transactions that are
-- still noted, from a third number on; returns how many. By index, whatever the table looked like when the plan was made.
create or replace function relay.delete_positions(the_group text, owners text[], parts int[], firsts bigint[], ends bigint[],
                                                  notes_first bigint[])
returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
    total   bigint := 0;
    deleted bigint;
begin
    for n in 1 .. cardinality(owners) loop
        delete from relay.positions as s
         where s.group_id = the_group and s.owner = owners[n] and s.topic_id = 1 and s.partition_id = parts[n]
           and s.number >= firsts[n] and s.number < ends[n]
           and (s.xids is null or s.number < notes_first[n]);
        get diagnostics deleted = row_count;
        total := total + deleted;
    end loop;
    return total;
end
$$;

revoke all on function relay.acting_role(), relay.chain(text), relay.notes_after(text, pg_snapshot), relay.lock_positions(text, int, int[], text[]),
                       relay.claim_positions(text, int, int[]),
                       relay.store_sinks(text, boolean, boolean, text[], bigint[], int[], text[], text[], text[], text[], bigint[],
                                         text[], text[], text[]),
                       relay.delete_positions(text, text[], int[], bigint[], bigint[], bigint[]),
                       relay.hold_keys(), relay.release_keys(),
                       relay.lock_streaks(), relay.note_streaks() from public;

-- What the service needs in the target: its own tables. Handlers' tables are granted by their owner.

do $$
begin
    if not exists (select from pg_roles where rolname = 'relay') then
        create role relay nologin;
    end if;
exception
    when duplicate_object or unique_violation then
        null; -- an installation in another database of the server has just created it
    when insufficient_privilege then
        raise notice 'relay: this role may not create roles; create relay yourself, then run this file again';
end
$$;

do $$
begin
    if exists (select from pg_roles where rolname = 'relay') then
        grant usage on schema relay to relay;
        grant select on relay.migrations to relay;
        -- A group that is split into another number of partitions gets other rows.
        grant select, insert, update, delete on relay.group_partitions, relay.positions to relay;
        grant select on relay.consumer_offsets, relay.applied_commits, relay.sinks, relay.sink_commits to relay;
        grant select, insert, update, delete on relay.snapshots to relay;
        grant usage on sequence relay.snapshot_ids to relay;
        grant select, insert, delete on relay.noted_witnesses to relay;
        grant select, insert, update, delete on relay.dead_letter_queue to relay;
        grant usage on sequence relay.dead_transactions to relay;
        -- Who acted, and when, is what the server says.
        grant select on relay.dead_letter_actions to relay;
        grant insert (group_id, dead_transaction, letters, transaction_id, action, reason) on relay.dead_letter_actions to relay;
        grant select on relay.actions to relay;
        grant insert (group_id, sink, action, reason, detail) on relay.actions to relay;
        grant select, insert, update on relay.groups to relay;
        grant select, insert, update, delete on relay.suspects, relay.brakes, relay.engines, relay.part_faults to relay;
        grant select, insert, delete on relay.streaks to relay;
        grant select, insert, update, delete on relay.sink_claims, relay.sink_activity to relay;
        grant select, insert, delete on relay.sink_completions to relay;
        grant select, insert, update, delete on relay.endpoints to relay;
        grant select, insert, update, delete on relay.deferred to relay;
        grant select, insert, delete on relay.deferred_keys, relay.deferred_rows to relay;
        grant usage on sequence relay.deferred_id_seq to relay;
        grant select, insert, update, delete on relay.spark_batches, relay.completeness to relay;
        grant select on relay.watermarks to relay;
        grant execute on function relay.acting_role() to relay;
        grant execute on function relay.chain(text), relay.notes_after(text, pg_snapshot) to relay;
        grant execute on function relay.lock_positions(text, int, int[], text[]), relay.claim_positions(text, int, int[]) to relay;
        grant execute on function relay.store_sinks(text, boolean, boolean, text[], bigint[], int[], text[], text[], text[], text[],
                                                    bigint[], text[], text[], text[]) to relay;
        grant execute on function relay.delete_positions(text, text[], int[], bigint[], bigint[], bigint[]) to relay;
        -- Handlers load events into a temporary relation, which a database may have reserved.
        execute format('grant temporary on database %I to relay', current_database());
    end if;
end
$$;

insert into relay.migrations (name) values ('target/001_target.sql') on conflict do nothing;
