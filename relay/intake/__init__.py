"""What publishes for others, who reach no database: the core of `POST /v1/events`, and of the intake from brokers."""
