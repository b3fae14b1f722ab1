-- What became of each attempt to deliver an event, or to work a message of a queue. Needs 001_target.sql.

-- A row is in the slice of the day until which it is kept. There are nine, for seven days and the one that ends: that of yesterday
-- has nothing that counts any more, and is emptied at once. No row is deleted, so nothing is left to be vacuumed.
create table if not exists relay.attempts (
    slice       smallint    not null,
    kept_until  timestamptz not null,
    group_id    text        not null,
    consumer    text        not null,
    destination text,
    event_ids   text[]      not null,
    hosts       text[]      not null,
    message_id  bigint,
    number      int         not null,
    began_at    timestamptz not null,
    seconds     real,
    outcome     text        not null,
    status      int,
    error       text,
    answer      text,
    resent_by   text
) partition by list (slice);
create index if not exists attempts_events on relay.attempts using gin (event_ids);

-- Where a sink began: what is older was never for it.
alter table relay.sink_claims add column if not exists begun jsonb;

comment on column relay.sink_claims.begun is
    'its first position: everything that it had read, before it delivered anything; null where that is not known';

-- Who has had it delivered again.
alter table relay.deferred add column if not exists resent_by text;

comment on column relay.deferred.resent_by is
    'who had the sink get its events again, by `relay sink resend`; null otherwise';

do $$
begin
    for number in 0..8 loop
        execute format('create table if not exists relay.attempts_%s partition of relay.attempts for values in (%s)', number, number);
    end loop;
end
$$;

comment on table relay.attempts is
    'attempts to deliver events, as attempts of the configuration says which are kept, and to work messages of queues; never a payload';
comment on column relay.attempts.slice is
    'the day of kept_until in UTC, as days since 1970 modulo 9';
comment on column relay.attempts.kept_until is
    'from this time on the row does not count; relay.prune_attempts removes it within a day';
comment on column relay.attempts.consumer is
    'the sink, or queue:NAME';
comment on column relay.attempts.destination is
    'where the attempt went within the sink, without anything secret, such as the address of an endpoint; null where it is not known';
comment on column relay.attempts.event_ids is
    'the events of the delivery, at most the first 1,000: an id of more than 1,000 octets as relay.event_key has it';
comment on column relay.attempts.hosts is
    'the distinct host_ids of these events, for an erasure';
comment on column relay.attempts.message_id is
    'the message of the queue; null for a sink';
comment on column relay.attempts.number is
    '1 for the first attempt, and one more after each that failed and counted';
comment on column relay.attempts.began_at is
    'when the attempt began; without seconds, when it ended';
comment on column relay.attempts.seconds is
    'how long the attempt took; in a batch that of the call; null where that is not known';
comment on column relay.attempts.outcome is
    'delivered (also: its worker has completed the message), dropped (the sink or the worker has ended it without effects) or failed';
comment on column relay.attempts.status is
    'the status of an HTTP response';
comment on column relay.attempts.error is
    'why it failed or was dropped, in one line: of a sink one that quotes no payload, of a message the first that its worker says';
comment on column relay.attempts.answer is
    'the beginning of the response, where attempts.answers of the configuration asks for it';
comment on column relay.attempts.resent_by is
    'who had it sent again, where it is a resend';

-- Empties the slice of yesterday and, where the others have more octets than given, those that end first; returns how many. One that
-- somebody reads or writes is left to a later call: sinks would wait behind this one. relay.note_attempt sees the other lock, and does not wait.
create or replace function relay.prune_attempts(most_bytes bigint) returns int
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    today   bigint := extract(epoch from clock_timestamp())::bigint / 86400;
    total   bigint := 0;
    emptied int := 0;
    part    regclass;
begin
    for ahead in reverse 7..-1 loop
        part := format('relay.attempts_%s', (today + ahead + 9) % 9)::regclass;
        if pg_relation_size(part) = 0 then
            continue;
        end if;
        total := total + pg_total_relation_size(part);
        if ahead < 0 or total > most_bytes then
            begin
                if pg_try_advisory_xact_lock(x'71617474'::int, ((today + ahead + 9) % 9)::int) then
                    execute format('lock table %s in access exclusive mode nowait', part);
                    execute format('truncate %s', part);
                    emptied := emptied + 1;
                end if;
            exception when lock_not_available then
                null;
            end;
        end if;
    end loop;
    return emptied;
end
$$;

revoke all on function relay.prune_attempts(bigint) from public;

do $$
begin
    if to_regrole('relay') is not null then
        -- An erasure deletes them.
        grant select, insert, delete on relay.attempts to relay;
        grant truncate on relay.attempts_0, relay.attempts_1, relay.attempts_2, relay.attempts_3, relay.attempts_4, relay.attempts_5, relay.attempts_6, relay.attempts_7, relay.attempts_8 to relay;
        grant execute on function relay.prune_attempts(bigint) to relay;
    end if;
    if to_regrole('relay_owner') is not null then
        -- relay.note_attempt runs as it.
        grant insert on relay.attempts to relay_owner;
    end if;
end
$$;

insert into relay.migrations (name) values ('target/007_attempts.sql') on conflict do nothing;
