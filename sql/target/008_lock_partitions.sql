-- What a task has to know before it applies anything, in one round trip.

-- Locks partitions to the end of the transaction, in order. Returns where each stands, and in a row of its own those of
-- the hosts of which a waiting transaction holds a key. Each statement of the function sees what was committed while the
-- one before waited for a lock; a single statement would not.
create or replace function relay.lock_partitions(the_group text, the_topic int, partitions int[], asked text[])
returns table (partition_id int, next_offset bigint, applied_lsn text, handover_offset bigint, holding text[])
language plpgsql
as $$
begin
    return query
        select o.partition_id, o.next_offset, o.applied_lsn::text, o.handover_offset, '{}'::text[]
          from relay.consumer_offsets as o
         where o.group_id = the_group and o.topic_id = the_topic and o.partition_id = any (partitions)
         order by o.partition_id for update;
    return query
        select null::int, null::bigint, null::text, null::bigint, array_agg(distinct host)
          from relay.deferred, unnest(hosts) as host
         where group_id = the_group and holds and hosts && asked and host = any (asked);
end
$$;

do $$
begin
    if exists (select from pg_roles where rolname = 'relay') then
        grant execute on function relay.lock_partitions(text, int, int[], text[]) to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('target/008_lock_partitions.sql') on conflict do nothing;
