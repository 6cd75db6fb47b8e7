"""Log lines as text or JSON, with the id of the current request."""

from __future__ import annotations

import json
import logging
import logging.config
import time
from contextvars import ContextVar

current_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

# Optional attributes of a record: see ``requests``.
_FIELDS = ("request_id", "client", "method", "path", "status", "seconds")


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: getattr(record, name) for name in _FIELDS if hasattr(record, name)},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class RequestIds(logging.Filter):
    """Sets ``request_id`` of each record, and ``request``, its form in a text line."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = getattr(record, "request_id", None) or current_request_id.get()
        if request_id is not None:
            record.request_id = request_id
        record.request = "" if request_id is None else f"[{request_id}] "
        return True


def set_up_logs(as_json: bool) -> None:
    """Log to stderr: messages of pagespec, libraries and, as JSON, the ``warnings`` module."""
    formatter = (
        {"()": JsonFormatter} if as_json else {"format": "%(asctime)s %(request)s%(message)s"}
    )
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": formatter},
            "filters": {"ids": {"()": RequestIds}},
            "handlers": {
                "stderr": {
                    "class": "logging.StreamHandler",
                    "formatter": "line",
                    "filters": ["ids"],
                }
            },
            "root": {"level": "WARNING", "handlers": ["stderr"]},
            "loggers": {"pagespec": {"level": "INFO"}},
        }
    )
    logging.captureWarnings(as_json)
