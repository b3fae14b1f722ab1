"""Errors as RFC 9457 defines them, and which status a fault has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import psycopg
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from relay.faults import ConfigurationError, TransientFault, Unreachable, first_line
from relay.web.requests import TooManyFailures
from relay.web.sessions import READ_SECONDS

PROBLEM = "application/problem+json"
"""The content type of an error."""
FAULTS: tuple[type[Exception], ...] = (
    ConfigurationError,
    TransientFault,
    psycopg.Error,
    HTTPException,
    RequestValidationError,
    TooManyFailures,
)
"""The exceptions that `refusal_of` knows."""


class Problem(BaseModel):
    """An error, as RFC 9457 defines it; `detail` is one line for a person."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


def described_problems(
    texts: Mapping[int, str], model: type[Problem] = Problem
) -> dict[int | str, dict[str, Any]]:
    """Return the errors of a route for its description in OpenAPI, by status."""
    content = {PROBLEM: {"schema": model.model_json_schema()}}
    return {status: {"description": text, "content": content} for status, text in texts.items()}


class HttpRefusal(NamedTuple):
    """The status of a response that reports a fault, its detail, and further headers."""

    status: int
    detail: str
    headers: Mapping[str, str] = {}


def problem(refusal: HttpRefusal) -> JSONResponse:
    """Return the response for a refusal; one of status 401 asks for a bearer token."""
    status, detail, headers = refusal
    content = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    if status == 401:
        headers = {"www-authenticate": "Bearer", **headers}
    return JSONResponse(content.model_dump(), status, headers, media_type=PROBLEM)


def refusal_of(error: Exception) -> HttpRefusal:
    """Return how a fault is reported. Raises one that is no fault of the request or of a database."""
    match error:
        case Unreachable() | TransientFault():
            return HttpRefusal(503, str(error))
        case ConfigurationError():
            return HttpRefusal(409, " ".join(str(error).splitlines()))
        case TooManyFailures():
            seconds = f"{error.seconds:.0f}"
            return HttpRefusal(
                429, f"too many wrong tokens: try again in {seconds} s", {"retry-after": seconds}
            )
        case psycopg.errors.QueryCanceled():
            return HttpRefusal(
                503, f"the database took longer than {READ_SECONDS:.0f} s: ask for less"
            )
        case psycopg.errors.StatementTooComplex() | psycopg.errors.ProgramLimitExceeded():
            # Operational errors by class, though the request causes them, such as JSON that is nested too deep.
            return HttpRefusal(409, f"the database refuses: {first_line(error)}")
        case psycopg.OperationalError():
            return HttpRefusal(503, f"the database cannot be reached: {first_line(error)}")
        case psycopg.Error():
            return HttpRefusal(409, f"the database refuses: {first_line(error)}")
        case RequestValidationError():
            first = error.errors()[0]
            return HttpRefusal(422, described(first["loc"], first["msg"]))
        case HTTPException():
            return HttpRefusal(error.status_code, str(error.detail), error.headers or {})
        case _:
            raise error


_OF_A_REQUEST = (
    HTTPException,
    psycopg.errors.StatementTooComplex,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.DataError,
)
"""The errors that a request can cause."""


def public_refusal_of(error: Exception) -> HttpRefusal:
    """Return how a fault is reported to clients, whom the address of the database does not concern.

    What an operator has to mend is no conflict of the request. Raises what `refusal_of` raises.
    """
    refusal = refusal_of(error)
    if refusal.status == 409 and not isinstance(error, _OF_A_REQUEST):
        return HttpRefusal(503, "relay cannot serve this now: `relay check` says why")
    own_text = isinstance(error, HTTPException | psycopg.errors.QueryCanceled)
    if refusal.status != 503 or own_text:
        return refusal
    return refusal._replace(detail="the database cannot be reached: see relay's log")


def described(location: Sequence[int | str], message: str) -> str:
    """Return a fault of a validation and its location on one line."""
    key = ".".join(str(part) for part in location if part not in ("body", "query", "path"))
    text = message.removeprefix("Value error, ")
    return f"{key or 'the request'}: {text[:1].lower()}{text[1:]}"
