create table sent_mails (event_id uuid primary key, recipient text not null, sent_at timestamptz not null default now());
grant select, insert on sent_mails to relay;
