"""Pagination and search of project trees; a row without its parent names its ancestors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from django.core.paginator import Page, Paginator

from portal.domain.projects.project_tree import path_to_root
from portal.models import Project
from portal.selectors.projects.projects import ProjectRow

ROWS = 50
MIN_ROWS_FOR_SEARCH = 12
"""Pages with more projects than this offer a search."""
MAX_SEARCH_LENGTH = 100

Row = TypeVar("Row", bound=ProjectRow)


def paginate_tree(rows: Sequence[Row], query: Mapping[str, str]) -> tuple[Page[Row], str]:
    """Return one page of rows in tree order, and the search text (``q`` and ``page`` of the query)."""
    search = query.get("q", "").strip()[:MAX_SEARCH_LENGTH]
    words = search.lower()
    found = [row for row in rows if words in row.project.name or words in row.project.title.lower()]
    page = Paginator(found, ROWS).get_page(query.get("page"))
    name_hidden_parents(rows, list(page))
    return page, search


def name_hidden_parents(rows: Sequence[Row], shown: Sequence[Row]) -> None:
    """Set ``ancestor_names`` of each shown row whose parent is not shown."""
    projects: dict[int | None, Project] = {row.project.pk: row.project for row in rows}
    here = {row.project.pk for row in shown}
    for row in shown:
        line = path_to_root(row.project, lambda below: projects.get(below.parent_id))
        over = [] if row.project.parent_id in here else line[1:]
        row.ancestor_names = " / ".join(project.name for project in reversed(over))
