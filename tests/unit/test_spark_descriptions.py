"""What may be told of an error that Spark raises: what it is and where, and no value."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import (
    AnalysisException,
    NumberFormatException,
    PySparkException,
    PythonException,
)

from relay.faults import ConfigurationError
from relay.spark.descriptions import of_function, safe_description

SECRET = "4111-1111"
TRACEBACK = """
  An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/lib/pyspark.zip/pyspark/worker.py", line 264, in main
    process()
  File "/app/shop.py", line 12, in price
    return int(text)
{line}

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/app/shop.py", line 14, in price
RuntimeError: 4111-1111
"""


class Java:
    """A Java error, as py4j shows it."""

    def __init__(self, name: str, message: str, cause: Java | None = None, **spark: str) -> None:
        self._name, self._message, self._cause = name, message, cause
        if spark:
            self.getCondition = lambda: spark["condition"]
            self.getSqlState = lambda: spark["state"]
            self.getMessageParameters = lambda: spark

    def getClass(self) -> Java:  # noqa: N802
        return self

    def getName(self) -> str:  # noqa: N802
        return self._name

    def getMessage(self) -> str:  # noqa: N802
        return self._message

    def getCause(self) -> Java | None:  # noqa: N802
        return self._cause


class Py4JJavaError(Exception):
    def __init__(self, thrown: Any) -> None:
        super().__init__(f"An error occurred while calling o1.save.\n: {SECRET}")
        self.java_exception = thrown


LOST = (
    "Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times, most recent failure: Lost task 0.3 in stage"
    " 3.0 (TID 9) (10.0.0.7 executor 2): {}\nDriver stacktrace:"
)
REASON = "ExecutorLostFailure (executor 2 exited) Reason: Command exited with code 137"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            NumberFormatException(f"The value '{SECRET}'", "CAST_INVALID_INPUT", {}),
            "NumberFormatException: CAST_INVALID_INPUT",
        ),
        (
            PythonException(TRACEBACK.format(line=f"ValueError: {SECRET}")),
            "PythonException: ValueError (/app/shop.py:12)",
        ),
        (
            PythonException(TRACEBACK.format(line="relay.faults.RelayError: table: no t")),
            "PythonException: relay.faults.RelayError: table: no t",
        ),
        (
            PythonException(TRACEBACK.format(line="relay.outcomes.TransientFault: it lags")),
            "PythonException: relay.outcomes.TransientFault: it lags",
        ),
        (PySparkException(LOST.format(REASON)), f"PySparkException: {REASON}"),
        (
            PySparkException(LOST.format(f"java.io.IOException: {SECRET} ExecutorLostFailure ")),
            "PySparkException",
        ),
        (
            Py4JJavaError(Java("org.apache.spark.SparkException", LOST.format(REASON))),
            f"SparkException: {REASON}",
        ),
        (
            Py4JJavaError(
                Java(
                    "org.apache.spark.SparkException",
                    SECRET,
                    Java("java.io.IOException", SECRET),
                    condition="TASK_WRITE_FAILED",
                    state="58030",
                )
            ),
            "SparkException: TASK_WRITE_FAILED: sqlstate 58030: caused by IOException",
        ),
        (
            Py4JJavaError(
                Java(
                    "org.apache.spark.SparkException",
                    SECRET,
                    Java("java.lang.RuntimeException", SECRET),
                    condition="FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER",
                    state="KD001",
                    path=f"file:///lake/aggregate_id={SECRET}/relay_batch=b/part-0.parquet",
                )
            ),
            "SparkException: FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER: sqlstate KD001: part-0.parquet: caused by"
            " RuntimeException",
        ),
        (
            Py4JJavaError(
                Java(
                    "org.apache.spark.SparkException",
                    SECRET,
                    Java("java.io.IOException", f"No space left on device: {SECRET}"),
                )
            ),
            "SparkException: caused by IOException: No space left on device",
        ),
        (
            Py4JJavaError(
                Java(
                    "java.lang.RuntimeException",
                    SECRET,
                    Java("java.lang.ClassNotFoundException", "Class org.h.S3AFileSystem not found"),
                )
            ),
            "RuntimeException: caused by ClassNotFoundException: Class org.h.S3AFileSystem not found",
        ),
        (Py4JJavaError(object()), "Py4JJavaError"),
        (
            PythonException(
                TRACEBACK.format(line=f"OSError: [Errno 28] No space left on device: '/{SECRET}'")
            ),
            "PythonException: OSError (/app/shop.py:12): No space left on device",
        ),
        (
            OSError(
                f"Generic S3 error: Error performing GET http://bucket/{SECRET} - Server returned non-2xx status code:"
                f" 403 Forbidden: <Error><Code>InvalidAccessKeyId</Code><AWSAccessKeyId>{SECRET}</AWSAccessKeyId>"
            ),
            "OSError: HTTP 403, InvalidAccessKeyId",
        ),
        (
            OSError(
                "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token"
            ),
            "OSError: no credentials in `options`, and none from the machine's metadata service",
        ),
        (
            PermissionError(13, "Permission denied", f"/{SECRET}"),
            "PermissionError: Permission denied",
        ),
        (ValueError("Permission denied"), "ValueError"),
        (ValueError(SECRET), "ValueError"),
        (ConfigurationError("handlers.lake: wrong"), "handlers.lake: wrong"),
    ],
)
def test_a_message_that_may_quote_values_is_not_shown(error: Exception, expected: str) -> None:
    assert safe_description(error) == expected


def test_an_error_of_a_query_is_shown_unless_a_function_made_the_query() -> None:
    error = AnalysisException(f"[X] no column {SECRET};\n'Project", "UNRESOLVED_COLUMN", {})
    assert safe_description(error).startswith("AnalysisException: [")
    assert SECRET not in safe_description(error, quoted=False)


def test_of_a_function_its_kind_and_line_are_shown() -> None:
    with (
        pytest.raises(
            Exception, match=r"^handlers\.x\.transform: ValueError \(.*descriptions\.py:\d+\)$"
        ),
        of_function("handlers.x.transform"),
    ):
        raise ValueError(SECRET)
