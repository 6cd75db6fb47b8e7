"""Lines of the log: for people, or one JSON object each."""

from __future__ import annotations

import json
import logging
import logging.config
import time

# What a record may carry besides: see ``requests``.
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


def set_up_logs(as_json: bool) -> None:
    """Log to stderr, all that is said in this process: also warnings, and what libraries say."""
    formatter = {"()": JsonFormatter} if as_json else {"format": "%(asctime)s %(message)s"}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": formatter},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "root": {"level": "WARNING", "handlers": ["stderr"]},
            "loggers": {"pagespec": {"level": "INFO"}},
        }
    )
    logging.captureWarnings(as_json)
