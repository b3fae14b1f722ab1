"""Each promise has tests that show it: those of docs/explanation/guarantees.md, and the invariants of the design."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import pytest

from tests.process import ROOT

DESIGN = "Invariants of the design"

ROWS = re.compile(r"^\| (.+?) \| ", re.MULTILINE)
ITEMS = re.compile(r"^(?:- |\d+\. )(.+)", re.MULTILINE)
NAMED = re.compile(r"^\*\*(.+?)\*\*", re.MULTILINE)
PARAGRAPHS = re.compile(r"(?:\A|(?<=\n\n)|(?<=\n)(?=- ))(?:- )?(.+)")
"""Items of a list are paragraphs of their own."""
SECTIONS = {
    "What is promised": ITEMS,
    "Between the WAL and polling": ROWS,
    "Sinks": NAMED,
    "What a crash repeats": PARAGRAPHS,
    "What holds back WAL": ROWS,
    "An outage of a destination": PARAGRAPHS,
    "In mode wal": PARAGRAPHS,
    "Complete up to a time": ITEMS,
    "What becomes of a fault": ROWS,
}
"""The sections of the page with promises, and what in each of them is one."""

SHOWN = """
# What is promised
No loss
  tests/unit/test_confirmation.py::TestStream
  tests/chaos/test_faults.py::test_killed_at_random_moments
  tests/chaos/test_durability.py::test_without_synchronous_commit_nothing_is_confirmed_that_a_crash_can_take
  tests/field/test_confirmed_positions.py::test_no_history_confirms_more_than_is_stored
  tests/integration/test_sessions.py::test_synchronous_commit_is_what_the_configuration_says
Effectively once in the target database
  tests/chaos/test_positions.py::test_what_is_committed_is_applied_once
  tests/chaos/test_recovery.py::test_the_outcome_of_a_commit_is_not_known
  tests/integration/test_pipeline.py::test_redelivery_is_recognised
  tests/integration/test_polling.py::test_another_instance_may_go_on_between_any_two_statements_of_a_poll
  tests/integration/test_sessions.py::test_of_two_that_follow_one_position_the_key_refuses_the_second
Order
  tests/integration/test_pipeline.py::test_every_event_is_applied_once_in_order
  tests/integration/test_pipeline.py::test_order_survives_rows_of_every_size_and_poison
  tests/integration/test_polling.py::test_concurrent_publishers_lose_nothing
  tests/unit/test_assembler.py::test_interleaved_business_transactions_of_one_commit_come_apart
  tests/unit/test_plan.py::test_the_plan_keeps_order_and_atomicity
Atomic business transactions
  tests/integration/test_pipeline.py::test_a_transaction_over_hosts_of_several_partitions_is_atomic
  tests/integration/test_pipeline.py::test_without_transaction_id_host_and_user_stand_for_the_transaction
  tests/unit/test_assembler.py::test_one_transaction_id_in_two_commits_makes_two_transactions
Poison neither blocks nor spreads
  tests/integration/test_pipeline.py::test_many_failing_transactions_among_many
  tests/integration/test_pipeline.py::test_failing_transactions_between_good_ones
  tests/integration/test_brake.py::test_a_broken_handler_is_stopped_and_goes_on_when_it_is_mended
An outage dead-letters nothing
  tests/chaos/test_faults.py::test_the_server_crashes_and_comes_back
  tests/integration/test_http.py::test_a_circuit_breaker_stops_the_sink_and_spends_no_attempts
  tests/integration/test_http.py::test_exhausted_attempts_release_the_key_or_hold_it
Bounded memory
  tests/integration/test_source.py::test_a_million_events_in_one_transaction_stay_out_of_memory
  tests/integration/test_source.py::test_a_commit_larger_than_the_receive_buffer_is_spooled
  tests/unit/test_assembler.py::test_memory_holds_no_more_than_the_limit_and_what_is_held_is_reported
  tests/unit/test_sink_cursor.py::test_a_feed_buffers_while_it_is_open_and_has_room
  tests/field/test_due_together.py::test_what_falls_due_together_does_not_fill_the_memory
WAL is not held for nothing
  tests/integration/test_source.py::test_an_idle_outbox_does_not_hold_the_wal_of_others
  tests/field/test_confirmed_positions.py::test_a_sink_holds_no_wal_for_events_that_are_not_its_own
Nothing disappears silently
  tests/integration/test_pipeline.py::test_unrouted_events_follow_the_policy
  tests/integration/test_cli.py::test_an_event_that_may_not_be_unrouted_stops_the_service
At least once in sinks
  tests/chaos/test_deferral.py::test_an_endpoint_with_every_fault_loses_nothing_and_delays_nobody_else
  tests/integration/test_sinks.py::test_a_killed_relay_goes_on_within_seconds_and_loses_nothing
  tests/integration/test_function.py::test_effects_commit_with_the_delivery
  tests/chaos/test_functions.py::test_effects_are_there_exactly_once
Once in files and tables
  tests/integration/test_spark_handler.py::test_each_event_is_written_once_with_relay_killed_while_it_writes
  tests/integration/test_spark_handler.py::test_a_batch_is_the_same_however_often_it_is_tried
  tests/integration/test_spark_lake.py::test_a_batch_is_there_once_however_often_it_is_written
  tests/field/test_late_writers.py::test_a_writer_that_wakes_up_takes_nothing_from_its_successor

# Between the WAL and polling
a committed event has not come from the WAL
  tests/integration/test_hybrid.py::test_nothing_is_lost_or_repeated[lose_slot]
  tests/field/test_partial_commits.py::test_a_publication_that_changes_under_the_stream_is_noticed[swapped, auto]
a commit of which the WAL has brought a part
  tests/field/test_partial_commits.py::test_a_partition_that_is_attached_with_rows_is_polled[part]
  tests/field/test_partial_commits.py::test_a_commit_of_which_a_part_came_is_named_and_can_be_repaired
host_id of a row is updated
  tests/field/test_partition_of_host.py::test_a_host_that_changes_after_the_delivery_is_not_delivered_again
a table whose rows were committed before is attached
  tests/field/test_partial_commits.py::test_rows_that_were_committed_before_their_table_was_attached_are_polled_unless_they_are_seen
the publication leaves out the outbox
  tests/field/test_partial_commits.py::test_children_that_come_while_relay_streams_are_polled
  tests/field/test_partial_commits.py::test_what_the_stream_cannot_have_whole_is_refused
  tests/field/test_partial_commits.py::test_check_and_run_refuse_children
  tests/field/test_partial_commits.py::test_a_publication_that_changes_under_the_stream_is_noticed[swapped]
the slot is new or was recreated, or another client has advanced it
  tests/integration/test_hybrid.py::test_rows_older_than_the_slot_are_read_first
  tests/integration/test_hybrid.py::test_nothing_is_lost_or_repeated[leave_to_another]
  tests/integration/test_hybrid.py::test_a_slot_that_is_recreated_while_the_stream_opens_is_noticed
  tests/integration/test_hybrid.py::test_a_slot_that_somebody_has_advanced_keeps_the_order_and_is_said
slot missing, lost or invalidated, publication dropped
  tests/integration/test_hybrid.py::test_nothing_is_lost_or_repeated[lose_slot]
  tests/integration/test_hybrid.py::test_nothing_is_lost_or_repeated[lose_publication]
  tests/integration/test_hybrid.py::test_nothing_is_lost_or_repeated[lose_publication_of_another]
  tests/integration/test_hybrid.py::test_the_slot_is_not_recreated_for_ever
  tests/integration/test_slot.py::test_a_slot_that_is_being_made_is_shown_as_such
no right to replicate
  tests/integration/test_hybrid.py::test_a_role_that_may_not_replicate_polls
  tests/integration/test_hybrid.py::test_no_walsender_is_free_and_the_slot_is_invalidated_and_wal_level_is_lowered
  tests/integration/test_hybrid.py::test_a_stream_that_ends_whenever_it_begins_is_one_outage
  tests/field/test_ends.py::test_the_reason_why_relay_polls_is_that_of_now
the server shuts down
  tests/field/test_server_ends.py::test_a_fast_shutdown_does_not_wait_for_relay
synchronous_standby_names has a *
  tests/field/test_publishers.py::test_no_commit_waits_for_the_stream
  tests/field/test_publishers.py::test_which_standbys_commits_wait_for
another relay reads the slot
  tests/integration/test_source.py::test_a_second_relay_stands_by_and_takes_over
the slot is held for an instance that does not run
  tests/field/test_standstill.py::test_a_walsender_hangs_whose_reader_is_gone
the stream stands still without a fault
  tests/field/test_standstill.py::test_a_walsender_hangs
  tests/field/test_standstill.py::test_a_standby_slot_that_nobody_reads_holds_back_the_stream
another timeline that has everything that was applied
  tests/chaos/test_failover.py::test_a_standby_is_promoted
  tests/integration/test_histories.py::test_a_timeline_that_was_left_after_all_that_was_applied_is_followed
another timeline that lacks some of it
  tests/chaos/test_failover.py::test_a_failover_loses_events_that_were_applied
  tests/integration/test_histories.py::test_a_former_primary_is_refused
  tests/integration/test_histories.py::test_a_source_that_lost_what_was_applied_stops_relay_until_somebody_decides
another system identifier, with the witness
  tests/field/test_histories.py::test_an_upgraded_server_goes_on
no such witness, whatever the transaction ids
  tests/field/test_histories.py::test_an_older_image_of_a_server_is_refused_when_its_ids_have_passed
  tests/field/test_histories.py::test_a_dump_in_another_cluster_is_refused_when_its_ids_have_passed
  tests/field/test_histories.py::test_a_source_that_is_restored_into_its_server_is_refused
a row with a c_xid that the server has not assigned yet
  tests/field/test_row_identity.py::test_a_forged_xid_is_a_dead_letter_and_ends_nobody
other rows with a c_xid that the server has not assigned yet
  tests/integration/test_polling.py::test_rows_of_another_cluster_are_refused_and_found_by_check
  tests/field/test_row_identity.py::test_a_forged_xid_that_nobody_has_seen_is_named
a hot standby
  tests/chaos/test_failover.py::test_a_standby_is_polled_up_to_the_oldest_open_transaction
source.dsn leads to a server that does not have yet
  tests/chaos/test_failover.py::test_an_instance_at_a_lagging_standby_waits

# Sinks
Independence
  tests/integration/test_sinks.py::test_a_slow_delivery_holds_back_neither_the_target_nor_other_sinks
  tests/integration/test_sinks.py::test_an_endpoint_that_fails_costs_the_other_one_no_copy
  tests/field/test_many_sinks.py::test_what_hangs_or_is_locked_holds_up_no_other_sink
Order
  tests/unit/test_dispatch.py::test_order_holds_for_each_key_and_nothing_follows_on_what_has_to_wait
  tests/integration/test_sinks.py::test_order_holds_where_only_some_events_of_a_host_go_to_the_sink_that_fails
  tests/integration/test_deferred_order.py::test_every_transaction_has_its_turn_and_none_before_it

# What a crash repeats
A sink stores at least once a second
  tests/integration/test_sinks.py::test_a_kill_repeats_only_what_was_not_done
what was in flight
  tests/integration/test_sinks.py::test_a_killed_relay_goes_on_within_seconds_and_loses_nothing
what was done within the last second
  tests/integration/test_sinks.py::test_a_kill_repeats_only_what_was_not_done
of rows with a null c_xid
  tests/integration/test_sink_faults.py::test_a_kill_repeats_rows_from_before_relay_from_the_oldest_in_flight
A commit with several business transactions is done
  tests/integration/test_sinks.py::test_what_is_deferred_is_done_in_the_same_moment
A stop with SIGTERM repeats nothing
  tests/integration/test_http.py::test_a_stop_leaves_what_is_not_delivered_yet_and_repeats_nothing
  tests/integration/test_sinks.py::test_a_target_that_is_restored_takes_sinks_back

# What holds back WAL
the target
  tests/chaos/test_faults.py::test_the_target_is_down_for_a_while
  tests/unit/test_confirmation.py::test_an_unacknowledged_commit_holds_back_everything_after_it
an attached sink
  tests/integration/test_sinks.py::test_a_sink_that_hangs_leaves_the_stream_and_comes_back
  tests/unit/test_sink_cursor.py::test_wal_is_held_for_what_is_not_stored_until_the_row_says_that_the_sink_polls
  tests/integration/test_sinks.py::test_a_backlog_larger_than_the_buffer_is_polled_in_order
a sink that lags or is paused
  tests/integration/test_sinks.py::test_a_paused_sink_keeps_its_position_and_costs_nothing
  tests/integration/test_sinks.py::test_what_hangs_keeps_only_its_key
a sink in mode wal
  tests/integration/test_sinks.py::test_only_the_wal_feeds_a_sink_that_fails
  tests/field/test_confirmed_positions.py::test_nothing_is_confirmed_for_a_sink_that_another_process_has

# An outage of a destination
The circuit breaker opens
  tests/integration/test_sinks.py::test_an_outage_does_not_copy_the_stream
  tests/integration/test_http.py::test_a_circuit_breaker_stops_the_sink_and_spends_no_attempts

# In mode wal
There is nothing to poll
  tests/integration/test_sinks.py::test_only_the_wal_feeds_a_sink_that_fails
  tests/integration/test_sinks.py::test_where_only_the_wal_is_read_the_target_waits_for_room_in_a_sinks_buffer
  tests/integration/test_sinks.py::test_a_sink_that_only_the_wal_feeds_is_not_moved
  tests/field/test_confirmed_positions.py::test_a_cut_session_of_the_target_confirms_what_is_stored
The slot is never confirmed past an event
  tests/field/test_confirmed_positions.py::test_no_history_confirms_more_than_is_stored
  tests/field/test_confirmed_positions.py::test_an_orderly_stop_with_a_slow_endpoint_confirms_what_is_stored
  tests/unit/test_sink_cursor.py::test_in_mode_wal_the_stored_position_alone_decides
  tests/integration/test_sink_faults.py::test_a_sink_that_is_back_where_only_the_wal_is_read_misses_nothing_silently

# Complete up to a time
Committed before T means
  tests/integration/test_completeness.py::test_the_target_is_complete_up_to_a_time_that_goes_on
  tests/unit/test_completeness.py::test_everything_committed_before_the_time_is_visible
T is the time at which relay's query for a snapshot began
  tests/integration/test_completeness.py::test_the_time_is_before_the_snapshot
A batch that is cut in the middle of a backlog
  tests/unit/test_completeness.py::test_everything_committed_before_the_time_is_visible
  tests/unit/test_completeness.py::test_a_transaction_that_is_still_to_come_holds_the_time
There means applied
  tests/integration/test_completeness.py::test_what_is_dead_or_deferred_is_counted
All events are those since
  tests/integration/test_completeness.py::test_a_sink_that_is_moved_begins_again
  tests/integration/test_completeness.py::test_a_sink_that_begins_in_the_middle_is_complete_from_its_first_batch_on
A destination of a Spark sink that does not have the last batch
  tests/field/test_lost_destinations.py::test_a_sink_whose_destination_is_lost_is_down_until_it_is_brought_back
T is stored in the transaction
  tests/integration/test_completeness.py::test_a_table_has_all_that_was_committed_before_its_time
  tests/integration/test_completeness.py::test_the_target_is_complete_up_to_a_time_that_goes_on

# What becomes of a fault
connection lost or refused (class 08)
  tests/unit/test_faults.py::test_a_fault_of_the_surroundings_is_tried_again
  tests/unit/test_faults.py::test_what_each_exception_leads_to
  tests/field/test_wrong_sessions.py::test_a_session_is_replaced_after_a_fault_that_may_be_its_own
  tests/field/test_cached_plans.py::test_a_prepared_statement_of_another_client_of_the_pooler
  tests/unit/test_retry.py::test_waits_are_those_of_the_page_of_guarantees
  tests/unit/test_waits.py::test_waits_double_until_they_are_reset
an error that wraps one of these
  tests/unit/test_faults.py::test_an_error_that_wraps_an_outage_names_it
  tests/unit/test_faults.py::test_from_none_says_that_the_cause_does_not_count
statement_timeout cancels a portion
  tests/integration/test_handler_faults.py::test_a_portion_that_takes_longer_than_statement_timeout_is_halved
a fault of the target that comes again for one transaction
  tests/field/test_faults_of_one.py::test_one_transaction_is_given_up_as_retry_says_and_the_others_flow
  tests/field/test_faults_of_one.py::test_without_a_limit_it_is_deferred_and_an_operator_gives_it_up
  tests/field/test_faults_of_one.py::test_a_lock_that_all_wait_for_dead_letters_nothing
  tests/field/test_faults_of_one.py::test_after_ten_in_a_row_the_others_are_deferred_without_an_attempt
a fixed limit, 53400
  tests/unit/test_faults.py::test_a_fault_of_the_event_goes_to_the_dead_letters[53400]
  tests/field/test_faults_of_one.py::test_one_transaction_is_given_up_as_retry_says_and_the_others_flow[temporary]
RetryLater from a Python handler, or MemoryError
  tests/integration/test_http.py::test_a_python_handler_that_asks_for_time_defers_only_its_key
  tests/field/test_users_functions.py::test_an_event_for_which_memory_does_not_suffice_stops_no_other_host
any other fault of a Python handler or a sink with
  tests/field/test_retries.py::test_any_fault_is_retried_up_to_its_limit_and_the_function_knows_the_attempt
  tests/field/test_retries.py::test_faults_of_events_do_not_open_the_circuit_breaker
  tests/field/test_retries.py::test_a_brake_counts_what_is_given_up_and_not_what_is_retried
Drop from a Python handler
  tests/field/test_retries.py::test_a_function_may_end_its_part_as_done_or_dead
Fail from a Python handler
  tests/field/test_retries.py::test_a_function_may_end_its_part_as_done_or_dead
an endpoint that is away, slow
  tests/integration/test_http.py::test_a_host_that_fails_is_deferred_in_order_and_no_other
  tests/integration/test_http.py::test_a_hanging_endpoint_is_given_up_in_time
  tests/integration/test_http.py::test_a_circuit_breaker_stops_the_sink_and_spends_no_attempts
  tests/integration/test_brokers.py::test_an_outage_of_the_broker_defers_and_loses_nothing
an endpoint that refuses the content
  tests/field/test_refusals.py::test_a_refusal_of_the_content_is_a_dead_letter
  tests/integration/test_http.py::test_what_an_endpoint_refuses_is_its_own_dead_letter
  tests/integration/test_brokers.py::test_what_a_broker_refuses_is_dead_lettered
an endpoint that wants no more events
  tests/field/test_refusals.py::test_a_receiver_that_wants_no_more_stops_the_sink
an event with bytes that its source's encoding does not have
  tests/integration/test_values.py::test_only_the_event_with_an_undecodable_byte_is_dead
an event of a type that events declares
  tests/integration/test_event_types.py::test_what_is_not_valid_is_a_dead_letter_that_names_the_field
an outage, or RetryLater, that an upcaster
  tests/integration/test_event_types.py::test_a_transient_fault_of_an_upcaster_defers_the_transaction
everything else that a handler raises
  tests/unit/test_faults.py::test_a_fault_of_the_event_goes_to_the_dead_letters
  tests/integration/test_pipeline.py::test_failing_transactions_between_good_ones
more than dead_letters.brake transactions in a row
  tests/integration/test_brake.py::test_a_broken_handler_is_stopped_and_goes_on_when_it_is_mended
  tests/integration/test_brake.py::test_a_stopped_sink_keeps_its_position_and_others_go_on
the target cannot be reached
  tests/chaos/test_faults.py::test_the_target_is_down_for_a_while
  tests/integration/test_sink_faults.py::test_a_target_that_restarts_loses_nothing_and_keeps_the_order
  tests/field/test_confirmed_positions.py::test_a_cut_session_of_the_target_confirms_what_is_stored
source or target refuses relay's credentials
  tests/field/test_rotated_secrets.py::test_a_rotated_password_is_read_again
  tests/field/test_rotated_secrets.py::test_relay_ends_if_the_newest_password_is_refused
  tests/field/test_rotated_secrets.py::test_a_password_that_cannot_be_read_is_told
an endpoint or a broker refuses relay's credentials
  tests/field/test_rotated_secrets.py::test_a_rotated_token_costs_no_event
  tests/field/test_rotated_broker_secrets.py::test_a_password_of_redis_is_read_again
a Python handler that hides a database error
  tests/integration/test_handler_faults.py::test_a_handler_that_hides_an_error_is_told_so
a Python handler that ends the database transaction
  tests/integration/test_handler_faults.py::test_a_handler_that_ends_the_transaction_stops_relay_and_nothing_is_committed
a column to which host_id, id, event_type or payload is mapped
  tests/field/test_partial_commits.py::test_a_column_that_is_renamed_ends_relay_before_its_field_is_null
a statement that the server no longer accepts
  tests/integration/test_cli.py::test_a_statement_that_breaks_while_running_stops_and_blames_no_event
  tests/integration/test_cli.py::test_a_revoked_right_is_found_by_check_or_stops_and_blames_no_event
an unrouted event with unrouted: fail
  tests/integration/test_cli.py::test_an_event_that_may_not_be_unrouted_stops_the_service
  tests/field/test_taken_over.py::test_a_slot_that_was_made_again_is_not_followed_in_mode_wal
  tests/unit/test_assembler.py::test_a_garbled_stream_is_a_protocol_error_and_nothing_else
at the start: source or target refuses connections
  tests/integration/test_cli.py::test_run_waits_for_a_server_that_is_away
  tests/unit/test_faults.py::test_only_what_another_configuration_mends_ends_a_start
  tests/field/test_check_is_run.py::test_relay_waits_at_its_start_for_a_target_that_is_read_only
at the start: wrong credentials
  tests/integration/test_cli.py::test_run_does_not_wait_for_what_only_another_dsn_mends
a process that dies, again and again, with the same transaction
  tests/chaos/test_recovery.py::test_a_transaction_that_kills_its_process_is_dead_lettered
  tests/integration/test_handler_faults.py::test_an_outage_in_guarded_mode_is_no_death
memory that runs out, a row that the server cannot send
  tests/integration/test_large_events.py::test_a_commit_that_cannot_be_received_is_passed
  tests/integration/test_large_events.py::test_a_commit_that_cannot_be_received_is_not_passed_where_sinks_would_miss_it
  tests/integration/test_large_events.py::test_deaths_of_the_receiver_are_counted_over_a_commit
  tests/field/test_sizes.py::test_a_value_that_no_message_can_hold_is_passed
a Spark job or session that fails
  tests/chaos/test_faults.py::test_spark_workers_and_the_jvm_are_killed
a process with a Spark task that is frozen
  tests/field/test_frozen_executors.py::test_a_frozen_python_worker_stops_the_group_for_a_bounded_time
  tests/integration/test_sessions.py::test_a_node_that_lost_power_holds_nothing_for_hours
Spark slots that other jobs
  tests/field/test_spark_sharing.py::test_the_pipeline_goes_on_while_a_slow_sink_has_every_slot

# Invariants of the design
The slot is confirmed only up to what the target and attached sinks keep, and never back
  tests/unit/test_confirmation.py::TestStream
  tests/field/test_confirmed_positions.py::test_no_history_confirms_more_than_is_stored
  tests/chaos/test_failover.py::test_a_standby_is_promoted
Whoever brings an event again, and however it comes again, it has its effect in the target once
  tests/chaos/test_positions.py::test_what_is_committed_is_applied_once
  tests/chaos/test_recovery.py::test_the_work_of_a_zombie_is_refused
  tests/chaos/test_recovery.py::test_two_relays_take_over_from_each_other
  tests/integration/test_sessions.py::test_a_task_is_committed_whole_or_not_at_all
A sink gets each event, by key in order, with one identity; where a sink knows what it has, once
  tests/integration/test_consumers.py::test_each_committed_event_comes_once_and_in_order
  tests/chaos/test_deferral.py::test_an_endpoint_with_every_fault_loses_nothing_and_delays_nobody_else
  tests/chaos/test_functions.py::test_calls_are_made_at_least_once_and_in_order
  tests/chaos/test_spark_lake.py::test_a_delta_table_has_each_event_once_with_relay_killed
What was published after another's commit is applied after it, whichever way both come
  tests/chaos/test_positions.py::test_what_is_committed_is_applied_once
  tests/unit/test_plan.py::test_the_plan_keeps_order_and_atomicity
Of a business transaction the target has all or nothing
  tests/integration/test_pipeline.py::test_a_transaction_over_hosts_of_several_partitions_is_atomic
  tests/integration/test_pipeline.py::test_poison_in_a_batch_handler_is_found_and_takes_its_other_effects_along
What fails by itself stops nothing else, and what fails for all buries nothing
  tests/integration/test_pipeline.py::test_many_failing_transactions_among_many
  tests/field/test_faults_of_one.py::test_one_transaction_is_given_up_as_retry_says_and_the_others_flow
  tests/chaos/test_faults.py::test_the_server_crashes_and_comes_back
A publisher notices nothing of relay
  tests/integration/test_publish.py::test_publishers_do_not_wait_for_each_other
  tests/integration/test_notify.py::test_a_publisher_may_prepare_its_transaction
  tests/integration/test_notify.py::test_notifications_are_read_while_polling_is_busy
  tests/field/test_publishers.py::test_no_commit_waits_for_the_stream
One consumer's trouble is no other's
  tests/integration/test_sinks.py::test_a_slow_delivery_holds_back_neither_the_target_nor_other_sinks
  tests/field/test_many_sinks.py::test_what_hangs_or_is_locked_holds_up_no_other_sink
  tests/field/test_many_endpoints.py::test_whatever_one_endpoint_does_others_get_all_their_events_in_order
  tests/field/test_declared_bounds.py::test_a_condition_that_takes_too_long_stops_its_queue_alone
Memory and tables stay within bounds, whatever comes
  tests/integration/test_source.py::test_a_million_events_in_one_transaction_stay_out_of_memory
  tests/field/test_due_together.py::test_what_falls_due_together_does_not_fill_the_memory
  tests/integration/test_sink_handlers.py::test_gigabytes_of_a_response_are_neither_read_nor_held
  tests/field/test_leaks.py::test_a_destination_that_is_away_for_days_costs_no_memory
  tests/field/test_held_snapshots.py::test_superseded_positions_are_deleted_while_relay_runs
  tests/integration/test_retention.py::test_closed_dead_letters_and_old_actions_are_removed
Nothing is left out without a word, and what relay cannot do is refused before it runs
  tests/integration/test_pipeline.py::test_unrouted_events_follow_the_policy
  tests/field/test_check_is_run.py::test_a_route_that_never_applies_is_an_error_of_check_and_run
  tests/field/test_partial_commits.py::test_what_the_stream_cannot_have_whole_is_refused
  tests/field/test_row_security.py::test_a_policy_that_hides_rows_is_refused_with_its_cure
Who may publish, work or read may do that and no more
  tests/integration/test_publish.py::test_a_publisher_may_publish_and_nothing_else
  tests/integration/test_publish.py::test_the_service_runs_with_least_privilege
  tests/integration/test_work_queues.py::test_only_members_of_its_role_take_from_a_queue
  tests/integration/test_log_readers.py::test_each_role_has_its_own_readers
  tests/field/test_session_settings.py::test_no_code_of_another_role_runs_as_relay
A position counts in the history that it is of, and in no other
  tests/integration/test_consumers.py::test_in_another_history_nothing_comes
  tests/field/test_histories.py::test_an_older_image_of_a_server_is_refused_when_its_ids_have_passed
  tests/field/test_spark_history.py::test_a_failover_with_a_loss_of_what_was_read
  tests/field/test_reader_history.py::test_a_dump_in_another_cluster_is_refused_until_a_seek
  tests/field/test_api_history.py::test_a_position_with_a_witness_that_is_not_held_is_refused
  tests/field/test_lost_destinations.py::test_a_sink_whose_destination_is_lost_is_down_until_it_is_brought_back
"""
"""By section the beginning of each promise, and below it the tests that show it; the best one first."""

Table = Mapping[tuple[str, str], list[str]]
"""The tests that show each promise, by its section and beginning."""


def promises_of(page: str) -> Iterator[tuple[str, str]]:
    """Each promise of a page, in plain text, with its section."""
    for section, form in SECTIONS.items():
        found = re.search(
            rf"^#+ {re.escape(section)}\n+(.*?)(?=^#|\Z)", page, re.DOTALL | re.MULTILINE
        )
        assert found, f"the page has no section {section!r}"
        text = found[1].partition("|---|---|\n")[2] if form is ROWS else found[1]
        for promise in form.findall(text):
            yield section, re.sub(r"\[(.+?)\]\([^)]*\)", r"\1", promise).translate(_MARKUP)


_MARKUP = {ord(each): None for each in "*`"}


def table_of(text: str) -> Table:
    """The table that a text is."""
    table: dict[tuple[str, str], list[str]] = {}
    section = ""
    for line in filter(None, text.splitlines()):
        if line.startswith("# "):
            section = line[2:]
        elif line.startswith("  "):
            table[next(reversed(table))].append(line.strip())
        else:
            assert (section, line) not in table, f"{line!r} stands twice under {section!r}"
            table[section, line.translate(_MARKUP)] = []
    return table


def differences(page: str, table: Table) -> Iterator[str]:
    """What of a page the table lacks, and what it has that is not there."""
    used: Counter[tuple[str, str]] = Counter()
    for section, promise in promises_of(page):
        fitting = [key for key in table if key[0] == section and promise.startswith(key[1])]
        used.update(fitting)
        if not fitting:
            yield f"no test shows, under {section!r}: {promise[:60]!r}"
        elif len(fitting) > 1:
            yield f"several entries are of {promise[:60]!r}: {fitting}"
    for (section, beginning), nodes in table.items():
        if section != DESIGN and used[section, beginning] != 1:
            yield f"{used[section, beginning]} promises under {section!r} begin with {beginning!r}"
        if not nodes:
            yield f"no test shows, under {section!r}: {beginning!r}"


@cache
def module_of(path: str) -> ast.Module | None:
    file = ROOT / path
    return ast.parse(file.read_text()) if file.is_file() else None


def fault_of(node: str, module: ast.Module | None) -> str | None:
    """Why a test of a module does not show anything: it is not there, or does not run; None if it does."""
    _, *names = node.partition("[")[0].split("::")
    parameter = node.partition("[")[2].removesuffix("]")
    if module is None or not names:
        return "there is no such module"
    within: list[ast.stmt] = module.body
    marks = _marks(module.body)
    decorators: list[ast.expr] = []
    for name in names:
        defined = next((each for each in within if name in _names(each)), None)
        if defined is None:
            return "there is no such test"
        within = getattr(defined, "body", [])
        decorators = getattr(defined, "decorator_list", [])
        marks += [*decorators, *_marks(within)]
    if any(map(_never_runs, marks)) or any(_skips(each) for each in within):
        return "the test never runs"
    values = [each for each in module.body if isinstance(each, ast.Assign | ast.AnnAssign)]
    if parameter and parameter not in _words([*decorators, *values]):
        return f"the test has no parameter {parameter!r}"
    return None


def _names(statement: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(statement, ast.Assign):
        return [each.id for each in statement.targets if isinstance(each, ast.Name)]
    return [name] if (name := getattr(statement, "name", None)) else []


def _marks(body: Iterable[ast.stmt]) -> list[ast.expr]:
    """What `pytestmark` of a module or a class marks its tests with."""
    given = [
        each.value for each in body if isinstance(each, ast.Assign) and "pytestmark" in _names(each)
    ]
    return [mark for each in given for mark in getattr(each, "elts", [each])]


def _never_runs(mark: ast.expr) -> bool:
    """Whether a mark leaves a test out, or lets it fail, without a condition."""
    call = mark if isinstance(mark, ast.Call) else None
    name = ast.unparse(call.func if call else mark)
    conditions = (
        [*call.args, *(each for each in call.keywords if each.arg == "condition")] if call else []
    )
    return name == "pytest.mark.skip" or (name == "pytest.mark.xfail" and not conditions)


def _skips(statement: ast.stmt) -> bool:
    """Whether a statement of a test skips it, whatever happens."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func) in {"pytest.skip", "pytest.xfail"}
    )


def _words(nodes: Iterable[ast.AST]) -> set[object]:
    """The texts and names of what parametrizes tests."""
    return {
        each.value if isinstance(each, ast.Constant) else each.id
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Constant | ast.Name)
    }


TABLE = table_of(SHOWN)


def test_each_promise_has_tests_and_each_entry_is_a_promise() -> None:
    page = (ROOT / "docs" / "explanation" / "guarantees.md").read_text()
    assert list(differences(page, TABLE)) == []


def test_each_test_is_there_and_runs() -> None:
    nodes = sorted({node for each in TABLE.values() for node in each})
    faults = ((node, fault_of(node, module_of(node.partition("::")[0]))) for node in nodes)
    assert [f"{node}: {fault}" for node, fault in faults if fault] == []


PLAIN = "".join(f"# {section}\n\n" for section in SECTIONS)


@pytest.mark.parametrize(
    ("section", "text", "shown", "said"),
    [
        ("What is promised", "1. **No loss.** relay", "No loss", None),
        ("What is promised", "1. **No loss.** relay", "Order", "no test shows.*'No loss. relay'"),
        ("What is promised", "1. **No loss.** relay", "Order", "0 promises.*begin with 'Order'"),
        ("In mode wal", "One.\ntwo\n\nThree.", "One", "no test shows.*'Three.'"),
        ("What a crash repeats", "One:\n\n- two", "One", "no test shows.*'two'"),
        ("What holds back WAL", "| | much |\n|---|---|\n| a `b` | c |", "a b", None),
        ("Sinks", "**One.** Two\n\nThree", "One", None),
        ("Sinks", "**One.** Two\n\n**One more.**", "One", "2 promises.*begin with 'One'"),
    ],
)
def test_a_promise_without_an_entry_is_named(
    section: str, text: str, shown: str, said: str | None
) -> None:
    page = PLAIN.replace(f"# {section}\n", f"# {section}\n\n{text}\n")
    found = list(differences(page, {(section, shown): ["a test"]}))
    assert any(re.search(said, each) for each in found) if said else found == []


def test_a_promise_without_a_test_is_named() -> None:
    assert list(differences(PLAIN, {(DESIGN, "One"): []})) == [
        "no test shows, under 'Invariants of the design': 'One'"
    ]


SOURCE = """
KINDS = {"one": 1}
TestMachine = Machine.TestCase
@pytest.mark.parametrize("kind", [*KINDS, two])
def test_runs(kind): pass
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail(reason="later")
def test_fails(): pass
@pytest.mark.xfail(sys.platform == "win32", reason="later")
def test_may_fail(): pass
def test_ends(): pytest.skip("later")
class TestAll:
    pytestmark = [pytest.mark.skip(reason="later")]
    def test_one(self): pass
"""


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("test_runs", None),
        ("test_runs[one]", None),
        ("test_runs[two]", None),
        ("test_runs[three]", "the test has no parameter 'three'"),
        ("TestMachine", None),
        ("test_may_fail", None),
        ("test_gone", "there is no such test"),
        ("TestAll::test_gone", "there is no such test"),
        ("test_skipped", "the test never runs"),
        ("test_fails", "the test never runs"),
        ("test_ends", "the test never runs"),
        ("TestAll::test_one", "the test never runs"),
    ],
)
def test_a_test_that_shows_nothing_is_named(name: str, fault: str | None) -> None:
    assert fault_of(f"tests/test_it.py::{name}", ast.parse(SOURCE)) == fault


def test_a_module_that_is_gone_is_named() -> None:
    assert (
        fault_of("tests/gone.py::test_it", module_of("tests/gone.py")) == "there is no such module"
    )
