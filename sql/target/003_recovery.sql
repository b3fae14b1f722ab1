-- What a group remembers of its source, so that a change of server or a lost slot is recognised.

create table if not exists relay.groups (
    group_id          text primary key,
    system_identifier text,
    timeline          int,
    slot_recreations  timestamptz[] not null default '{}',
    source_mode       text,
    source_reason     text,
    source_since      timestamptz,
    instance          text
);

comment on column relay.groups.timeline is
    'of the server that applied_lsn of this group''s offsets belongs to, with system_identifier';
comment on column relay.groups.slot_recreations is
    'when relay had to create the slot anew within the last hour';

comment on column relay.groups.source_mode is
    'how events come, wal or poll, with the reason, since when, and to which instance: the last to change it';

do $$
begin
    if exists (select from pg_roles where rolname = 'relay') then
        grant select, insert, update on relay.groups to relay;
        -- A group that is split into another number of partitions gets other rows.
        grant delete on relay.consumer_offsets to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('target/003_recovery.sql') on conflict do nothing;
