"""Tables as CSV downloads."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence

from django.http import StreamingHttpResponse

from portal.domain.experiments.tracking import metric_name


class _Line:
    """A file for ``csv.writer`` that returns each line instead of keeping it."""

    def write(self, line: str) -> str:
        return line


def csv_response(
    name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> StreamingHttpResponse:
    """Stream a table as the file ``name``."""
    writer = csv.writer(_Line())

    def lines() -> Iterator[str]:
        yield writer.writerow(map(_cell, columns))
        for row in rows:
            yield writer.writerow(map(_cell, row))

    return StreamingHttpResponse(
        lines(),
        content_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


def _cell(value: object) -> object:
    """Return the value; a text that a spreadsheet would read as a formula gets an apostrophe."""
    if isinstance(value, float):
        return metric_name(value)
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
