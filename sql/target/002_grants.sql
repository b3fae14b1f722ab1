-- What the service needs in the target: its own tables. Handlers' tables are granted by their owner.

do $$
begin
    if not exists (select from pg_roles where rolname = 'relay') then
        create role relay nologin replication;
    end if;
exception when insufficient_privilege then
    raise notice 'relay: this role may not create roles; create relay yourself, then run this file again';
end
$$;

do $$
begin
    if exists (select from pg_roles where rolname = 'relay') then
        grant usage on schema relay to relay;
        grant select on relay.migrations to relay;
        grant select, insert, update on relay.consumer_offsets to relay;
        grant select, insert, update, delete on relay.dead_letter_queue to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('target/002_grants.sql') on conflict do nothing;
