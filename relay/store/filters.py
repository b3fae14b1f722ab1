"""What selects rows for lists and acts: the options of commands, the API and the searches of pages are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from relay.store import states
from relay.store.states import DeferredKind

Text = Annotated[str, StringConstraints(max_length=1_000_000)]
"""What rows are looked for by. A bound lets pydantic refuse half of a surrogate pair, too."""


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


Moment = Annotated[datetime, AfterValidator(_aware)]
"""A time; in UTC if it has no zone."""


class Filter(BaseModel):
    """Conditions, each of which is met; None is no condition. The description of a field is the help of its option."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def given(self) -> dict[str, Any]:
        """Return the conditions that there are."""
        return {name: value for name, value in self if value not in (None, [], ())}


class DeferredSelection(Filter):
    """A filter for deferred transactions: it selects those that meet every condition."""

    ids: Sequence[int] = Field([], description="The transaction; repeatable.")
    sink: Text | None = Field(None, description="The sink that it goes to; '' for the target.")
    handler: Text | None = Field(None, description="The handler that failed last.")
    kind: DeferredKind | None = Field(None, description=f"One of {', '.join(states.DEFERRED)}.")
    key: Text | None = Field(None, description="One of its ordering keys.")
    host: Text | None = Field(None, description="One of its host_ids.")
    endpoint: Text | None = Field(None, description="The one of several endpoints that it goes to.")
