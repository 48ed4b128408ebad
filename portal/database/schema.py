"""Creates tables with fewer indexes than Django's PostgreSQL backend."""

from __future__ import annotations

from typing import Any

from django.db.backends.postgresql.schema import DatabaseSchemaEditor


class SchemaEditor(DatabaseSchemaEditor):
    """Leaves out the second index of each unique text, which is for patterns such as LIKE 'abc%'.

    No query here has such a pattern on a unique column, and each of the indexes is written with every row.
    """

    def _create_like_index_sql(self, *_arguments: Any) -> None:
        return None
