create table stock (item text primary key, pieces int not null check (pieces >= 0));
create table reservations (order_id text primary key, item text not null);
-- What the payment service knows: a charge, or a refund, for each idempotency key.
create table payments (idempotency_key uuid primary key, order_id text not null, amount numeric not null);
create table parcels (order_id text primary key);
