-- Handlers load events into a temporary relation, which a database may have reserved.

do $$
begin
    if exists (select from pg_roles where rolname = 'relay') then
        execute format('grant temporary on database %I to relay', current_database());
    end if;
end
$$;

insert into relay.migrations (name) values ('target/004_temporary.sql') on conflict do nothing;
