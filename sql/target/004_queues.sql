-- Work queues: rows that any number of workers take. relay fills them from the log in the commit of the target that applies the
-- events. Needs 001_target.sql. The design: docs/explanation/queues.md.

create table if not exists relay.queues (
    id          bigint      generated always as identity primary key,
    group_id    text        not null,
    name        text        not null unique,
    match       jsonb,
    key         text        not null default 'none',
    attempts    int         not null default 5,
    backoff     interval    not null default '1 second',
    max_backoff interval    not null default '5 minutes',
    workers     text        not null,
    paused_at   timestamptz,
    paused_by   text,
    declared_at timestamptz not null default clock_timestamp(),
    keep_done   interval,
    condition   jsonpath,
    params      jsonb,
    configured  boolean     not null default false,
    stopped_at  timestamptz,
    fault       text
);
alter table relay.queues
    add column if not exists keep_done interval, add column if not exists condition jsonpath,
    add column if not exists params jsonb, add column if not exists configured boolean not null default false,
    add column if not exists stopped_at timestamptz, add column if not exists fault text;

comment on table relay.queues is
    'the declared queues: relay.declare_queue writes them';
comment on column relay.queues.match is
    'which events of the log go into the queue, as in a route; null: none, only direct messages do';
comment on column relay.queues.key is
    'what orders its messages: none, host, user, aggregate, or a path into payload or metadata, within a host';
comment on column relay.queues.workers is
    'the role whose members may take from the queue';
comment on column relay.queues.keep_done is
    'how long its done messages stay in relay.queue_items; null: not at all';
comment on column relay.queues.condition is
    'where: of the events that match, those that satisfy this path go into the queue; null: all';
comment on column relay.queues.params is
    'the variables of the path';
comment on column relay.queues.configured is
    'relay declares the queue when it starts, as its configuration says';
comment on column relay.queues.stopped_at is
    'since when relay puts no events of the log into it, for it cannot evaluate match or where; null: it does';
comment on column relay.queues.fault is
    'why relay has stopped filling it';

-- Counts the declarations of a group: each task reads the sum of its rows, and reads the queues again where it has changed. Rows are
-- added, so that no declaration waits for another's transaction.
create table if not exists relay.queue_revisions (
    group_id text   not null,
    revision bigint not null
);
alter table relay.queue_revisions drop constraint if exists queue_revisions_pkey;
create index if not exists queue_revisions_group on relay.queue_revisions (group_id);
-- A publication FOR ALL TABLES refuses what deletes from a table without a key otherwise.
alter table relay.queue_revisions replica identity full;

comment on column relay.queue_revisions.revision is
    'how often a queue of the group was declared, changed or dropped, in sum';

create sequence if not exists relay.queue_message_ids;

-- The messages that are not done. One that is at hand has no available_at; one that waits for a time, a retry or the end of a lease
-- has one, and is in other indexes.
create table if not exists relay.queue_messages (
    id                bigint      not null default nextval('relay.queue_message_ids'),
    queue_id          bigint      not null,
    key               text        collate "C",
    attempts          int         not null default 0,
    leased            boolean     not null default false,
    available_at      timestamptz,
    enqueued_at       timestamptz not null default clock_timestamp(),
    first_taken_at    timestamptz,
    event_id          text        not null,
    event_type        text        not null,
    host_id           text,
    user_id           text,
    aggregate_type    text,
    aggregate_id      text,
    aggregate_version bigint,
    event_ts          timestamptz,
    transaction_id    text,
    payload           jsonb,
    metadata          jsonb,
    error             text,
    interruptions     int         not null default 0
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
        autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.5);
alter table relay.queue_messages add column if not exists interruptions int not null default 0,
                                 add column if not exists unique_key text collate "C",
                                 add column if not exists note jsonb,
                                 add column if not exists leased_at timestamptz;
create index if not exists queue_messages_ready on relay.queue_messages (queue_id, id) where available_at is null;
create index if not exists queue_messages_ready_keys on relay.queue_messages (queue_id, key, id)
    where available_at is null and key is not null;
create index if not exists queue_messages_later on relay.queue_messages (queue_id, available_at) where available_at is not null;
create index if not exists queue_messages_held on relay.queue_messages (queue_id, id) where available_at is not null;
create index if not exists queue_messages_held_keys on relay.queue_messages (queue_id, key, available_at)
    where available_at is not null and key is not null;
create index if not exists queue_messages_unique on relay.queue_messages (queue_id, unique_key) where unique_key is not null;

comment on column relay.queue_messages.id is
    'the number of the message, in the order of insertion';
comment on column relay.queue_messages.key is
    'one message of a key is worked at a time, in order; null: in any order';
comment on column relay.queue_messages.attempts is
    'the attempts that were counted: those of leases, and those that ended with relay.retry';
comment on column relay.queue_messages.leased is
    'a worker has it until available_at';
comment on column relay.queue_messages.available_at is
    'from when on it can be taken; null: it can be taken now';

comment on column relay.queue_messages.interruptions is
    'how many transactions that had claimed it were aborted since its last retry, as far as relay.claim has seen';
comment on column relay.queue_messages.unique_key is
    'relay.enqueue puts no second message with it into the queue';
comment on column relay.queue_messages.note is
    'what its worker says of the work, with relay.note_message';
comment on column relay.queue_messages.leased_at is
    'when its last lease began';

-- Messages whose attempts are exhausted, and those that a worker has given up.
create table if not exists relay.queue_dead_letters (
    id                bigint      primary key,
    queue_id          bigint      not null,
    key               text,
    attempts          int         not null,
    enqueued_at       timestamptz not null,
    first_taken_at    timestamptz,
    event_id          text        not null,
    event_type        text        not null,
    host_id           text,
    user_id           text,
    aggregate_type    text,
    aggregate_id      text,
    aggregate_version bigint,
    event_ts          timestamptz,
    transaction_id    text,
    payload           jsonb,
    metadata          jsonb,
    error             text,
    dead_at           timestamptz not null default clock_timestamp()
);
alter table relay.queue_dead_letters add column if not exists unique_key text;
create index if not exists queue_dead_letters_queue on relay.queue_dead_letters (queue_id, id);

comment on column relay.queue_dead_letters.error is
    'why the last attempt failed, as the worker says';
comment on column relay.queue_dead_letters.dead_at is
    'when it was given up';

-- What is left of the messages that are done, for the queue's keep_done.
create table if not exists relay.queue_done (
    id             bigint      not null,
    queue_id       bigint      not null,
    key            text,
    attempts       int         not null,
    enqueued_at    timestamptz not null,
    first_taken_at timestamptz not null,
    event_id       text        not null,
    event_type     text        not null,
    host_id        text,
    error          text,
    done_at        timestamptz not null default clock_timestamp()
);
alter table relay.queue_done add column if not exists note jsonb, add column if not exists result jsonb;
create index if not exists queue_done_times on relay.queue_done (queue_id, done_at);
create index if not exists queue_done_events on relay.queue_done (event_id);
alter table relay.queue_done replica identity full;

comment on column relay.queue_done.error is
    'why the last attempt that failed did so';
comment on column relay.queue_done.done_at is
    'when its completion was called; it commits later';
comment on column relay.queue_done.note is
    'what its worker said last of the work, with relay.note_message';
comment on column relay.queue_done.result is
    'what relay.complete was given';

-- Lower bounds of what can be taken. Whoever takes starts there instead of at the left end of an index, where the entries of taken
-- messages stay as long as somebody holds a snapshot. Bounds are appended, for the same reason; each of them stays true.
create table if not exists relay.queue_marks (
    queue_id     bigint      not null,
    mark         bigint      not null,
    due_mark     timestamptz not null,
    noted_at     timestamptz not null default clock_timestamp()
);
alter table relay.queue_marks add column if not exists start bigint not null default 0;
drop index if exists relay.queue_marks_newest;
create index if not exists queue_marks_latest on relay.queue_marks (queue_id, mark desc, due_mark desc, noted_at desc);
alter table relay.queue_marks replica identity full;

comment on column relay.queue_marks.mark is
    'no message of the queue with a lower id can be taken now, or ever becomes so';
comment on column relay.queue_marks.due_mark is
    'no message of the queue becomes available before this time';
comment on column relay.queue_marks.start is
    'for one or two seconds after noted_at, whoever takes by key begins here: the messages below wait for others of their keys, or somebody has them';

-- How far the log has been read for a queue that relay fills from it: relay.declare_queue with start, or relay.rebuild_queue, asks for
-- that. The rest of the group fills such a queue only once what it has applied before is there: docs/explanation/queues.md.
create table if not exists relay.queue_fills (
    queue_id      bigint      primary key,
    start         text        not null,
    asked_at      timestamptz not null default clock_timestamp(),
    purges        boolean     not null default false,
    purge_upto    bigint,
    from_offset   bigint,
    seen          pg_snapshot,
    before        pg_snapshot,
    after         pg_snapshot,
    polled_offset bigint,
    messages      bigint      not null default 0,
    begun_at      timestamptz,
    ended_at      timestamptz,
    error         text
);

comment on table relay.queue_fills is
    'the queues that are filled from the log, or were: what has been read of it';
comment on column relay.queue_fills.start is
    'from where on: beginning, a c_offset, or a time';
comment on column relay.queue_fills.purges is
    'what was in the queue before is deleted first';
comment on column relay.queue_fills.purge_upto is
    'the id up to which messages and dead letters are still to be deleted';
comment on column relay.queue_fills.from_offset is
    'the transactions that end at a lower c_offset, and are visible in `seen`, are left out';
comment on column relay.queue_fills.before is
    'all that this snapshot sees has been read';
comment on column relay.queue_fills.after is
    'of what this snapshot sees as well, transactions up to polled_offset have been read; null between two such differences';
comment on column relay.queue_fills.ended_at is
    'from when on the queue is filled like others; null: it is not yet';
comment on column relay.queue_fills.error is
    'why it cannot go on; it is tried again';

-- The transactions of the log that a fill has passed by, since they were deferred or dead-lettered: those that are applied while the
-- queue is being filled are read again, the others come with their retry or replay.
create table if not exists relay.queue_fill_deferred (
    queue_id    bigint   not null,
    last_offset bigint   not null,
    position    bigint   not null,
    unmarked    boolean  not null,
    keys        bigint[] not null,
    primary key (queue_id, last_offset)
);

comment on column relay.queue_fill_deferred.last_offset is
    'the greatest c_offset of the business transaction, which identifies it';
comment on column relay.queue_fill_deferred.keys is
    'how its rows are found: their c_xid or, if they are older than that column, each c_offset';

-- What the groups' configurations say of attempts that are kept: workers have none. A group that relay has not noted yet has the defaults.
create table if not exists relay.attempt_settings (
    group_id  text     primary key,
    record    text     not null,
    keep      interval not null,
    max_bytes bigint   not null
);

comment on table relay.attempt_settings is
    'attempts of the configuration of each group, as the instance that started last has it';

-- The functions that nobody else may call have no settings of their own, which would cost as much as a statement: those that call
-- them set the search path and how statements are planned.

-- What the functions below need of a queue; no row unless it is declared, the caller may take from it, and its newest mark is not far ahead
-- of the clock, which was set back then. One less far ahead is the queue's present until the clock has reached it.
drop function if exists relay.queue_state(text, relay.call); -- without `records_all`
create or replace function relay.queue_state(asked text, call relay.call)
returns table (id bigint, keyed boolean, key text, attempts int, backoff interval, max_backoff interval, keeps boolean,
               paused boolean, mark bigint, due_mark timestamptz, noted_at timestamptz, start bigint, records_all boolean)
language sql stable
as $$
    select q.id, q.key <> 'none', q.key, q.attempts, q.backoff, q.max_backoff, q.keep_done is not null,
           q.paused_at is not null, coalesce(m.mark, 0), coalesce(m.due_mark, '-infinity'), coalesce(m.noted_at, '-infinity'),
           -- So that sessions do not all search again at the same moment.
           case when m.noted_at > statement_timestamp() - interval '1 second' * (1 + pg_backend_pid() % 16 / 16.0)
                     and m.noted_at <= statement_timestamp()
                then m.start else 0 end,
           exists (select from relay.attempt_settings as s where s.group_id = q.group_id and s.record = 'all')
      from relay.queues as q
      left join lateral (select n.mark, n.due_mark, n.noted_at, n.start from relay.queue_marks as n
                          where n.queue_id = q.id order by n.mark desc, n.due_mark desc, n.noted_at desc limit 1) as m on true
     where q.name = asked and relay.may_act_as(q.workers, call)
       and (m.due_mark is null or m.due_mark <= statement_timestamp() + interval '1 minute')
$$;

-- The state of a queue, also after its marks that are ahead are deleted: what is given a time now would be below them. Raises an error
-- where there is no such queue, or the caller may not take from it. Those who are called for each message look at relay.queue_state first.
create or replace function relay.require_queue(asked text, call relay.call) returns record
language plpgsql
as $$
declare
    q     record;
    named record;
begin
    select * into q from relay.queue_state(asked, call);
    if found then
        return q;
    end if;
    select d.id, d.workers, relay.may_act_as(d.workers, call) as permitted into named from relay.queues as d where d.name = asked;
    if not found then
        raise undefined_object using message = format('there is no queue %L: declare it with relay.declare_queue', asked);
    end if;
    if not named.permitted then
        raise insufficient_privilege using
            message = format('only members of the role %I may take from the queue %L', named.workers, asked);
    end if;
    delete from relay.queue_marks as n
     where n.queue_id = named.id and n.due_mark > statement_timestamp() + interval '1 minute';
    select * into q from relay.queue_state(asked, call);
    return q;
end
$$;

-- Says that this transaction will insert messages: no mark passes the ids that it takes from the sequence afterwards. The lock
-- carries the last id that was given before, whose low 31 bits are part of its key. One lock is enough for the transaction: each more
-- would take shared memory. The setting that has its id is undone with the lock, also by a rollback to a savepoint. Anybody may set it: so
-- the lock is asked for again, which is nothing where the transaction has it.
create or replace function relay.begin_messages() returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    said   text := current_setting('relay.inserts_messages', true);
    newest bigint;
    since  bigint;
begin
    select s.last_value into newest from relay.queue_message_ids as s;
    since := case when said ~ '^[0-9]{1,18}$' then said::bigint end;
    if since is null or since not between newest - 1073741824 and newest then
        since := newest;
        perform set_config('relay.inserts_messages', since::text, true);
    end if;
    perform pg_advisory_xact_lock_shared(x'71696473'::int, (since % 2147483648)::int);
end
$$;

-- Says that this transaction will give messages a time: no mark of times passes the current one before it has ended.
create or replace function relay.begin_times() returns void
language plpgsql
as $$
begin
    perform pg_advisory_xact_lock_shared(
        x'71647565'::int, (floor(extract(epoch from clock_timestamp()))::bigint % 2147483648)::int);
end
$$;

drop function if exists relay.move_marks(bigint, bigint, timestamptz, timestamptz);

-- Moves the marks of a queue to what can be taken first, unless that was done within a second. `first_open` is where a search by key that began
-- at the mark has found something. Its statements have to see what was committed meanwhile, in this order:
-- ids and times that are given later need no lock; those that were given before are held by a lock, or their transactions have
-- ended and the last statements see what they have left.
create or replace function relay.move_marks(
    the_queue bigint, former bigint, former_due timestamptz, noted_at timestamptz,
    first_open bigint default null)
returns void
language plpgsql
as $$
declare
    newest    bigint;
    now_at    timestamptz;
    begun     bigint;
    begun_at  timestamptz;
    first     bigint;
    first_due timestamptz;
begin
    if noted_at >= clock_timestamp() - interval '1 second' or current_setting('transaction_isolation') <> 'read committed' then
        return;
    end if;
    select s.last_value into newest from relay.queue_message_ids as s;
    now_at := clock_timestamp();
    select min(case when l.classid = x'71696473'::int then newest - ((newest - l.objid::bigint) & 2147483647) end),
           min(case when l.classid = x'71647565'::int then
                    to_timestamp(floor(extract(epoch from now_at))::bigint
                                 - ((floor(extract(epoch from now_at))::bigint - l.objid::bigint) & 2147483647)) end)
      into begun, begun_at
      from pg_locks as l
     where l.locktype = 'advisory' and l.objsubid = 2 and l.classid in (x'71696473'::int, x'71647565'::int)
       and l.database = (select d.oid from pg_database as d where d.datname = current_database());
    select m.id into first from relay.queue_messages as m
     where m.queue_id = the_queue and m.available_at is null and m.id >= former order by m.id limit 1;
    select m.available_at into first_due from relay.queue_messages as m
     where m.queue_id = the_queue and m.available_at >= former_due order by m.available_at limit 1;
    insert into relay.queue_marks (queue_id, mark, due_mark, start)
    values (the_queue,
            greatest(former, least(first, begun, newest)),
            greatest(former_due, least(first_due, begun_at, now_at)),
            case when first_due is null then 0 else coalesce(first_open, 0) end);
    delete from relay.queue_marks where ctid = any (array(
        select n.ctid from relay.queue_marks as n
         where n.queue_id = the_queue and n.noted_at < now_at - interval '10 seconds'
         order by n.mark, n.due_mark limit 100 for update skip locked));
end
$$;

-- Whether a transaction that had a message was aborted, as far as the server still knows it. `locked_by` is the xmax of a row: 0 where
-- nobody locked it. Whoever deletes or moves messages, and works none, locks them first and changes them in a transaction within: xmax is
-- then the number of both (a multixact), which can be that of a transaction, too.
create or replace function relay.was_aborted(locked_by xid) returns boolean
language plpgsql
as $$
declare
    next_id bigint;
    full_id bigint;
begin
    if locked_by = '0' then
        return false;
    end if;
    next_id := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
    full_id := (next_id / 4294967296) * 4294967296 + locked_by::text::bigint;
    if full_id >= next_id then
        full_id := full_id - 4294967296;
    end if;
    if full_id <= 2 or pg_xact_status(full_id::text::xid8) is distinct from 'aborted' then
        return false;
    end if;
    return not exists (select from pg_get_multixact_members(locked_by) as m
                       having count(*) = 2 and bool_or(m.mode = 'forupd') and bool_or(m.mode in ('upd', 'nokeyupd')));
exception when internal_error or invalid_parameter_value then
    return true; -- it is the number of no multixact
end
$$;

-- Deletes messages that the caller has locked and does not work; returns how many. See relay.was_aborted.
create or replace function relay.remove_messages(these tid[]) returns bigint
language plpgsql
as $$
declare
    removed bigint;
begin
    begin
        delete from relay.queue_messages as m where m.ctid = any (these);
        get diagnostics removed = row_count;
    exception when others then
        raise; -- what makes it a transaction within
    end;
    return removed;
end
$$;

-- After messages were locked: moves the marks where much has been passed, or the next would search as far, and says in the setting
-- relay.more_messages, which lasts as long as the transaction, whether there may be more that can be taken. Whoever began at `start` has not
-- seen what is below.
create or replace function relay.note_progress(q record, locked record) returns void
language plpgsql
as $$
begin
    perform set_config('relay.more_messages', locked.more::text, true);
    if locked.searched then
        perform relay.move_marks(q.id, q.mark, q.due_mark, '-infinity', locked.first_open);
    elsif (locked.first_ready >= q.mark + 500 or locked.due > 0) and (q.start = 0 or locked.first_open is not null) then
        perform relay.move_marks(q.id, q.mark, q.due_mark, q.noted_at, locked.first_open);
    end if;
end
$$;

drop function if exists relay.lock_messages(bigint, boolean, int, bigint, timestamptz, int);
drop function if exists relay.lock_messages(bigint, boolean, int, bigint, timestamptz, bigint, int); -- without `more`, `searched` and `tried`

-- Locks messages that can be taken, at most `most`, and returns where they are. Passes by what others have locked. Messages whose
-- last lease has expired become dead letters. `left_over` are those of them that a transaction had locked which was aborted: the id
-- of who locked a row outlives the lock. `more` is false where no message is left that can be taken, as far as this statement sees: those
-- that others have locked, or that are blocked by their keys, may make it true. `searched`: a window was not enough to find one.
-- `tried`: how many attempts one of those has had that were due, at most; null without one.
create or replace function relay.lock_messages(
    the_queue bigint, keyed boolean, most_attempts int, low bigint, low_due timestamptz, start bigint, most int,
    out chosen tid[], out first_ready bigint, out due int, out left_over tid[], out first_open bigint, out more boolean,
    out searched boolean, out tried int
)
language plpgsql
as $$
declare
    now_at    timestamptz := greatest(clock_timestamp(), low_due);
    exhausted tid[];
    since     bigint;
    candidate tid;
    locked_by xid;
begin
    loop
        select coalesce(array_agg(m.ctid) filter (where m.attempts < most_attempts), '{}'),
               array_agg(m.ctid) filter (where m.attempts >= most_attempts), count(*),
               coalesce(array_agg(m.ctid) filter (where m.attempts < most_attempts and m.locked_by <> '0' and relay.was_aborted(m.locked_by)), '{}'),
               max(m.attempts)
          into chosen, exhausted, due, left_over, tried
          from (select n.ctid, n.attempts, n.xmax as locked_by from relay.queue_messages as n
                 where n.queue_id = the_queue and n.available_at >= low_due and n.available_at <= now_at
                 order by n.available_at limit most for update skip locked) as m;
        if tried > 0 then
            -- Once: one that a transaction had claimed since, which was aborted, is passed by and seen again.
            perform relay.note_attempt(m.ctid, null, 'failed', 'the lease has expired')
               from relay.queue_messages as m
              where m.ctid = any (chosen || exhausted) and m.leased and (m.interruptions = 0 or m.attempts >= most_attempts);
        end if;
        exit when exhausted is null;
        perform relay.dead_letter_messages(exhausted, 'the lease of the last attempt has expired');
        -- They may have used up the limit.
        exit when cardinality(chosen) > 0 or due < most;
    end loop;
    more := true;
    searched := false;
    if cardinality(chosen) >= most then
        more := (select true from relay.queue_messages as e
                  where e.queue_id = the_queue and e.available_at is null and e.id >= low order by e.id limit 1) is not null
                or (select true from relay.queue_messages as e
                     where e.queue_id = the_queue and e.available_at >= low_due and e.available_at <= now_at
                     order by e.available_at offset due limit 1) is not null;
        return;
    end if;
    if not keyed then
        select chosen || coalesce(array_agg(m.ctid), '{}'), min(m.id),
               left_over || coalesce(array_agg(m.ctid) filter (where m.locked_by <> '0' and relay.was_aborted(m.locked_by)), '{}'),
               (select true from relay.queue_messages as e
                 where e.queue_id = the_queue and e.available_at is null and e.id > max(m.id) order by e.id limit 1) is not null
          into chosen, first_ready, left_over, more
          from (select n.ctid, n.id, n.xmax as locked_by from relay.queue_messages as n
                 where n.queue_id = the_queue and n.available_at is null and n.id >= low
                 order by n.id limit most - cardinality(chosen) for update skip locked) as m;
        return;
    end if;
    -- The oldest messages that are the first of their keys, read until there are enough. A window, since a key may have any number of
    -- messages. Only one index has the order that each inner query asks for: a planner whose statistics are of a queue where nothing
    -- waited may otherwise read all messages that wait, for each row. Without the cast to text it may read all of a partial index
    -- instead of the rows by their ctid.
    foreach since in array case when start > low then array[start, low] else array[low] end loop
        select chosen || coalesce(array_agg(m.ctid), '{}'), min(m.id),
               left_over || coalesce(array_agg(m.ctid) filter (where m.locked_by <> '0' and relay.was_aborted(m.locked_by)), '{}'),
               (select true from relay.queue_messages as e
                 where e.queue_id = the_queue and e.available_at is null and e.id > max(m.id) order by e.id limit 1) is not null
          into chosen, first_ready, left_over, more
          from (select n.ctid, n.id, n.xmax as locked_by
                  from (select w.ctid, w.id, w.key from relay.queue_messages as w
                         where w.queue_id = the_queue and w.available_at is null and w.id >= since
                         order by w.id limit 100 + 10 * most::bigint) as o
                  join relay.queue_messages as n on n.ctid = o.ctid and n.available_at::text is null
                 where o.key is null
                    or (select e.id from relay.queue_messages as e
                         where e.queue_id = the_queue and e.available_at is null and e.key is not null
                           and (e.key, e.id) >= (o.key, low) and (e.key, e.id) < (o.key, o.id)
                         order by e.key, e.id limit 1) is null
                   and ((select e.id from relay.queue_messages as e
                          where e.queue_id = the_queue and e.available_at >= low_due
                          order by e.available_at limit 1) is null
                        or (select e.id from relay.queue_messages as e
                             where e.queue_id = the_queue and e.available_at is not null and e.key is not null
                               and (e.key, e.available_at) >= (o.key, low_due) and e.key <= o.key
                             order by e.key, e.available_at limit 1) is null)
                 order by o.id limit most - cardinality(chosen) for update of n skip locked) as m;
        if cardinality(chosen) > 0 then
            first_open := case when since = low then first_ready end;
            return;
        end if;
    end loop;
    if (select count(*)
             from (select from relay.queue_messages as n
                    where n.queue_id = the_queue and n.available_at is null and n.id >= low
                    order by n.id limit 100 + 10 * most::bigint) as w) < 100 + 10 * most::bigint then
        return;
    end if;
    -- All of the window is blocked. A larger one, unless more keys are held than can be compared at once: its first message of a key is
    -- the first of that key.
    with held as materialized (
        select e.key from relay.queue_messages as e
         where e.queue_id = the_queue and e.available_at >= low_due and e.key is not null
         order by e.available_at limit 1001),
    oldest as materialized (
        select n.ctid, n.id, n.key from relay.queue_messages as n
         where n.queue_id = the_queue and n.available_at is null and n.id >= low and (select count(*) from held) <= 1000
         order by n.id limit 1000 + 20 * most::bigint),
    firsts as materialized (
        select f.ctid, f.id
          from (select distinct on (o.key) o.ctid, o.id from oldest as o
                 where o.key not in (select h.key from held as h) order by o.key, o.id) as f
         order by f.id limit 100 + 2 * most::bigint),
    locked as materialized (
        select n.ctid, n.id, n.xmax as locked_by from relay.queue_messages as n
         where n.ctid = any (array(select f.ctid from firsts as f)) and n.available_at::text is null
         order by n.id limit most - cardinality(chosen) for update skip locked)
    select chosen || coalesce((select array_agg(l.ctid) from locked as l), '{}'),
           left_over || coalesce((select array_agg(l.ctid) filter (where l.locked_by <> '0' and relay.was_aborted(l.locked_by)) from locked as l), '{}'),
           (select min(f.id) from firsts as f)
      into chosen, left_over, first_open;
    if cardinality(chosen) > 0 then
        searched := true;
        return;
    end if;
    -- From key to key, the first message of each.
    for candidate in
        with recursive heads as (
            (select n.key, n.ctid from relay.queue_messages as n
              where n.queue_id = the_queue and n.available_at is null and n.key is not null
              order by n.key, n.id limit 1)
            union all
            select next.key, next.ctid from heads as h cross join lateral (
                   select n.key, n.ctid from relay.queue_messages as n
                    where n.queue_id = the_queue and n.available_at is null and n.key > h.key
                    order by n.key, n.id limit 1) as next)
        select h.ctid from heads as h
         where (select e.id from relay.queue_messages as e
                 where e.queue_id = the_queue and e.available_at is not null and e.key is not null
                   and (e.key, e.available_at) >= (h.key, low_due) and e.key <= h.key
                 order by e.key, e.available_at limit 1) is null
    loop
        select n.id, n.xmax into since, locked_by from relay.queue_messages as n
          where n.ctid = candidate and n.available_at is null for update skip locked;
        if found then
            chosen := chosen || candidate;
            first_open := least(first_open, since);
            searched := true;
            if relay.was_aborted(locked_by) then
                left_over := left_over || candidate;
            end if;
            exit when cardinality(chosen) >= most;
        end if;
    end loop;
end
$$;

-- Keeps what became of an attempt of a locked message in relay.attempts. `attempt` is null where its lease has expired; `ends` is false
-- where it is not known since when the attempt lasts, or until when. Nothing is kept where attempts.record says so, nor while relay
-- empties the slice: it waits for nobody.
create or replace function relay.note_attempt(location tid, attempt int, outcome text, why text, ends boolean default true) returns void
language plpgsql
as $$
declare
    until timestamptz;
    day   int;
begin
    select now() + coalesce(s.keep, '7 days') into until
      from relay.queue_messages as m
      join relay.queues as q on q.id = m.queue_id
      left join relay.attempt_settings as s on s.group_id = q.group_id
     where m.ctid = location and s.record is distinct from 'none';
    day := extract(epoch from until)::bigint / 86400 % 9;
    if day is null or not pg_try_advisory_xact_lock_shared(x'71617474'::int, day) then
        return;
    end if;
    insert into relay.attempts (
        slice, kept_until, group_id, consumer, event_ids, hosts, message_id, number, began_at, seconds, outcome, error)
    select day, until, q.group_id, 'queue:' || q.name, array[relay.event_key(m.event_id)],
           array_remove(array[m.host_id], null), m.id, coalesce(note_attempt.attempt, m.attempts), coalesce(t.began, t.ended),
           extract(epoch from t.ended - t.began), note_attempt.outcome, left(substring(why from '[^\r\n]+'), 1000)
      from relay.queue_messages as m
      join relay.queues as q on q.id = m.queue_id
     cross join lateral (
           select case when not ends then null
                       when m.leased then m.leased_at
                       -- One that was claimed in this transaction.
                       when current_setting('relay.more_messages', true) <> '' then now() end as began,
                  case when note_attempt.attempt is null then m.available_at else clock_timestamp() end as ended) as t
     where m.ctid = location;
end
$$;

-- Moves locked messages to the dead letters.
create or replace function relay.dead_letter_messages(these tid[], why text) returns void
language sql
as $$
    with gone as (delete from relay.queue_messages where ctid = any (these) returning *)
    insert into relay.queue_dead_letters (
        id, queue_id, key, attempts, enqueued_at, first_taken_at, event_id, event_type, host_id, user_id, aggregate_type,
        aggregate_id, aggregate_version, event_ts, transaction_id, payload, metadata, error, unique_key)
    select id, queue_id, key, attempts, enqueued_at, first_taken_at, event_id, event_type, host_id, user_id, aggregate_type,
           aggregate_id, aggregate_version, event_ts, transaction_id, payload, metadata, coalesce(why, error), unique_key
      from gone
$$;

drop function if exists relay.keep_messages(tid[], int); -- without `result`

-- Keeps what is to be seen of locked messages that are done; `attempt` is the one that is, by default the next of each.
create or replace function relay.keep_messages(these tid[], attempt int default null, result jsonb default null) returns void
language plpgsql
as $$
begin
    insert into relay.queue_done (
        id, queue_id, key, attempts, enqueued_at, first_taken_at, event_id, event_type, host_id, error, note, result)
    select id, queue_id, key, coalesce(attempt, attempts + 1), enqueued_at, coalesce(first_taken_at, clock_timestamp()), event_id,
           event_type, host_id, error, note, keep_messages.result
      from relay.queue_messages where ctid = any (these);
end
$$;

-- What idle workers are woken by: relay.watch_queue takes a lock for the session, and whoever puts a message into the queue sends a
-- notification only where somebody has that lock: NOTIFY makes commits take turns, so nobody who is at work asks for it. Nothing
-- depends on it: a notification may be lost, or nobody may listen, and whoever looks for messages from time to time finds them.
create or replace function relay.wake_workers(the_queue bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    number int := the_queue % 2147483648;
begin
    if pg_try_advisory_lock(x'7169776b'::int, number) then
        perform pg_advisory_unlock(x'7169776b'::int, number);
    elsif pg_notification_queue_usage() < 0.5 then
        -- A full queue would abort the transaction.
        perform pg_notify('relay_queue_' || the_queue, '');
    end if;
end
$$;

-- Says that this session waits for messages of a queue, and returns the channel that they are notified on. Then listen there, take
-- what has come meanwhile, and wait. pg_advisory_unlock_all() says that the session no longer waits.
create or replace function relay.watch_queue(queue text, call relay.call default relay.this_call()) returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    q record;
begin
    q := relay.require_queue(queue, call);
    perform pg_advisory_lock_shared(x'7169776b'::int, (q.id % 2147483648)::int);
    return 'relay_queue_' || q.id;
end
$$;

-- How many sessions wait for messages of a queue, so that they can share the polls, and which transactions are running that have
-- changed something: those that were when the session began to wait may have seen nobody wait.
create or replace function relay.queue_watchers(
    queue text, call relay.call default relay.this_call(), out watchers int, out running text[]
)
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    q record;
begin
    q := relay.require_queue(queue, call);
    select count(*) filter (where l.locktype = 'advisory' and l.objsubid = 2 and l.classid = x'7169776b'::int
                                  and l.objid = (q.id % 2147483648)::int and l.mode = 'ShareLock' and l.granted
                                  and l.database = (select d.oid from pg_database as d where d.datname = current_database())),
           coalesce(array_agg(l.transactionid::text) filter (where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock'), '{}')
      into watchers, running
      from pg_locks as l;
end
$$;

-- Takes messages, at most `max`: they are deleted, and so done when the caller's transaction commits. After a rollback, or when the
-- session ends, they can be taken again at once. Nobody waits for messages that another has.
create or replace function relay.take(queue text, max int default 1, call relay.call default relay.this_call())
returns table (id bigint, attempt int, key text, event_id text, event_type text, host_id text, user_id text, aggregate_type text,
               aggregate_id text, aggregate_version bigint, event_ts timestamptz, transaction_id text, payload jsonb,
               metadata jsonb, enqueued_at timestamptz, first_taken_at timestamptz)
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    q      record;
    locked record;
    taken  bigint;
begin
    select * into q from relay.queue_state(take.queue, call);
    if not found then
        q := relay.require_queue(take.queue, call);
    end if;
    if q.paused then
        return;
    end if;
    if not q.keyed and not q.keeps and not q.records_all then
        -- What relay.lock_messages does where nothing is due, in one statement. Each row is looked up by its ctid, in the order of the ids.
        return query
            delete from relay.queue_messages as m
             using (select n.ctid from relay.queue_messages as n
                     where n.queue_id = q.id and n.available_at is null and n.id >= q.mark
                       and (select true from relay.queue_messages as d
                             where d.queue_id = q.id and d.available_at >= q.due_mark
                               and d.available_at <= greatest(clock_timestamp(), q.due_mark)
                             order by d.available_at limit 1) is null
                     order by n.id limit greatest(take.max, 1) for update skip locked) as o
             where m.ctid = o.ctid
            returning m.id, m.attempts + 1, m.key, m.event_id, m.event_type, m.host_id, m.user_id, m.aggregate_type, m.aggregate_id,
                      m.aggregate_version, m.event_ts, m.transaction_id, m.payload, m.metadata, m.enqueued_at, clock_timestamp();
        get diagnostics taken = row_count;
        if random() < taken / 250.0 then -- seldom, since the statement does not say how far it had to look
            perform relay.move_marks(q.id, q.mark, q.due_mark, q.noted_at);
        end if;
        if taken > 0 then
            return;
        end if;
    end if;
    select * into locked from relay.lock_messages(q.id, q.keyed, q.attempts, q.mark, q.due_mark, q.start, greatest(take.max, 1));
    if q.keeps then
        perform relay.keep_messages(locked.chosen);
    end if;
    if locked.tried > 0 or q.records_all then
        perform relay.note_attempt(m.ctid, m.attempts + 1, 'delivered', null, false)
           from relay.queue_messages as m where m.ctid = any (locked.chosen) and (m.attempts > 0 or q.records_all);
    end if;
    return query
        with gone as (delete from relay.queue_messages where ctid = any (locked.chosen) returning *)
        select id, attempts + 1, key, event_id, event_type, host_id, user_id, aggregate_type, aggregate_id, aggregate_version,
               event_ts, transaction_id, payload, metadata, enqueued_at, coalesce(first_taken_at, clock_timestamp())
          from gone order by id;
    perform relay.note_progress(q, locked);
end
$$;

-- Claims messages, at most `max`, for the caller's transaction: nobody else can take them before it ends. End each in it, with
-- relay.complete or, once its effects are undone to a savepoint after the claim, with relay.retry or relay.fail: so nobody takes a
-- message between its failure and the end of the attempt. One that is not ended can be taken again after the transaction. If that
-- was aborted, relay.claim counts it and leaves the message to the next call; when it has happened as often as the queue has attempts,
-- and three times at least, the message is a dead letter: it may be what kills its workers.
create or replace function relay.claim(queue text, max int default 1, call relay.call default relay.this_call())
returns table (id bigint, attempt int, key text, event_id text, event_type text, host_id text, user_id text, aggregate_type text,
               aggregate_id text, aggregate_version bigint, event_ts timestamptz, transaction_id text, payload jsonb,
               metadata jsonb, enqueued_at timestamptz, first_taken_at timestamptz)
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    q         record;
    locked    record;
    location  tid;
    locked_by xid;
    more      boolean;
    most      int;
    killer    tid[];
    why       text;
begin
    select * into q from relay.queue_state(claim.queue, call);
    if not found then
        q := relay.require_queue(claim.queue, call);
    end if;
    if q.paused then
        return;
    end if;
    if not q.keyed and claim.max = 1 then
        -- What relay.lock_messages does where nothing is due, in one statement.
        select o.id, o.attempts + 1, o.key, o.event_id, o.event_type, o.host_id, o.user_id, o.aggregate_type, o.aggregate_id,
               o.aggregate_version, o.event_ts, o.transaction_id, o.payload, o.metadata, o.enqueued_at,
               coalesce(o.first_taken_at, clock_timestamp()), o.location, o.locked_by,
               (select true from relay.queue_messages as e
                 where e.queue_id = q.id and e.available_at is null and e.id > o.id order by e.id limit 1) is not null
          into id, attempt, key, event_id, event_type, host_id, user_id, aggregate_type, aggregate_id, aggregate_version, event_ts,
               transaction_id, payload, metadata, enqueued_at, first_taken_at, location, locked_by, more
          from (select n.*, n.ctid as location, n.xmax as locked_by from relay.queue_messages as n
                 where n.queue_id = q.id and n.available_at is null and n.id >= q.mark
                   and (select true from relay.queue_messages as d
                         where d.queue_id = q.id and d.available_at >= q.due_mark
                           and d.available_at <= greatest(clock_timestamp(), q.due_mark)
                         order by d.available_at limit 1) is null
                 order by n.id limit 1 for update skip locked) as o;
    end if;
    if location is null then
        select * into locked from relay.lock_messages(q.id, q.keyed, q.attempts, q.mark, q.due_mark, q.start, greatest(claim.max, 1));
    else
        select array[location] as chosen, id as first_ready, 0 as due, '{}'::tid[] as left_over, null::bigint as first_open, more,
               false as searched into locked;
        if not relay.was_aborted(locked_by) then
            return next;
            perform relay.note_progress(q, locked);
            return;
        end if;
        locked.left_over := locked.chosen;
    end if;
    if locked.left_over <> '{}' then
        most := greatest(q.attempts, 3);
        why := format('%s transactions that had claimed the message were aborted: it may kill its workers', most);
        killer := array(select m.ctid from relay.queue_messages as m
                         where m.ctid = any (locked.left_over) and m.interruptions + 1 >= most);
        perform relay.note_attempt(m.ctid, m.attempts + 1, 'failed', why, false)
           from relay.queue_messages as m where m.ctid = any (killer);
        perform relay.dead_letter_messages(killer, why);
        update relay.queue_messages as m set interruptions = m.interruptions + 1 where m.ctid = any (locked.left_over);
    end if;
    return query
        select id, attempts + 1, key, event_id, event_type, host_id, user_id, aggregate_type, aggregate_id, aggregate_version,
               event_ts, transaction_id, payload, metadata, enqueued_at, coalesce(first_taken_at, clock_timestamp())
          from relay.queue_messages where ctid = any (locked.chosen) and ctid <> all (locked.left_over) order by id;
    perform relay.note_progress(q, locked);
end
$$;

-- Leases messages, at most `max`, for an interval, for work that outlives a transaction. When it is over, another worker can take
-- them. The attempt is the fencing token: relay.complete and the others do nothing for a worker whose lease has gone to another.
create or replace function relay.lease(
    queue text, max int default 1, duration interval default '1 minute', call relay.call default relay.this_call()
)
returns table (id bigint, attempt int, key text, event_id text, event_type text, host_id text, user_id text, aggregate_type text,
               aggregate_id text, aggregate_version bigint, event_ts timestamptz, transaction_id text, payload jsonb,
               metadata jsonb, enqueued_at timestamptz, first_taken_at timestamptz)
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    q      record;
    locked record;
begin
    select * into q from relay.queue_state(lease.queue, call);
    if not found then
        q := relay.require_queue(lease.queue, call);
    end if;
    if q.paused then
        return;
    end if;
    perform relay.begin_times();
    select * into locked from relay.lock_messages(q.id, q.keyed, q.attempts, q.mark, q.due_mark, q.start, greatest(lease.max, 1));
    return query
        with held as (
            update relay.queue_messages as m
               set leased = true, leased_at = clock_timestamp(), attempts = m.attempts + 1,
                   available_at = greatest(clock_timestamp(), q.due_mark) + greatest(lease.duration, '0 s'),
                   first_taken_at = coalesce(m.first_taken_at, clock_timestamp())
             where m.ctid = any (locked.chosen) returning m.*)
        select id, attempts, key, event_id, event_type, host_id, user_id, aggregate_type, aggregate_id, aggregate_version,
               event_ts, transaction_id, payload, metadata, enqueued_at, first_taken_at
          from held order by id;
    perform relay.note_progress(q, locked);
end
$$;

-- Locks the message that a worker has in an attempt: under a lease, or given back by a rollback and not taken by another since.
-- Returns null where it is another's, or gone.
create or replace function relay.lock_message(the_queue bigint, the_id bigint, attempt int, only_leased boolean) returns tid
language plpgsql
as $$
declare
    location tid;
begin
    if not only_leased then
        select m.ctid into location from relay.queue_messages as m
         where m.queue_id = the_queue and m.id = the_id and m.available_at is null and m.attempts = attempt - 1
           for update skip locked;
    end if;
    if location is null then
        -- With the order that only the index of ids has, as in relay.lock_messages.
        select m.ctid into location from relay.queue_messages as m
         where m.queue_id = the_queue and m.id >= the_id and m.id <= the_id and m.available_at is not null
           and (m.leased and m.attempts = attempt
                or not only_leased and m.attempts = attempt - 1 and (not m.leased or m.available_at <= clock_timestamp()))
         order by m.id for update skip locked;
    end if;
    if location is null then
        -- Whoever looked for messages while this one was leased may have its lock for a moment, though not the message: only one whose
        -- lease is over can be another's.
        select m.ctid into location from relay.queue_messages as m
         where m.queue_id = the_queue and m.id >= the_id and m.id <= the_id and m.available_at > clock_timestamp() and m.leased
           and m.attempts = attempt
         order by m.id for update;
    end if;
    return location;
end
$$;

-- Ends a message that was leased or claimed: it is done. Returns whether it was still this worker's. relay.queue_items shows the result
-- for the queue's keep_done. `dropped` says why the worker has left it without effects.
create or replace function relay.complete(
    queue text, id bigint, attempt int, result jsonb default null, dropped text default null,
    call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan
as $$
declare
    q     record;
    location tid;
begin
    select * into q from relay.queue_state(queue, call);
    if not found then
        q := relay.require_queue(queue, call);
    end if;
    if not q.keeps and complete.attempt <= 1 and complete.dropped is null and not q.records_all then
        -- One that was claimed, in one statement.
        delete from relay.queue_messages as m where m.ctid = any (array(
            select n.ctid from relay.queue_messages as n
             where n.queue_id = q.id and n.id = complete.id and n.available_at is null and n.attempts = complete.attempt - 1
               for update skip locked));
        if found then
            return true;
        end if;
    end if;
    location := relay.lock_message(q.id, complete.id, complete.attempt, false);
    if q.keeps and location is not null then
        perform relay.keep_messages(array[location], complete.attempt, complete.result);
    end if;
    if (complete.attempt > 1 or complete.dropped is not null or q.records_all) and location is not null then
        perform relay.note_attempt(
            location, complete.attempt, case when complete.dropped is null then 'delivered' else 'dropped' end, complete.dropped);
    end if;
    delete from relay.queue_messages as m where m.ctid = location;
    return location is not null;
end
$$;

-- Prolongs a lease: it ends after an interval from now. Returns whether the message was still this worker's.
create or replace function relay.extend(
    queue text, id bigint, attempt int, duration interval default '1 minute', call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan
as $$
declare
    q     record;
    location tid;
begin
    q := relay.require_queue(queue, call);
    perform relay.begin_times();
    location := relay.lock_message(q.id, extend.id, extend.attempt, true);
    update relay.queue_messages as m set available_at = greatest(clock_timestamp(), q.due_mark) + greatest(duration, '0 s')
     where m.ctid = location;
    return location is not null;
end
$$;

-- Says how far the work on a leased message is, for relay.queue_items, which shows it at once. Returns whether the message was still
-- this worker's.
create or replace function relay.note_message(
    queue text, id bigint, attempt int, note jsonb, call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan
as $$
declare
    q        record;
    location tid;
begin
    q := relay.require_queue(queue, call);
    location := relay.lock_message(q.id, note_message.id, note_message.attempt, true);
    update relay.queue_messages as m set note = note_message.note where m.ctid = location;
    return location is not null;
end
$$;

-- Gives back a message that was leased or claimed: another worker can take it after an interval, by default at once, and the attempt
-- does not count. It keeps its key meanwhile. `error` says why, such as that the worker does not know its type. Returns whether it
-- was still this worker's.
create or replace function relay.release(
    queue text, id bigint, attempt int, after interval default '0 s', error text default null,
    call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan
as $$
declare
    q     record;
    location tid;
begin
    q := relay.require_queue(queue, call);
    perform relay.begin_times();
    location := relay.lock_message(q.id, release.id, release.attempt, false);
    update relay.queue_messages as m
       set leased = false, attempts = release.attempt - 1, error = coalesce(release.error, m.error),
           first_taken_at = coalesce(m.first_taken_at, clock_timestamp()),
           available_at = greatest(clock_timestamp(), q.due_mark) + greatest(release.after, '0 s')
     where m.ctid = location;
    if coalesce(release.after, '0 s') <= '0 s' then
        perform relay.wake_workers(q.id);
    end if;
    return location is not null;
end
$$;

-- Ends an attempt that failed: the message is tried again after an interval, by default that of the queue's backoff; a message
-- whose attempts are exhausted becomes a dead letter. It keeps its key meanwhile. Of relay.take, call it after the rollback that gives
-- the message back; another worker may be faster. Returns retry or dead; null where another worker has the message.
create or replace function relay.retry(
    queue text, id bigint, attempt int, after interval default null, error text default null, call relay.call default relay.this_call()
)
returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan
as $$
declare
    q     record;
    location tid;
    pause interval := after;
begin
    q := relay.require_queue(queue, call);
    perform relay.begin_times();
    location := relay.lock_message(q.id, retry.id, retry.attempt, false);
    if location is null then
        return null;
    end if;
    perform relay.note_attempt(location, retry.attempt, 'failed', retry.error);
    update relay.queue_messages as m
       set leased = false, attempts = retry.attempt, error = retry.error, interruptions = 0,
           first_taken_at = coalesce(m.first_taken_at, clock_timestamp()),
           available_at = greatest(clock_timestamp(), q.due_mark) + greatest('0 s', coalesce(
               pause, (0.5 + random() / 2) * make_interval(secs => least(
                   extract(epoch from q.max_backoff), extract(epoch from q.backoff) * 2 ^ least(retry.attempt - 1, 30)))))
     where m.ctid = location
    returning m.ctid into location;
    if retry.attempt >= q.attempts then
        perform relay.dead_letter_messages(array[location], null);
        return 'dead';
    end if;
    return 'retry';
end
$$;

-- Gives a message up: it becomes a dead letter. Of relay.take, call it after the rollback that gives the message back. Returns whether
-- it was still this worker's.
create or replace function relay.fail(
    queue text, id bigint, attempt int, error text default null, call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan
as $$
declare
    q     record;
    location tid;
begin
    q := relay.require_queue(queue, call);
    location := relay.lock_message(q.id, fail.id, fail.attempt, false);
    if location is null then
        return false;
    end if;
    perform relay.note_attempt(location, fail.attempt, 'failed', fail.error);
    update relay.queue_messages as m set attempts = fail.attempt, error = fail.error where m.ctid = location
    returning m.ctid into location;
    perform relay.dead_letter_messages(array[location], null);
    return true;
end
$$;

-- Puts dead letters of a queue into it again, all or those with some ids, after the messages that are there; returns how many. Records
-- it in relay.dead_letter_actions, with the reason.
create or replace function relay.requeue(
    queue text, ids bigint[] default null, reason text default null, call relay.call default relay.this_call()
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    q       record;
    counted bigint;
begin
    q := relay.require_queue(queue, call);
    perform relay.begin_messages();
    with gone as (
        delete from relay.queue_dead_letters as d
         where d.id = any (array(select o.id from relay.queue_dead_letters as o
                                  where o.queue_id = q.id and (ids is null or o.id = any (ids))
                                    for update skip locked))
        returning *),
    noted as (
        insert into relay.dead_letter_actions (
            group_id, consumer, dead_transaction, letters, transaction_id, action, reason, acted_by)
        select d.group_id, 'queue:' || d.name, g.dead_transaction, array[g.id], g.transaction_id, 'replay', requeue.reason,
               relay.calling_role(call)
          from gone as g join relay.queues as d on d.id = g.queue_id order by g.id)
    insert into relay.queue_messages (
        queue_id, key, event_id, event_type, host_id, user_id, aggregate_type, aggregate_id, aggregate_version, event_ts,
        transaction_id, payload, metadata, unique_key)
    select g.queue_id, g.key, g.event_id, g.event_type, g.host_id, g.user_id, g.aggregate_type, g.aggregate_id,
           g.aggregate_version, g.event_ts, g.transaction_id, g.payload, g.metadata, g.unique_key
      from gone as g order by g.id;
    get diagnostics counted = row_count;
    perform relay.wake_workers(q.id);
    return counted;
end
$$;

-- The message of a queue that is enough for a unique key, and has what on_duplicate says now; null without one.
create or replace function relay.duplicate_of(
    the_queue bigint, wanted text, on_duplicate text, at timestamptz, event_id text, event_type text, payload jsonb, metadata jsonb
) returns bigint
language plpgsql
as $$
declare
    waiting tid[];
    given   bigint;
begin
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        raise feature_not_supported using
            message = 'relay.enqueue: a unique_key needs a READ COMMITTED transaction: others do not see what was enqueued since they began';
    end if;
    -- Those who enqueue with one key take turns until they commit, so that each sees what the one before has put in.
    perform pg_advisory_xact_lock(x'71756e69'::int, hashtext(the_queue || ' ' || wanted));
    if on_duplicate = 'skip' then
        -- Also one that a transaction has taken, and not yet deleted for others.
        select m.id into given from relay.queue_messages as m
         where m.queue_id = the_queue and m.unique_key = wanted order by m.id limit 1;
        return given;
    end if;
    -- Not one whose lease is over: its worker may complete it all the same.
    waiting := array(select m.ctid from relay.queue_messages as m
                      where m.queue_id = the_queue and m.unique_key = wanted and not m.leased
                      order by m.id desc limit 1 for update skip locked);
    begin
        update relay.queue_messages as m
           set event_id = case when on_duplicate = 'replace' then coalesce(duplicate_of.event_id, m.event_id) else m.event_id end,
               event_type = case when on_duplicate = 'replace' then duplicate_of.event_type else m.event_type end,
               payload = case when on_duplicate = 'replace' then duplicate_of.payload else m.payload end,
               metadata = case when on_duplicate = 'replace' then duplicate_of.metadata else m.metadata end,
               available_at = case when at is not null then greatest(at, clock_timestamp()) else m.available_at end
         where m.ctid = any (waiting) returning m.id into given;
    exception when others then
        raise; -- a transaction within: see relay.was_aborted
    end;
    return given;
end
$$;

-- Puts a message into a queue in the caller's transaction, beside the log; returns its id. `key` is what orders it within the host:
-- a user_id, an aggregate's type and id with a space between them, or the value of the queue's path. With a time it can be taken from
-- then on.
-- With a unique_key, no second message with that key waits, and the id is that of the one that does. With on_duplicate => 'skip' it stays
-- as it is, also while a worker has it; with 'replace' it gets these contents, and the time if there is one; with 'move' only the time. For
-- the latter two another message is put in while a worker has the first, which a worker may take beside it.
create or replace function relay.enqueue(
    queue text, payload jsonb, event_type text default 'message', host_id text default null, key text default null,
    deliver_at timestamptz default null, metadata jsonb default null, event_id text default null,
    unique_key text default null, on_duplicate text default 'skip', call relay.call default relay.this_call()
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    q      record;
    within text;
    host   text := coalesce(enqueue.host_id, '');
    wanted text := case when octet_length(enqueue.unique_key) > 1000 then encode(sha256(convert_to(enqueue.unique_key, 'UTF8')), 'hex')
                        else enqueue.unique_key end;
    given  bigint;
begin
    q := relay.require_queue(queue, call);
    if coalesce(enqueue.on_duplicate, '') not in ('skip', 'replace', 'move') then
        raise invalid_parameter_value using
            message = format('relay.enqueue: on_duplicate is %L: give skip, replace or move', enqueue.on_duplicate);
    end if;
    if enqueue.on_duplicate = 'move' and deliver_at is null then
        raise null_value_not_allowed using message = 'relay.enqueue: on_duplicate is move: give a deliver_at';
    end if;
    if q.keyed and deliver_at is not null then
        raise feature_not_supported using
            message = format('the messages of the queue %L are ordered by a key: publish an event with deliver_at instead', queue);
    end if;
    -- As relay makes the keys of events.
    if octet_length(host) > 1000 or strpos(host, e'\x1f') > 0 then
        host := encode(sha256(convert_to(host, 'UTF8')), 'hex');
    end if;
    within := case when q.key = 'host' then 'host' else q.key || ' ' || enqueue.key end;
    if octet_length(within) > 1000 or strpos(within, e'\x1f') > 0 then
        within := q.key || ' ' || encode(sha256(convert_to(within, 'UTF8')), 'hex');
    end if;
    perform relay.begin_messages();
    if deliver_at is not null then
        perform relay.begin_times();
    end if;
    if wanted is not null then
        given := relay.duplicate_of(q.id, wanted, enqueue.on_duplicate,
                                    case when deliver_at is not null then greatest(deliver_at, q.due_mark) end,
                                    enqueue.event_id, enqueue.event_type, enqueue.payload, enqueue.metadata);
        if given is not null then
            if deliver_at <= clock_timestamp() then
                perform relay.wake_workers(q.id);
            end if;
            return given;
        end if;
    end if;
    insert into relay.queue_messages (queue_id, key, available_at, event_id, event_type, host_id, payload, metadata, unique_key)
    values (q.id, case when q.keyed then host || ' ' || within end,
            case when deliver_at is not null then greatest(deliver_at, clock_timestamp(), q.due_mark) end,
            coalesce(enqueue.event_id, gen_random_uuid()::text), enqueue.event_type,
            enqueue.host_id, enqueue.payload, enqueue.metadata, wanted)
    returning queue_messages.id into given;
    -- A time that comes later wakes nobody: a poll finds it.
    if deliver_at is null or deliver_at <= clock_timestamp() then
        perform relay.wake_workers(q.id);
    end if;
    return given;
end
$$;

-- Where a fill from the log begins, as it is stored: beginning, a c_offset, or a time. Raises an error, which names the function, for
-- anything else, and for a group that has no log to read.
create or replace function relay.fill_start(asked text, the_group text, named text) returns text
language plpgsql
as $$
declare
    moment timestamptz;
begin
    if not exists (select from relay.snapshots as s where s.group_id = the_group) then
        raise feature_not_supported using
            message = format('%s: start: the group %L reads only the WAL (source.mode: wal), which has no earlier events', named,
                             the_group);
    end if;
    if asked = 'beginning' or asked ~ '^[0-9]{1,18}$' then
        return asked;
    end if;
    begin
        moment := asked::timestamptz;
    exception when data_exception then
        null;
    end;
    if moment is null or moment not between '0001-01-02Z' and '9999-12-30Z' then
        raise invalid_parameter_value using
            message = format('%s: start: %L is neither beginning, a c_offset, nor a time such as 2026-03-01T12:00Z', named, asked);
    end if;
    return to_char(moment at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"');
end
$$;

-- Declares a queue: the events of the log that match go into it, from the first that is published after this transaction has
-- committed; with `start`, from an earlier one on: beginning, which is the oldest that is there, a c_offset, or a time. `start` counts
-- when the queue is made: relay.rebuild_queue fills one that is there again. Returns whether anything changed; a second call with the same arguments changes nothing, and writes nothing. It does not
-- touch what is in the queue, nor whether it is paused, nor, without `workers`, whose it is: of who declared it first. `where` is a path of SQL/JSON into a message, such as
-- '$.payload.amount >= $least', with its variables in `params`; it is true where it yields anything but false or null first.
-- A queue that relay has stopped, for it could not evaluate its match or `where`, is filled again from a call that changes something
-- on; relay.rebuild_queue brings what it has missed. Only members of relay may call it with `configured`. It waits at most five seconds
-- for a transaction that declares, changes or drops a queue of the same name.
create or replace function relay.declare_queue(
    name text, match jsonb default '{}', key text default 'none', attempts int default 5, backoff interval default '1 second',
    max_backoff interval default '5 minutes', workers text default null, paused boolean default false,
    group_id text default null, keep_done interval default null, "where" text default null, params jsonb default null,
    configured boolean default false, start text default null,
    call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s'
as $$
declare
    path   jsonpath;
    begins text;
    caller text := relay.calling_role(call);
    owner  text := coalesce(declare_queue.workers, caller);
    groups text[];
    whose  text := declare_queue.group_id;
    field  text;
    value  jsonb;
    former relay.queues;
begin
    if declare_queue.name is null or declare_queue.name !~ '^[^[:cntrl:]]{1,100}$' then
        raise invalid_parameter_value using message = 'relay.declare_queue: name must have 1 to 100 characters';
    end if;
    if jsonb_typeof(declare_queue.match) <> 'object' then
        raise invalid_parameter_value using message = 'relay.declare_queue: match must be an object, such as '
            '{"event_type": "order.*"}, or null for a queue of direct messages only';
    end if;
    perform relay.require_bounded(declare_queue.match, 20000, 'relay.declare_queue: match');
    for field, value in select m.key, m.value from jsonb_each(declare_queue.match) as m loop
        if not relay.is_event_field(field) then
            raise invalid_parameter_value using
                message = format('relay.declare_queue: match: %L is neither a field of an event nor a path such as '
                                 'payload.customer.tier', field);
        end if;
        if jsonb_typeof(value) in ('null', 'object') or value = '[]'
           or jsonb_typeof(value) = 'array' and exists (
               select from jsonb_array_elements(value) as item where jsonb_typeof(item) in ('null', 'object', 'array')) then
            raise invalid_parameter_value using
                message = format('relay.declare_queue: match: the value of %s must be a value, a pattern such as order.*, or a '
                                 'list of them', field);
        end if;
    end loop;
    if declare_queue.key is null or declare_queue.key not in ('none', 'host', 'user', 'aggregate')
       and not (declare_queue.key ~ '^(payload|metadata)\.' and relay.is_event_field(declare_queue.key)) then
        raise invalid_parameter_value using message = 'relay.declare_queue: key must be none, host, user, aggregate, or a path '
            'such as payload.customer.id';
    end if;
    if coalesce(declare_queue.attempts, 0) < 1 or coalesce(declare_queue.backoff, '-1 s') < '0 s'
       or coalesce(declare_queue.max_backoff, '-1 s') < declare_queue.backoff then
        raise invalid_parameter_value using message = 'relay.declare_queue: attempts must be 1 or more, backoff 0 or longer, and '
            'max_backoff not shorter than backoff';
    end if;
    if declare_queue.keep_done <= '0 s' or declare_queue.keep_done > '36500 days' or declare_queue.max_backoff > '36500 days' then
        raise invalid_parameter_value using message = 'relay.declare_queue: keep_done must be longer than 0, or null, and neither it '
            'nor max_backoff longer than 36500 days';
    end if;
    path := relay.condition_path(declare_queue."where", declare_queue.params, 'relay.declare_queue');
    if path is not null and declare_queue.match is null then
        raise invalid_parameter_value using message = 'relay.declare_queue: where: without match, no events go into the queue';
    end if;
    if declare_queue.configured and to_regrole('relay') is not null and not relay.may_act_as('relay', call) then
        raise insufficient_privilege using
            message = 'relay.declare_queue: configured: only a member of the role relay may give it';
    end if;
    if not exists (select from pg_roles where rolname = owner) then
        raise undefined_object using message = format('relay.declare_queue: workers: there is no role %L', owner);
    end if;
    if whose is null then
        select array_agg(distinct p.group_id) into groups from relay.group_partitions as p;
        if cardinality(groups) is distinct from 1 then
            raise invalid_parameter_value using
                message = format('relay.declare_queue: group_id: say which group fills the queue (groups of this database: %s)',
                                 coalesce(array_to_string(groups, ', '), 'none'));
        end if;
        whose := groups[1];
    elsif not exists (select from relay.group_partitions as p where p.group_id = whose) then
        raise invalid_parameter_value using message = format('relay.declare_queue: there is no group %L', whose);
    end if;
    if declare_queue.start is not null then
        begins := relay.fill_start(declare_queue.start, whose, 'relay.declare_queue');
    end if;
    loop
        select * into former from relay.queues as q where q.name = declare_queue.name;
        exit when found;
        insert into relay.queues (group_id, name, match, key, attempts, backoff, max_backoff, workers, paused_at, paused_by,
                                  keep_done, condition, params, configured)
        values (whose, declare_queue.name, declare_queue.match, declare_queue.key, declare_queue.attempts, declare_queue.backoff,
                declare_queue.max_backoff, owner, case when paused then clock_timestamp() end, case when paused then caller end,
                declare_queue.keep_done, path, declare_queue.params, declare_queue.configured)
        on conflict do nothing
        returning * into former;
        if found then
            if begins is not null then
                insert into relay.queue_fills (queue_id, start) values (former.id, begins);
            end if;
            perform relay.note_queues(whose);
            return true;
        end if;
    end loop;
    if not relay.may_act_as(former.workers, call) then
        raise insufficient_privilege using
            message = format('the queue %L is that of the role %I: only its members may declare it', former.name, former.workers);
    end if;
    -- An operator who declares it, or a member of its role, does not take it from those who work it.
    owner := coalesce(declare_queue.workers, former.workers);
    if former.group_id <> whose then
        raise invalid_parameter_value using
            message = format('relay.declare_queue: the queue %L is filled by the group %L: drop it first', former.name,
                             former.group_id);
    end if;
    if (former.match, former.key, former.attempts, former.backoff, former.max_backoff, former.workers, former.keep_done,
        former.condition::text, former.params, former.configured)
       is not distinct from (declare_queue.match, declare_queue.key, declare_queue.attempts, declare_queue.backoff,
                             declare_queue.max_backoff, owner, declare_queue.keep_done, path::text, declare_queue.params,
                             declare_queue.configured) then
        return false;
    end if;
    update relay.queues as q
       set match = declare_queue.match, key = declare_queue.key, attempts = declare_queue.attempts,
           backoff = declare_queue.backoff, max_backoff = declare_queue.max_backoff, workers = owner,
           keep_done = declare_queue.keep_done, condition = path, params = declare_queue.params,
           configured = declare_queue.configured, stopped_at = null, fault = null
     where q.id = former.id;
    perform relay.note_queues(whose);
    return true;
exception when lock_not_available then
    raise lock_not_available using
        message = format('relay.declare_queue: another session declares, changes or drops the queue %L in a transaction that it '
                         'has not ended', declare_queue.name),
        hint = 'Declare queues in transactions of their own.';
end
$$;

-- Whether a message satisfies the condition of a queue. One that fails for the message, in whatever way, is not satisfied.
create or replace function relay.satisfies(message jsonb, path jsonpath, params jsonb) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp set timezone = 'UTC'
as $$
begin
    return coalesce(jsonb_path_query_first_tz(message, path, coalesce(params, '{}'), true) not in ('null', 'false'), false);
exception when others then
    return false;
end
$$;

-- Whether a name is a field of an event, or a path into its payload or metadata.
create or replace function relay.is_event_field(name text) returns boolean
language sql immutable set search_path = pg_catalog, pg_temp
as $$
    select name ~ '^(payload|metadata)(\.[^.]+)*$' or name in (
        'id', 'host_id', 'user_id', 'aggregate_id', 'aggregate_version', 'aggregate_type', 'event_type', 'event_ts', 'c_offset',
        'transaction_id', 'transaction_ordinal', 'transaction_count', 'deliver_at', 'commit_lsn', 'commit_ts', 'xid')
$$;

-- Notes that the queues of a group have changed. The rows that no other transaction has become one. A stricter transaction, which would
-- fail where another has done that since it began, adds its own.
create or replace function relay.note_queues(the_group text) returns void
language sql set search_path = pg_catalog, pg_temp
as $$
    with former as (
        delete from relay.queue_revisions where ctid = any (array(
            select r.ctid from relay.queue_revisions as r
             where r.group_id = the_group and current_setting('transaction_isolation') = 'read committed'
               for update skip locked))
        returning revision)
    insert into relay.queue_revisions (group_id, revision) select the_group, coalesce(sum(revision), 0) + 1 from former
$$;

-- How often the queues of a group have changed; null where there never was one. VOLATILE: what has committed before the call counts,
-- whatever the statement that calls it sees.
create or replace function relay.queues_revision(the_group text) returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    return (select sum(r.revision)::bigint from relay.queue_revisions as r where r.group_id = the_group);
end
$$;

-- Pauses a queue, or lets it go on: nobody can take from one that is paused, and relay fills it all the same. Returns whether that
-- changed anything.
create or replace function relay.pause_queue(
    name text, paused boolean default true, call relay.call default relay.this_call()
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    q       record;
    changed boolean;
begin
    q := relay.require_queue(name, call);
    update relay.queues as u
       set paused_at = case when paused then clock_timestamp() end, paused_by = case when paused then relay.calling_role(call) end
     where u.id = q.id and (u.paused_at is not null) <> paused;
    changed := found;
    perform relay.wake_workers(q.id);
    return changed;
end
$$;

-- The state of a message that is not done. Everybody may call it, for whoever may read relay.queue_items.
create or replace function relay.message_state(leased boolean, available_at timestamptz, attempts int, error text) returns text
language sql volatile
    return case when leased and available_at > clock_timestamp() then 'leased'
                when available_at is not null and (attempts > 0 or error is not null) then 'retry'
                when available_at > clock_timestamp() then 'scheduled' else 'enqueued' end;

-- Locks the messages of a queue that nobody has and that meet every condition which is not null. `error` is a part of the text. `waiting`:
-- only those whose time has not come. One that can be taken now is found by its event in as much time as the queue has messages.
create or replace function relay.lock_selected(
    the_queue bigint, low_due timestamptz, id bigint default null, event_id text default null, key text default null,
    event_type text default null, host_id text default null, error text default null, states text[] default null,
    waiting boolean default false
) returns tid[]
language plpgsql
as $$
declare
    those    text;
    more     tid[];
    selected tid[] := '{}';
begin
    if not states <@ '{enqueued, scheduled, retry}' then
        raise invalid_parameter_value using message = format(
            'states: %L is not enqueued, scheduled or retry: a message that is leased is its worker''s, and dead ones are dead letters', states);
    end if;
    -- Each of these is in an index of its own. Those whose lease is over nobody has, although nobody has taken them since.
    foreach those in array case when waiting then array['n.available_at > $10 and not n.leased'] else array[
        'n.available_at is not null and not n.leased',
        'n.leased and n.available_at >= $2 and n.available_at <= $10',
        'n.available_at is null'] end
    loop
        execute format(
            'select array(
                    select n.ctid from relay.queue_messages as n
                     where n.queue_id = $1 and %s and ($3 is null or n.id = $3) and ($4 is null or n.event_id = $4)
                       and ($5 is null or n.key = $5) and ($6 is null or n.event_type = $6) and ($7 is null or n.host_id = $7)
                       and ($8 is null or strpos(n.error, $8) > 0)
                       and ($9 is null or relay.message_state(n.leased, n.available_at, n.attempts, n.error) = any ($9))
                       for update skip locked)', those)
        into more
        using the_queue, low_due, id, event_id, key, event_type, host_id, error, states, clock_timestamp();
        selected := selected || more;
    end loop;
    return selected;
end
$$;

-- Deletes the messages of a queue but those that workers have; returns how many. Its dead letters stay.
create or replace function relay.purge_queue(name text, call relay.call default relay.this_call()) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    q record;
begin
    q := relay.require_queue(name, call);
    return relay.remove_messages(relay.lock_selected(q.id, q.due_mark));
end
$$;

-- Empties a queue, and fills it from the log again, from `start` on as in relay.declare_queue. Of what is there, messages that workers
-- have under a lease and dead letters go, too: what such a worker completes then is not its any more. Messages that relay.enqueue put
-- there are in no log: they are gone. relay does it, and waits for the transactions of workers that have taken messages.
create or replace function relay.rebuild_queue(
    name text, start text default 'beginning', call relay.call default relay.this_call()
) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    q      record;
    whose  text;
    begins text;
begin
    q := relay.require_queue(name, call);
    select d.group_id into whose from relay.queues as d where d.id = q.id;
    begins := relay.fill_start(coalesce(rebuild_queue.start, 'beginning'), whose, 'relay.rebuild_queue');
    -- Waits for the portion that a fill of before has in flight.
    delete from relay.queue_fills as f where f.queue_id = q.id;
    delete from relay.queue_fill_deferred as f where f.queue_id = q.id;
    insert into relay.queue_fills (queue_id, start, purges) values (q.id, begins, true);
    update relay.queues as d set stopped_at = null, fault = null where d.id = q.id and d.stopped_at is not null;
    perform relay.note_queues(whose);
end
$$;

-- Drops a queue with its messages; waits for the workers that have some. A task of relay that has read the queues before may still put
-- messages in: they are of no queue, and relay.remove_orphans deletes them.
create or replace function relay.drop_queue(name text, call relay.call default relay.this_call()) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    q     record;
    whose text;
    more  boolean;
begin
    q := relay.require_queue(name, call);
    select d.group_id into whose from relay.queues as d where d.id = q.id;
    -- Waits for the portion that a fill from the log has in flight.
    delete from relay.queue_fills as f where f.queue_id = q.id;
    delete from relay.queue_fill_deferred as f where f.queue_id = q.id;
    for pass in 1..10 loop
        -- Locked first: see relay.was_aborted.
        more := relay.remove_messages(array(
            select m.ctid from relay.queue_messages as m where m.queue_id = q.id for update)) > 0;
        -- What workers have made of messages until they let go of them.
        delete from relay.queue_dead_letters as d where d.queue_id = q.id;
        delete from relay.queue_done as d where d.queue_id = q.id;
        exit when not more;
    end loop;
    delete from relay.queue_marks as n where n.queue_id = q.id;
    delete from relay.queues as u where u.id = q.id;
    perform relay.note_queues(whose);
end
$$;

-- The ranges between the ids of queues, exclusive of both ends, in which what refers to a queue is of one that was dropped: an id is not
-- given again. STABLE: it sees the queues of the statement that looks for what is there, so also those whose messages that sees.
create or replace function relay.dropped_queues(out low bigint, out high bigint) returns setof record
language sql stable
as $$
    select e.low, e.high
      from (select q.id as low, lead(q.id, 1, 9223372036854775807) over (order by q.id) as high
              from (select 0 as id union all select d.id from relay.queues as d) as q) as e
     where e.high - e.low > 1
$$;

-- Deletes what was left for queues that are dropped, at most so many rows of each table; returns how many it were. Whatever another
-- transaction has is left for the next call.
create or replace function relay.remove_orphans(most int) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
declare
    rows    record;
    these   tid[];
    removed bigint;
    gone    bigint := 0;
begin
    -- Each in the order of an index.
    for rows in select * from (values ('queue_messages', 'and o.available_at is null', 'id'), ('queue_messages', 'and o.available_at is not null', 'id'),
                                      ('queue_dead_letters', '', 'id'), ('queue_done', '', 'done_at'), ('queue_marks', '', 'queue_id'))
                                as r (relation, which, ordered) loop
        execute format(
            'select array(
                    select m.ctid from relay.dropped_queues() as d cross join lateral (
                           select o.ctid from relay.%I as o where o.queue_id > d.low and o.queue_id < d.high %s
                            order by o.queue_id, o.%I limit $1 for update skip locked) as m limit $1)',
            rows.relation, rows.which, rows.ordered)
        into these using most;
        -- Where a publication has all tables, a delete from one without a replica identity fails, also of no rows.
        continue when these = '{}';
        execute format('delete from relay.%I where ctid = any ($1)', rows.relation) using these;
        get diagnostics removed = row_count;
        gone := gone + removed;
    end loop;
    return gone;
end
$$;

create or replace view relay.queue_items as
select i.queue, i.id, i.event_id, i.event_type, i.state, i.attempts, i.key, i.enqueued_at, i.first_taken_at, i.available_at, i.error, i.unique_key, i.note, i.result, i.host_id
  from (select q.name as queue, m.id, m.event_id, m.event_type,
               relay.message_state(m.leased, m.available_at, m.attempts, m.error) as state,
               m.attempts, m.key, m.enqueued_at, m.first_taken_at, m.available_at, m.error, m.unique_key, m.note, null::jsonb as result,
               m.host_id
          from relay.queues as q join relay.queue_messages as m on m.queue_id = q.id
        union all
        select q.name, d.id, d.event_id, d.event_type, 'dead', d.attempts, d.key, d.enqueued_at, d.first_taken_at, null, d.error,
               d.unique_key, null, null, d.host_id
          from relay.queues as q join relay.queue_dead_letters as d on d.queue_id = q.id
        union all
        select q.name, d.id, d.event_id, d.event_type, 'done', d.attempts, d.key, d.enqueued_at, d.first_taken_at, null, d.error,
               null, d.note, d.result, d.host_id
          from relay.queues as q join relay.queue_done as d on d.queue_id = q.id and d.done_at > now() - q.keep_done) as i;

comment on view relay.queue_items is
    'the messages of queues: enqueued, scheduled, leased, retry or dead, and done ones for the queue''s keep_done';
comment on column relay.queue_items.state is
    'enqueued (also while a transaction has taken it), scheduled, leased, retry, dead or done';

-- A figure counts to 100,001 at most, so that reading it stays cheap. `workers` are the connections of relay.client.worker.
create or replace view relay.queue_figures as
select f.queue, f.group_id, f.paused_at, f.ready, f.waiting, f.leased, f.dead, f.oldest_seconds, f.workers, f.filled, f.fill_error, f.stopped_at, f.fault
  from (select q.name as queue, q.group_id, q.paused_at, q.stopped_at, q.fault, open.messages as filled, open.error as fill_error, ready.messages + due.messages as ready, waiting.messages as waiting,
               leased.messages as leased, dead.messages as dead,
               coalesce(extract(epoch from clock_timestamp() - case when oldest.enqueued_at is not null or due.since is not null then
                            greatest(least(oldest.enqueued_at, due.since, '9999-12-30'), '0001-01-02') end)::float8, 0) as oldest_seconds,
               (select count(*) from pg_stat_activity as a
                 where a.datname = current_database() and a.application_name = left('relay worker ' || case
                           when q.name collate "C" ~ '^[ -~]{1,50}$' then q.name
                           else encode(sha256(convert_to(q.name, 'UTF8')), 'hex') end, 63)) as workers
          from relay.queues as q
          left join relay.queue_fills as open on open.queue_id = q.id and open.ended_at is null
          left join lateral (select n.mark, n.due_mark from relay.queue_marks as n
                              where n.queue_id = q.id order by n.mark desc, n.due_mark desc limit 1) as m on true
          left join lateral (select i.enqueued_at from relay.queue_messages as i
                              where i.queue_id = q.id and i.available_at is null and i.id >= coalesce(m.mark, 0)
                              order by i.id limit 1) as oldest on true
          cross join lateral (select count(*) as messages
                                from (select from relay.queue_messages as i
                                       where i.queue_id = q.id and i.available_at is null and i.id >= coalesce(m.mark, 0)
                                       limit 100001) as c) as ready
          cross join lateral (select count(*) as messages, min(c.available_at) as since
                                from (select i.available_at from relay.queue_messages as i
                                       where i.queue_id = q.id and i.available_at >= coalesce(m.due_mark, '-infinity')
                                         and i.available_at <= clock_timestamp()
                                       order by i.available_at limit 100001) as c) as due
          cross join lateral (select count(*) as messages
                                from (select from relay.queue_messages as i
                                       where i.queue_id = q.id and i.available_at > clock_timestamp() and not i.leased
                                       limit 100001) as c) as waiting
          cross join lateral (select count(*) as messages
                                from (select from relay.queue_messages as i
                                       where i.queue_id = q.id and i.available_at > clock_timestamp() and i.leased
                                       limit 100001) as c) as leased
          cross join lateral (select count(*) as messages
                                from (select from relay.queue_dead_letters as d where d.queue_id = q.id limit 100001) as c) as dead) as f;

comment on view relay.queue_figures is
    'for each queue, how many messages it has, and how long the oldest waits: for monitoring and scaling';
comment on column relay.queue_figures.ready is
    'messages that can be taken now, also those that transactions have taken';
comment on column relay.queue_figures.waiting is
    'messages that wait for their time or a retry';
comment on column relay.queue_figures.oldest_seconds is
    'how long the oldest message that can be taken has been in the queue, or due; 0 without one';
comment on column relay.queue_figures.workers is
    'connections of workers in Python, by the name that they give the server';
comment on column relay.queue_figures.filled is
    'how many messages relay has put into it from the log, while it is being filled; null when that is over';
comment on column relay.queue_figures.fill_error is
    'why that does not go on';
comment on column relay.queue_figures.stopped_at is
    'since when relay puts no events of the log into it; null: it does';
comment on column relay.queue_figures.fault is
    'why relay has stopped filling it';

select relay.replace_functions();

-- Least privilege. relay_worker may declare queues and take from those of its roles; what it calls runs with the rights of the owner.

do $$
declare
    each regprocedure;
begin
    for each in select p.oid from pg_proc as p
                 where p.pronamespace = 'relay'::regnamespace
                   and p.proname in ('calling_role', 'may_act_as', 'queue_state', 'require_queue', 'begin_messages', 'begin_times', 'move_marks', 'note_progress',
                                     'was_aborted', 'remove_messages', 'lock_messages', 'note_attempt', 'dead_letter_messages', 'keep_messages', 'lock_selected', 'take', 'claim',
                                     'lease', 'lock_message', 'complete', 'extend', 'note_message', 'release', 'retry', 'fail', 'requeue', 'duplicate_of', 'enqueue',
                                     'declare_queue', 'wake_workers', 'watch_queue', 'queue_watchers', 'satisfies', 'is_event_field', 'note_queues', 'queues_revision',
                                     'pause_queue', 'purge_queue', 'drop_queue', 'dropped_queues', 'remove_orphans', 'rebuild_queue', 'fill_start', 'require_bounded', 'condition_path') loop
        execute format('revoke all on function %s from public', each);
    end loop;
end
$$;

do $$
begin
    if to_regrole('relay_worker') is null then
        create role relay_worker nologin;
    end if;
exception
    when duplicate_object or unique_violation then
        null; -- an installation in another database of the server has just created it
    when insufficient_privilege then
        raise notice 'relay: this role may not create roles; create relay_worker yourself, then run this file again';
end
$$;

do $$
begin
    if to_regrole('relay_worker') is not null then
        grant usage on schema relay to relay_worker;
        -- To scale with them.
        grant select on relay.queue_figures to relay_worker;
        grant execute on function relay.take(text, int, relay.call), relay.claim(text, int, relay.call),
            relay.lease(text, int, interval, relay.call),
            relay.complete(text, bigint, int, jsonb, text, relay.call), relay.extend(text, bigint, int, interval, relay.call),
            relay.note_message(text, bigint, int, jsonb, relay.call),
            relay.release(text, bigint, int, interval, text, relay.call),
            relay.retry(text, bigint, int, interval, text, relay.call), relay.fail(text, bigint, int, text, relay.call),
            relay.requeue(text, bigint[], text, relay.call),
            relay.enqueue(text, jsonb, text, text, text, timestamptz, jsonb, text, text, text, relay.call),
            relay.declare_queue(text, jsonb, text, int, interval, interval, text, boolean, text, interval, text, jsonb,
                                boolean, text, relay.call),
            relay.pause_queue(text, boolean, relay.call), relay.purge_queue(text, relay.call), relay.drop_queue(text, relay.call),
            relay.rebuild_queue(text, text, relay.call),
            relay.watch_queue(text, relay.call), relay.queue_watchers(text, relay.call) to relay_worker;
    end if;
    if to_regrole('relay') is not null then
        grant select on relay.queues, relay.queue_revisions, relay.queue_items, relay.queue_figures to relay;
        -- To say which attempts are kept.
        grant select, insert, update on relay.attempt_settings to relay;
        -- To stop a queue whose match or condition cannot be evaluated.
        grant update (stopped_at, fault) on relay.queues to relay;
        -- To fill a queue from the log, and to say that it is filled.
        grant select, insert, update, delete on relay.queue_fills, relay.queue_fill_deferred to relay;
        grant insert, update, delete on relay.queue_revisions to relay;
        grant execute on function relay.note_queues(text) to relay;
        grant insert on relay.queue_dead_letters to relay;
        -- To erase a host, and what is done.
        grant select, delete on relay.queue_dead_letters, relay.queue_done to relay;
        grant select, insert, delete on relay.queue_messages to relay;
        grant select, usage on sequence relay.queue_message_ids to relay;
        grant execute on function relay.begin_messages(), relay.queues_revision(text), relay.wake_workers(bigint),
            relay.remove_orphans(int) to relay;
        grant execute on function relay.satisfies(jsonb, jsonpath, jsonb) to relay;
        grant execute on function relay.declare_queue(text, jsonb, text, int, interval, interval, text, boolean, text, interval, text,
            jsonb, boolean, text, relay.call) to relay;
        grant execute on function relay.pause_queue(text, boolean, relay.call), relay.purge_queue(text, relay.call),
            relay.drop_queue(text, relay.call),
            relay.rebuild_queue(text, text, relay.call) to relay;
        grant execute on function relay.requeue(text, bigint[], text, relay.call) to relay;
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
    grant usage on schema relay to relay_owner;
    grant select on relay.group_partitions to relay_owner;
    revoke update on relay.group_partitions from relay_owner;
    grant select, insert, update, delete on relay.queues, relay.queue_revisions, relay.queue_messages, relay.queue_dead_letters,
        relay.queue_done, relay.queue_marks, relay.queue_fills, relay.queue_fill_deferred to relay_owner;
    grant select on relay.snapshots, relay.attempt_settings to relay_owner;
    grant select, usage on sequence relay.queue_message_ids to relay_owner;
    grant execute on function relay.calling_role(relay.call), relay.may_act_as(text, relay.call), relay.queue_state(text, relay.call),
        relay.require_queue(text, relay.call),
        relay.begin_messages(), relay.begin_times(),
        relay.move_marks(bigint, bigint, timestamptz, timestamptz, bigint), relay.note_progress(record, record), relay.was_aborted(xid), relay.remove_messages(tid[]),
        relay.lock_messages(bigint, boolean, int, bigint, timestamptz, bigint, int),
        relay.note_attempt(tid, int, text, text, boolean), relay.dead_letter_messages(tid[], text), relay.keep_messages(tid[], int, jsonb),
        relay.duplicate_of(bigint, text, text, timestamptz, text, text, jsonb, jsonb), relay.lock_message(bigint, bigint, int, boolean),
        relay.lock_selected(bigint, timestamptz, bigint, text, text, text, text, text, text[], boolean),
        relay.is_event_field(text), relay.wake_workers(bigint), relay.fill_start(text, text, text), relay.dropped_queues(),
        relay.require_bounded(jsonb, int, text), relay.condition_path(text, jsonb, text), relay.note_queues(text) to relay_owner;
    grant create on schema relay to relay_owner;
    -- A function's new owner must have the right to create in its schema.
    for each in select p.oid from pg_proc as p where p.pronamespace = 'relay'::regnamespace and p.prosecdef
                   and p.proname in ('take', 'claim', 'lease', 'complete', 'extend', 'note_message', 'release', 'retry', 'fail', 'requeue', 'enqueue',
                                     'declare_queue', 'pause_queue', 'purge_queue', 'drop_queue', 'remove_orphans', 'rebuild_queue', 'watch_queue',
                                     'queue_watchers') loop
        execute format('alter function %s owner to relay_owner', each);
    end loop;
    revoke create on schema relay from relay_owner;
exception when insufficient_privilege then
    raise notice 'relay: this role may not give functions to relay_owner; they stay its own';
end
$$;

insert into relay.migrations (name) values ('target/004_queues.sql') on conflict do nothing;
