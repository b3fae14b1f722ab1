-- Business transactions that wait: for a time, for another attempt, or behind one of the same ordering key that does.

create table if not exists relay.deferred (
    id              bigint generated always as identity primary key,
    group_id        text        not null,
    keys            text[]      not null,
    holds           boolean     not null,
    blocked         boolean     not null default false,
    retry_at        timestamptz not null,
    attempts        int         not null default 0,
    first_failed_at timestamptz,
    handler         text,
    reason          text,
    letters         bigint[]    not null default '{}',
    transaction_id  text,
    hosts           text[]      not null,
    columns         text[]      not null,
    commit_lsn      pg_lsn      not null,
    end_lsn         pg_lsn      not null,
    commit_ts       bigint      not null,
    xid             bigint      not null,
    first_offset    bigint      not null,
    last_offset     bigint      not null,
    events          bigint      not null,
    size            bigint      not null,
    deferred_at     timestamptz not null default now()
);
create index if not exists deferred_due on relay.deferred (group_id, retry_at) where not blocked;
create index if not exists deferred_keys on relay.deferred using gin (keys) where holds;
create index if not exists deferred_hosts on relay.deferred using gin (hosts) where holds;

comment on column relay.deferred.keys is
    'what the handlers of the transaction order by; it waits for every older row that holds one of them';
comment on column relay.deferred.holds is
    'whether later transactions of its keys wait for it; one that only waits for its time is overtaken';
comment on column relay.deferred.blocked is
    'its attempts are exhausted: it is a dead letter, and holds its keys until that is replayed or discarded';
comment on column relay.deferred.letters is
    'the dead letters that are replayed by it';
comment on column relay.deferred.commit_ts is
    'in microseconds since 2000-01-01';

create table if not exists relay.deferred_rows (
    deferred_id bigint not null references relay.deferred on delete cascade,
    portion     int    not null,
    sizes       int[]  not null,
    data        bytea  not null,
    primary key (deferred_id, portion)
);

comment on table relay.deferred_rows is
    'the rows of the outbox as the WAL brought them (TupleData messages), one behind the other';

do $$
begin
    if exists (select from pg_roles where rolname = 'relay') then
        grant select, insert, update, delete on relay.deferred, relay.deferred_rows to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('target/005_deferred.sql') on conflict do nothing;
