create table invoices (order_id text, amount numeric);
