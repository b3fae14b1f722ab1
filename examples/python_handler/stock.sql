create table stock (
    sku  text primary key,
    free int not null check (free >= 0)
);

create table reservations (
    event_id uuid primary key,
    order_id text not null,
    sku      text not null references stock,
    quantity int  not null
);
