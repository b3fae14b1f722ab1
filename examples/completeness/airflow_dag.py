"""A daily Airflow DAG, which waits until relay's table has all events of the day before it reads them."""

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.sensors.bash import BashSensor
from airflow.sdk import DAG

GRACE = 600
"""Seconds after midnight until which a transaction of the day before may commit."""

with DAG("revenue", schedule="@daily", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False):
    complete = BashSensor(
        task_id="complete",
        bash_command=(
            "relay status --config /etc/relay/relay.yaml --sink lake --complete-before "
            f"'{{{{ (data_interval_end + macros.timedelta(seconds={GRACE})).isoformat() }}}}'"
        ),
        # 1: not yet. Without this key a wrong configuration, which is 2, would be polled until the timeout.
        retry_exit_code=1,
        mode="reschedule",
        poke_interval=60,
        timeout=timedelta(hours=6),
    )
    revenue = BashOperator(
        task_id="revenue",
        bash_command="spark-submit revenue.py '{{ macros.ds_add(data_interval_end | ds, -1) }}'",
    )
    complete >> revenue
