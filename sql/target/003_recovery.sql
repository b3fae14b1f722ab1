-- What a group remembers of its source, so that a change of server or a lost slot is recognised.

create table if not exists relay.groups (
    group_id          text primary key,
    system_identifier text,
    timeline          int,
    slot_recreations  timestamptz[] not null default '{}',
    running           boolean       not null default false,
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

comment on column relay.groups.running is
    'set when an instance starts and reset when one ends cleanly: still set at the next start, one has died';

create table if not exists relay.suspects (
    group_id text        not null,
    suspect  text        not null,
    attempts int         not null default 1,
    noted_at timestamptz not null default now(),
    primary key (group_id, suspect)
);

comment on table relay.suspects is
    'transactions that a process had in hand when it died, and how often; written only after a crash';

do $$
begin
    if exists (select from pg_roles where rolname = 'relay') then
        grant select, insert, update on relay.groups to relay;
        grant select, insert, update, delete on relay.suspects to relay;
        -- A group that is split into another number of partitions gets other rows.
        grant delete on relay.consumer_offsets to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('target/003_recovery.sql') on conflict do nothing;
