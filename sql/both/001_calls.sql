-- Whose word relay's functions take, in the database of the outbox and in that of the target.

create schema if not exists relay;

create table if not exists relay.migrations (
    name       text primary key,
    digest     text,
    applied_at timestamptz not null default now()
);

comment on column relay.migrations.digest is
    'SHA-256 of the file, in hexadecimal; null where psql applied it';

-- Who calls. The last argument of the functions that decide by it, `call`, is filled where the call is written: the role as which that
-- code runs. session_user is who opened the session: a superuser's, where autovacuum, ANALYZE or REINDEX calls a function of somebody
-- else's index. The number of the session and the time of the transaction are in it so that a value that was stored somewhere is worth
-- nothing later. The time as a number: neither the time zone nor extra_float_digits changes its text.
create or replace function relay.this_call() returns text
language sql stable
return pg_backend_pid()::text || ' ' || extract(epoch from now())::text || ' ' || current_user::text;

-- Where whoever calls is asked. Some administrators take it from everybody.
grant execute on function relay.this_call() to public;

do $$
begin
    if to_regtype('relay.call') is null then
        -- Checked where the call is written, too. Functions with it that return one value are VOLATILE: the planner calls others for its
        -- estimates, without the check.
        create domain relay.call as text check (value = relay.this_call());
        revoke usage on domain relay.call from public;
    end if;
end
$$;

-- Drops the functions that a former edition has without `call`, or with fewer arguments before it, and gives who was granted one the
-- right to what replaces it.
create or replace function relay.replace_functions() returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    former  record;
    granted record;
    detail  text;
begin
    for former in
        select f.oid::regprocedure as name, f.proacl as rights, f.proowner as owner, present.oid::regprocedure as present
          from pg_proc as f
          join pg_proc as present on present.pronamespace = f.pronamespace and present.proname = f.proname
         where f.pronamespace = to_regnamespace('relay') and 'relay.call'::regtype = any (present.proargtypes::oid[])
           and ('relay.call'::regtype <> all (f.proargtypes::oid[]) or f.pronargs < present.pronargs)
    loop
        for granted in select a.grantee::regrole as role, a.is_grantable from aclexplode(former.rights) as a
                        where a.grantee not in (0, former.owner) loop
            execute format('grant execute on function %s to %s%s', former.present, granted.role,
                           case when granted.is_grantable then ' with grant option' end);
        end loop;
        execute format('drop function %s', former.name);
    end loop;
exception when dependent_objects_still_exist then
    get stacked diagnostics detail = pg_exception_detail;
    raise exception using errcode = 'restrict_violation', message = format(
        'functions of relay have new arguments, and other objects depend on them (%s): drop these, run `relay init` again, and '
        'create them again', replace(detail, chr(10), '; '));
end
$$;

revoke all on function relay.replace_functions() from public;

-- The role that wrote a call. Functions that call others of relay's pass `call` on: else these would be called by the owner of both.
create or replace function relay.calling_role(call relay.call) returns name
language plpgsql stable
as $$
declare
    stamp text := pg_backend_pid()::text || ' ' || extract(epoch from now())::text || ' ';
begin
    if starts_with(call, stamp) then
        return substr(call, length(stamp) + 1);
    end if;
    raise insufficient_privilege using message = 'relay: who calls is filled in by the server: leave out the argument "call"';
end
$$;

-- Whether the caller is a member of a role, or of relay, which has the rights to the tables. Nobody is of one that was dropped.
create or replace function relay.may_act_as(name text, call relay.call) returns boolean
language plpgsql stable
as $$
declare
    caller name := relay.calling_role(call);
begin
    return coalesce(pg_has_role(caller, to_regrole(quote_ident(name))::oid, 'member'), false)
           or to_regrole('relay') is not null and pg_has_role(caller, 'relay', 'member');
end
$$;

revoke all on function relay.calling_role(relay.call), relay.may_act_as(text, relay.call) from public;

insert into relay.migrations (name) values ('both/001_calls.sql') on conflict do nothing;
