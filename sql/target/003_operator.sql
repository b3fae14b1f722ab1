-- Who acts through the console, and the list of dead letters by pages. Needs 001_target.sql.

-- The session tells it. Who acted as far as the server knows is in acted_by.
alter table relay.actions
    add column if not exists operator text default nullif(current_setting('relay.operator', true), '');
alter table relay.dead_letter_actions
    add column if not exists operator text default nullif(current_setting('relay.operator', true), '');

comment on column relay.actions.operator is
    'who acted through the console, as the console says; null where a command did it';
comment on column relay.dead_letter_actions.operator is
    'who acted through the console, as the console says; null where a command did it';

create index if not exists dead_letter_queue_status on relay.dead_letter_queue (group_id, status, dead_transaction);
create index if not exists dead_letter_actions_group on relay.dead_letter_actions (group_id, id);

insert into relay.migrations (name) values ('target/003_operator.sql') on conflict do nothing;
