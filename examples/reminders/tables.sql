create table customers (id bigint generated always as identity primary key, email text not null, reminded_after interval not null);
create table reminded (customer bigint not null, campaign text not null, at timestamptz not null default now(), primary key (customer, campaign));
