-- The first start of docker-compose.yml's database: the service's role, and the tables that config/compose.yaml fills.
-- psql runs it; the password comes from the container's environment.

\getenv relay_password RELAY_PASSWORD
create role relay login replication password :'relay_password';

create schema shop;

create table shop.order_history (
    event_id   uuid primary key,
    host_id    uuid        not null,
    order_id   text        not null,
    event_type text        not null,
    event_ts   timestamptz not null,
    payload    jsonb       not null,
    c_offset   bigint      not null
);

create table shop.order_totals (
    host_id uuid    primary key,
    orders  bigint  not null,
    amount  numeric not null
);

grant usage on schema shop to relay;
grant insert on shop.order_history to relay;
grant select, insert, update on shop.order_totals to relay;
