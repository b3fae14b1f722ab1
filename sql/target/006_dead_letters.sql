-- The dead letters of the target, of sinks and of work queues as one. Needs 001_target.sql and 004_queues.sql.

-- A dead message is a dead transaction of one event.
alter table relay.queue_dead_letters
    add column if not exists dead_transaction bigint not null default nextval('relay.dead_transactions');
alter table relay.queue_dead_letters add column if not exists original_payload jsonb;
create index if not exists queue_dead_letters_dead on relay.queue_dead_letters (dead_transaction);

comment on column relay.queue_dead_letters.dead_transaction is
    'its number among all dead transactions; unlike its id, another message never has it';
comment on column relay.queue_dead_letters.original_payload is
    'the payload as it was enqueued, where it was edited';

alter table relay.dead_letter_actions add column if not exists consumer text;

comment on column relay.dead_letter_actions.consumer is
    'whose dead letter it is, as in relay.dead_letters; null in rows of former editions';

-- Each part reads one table, so that a list by pages reads the indexes of both in the order of the numbers.
create or replace view relay.dead_letters as
select l.dead_transaction, l.group_id, l.consumer, l.queue_id, l.id, l.status, l.undelivered, l.handler, l.exception, l.attempts, l.host_id, l.user_id, l.transaction_id, l.transaction_ordinal, l.transaction_count, l.event_id, l.event_type, l.aggregate_type, l.aggregate_id, l.aggregate_version, l.event_ts, l.deliver_at, l.c_offset, l.commit_lsn, l.payload, l.original_payload, l.metadata, l.headers, l.refused, l.by_reference, l.key, l.enqueued_at, l.first_taken_at, l.created_dt, l.endpoint
  from (select d.dead_transaction, d.group_id, d.sink as consumer, null::bigint as queue_id, d.id, d.status, d.undelivered, d.handler,
               d.exception, d.attempts, d.host_id, d.user_id, d.transaction_id, d.transaction_ordinal, d.transaction_count,
               d.event_id, d.event_type, d.aggregate_type, d.aggregate_id, d.aggregate_version, d.event_ts, d.deliver_at,
               d.c_offset, d.commit_lsn, d.payload, d.original_payload, d.metadata, d.headers, d.refused, d.by_reference,
               null::text as key, null::timestamptz as enqueued_at, null::timestamptz as first_taken_at, d.created_dt, d.endpoint
          from relay.dead_letter_queue as d
        union all
        select m.dead_transaction, (select q.group_id from relay.queues as q where q.id = m.queue_id),
               (select 'queue:' || q.name from relay.queues as q where q.id = m.queue_id), m.queue_id, m.id, 'dead', false, null,
               coalesce(m.error, ''), m.attempts, m.host_id, m.user_id, m.transaction_id, null::int, null::int,
               m.event_id, m.event_type, m.aggregate_type, m.aggregate_id, m.aggregate_version, m.event_ts, null::timestamptz,
               null::bigint, null::pg_lsn, m.payload, m.original_payload, m.metadata, null::jsonb, null::json, false,
               m.key, m.enqueued_at, m.first_taken_at, m.dead_at, null::text
          from relay.queue_dead_letters as m) as l;

comment on view relay.dead_letters is
    'all dead letters: events of relay.dead_letter_queue, and messages of relay.queue_dead_letters, whose consumer is queue:NAME';
comment on column relay.dead_letters.dead_transaction is
    'number of the dead business transaction, or of the dead message: the same for all of its events, and for no others';
comment on column relay.dead_letters.consumer is
    'what it could not be brought to: empty the target, a sink by its name, a work queue as queue:NAME';
comment on column relay.dead_letters.queue_id is
    'the queue in relay.queues; null for the target and sinks';
comment on column relay.dead_letters.id is
    'the dead letter; for one of a queue the number that the message had, which is unique within the queue';
comment on column relay.dead_letters.key is
    'what ordered the message in its queue; null for the target and sinks';
comment on column relay.dead_letters.enqueued_at is
    'when the message came into the queue; null for the target and sinks';
comment on column relay.dead_letters.first_taken_at is
    'when the first attempt of a worker began; null for the target and sinks';
comment on column relay.dead_letters.endpoint is
    'of a sink with several endpoints of a host: the one to which it could not be delivered';
comment on column relay.dead_letters.created_dt is
    'when it became a dead letter';

do $$
begin
    if to_regrole('relay') is not null then
        grant select on relay.dead_letters to relay;
        -- To lock them, and to give them an edited payload.
        grant update (payload, original_payload) on relay.queue_dead_letters to relay;
        grant insert (consumer) on relay.dead_letter_actions to relay;
    end if;
    if to_regrole('relay_owner') is not null then
        grant usage on sequence relay.dead_transactions to relay_owner;
        -- For relay.requeue, which knows who has called it.
        grant insert (group_id, consumer, dead_transaction, letters, transaction_id, action, reason, acted_by)
            on relay.dead_letter_actions to relay_owner;
    end if;
end
$$;

insert into relay.migrations (name) values ('target/006_dead_letters.sql') on conflict do nothing;
