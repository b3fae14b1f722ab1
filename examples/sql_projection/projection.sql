create table order_status (
    order_id   text primary key,
    host_id    uuid        not null,
    status     text        not null,
    amount     numeric,
    changed_at timestamptz not null
);

create table revenue (
    host_id uuid,
    day     date,
    orders  bigint  not null,
    amount  numeric not null,
    primary key (host_id, day)
);
