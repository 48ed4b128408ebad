"""Cursor pagination: the encrypted position of the last row read, so that inserts do not shift pages.

The cursor is encrypted, not only signed: its row number would reveal how many invisible rows exist.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

from django.db.models import Model, Q, QuerySet
from django.utils.dateparse import parse_datetime
from rest_framework.request import Request

from portal.errors import InvalidRequest
from portal.services.encryption import DecryptionError, EncryptionContext, decrypt, encrypt

DEFAULT_LIMIT = 50
MAX_LIMIT = 200

_Row = TypeVar("_Row", bound=Model)


@dataclass(frozen=True)
class Order:
    """An allowed order: a column that is never null, then the row number, both in one direction.

    ``presort`` sorts row numbers before the joins: for columns without an index in large tables.
    """

    column: str
    descending: bool = False
    presort: bool = False

    @property
    def columns(self) -> list[str]:
        """Return the ORDER BY columns."""
        names = [self.column] if self.column == "id" else [self.column, "id"]
        return [f"-{name}" if self.descending else name for name in names]

    def following(self, value: Any, row: int) -> Q:
        """Return the condition for rows after (value, row) in this order."""
        beyond = "lt" if self.descending else "gt"
        if self.column == "id":
            return Q(**{f"id__{beyond}": row})
        return Q(**{f"{self.column}__{beyond}": value}) | Q(**{self.column: value, f"id__{beyond}": row})


NEWEST = Order("id", descending=True)
OLDEST = Order("id")


def paginate(
    request: Request,
    rows: QuerySet[_Row],
    order: Order,
    query: Mapping[str, Any],
    serialize_all: Callable[[list[_Row]], list[Any]],
) -> dict[str, Any]:
    """Return ``{"items": [...], "next": URI reference or null}`` from one query."""
    limit = query.get("limit") or DEFAULT_LIMIT
    mark = _decode_cursor(query.get("cursor", ""), request)
    if mark is not None:
        rows = rows.filter(order.following(*mark))
    rows = rows.order_by(*order.columns)
    if order.presort:
        rows = rows.filter(pk__in=rows.select_related(None).values("pk")[: limit + 1])
    found = list(rows[: limit + 1])
    following = None
    if len(found) > limit:
        found = found[:limit]
        following = _next_link(request, _encode_cursor(found[-1], order, request))
    return {"items": serialize_all(found), "next": following}


def _encode_cursor(last: Model, order: Order, request: Request) -> str:
    value: Any = last
    for name in order.column.split("__"):
        value = getattr(value, name)
    if isinstance(value, dt.datetime):
        value = {"at": value.isoformat()}
    return encrypt(json.dumps([value, last.pk]), _list_signature(request))


def _decode_cursor(cursor: str, request: Request) -> tuple[Any, int] | None:
    if not cursor:
        return None
    try:
        value, row = json.loads(decrypt(cursor, _list_signature(request)))
    except DecryptionError as error:
        message = "The cursor is invalid or belongs to another list."
        raise InvalidRequest(fields={"cursor": message}, code="invalid_cursor") from error
    if isinstance(value, dict):
        value = parse_datetime(value["at"])
    return value, row


def _list_signature(request: Request) -> EncryptionContext:
    """Return the encryption context of the route and its filters: a cursor is valid for one list only."""
    kept = sorted(
        (name, given) for name, given in request.query_params.lists() if name not in _PAGING_PARAMETERS
    )
    text = json.dumps([request.path, kept])
    return EncryptionContext("cursor", text, "")


_PAGING_PARAMETERS = {"cursor", "limit"}


def _next_link(request: Request, cursor: str) -> str:
    pairs = [
        (name, each) for name, given in request.query_params.lists() for each in given if name != "cursor"
    ]
    return f"{request.path}?{urlencode([*pairs, ('cursor', cursor)])}"
