-- Scheduled delivery: an event with a time in the future is held until then.

alter table public.outbox_message_t add column if not exists deliver_at timestamptz;

comment on column public.outbox_message_t.deliver_at is
    'when the event is to be delivered; null: at once';

create or replace function relay.publish(
    host_id        uuid,
    user_id        uuid,
    events         jsonb,
    transaction_id uuid default null
) returns uuid
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    business_id  uuid := coalesce(publish.transaction_id, gen_random_uuid());
    how_many     int;
    first_offset bigint;
    malformed    bigint;
begin
    if jsonb_typeof(publish.events) is distinct from 'array' or jsonb_array_length(publish.events) = 0 then
        raise invalid_parameter_value using
            message = 'relay.publish: events must be a JSON array of at least one event',
            hint = 'Pass [{"event_type": ..., "aggregate_type": ..., "aggregate_id": ..., "payload": {...}}, ...].';
    end if;

    select min(ordinal) into malformed
      from jsonb_array_elements(publish.events) with ordinality as element (event, ordinal)
     where jsonb_typeof(event) <> 'object'
        or not (event ?& array['event_type', 'aggregate_type', 'aggregate_id', 'payload'])
        or event ->> 'event_type' is null;
    if malformed is not null then
        raise invalid_parameter_value using
            message = format('relay.publish: event %s of the array lacks one of event_type, aggregate_type, '
                             'aggregate_id, payload', malformed),
            hint = 'Each event is an object with these four keys; event_type may not be null.';
    end if;

    how_many := jsonb_array_length(publish.events);
    first_offset := relay.reserve_offsets(how_many);

    insert into public.outbox_message_t (
        id, host_id, user_id, aggregate_id, aggregate_version, aggregate_type, event_type, event_ts,
        payload, metadata, c_offset, transaction_id, transaction_ordinal, transaction_count, deliver_at)
    select coalesce((event ->> 'id')::uuid, gen_random_uuid()),
           publish.host_id,
           publish.user_id,
           event ->> 'aggregate_id',
           (event ->> 'aggregate_version')::bigint,
           event ->> 'aggregate_type',
           event ->> 'event_type',
           coalesce((event ->> 'event_ts')::timestamptz, clock_timestamp()),
           event -> 'payload',
           nullif(event -> 'metadata', 'null'),
           first_offset + ordinal - 1,
           business_id,
           ordinal::int,
           how_many,
           (event ->> 'deliver_at')::timestamptz
      from jsonb_array_elements(publish.events) with ordinality as element (event, ordinal)
     order by ordinal;

    return business_id;
end
$$;

insert into relay.migrations (name) values ('outbox/004_deliver_at.sql') on conflict do nothing;
