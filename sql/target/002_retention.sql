-- Retention of relay's own tables in the target. Needs 001_target.sql.

-- Deletes what is settled and older than a time, at least a day, a portion at a time; returns how many rows. With the rights of
-- its owner, since the role relay may only add to the tables of actions.
create or replace function relay.prune_history(the_group text, older_than timestamptz, portion int) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    total   bigint;
    deleted bigint;
begin
    if older_than > clock_timestamp() - interval '1 day' then
        raise invalid_parameter_value using message = 'what is younger than a day is kept';
    end if;
    delete from relay.dead_letter_queue where id = any (array(
        select d.id from relay.dead_letter_queue as d
         where d.group_id = the_group and d.status in ('replayed', 'discarded') and d.created_dt < older_than
         order by d.id limit portion));
    get diagnostics total = row_count;
    delete from relay.dead_letter_actions where id = any (array(
        select a.id from relay.dead_letter_actions as a
         where a.group_id = the_group and a.acted_at < older_than
           and not exists (select from relay.dead_letter_queue as d where d.dead_transaction = a.dead_transaction)
           and not exists (select from relay.queue_dead_letters as d where d.dead_transaction = a.dead_transaction)
         order by a.id limit portion));
    get diagnostics deleted = row_count;
    total := total + deleted;
    delete from relay.actions where id = any (array(
        select a.id from relay.actions as a where a.group_id = the_group and a.acted_at < older_than order by a.id limit portion));
    get diagnostics deleted = row_count;
    total := total + deleted;
    delete from relay.engines where group_id = the_group and updated_at < older_than;
    delete from relay.suspects where group_id = the_group and noted_at < older_than;
    return total;
end
$$;

revoke all on function relay.prune_history(text, timestamptz, int) from public;

do $$
begin
    if to_regrole('relay') is not null then
        grant execute on function relay.prune_history(text, timestamptz, int) to relay;
    end if;
end
$$;

do $$
begin
    if to_regrole('relay_owner') is null then
        return;
    end if;
    grant usage on schema relay to relay_owner;
    grant delete on relay.dead_letter_queue, relay.dead_letter_actions, relay.actions, relay.engines, relay.suspects
        to relay_owner;
    grant select (id, group_id, dead_transaction, status, created_dt) on relay.dead_letter_queue to relay_owner;
    grant select (id, group_id, dead_transaction, acted_at) on relay.dead_letter_actions to relay_owner;
    grant select (id, group_id, acted_at) on relay.actions to relay_owner;
    grant select (group_id, updated_at) on relay.engines to relay_owner;
    grant select (group_id, noted_at) on relay.suspects to relay_owner;
    grant create on schema relay to relay_owner;
    -- A function's new owner must have the right to create in its schema.
    alter function relay.prune_history(text, timestamptz, int) owner to relay_owner;
    revoke create on schema relay from relay_owner;
exception when insufficient_privilege then
    raise notice 'relay: this role may not give relay.prune_history to relay_owner; it stays its own';
end
$$;

insert into relay.migrations (name) values ('target/002_retention.sql') on conflict do nothing;
