-- The inbox of a consumer, for services that receive events: relay.client.inbox. No process of relay is needed in this database.

create schema if not exists relay;

create table if not exists relay.inbox (
    consumer   text        not null,
    id         text        not null,
    handled_at timestamptz not null default clock_timestamp(),
    primary key (consumer, id)
);
create index if not exists inbox_handled on relay.inbox (consumer, handled_at);

comment on table relay.inbox is
    'the ids of what consumers have handled, each written in the transaction of its effects';
comment on column relay.inbox.consumer is
    'whose ids these are';
comment on column relay.inbox.id is
    'the id of the event or the idempotency key of the delivery';
comment on column relay.inbox.handled_at is
    'when it was recorded; it commits later';
