-- What was done about dead letters.

alter table relay.dead_letter_queue add column if not exists original_payload jsonb;

comment on column relay.dead_letter_queue.original_payload is
    'the payload as it was published, where it was edited';
comment on column relay.dead_letter_queue.status is
    'dead, replaying, replayed or discarded: the same for all events of a transaction';

create table if not exists relay.dead_letter_actions (
    id             bigint generated always as identity primary key,
    group_id       text        not null,
    letters        bigint[]    not null,
    transaction_id uuid,
    action         text        not null,
    reason         text,
    acted_by       text        not null default session_user,
    acted_at       timestamptz not null default clock_timestamp()
);
create index if not exists dead_letter_actions_letters on relay.dead_letter_actions using gin (letters);

comment on table relay.dead_letter_actions is
    'one row for each action on a dead transaction: replay, replayed, died again, edit, discard, purge';

do $$
begin
    if exists (select from pg_roles where rolname = 'relay') then
        grant select, insert on relay.dead_letter_actions to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('target/006_dead_letter_actions.sql') on conflict do nothing;
