-- Progress and dead letters. Installs in the database that the handlers write to, because effects, dead letters and
-- offsets commit in one transaction.

create schema if not exists relay;

create table if not exists relay.migrations (
    name       text primary key,
    applied_at timestamptz not null default now()
);

create table if not exists relay.consumer_offsets (
    group_id        text        not null,
    topic_id        int         not null,
    partition_id    int         not null,
    next_offset     bigint      not null default 1,
    applied_lsn     pg_lsn      not null default '0/0',
    handover_offset bigint      not null default 1,
    updated_at      timestamptz not null default now(),
    primary key (group_id, topic_id, partition_id)
) with (fillfactor = 50);

comment on column relay.consumer_offsets.next_offset is
    'one more than the greatest c_offset applied in this partition';
comment on column relay.consumer_offsets.applied_lsn is
    'end of the last WAL commit applied in this partition; commits up to here are recognised as redelivered';
comment on column relay.consumer_offsets.handover_offset is
    'rows below this c_offset were applied by another way than this WAL (polling, an earlier system) and are skipped';

create table if not exists relay.dead_letter_queue (
    id             bigint generated always as identity primary key,
    group_id       text        not null,
    host_id        uuid,
    user_id        uuid,
    c_offset       bigint,
    transaction_id uuid,
    event_id       uuid,
    event_type     text,
    payload        jsonb,
    metadata       jsonb,
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
    created_dt     timestamptz not null default now()
);
create index if not exists dead_letter_queue_transaction on relay.dead_letter_queue (group_id, transaction_id);

insert into relay.migrations (name) values ('target/001_consumers.sql') on conflict do nothing;
