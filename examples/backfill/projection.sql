create table daily_sales (
    customer text,
    day      date,
    orders   bigint  not null,
    amount   numeric not null,
    primary key (customer, day)
);
