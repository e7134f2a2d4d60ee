"""Answers with a body that is known whole, and errors in OpenAI's shape. Knows HTTP's numbers and no HTTP library."""

from __future__ import annotations

import json
from dataclasses import dataclass

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


@dataclass(frozen=True)
class Answer:
    """A status with its whole body."""

    status: int
    body: bytes
    content_type: str = "application/json"


class FailedError(Exception):
    """A request that ends with an error; carries what the client is told and how it is counted.

    Never leaves the proxy: the client gets its answer, or its event where an answer has begun.
    """

    def __init__(self, answer: Answer, outcome: str) -> None:
        """Keeps both."""
        super().__init__(outcome)
        self.answer = answer
        self.outcome = outcome


def error(status: int, message: str) -> Answer:
    """An error as OpenAI's clients expect it."""
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    told = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return Answer(status, json.dumps(told).encode())


def failed(status: int, message: str, outcome: str) -> FailedError:
    """The same, to be raised."""
    return FailedError(error(status, message), outcome)
