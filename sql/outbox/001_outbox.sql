-- The transactional outbox, for databases that do not have one of their own. Needs source/001_offsets.sql.

create table if not exists public.outbox_message_t (
    id                  uuid primary key default gen_random_uuid(),
    host_id             uuid not null,
    user_id             uuid,
    aggregate_id        text,
    aggregate_version   bigint,
    aggregate_type      text,
    event_type          text not null,
    event_ts            timestamptz not null default now(),
    payload             jsonb not null,
    metadata            jsonb,
    c_offset            bigint unique,
    transaction_id      uuid,
    transaction_ordinal int,
    transaction_count   int
);

select relay.attach('public.outbox_message_t');

insert into relay.migrations (name) values ('outbox/001_outbox.sql') on conflict do nothing;
