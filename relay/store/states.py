"""The words for the states of deferred transactions, messages of queues and dead letters, each declared here alone.

What each means: docs/glossary.md, "States".
"""

from __future__ import annotations

from typing import Literal, get_args

DeferredKind = Literal["retry", "holding", "replay", "resend", "scheduled", "blocked"]
DEFERRED: tuple[DeferredKind, ...] = get_args(DeferredKind)
"""Why a transaction is deferred, as `relay.store.deferred.selection.KIND` tells it."""

MessageState = Literal["enqueued", "scheduled", "retry", "leased", "dead", "done"]
MESSAGES: tuple[MessageState, ...] = get_args(MessageState)
"""Where a message of a queue is, as the view `relay.queue_items` tells it."""
UNDONE = tuple(each for each in MESSAGES if each != "done")
AT_REST: tuple[MessageState, ...] = ("enqueued", "scheduled", "retry")
"""Those of messages that operators act on: others a worker has, are dead letters, or are done."""
FIGURES = ("ready", "waiting", "leased", "dead")
"""What `relay.queue_figures` counts: `ready` is enqueued or due, `waiting` scheduled or to be tried again later."""

DeadStatus = Literal["dead", "replaying", "replayed", "discarded"]
DEAD: tuple[DeadStatus, ...] = get_args(DeadStatus)
"""What has become of a dead letter. One of a queue is dead or gone."""

SagaState = Literal["running", "waiting", "undoing", "stuck", "done", "compensated", "given_up"]
SAGAS: tuple[SagaState, ...] = get_args(SagaState)
"""Where a saga is, as `relay.sagas` tells it."""
ENDED_SAGAS = SAGAS[-3:]


def listed(words: tuple[str, ...]) -> str:
    """Return words as a sentence lists them: `a, b or c`."""
    return f"{', '.join(words[:-1])} or {words[-1]}"
