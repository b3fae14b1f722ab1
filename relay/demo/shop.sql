-- The tables that the handlers of config/demo.yaml write to.

create schema shop;

create table shop.projection (
    seq            bigint generated always as identity primary key, -- the order in which events were applied
    id             uuid    not null,                                -- not unique, so that a repeated effect is visible
    host_id        uuid    not null,
    transaction_id uuid,
    c_offset       bigint  not null,
    event_type     text    not null,
    amount         numeric not null check (amount >= 0)             -- most of the poison violates it
);

create table shop.customer_totals (
    host_id  uuid,
    customer int,
    orders   bigint  not null,
    amount   numeric not null,
    primary key (host_id, customer)
);
