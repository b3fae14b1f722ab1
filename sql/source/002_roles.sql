-- Least privilege. Two roles without login, to be granted or given a password by the administrator:
--   relay_publisher   may publish, and nothing else
--   relay             runs the service: streams the WAL, reads the outbox, owns nothing
-- Where the installing role may not create roles (managed servers), the grants are left to the administrator.

revoke all on all functions in schema relay from public;

do $$
begin
    if not exists (select from pg_roles where rolname = 'relay_publisher') then
        create role relay_publisher nologin;
    end if;
    if not exists (select from pg_roles where rolname = 'relay') then
        create role relay nologin replication;
    end if;
exception when insufficient_privilege then
    raise notice 'relay: this role may not create roles; create relay_publisher and relay (REPLICATION) yourself, '
                 'then run this file again';
end
$$;

do $$
begin
    if exists (select from pg_roles where rolname = 'relay_publisher') then
        grant usage on schema relay to relay_publisher;
    end if;
    if exists (select from pg_roles where rolname = 'relay') then
        grant usage on schema relay to relay;
        grant select on relay.log_counter, relay.migrations to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('source/002_roles.sql') on conflict do nothing;
