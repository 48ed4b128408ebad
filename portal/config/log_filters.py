"""Filters of the log: what anybody can cause by a request is one line, without a traceback."""

from __future__ import annotations

import logging
from http import HTTPStatus


class CompactRequestErrors(logging.Filter):
    """Removes the traceback from Django's lines about refused requests, and the lines that repeat another.

    An unknown host is logged by ``django.security``, a forbidden page by ``portal.policy_middleware``; ``django.request`` would
    log both a second time.
    """

    SUPPRESSED_STATUSES = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN})

    def filter(self, record: logging.LogRecord) -> bool:
        status = getattr(record, "status_code", None)
        if status is None or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return True
        record.exc_info = None
        record.exc_text = None
        return record.name != "django.request" or status not in self.SUPPRESSED_STATUSES
