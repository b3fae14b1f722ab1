-- Witnesses: rows whose commits come after all that their snapshot sees. A position that is kept elsewhere (a target, a checkpoint,
-- a token) names one: where the row is still there as it was inserted, so is everything that its snapshot sees. A failover with a
-- loss, a dump, and an older backup do not have it. Needs 001_source.sql and 002_retention.sql.

create table if not exists relay.witnesses (
    id       uuid        primary key default gen_random_uuid(),
    number   bigint      generated always as identity unique,
    snapshot pg_snapshot not null,
    lsn      pg_lsn      not null,
    c_xid    xid8        not null default pg_current_xact_id(),
    kept     boolean     not null default false,
    taken_at timestamptz not null default clock_timestamp(),
    cluster  bigint
);

comment on table relay.witnesses is
    'rows that prove that a server has all that positions kept elsewhere have; relay.take_witness alone inserts them';
comment on column relay.witnesses.id is
    'its name in positions';
comment on column relay.witnesses.number is
    'counts witnesses';
comment on column relay.witnesses.snapshot is
    'everything that it sees was committed before this row';
comment on column relay.witnesses.lsn is
    'a position in the WAL at or after the end of all that the snapshot sees, and before the end of this row''s commit';
comment on column relay.witnesses.c_xid is
    'the transaction that inserted the row; where xmin is another one, the row was copied, as by a dump';
comment on column relay.witnesses.kept is
    'whether it stands for the history of this database, to which the positions of readers refer; it is never removed';
comment on column relay.witnesses.taken_at is
    'when it was inserted';
comment on column relay.witnesses.cluster is
    'where it is kept: the system identifier of the server, whose transaction ids go on where a dump is restored in it';

-- Whether this server has a witness as it was inserted. A copy of the table has the rows with another xmin or, by accident, one of
-- them with its own; but a copy has one xmin for neighbours.
create or replace function relay.holds_witness(witness uuid) returns boolean
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
    select coalesce((
        select w.xmin::text::bigint = w.c_xid::text::bigint & 4294967295
           and (select o.xmin from relay.witnesses as o where o.number < w.number order by o.number desc limit 1)
               is distinct from w.xmin
           and (select o.xmin from relay.witnesses as o where o.number > w.number order by o.number limit 1)
               is distinct from w.xmin
          from relay.witnesses as w where w.id = witness), false)
$$;

-- Inserts a witness, whose commit the server has flushed when it returns. Fails in a subtransaction, whose xmin would be another.
create or replace function relay.take_witness(out witness uuid, out snapshot pg_snapshot, out lsn pg_lsn)
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
begin
    -- Flushed, since a crash would lose it otherwise; but not after a standby that may be absent.
    perform set_config('synchronous_commit', 'local', true);
    -- In one statement: all that the snapshot sees ends at or before the position.
    insert into relay.witnesses as w (snapshot, lsn) values (pg_current_snapshot(), pg_current_wal_insert_lsn())
    returning w.id, w.snapshot, w.lsn into witness, take_witness.snapshot, take_witness.lsn;
    if not relay.holds_witness(witness) then
        raise object_not_in_prerequisite_state using
            message = 'relay.take_witness: the transaction has a savepoint, or has taken a witness already';
    end if;
end
$$;

-- The newest witness, or a new one where that is older than 0.2 s: for those who may not take one whenever they like.
create or replace function relay.recent_witness(out witness uuid, out snapshot pg_snapshot, out lsn pg_lsn)
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    taken timestamptz;
begin
    select w.id, w.snapshot, w.lsn, w.taken_at into witness, recent_witness.snapshot, recent_witness.lsn, taken
      from (select * from relay.witnesses order by number desc limit 10) as w
     where relay.holds_witness(w.id) order by w.number desc limit 1;
    if not pg_is_in_recovery() and (taken is null or clock_timestamp() - taken not between '0' and '200 milliseconds') then
        select t.* into witness, recent_witness.snapshot, recent_witness.lsn from relay.take_witness() as t;
    end if;
end
$$;

-- The witness of the history of this database, to which readers refer; null in a copy of the database, until `relay init` has
-- taken one.
create or replace function relay.history() returns uuid
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
    select w.id from relay.witnesses as w where w.kept and relay.holds_witness(w.id) order by w.number limit 1
$$;

-- Takes the witness of the history of this database where there is none; returns whether it did. In a copy that came from another
-- cluster, what was removed there says nothing here, and what readers have read there holds nothing back: they have read nothing.
create or replace function relay.begin_history() returns boolean
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    here  bigint := (select system_identifier from pg_control_system());
    taken uuid;
begin
    if relay.history() is not null then
        return false;
    end if;
    if exists (select from relay.witnesses where kept) and not exists (select from relay.witnesses where kept and cluster = here) then
        delete from relay.removed;
        update relay.readers set snapshot = '1:1:' where snapshot is not null;
    end if;
    select witness into taken from relay.take_witness();
    update relay.witnesses set kept = true, cluster = here where id = taken;
    return true;
end
$$;

-- Removes some of the oldest witnesses: those of positions that have lost events to retention in every outbox of the database, and
-- those that a dump has brought. Returns how many. From an outbox that is not given to retention nothing is removed.
create or replace function relay.remove_witnesses() returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    gone bigint;
begin
    delete from relay.witnesses as w
     where w.number = any (array(select o.number from relay.witnesses as o where not o.kept order by o.number limit 1000))
       -- Two are left, so that a copy of the table is known as one.
       and w.number < (select min(n.number) from (select number from relay.witnesses order by number desc limit 2) as n)
       and (not relay.holds_witness(w.id)
            or exists (select from relay.retained)
               and not exists (select from pg_attribute as a join pg_class as c on c.oid = a.attrelid
                                 join pg_namespace as n on n.oid = c.relnamespace
                                where a.attname = 'c_xid' and a.atttypid = 'xid8'::regtype and not a.attisdropped
                                  and c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence <> 't'
                                  and n.nspname <> 'relay'
                                  and not exists (select from relay.retained as o
                                                   where o.outbox = n.nspname || '.' || c.relname))
               and not exists (select from relay.retained as o
                                where not exists (select from relay.removed as r
                                                   where r.outbox = o.outbox
                                                     and not pg_visible_in_snapshot(r.newest, w.snapshot))));
    get diagnostics gone = row_count;
    return gone;
end
$$;

-- Lets all who may read an outbox, or some of its columns, keep positions in it: they take witnesses, and compare them.
create or replace function relay.let_keep_positions(outbox regclass) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    called text;
begin
    for called in select distinct case when grantee = 0 then 'public' else quote_ident(pg_get_userbyid(grantee)) end
                    from (select relacl from pg_class where oid = outbox
                          union all select attacl from pg_attribute where attrelid = outbox) as granted (acl),
                         aclexplode(acl) where privilege_type = 'SELECT' loop
        execute format('grant usage on schema relay to %s', called);
        execute format('grant execute on function relay.recent_witness(), relay.holds_witness(uuid) to %s', called);
    end loop;
end
$$;

revoke all on function relay.holds_witness(uuid), relay.take_witness(), relay.recent_witness(), relay.history(),
                       relay.begin_history(), relay.remove_witnesses(), relay.let_keep_positions(regclass) from public;

do $$
begin
    if to_regrole('relay') is not null then
        grant select on relay.witnesses to relay;
        grant execute on function relay.holds_witness(uuid), relay.take_witness(), relay.recent_witness() to relay;
        grant execute on function relay.history(), relay.remove_witnesses() to relay;
    end if;
end
$$;

do $$
declare
    called text;
begin
    if to_regrole('relay_owner') is null then
        return;
    end if;
    grant select, insert, update, delete on relay.witnesses to relay_owner;
    grant select on relay.retained, relay.removed to relay_owner;
    grant create on schema relay to relay_owner;
    -- A function's new owner must have the right to create in its schema.
    foreach called in array array['holds_witness(uuid)', 'take_witness()', 'recent_witness()', 'history()', 'remove_witnesses()'] loop
        execute format('alter function relay.%s owner to relay_owner', called);
    end loop;
    revoke create on schema relay from relay_owner;
exception when insufficient_privilege then
    raise notice 'relay: this role may not give functions to relay_owner; they stay its own';
end
$$;

insert into relay.migrations (name) values ('source/004_witnesses.sql') on conflict do nothing;
