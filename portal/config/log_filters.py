"""Log filters: an error that any client can cause by a request is one line, without a traceback."""

from __future__ import annotations

import logging
from http import HTTPStatus


class CompactRequestErrors(logging.Filter):
    """Remove tracebacks from Django's messages about rejected requests, and drop duplicate messages.

    ``django.security`` already logs unknown hosts, and ``portal.policy_middleware`` forbidden pages;
    ``django.request`` would log both again.
    """

    SUPPRESSED_STATUSES = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN})

    def filter(self, record: logging.LogRecord) -> bool:
        status = getattr(record, "status_code", None)
        if status is None or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return True
        record.exc_info = None
        record.exc_text = None
        return record.name != "django.request" or status not in self.SUPPRESSED_STATUSES
