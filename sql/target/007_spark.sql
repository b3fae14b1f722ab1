-- Events on their way to a DataFrame writer: they commit with the other effects of their transactions, and are written
-- from here in batches that stay the same however often they are tried.

create table if not exists relay.spark_portions (
    id        bigint generated always as identity primary key,
    group_id  text        not null,
    handler   text        not null,
    events    bigint      not null,
    staged_at timestamptz not null default now(),
    batch     bigint
);

comment on table relay.spark_portions is
    'the events that one target transaction routed to a handler of type spark';
comment on column relay.spark_portions.batch is
    'the batch that it is written with; null until that is decided, and never changed after';

create sequence if not exists relay.spark_batches;

-- No foreign key to the portion: it would be looked up for each event.
create table if not exists relay.spark_events (
    portion             bigint not null,
    id                  uuid,
    host_id             uuid,
    user_id             uuid,
    aggregate_id        text,
    aggregate_version   bigint,
    aggregate_type      text,
    event_type          text,
    event_ts            timestamptz,
    payload             jsonb,
    metadata            jsonb,
    c_offset            bigint,
    transaction_id      uuid,
    transaction_ordinal int,
    transaction_count   int,
    deliver_at          timestamptz,
    commit_lsn          pg_lsn,
    commit_ts           timestamptz,
    xid                 bigint
);
create index if not exists spark_events_portion on relay.spark_events (portion);

do $$
begin
    if exists (select from pg_roles where rolname = 'relay') then
        grant select, insert, update, delete on relay.spark_portions to relay;
        grant select, insert, delete on relay.spark_events to relay;
        grant usage on sequence relay.spark_batches to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('target/007_spark.sql') on conflict do nothing;
