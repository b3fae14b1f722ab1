-- Least privilege on relay's own outbox; the roles come from source/002_roles.sql.

revoke all on function relay.publish(uuid, uuid, jsonb, uuid) from public;

do $$
begin
    if exists (select from pg_roles where rolname = 'relay_publisher') then
        grant execute on function relay.publish(uuid, uuid, jsonb, uuid) to relay_publisher;
        grant insert on public.outbox_message_t to relay_publisher;
    end if;
    if exists (select from pg_roles where rolname = 'relay') then
        grant select on public.outbox_message_t to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('outbox/003_grants.sql') on conflict do nothing;
