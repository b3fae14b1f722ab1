create table sent (id uuid primary key, attempt int not null, sent_at timestamptz not null default now());
