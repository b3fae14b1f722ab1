-- What an event says of the event that caused it: correlation_id, causation_id and hop_count in its metadata, as
-- relay/causes.py has them. relay.publish needs it.

-- The hop count in an event's metadata; 0 without one, and for what is no count. More than a billion are not counted.
create or replace function relay.hops_of(metadata jsonb) returns bigint
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
begin
    if jsonb_typeof(metadata -> 'hop_count') is distinct from 'number' then
        return 0;
    end if;
    return trunc(least(greatest((metadata ->> 'hop_count')::numeric, 0), 1000000000));
end
$$;

-- The metadata of an event that the event with this id and these metadata causes.
create or replace function relay.caused_by(id anyelement, metadata jsonb) returns jsonb
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
begin
    return jsonb_build_object('correlation_id', coalesce(nullif(metadata -> 'correlation_id', 'null'), to_jsonb(id::text)),
                              'causation_id', id::text,
                              'hop_count', relay.hops_of(metadata) + 1);
end
$$;

comment on function relay.caused_by(anyelement, jsonb) is
    'The metadata of an event that another one causes: relay.caused_by(id, metadata) with those of the cause.';

-- Tells relay.publish which event a handler's next statement is called with, to the end of the transaction.
create or replace function relay.begin_cause(id anyelement, metadata jsonb, max_hops bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    perform set_config('relay.cause', (relay.caused_by(id, metadata) || jsonb_build_object('max_hops', max_hops))::text, true);
end
$$;

-- The metadata of event number `number` of an array that a handler publishes. Without an event in `cause`, as in a
-- statement over many events, they name it themselves.
create or replace function relay.with_cause(metadata jsonb, cause jsonb, number bigint) returns jsonb
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
declare
    told jsonb  := coalesce(nullif(metadata, 'null'), '{}');
    most bigint := (cause ->> 'max_hops')::bigint;
begin
    if jsonb_typeof(told) <> 'object' then
        raise invalid_parameter_value using
            message = format('relay.publish: the metadata of event %s of the array are no object', number),
            hint = 'What a handler publishes has its cause in the metadata: make them an object.';
    end if;
    if cause ? 'hop_count' then
        told := (cause - 'max_hops') || told || jsonb_build_object('hop_count', cause -> 'hop_count');
    elsif relay.hops_of(told) = 0 then
        raise invalid_parameter_value using
            message = format('relay.publish: the metadata of event %s of the array do not say what caused it', number),
            hint = 'A statement for many events publishes: add ''metadata'', relay.caused_by(id, metadata).';
    end if;
    if relay.hops_of(told) > most then
        raise exception using
            errcode = 'RLHOP',
            message = format('relay.publish: event %s of the array would be hop %s of a chain of events that cause each '
                             'other, and source.max_hops allows %s', number, relay.hops_of(told), most),
            hint = 'End the loop, or raise the limit.';
    end if;
    return told;
end
$$;

revoke all on function relay.hops_of(jsonb), relay.caused_by(anyelement, jsonb), relay.begin_cause(anyelement, jsonb, bigint),
                       relay.with_cause(jsonb, jsonb, bigint) from public;

do $$
begin
    if to_regrole('relay_publisher') is not null then
        grant execute on function relay.hops_of(jsonb), relay.caused_by(anyelement, jsonb) to relay_publisher;
    end if;
    if to_regrole('relay') is not null then
        grant execute on function relay.hops_of(jsonb), relay.caused_by(anyelement, jsonb) to relay;
        grant execute on function relay.begin_cause(anyelement, jsonb, bigint) to relay;
    end if;
end
$$;

insert into relay.migrations (name) values ('source/003_causes.sql') on conflict do nothing;
