-- What cron runs. The event's id is that of the day, so that a second run of the same day is refused.
select relay.publish('00000000-0000-4000-8000-000000000001', null, jsonb_build_array(jsonb_build_object(
    'id', md5('reminders ' || current_date)::uuid,
    'event_type', 'campaign.started', 'aggregate_type', 'Campaign', 'aggregate_id', current_date,
    'payload', jsonb_build_object('campaign', current_date, 'started_at', now()))));
