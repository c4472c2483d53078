"""Log lines of both services: as text for people, or one JSON object each for machines."""

import json
import logging
from typing import Literal

LogFormat = Literal["text", "json"]


def formatter(log_format: LogFormat) -> logging.Formatter:
    """Formatter that turns records into lines of that format."""
    match log_format:
        case "text":
            return logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")
        case "json":
            return _JsonFormatter()


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
