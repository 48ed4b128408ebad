"""ResponseSerializer: what each kind of declared field writes, and what the document says of it."""

from __future__ import annotations

import datetime as dt
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from django.http import JsonResponse
from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.schema import openapi_document
from portal.api.serializers.references import Reference
from tests.described_answers import check_described

AT = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.timezone(dt.timedelta(hours=2)))


class Part(ResponseSerializer):
    number = serializers.IntegerField(source="pk")
    seen = serializers.BooleanField()

    @staticmethod
    def get_seen(row: Any, context: Any) -> bool:
        return row.pk in context


class Whole(Reference):
    at = serializers.DateTimeField(allow_null=True)
    parent_name = serializers.CharField(source="parent.name", allow_null=True)
    parent = Reference(allow_null=True)  # type: ignore[assignment]
    parts = Part(many=True)
    words = serializers.ListField(child=serializers.CharField())
    times = serializers.ListField(child=serializers.DateTimeField())
    own = Part(source="*")
    count = serializers.IntegerField()
    newest = Part(allow_null=True)
    stored = Part(allow_null=True)

    @staticmethod
    def get_count(row: Any, context: Any) -> int:
        return len(row.parts)

    @staticmethod
    def get_newest(row: Any, context: Any) -> Any:
        return row.parts[-1] if row.parts else None


def row(**values: Any) -> SimpleNamespace:
    parts = [SimpleNamespace(pk=1), SimpleNamespace(pk=2)]
    defaults = {"pk": 7, "public_id": "w1", "name": "whole", "at": AT, "parent": None, "parts": parts}
    return SimpleNamespace(**defaults | {"words": ("a", "b"), "times": [AT], "stored": None} | values)


def test_represents_all_fields_in_their_order() -> None:
    parent = SimpleNamespace(public_id="p1", name="parent")
    answer = Whole.represent(row(parent=parent, stored={"number": 4}), {2, 7})
    assert list(answer.items()) == [
        ("id", "w1"),
        ("name", "whole"),
        ("at", "2026-01-02T01:04:05Z"),
        ("parent_name", "parent"),
        ("parent", {"id": "p1", "name": "parent"}),
        ("parts", [{"number": 1, "seen": False}, {"number": 2, "seen": True}]),
        ("words", ["a", "b"]),
        ("times", ["2026-01-02T01:04:05Z"]),
        ("own", {"number": 7, "seen": True}),
        ("count", 2),
        ("newest", {"number": 2, "seen": True}),
        ("stored", {"number": 4}),
    ]


def test_none_is_serialized_as_null() -> None:
    answer = Whole.represent(row(at=None, parts=[], words=None), ())
    nulls = {name for name, value in answer.items() if value is None}
    assert nulls == {"at", "parent_name", "parent", "newest", "stored", "words"}
    assert answer["parts"] == []


def test_a_missing_attribute_is_an_error() -> None:
    with pytest.raises(AttributeError, match="name"):
        Reference.represent(SimpleNamespace(public_id="x"))


def test_the_document_requires_every_property_and_allows_no_others() -> None:
    described = openapi_document()["components"]["schemas"]["Reference"]
    assert described["required"] == ["id", "name"]
    assert described["additionalProperties"] is False


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"items": []}, "secrets_list, 200: .*'next' is a required property"),
        ({"items": [], "next": None, "more": 1}, r"secrets_list, 200: .*\('more' was unexpected\)"),
        ({"items": [], "next": 3}, r"secrets_list, 200: \$\.next: 3 is not of type"),
        ({"items": [], "next": None}, None),
    ],
)
def test_an_answer_that_is_not_as_described_fails_its_test(body: Any, problem: str | None) -> None:
    answer: Any = JsonResponse(body)
    match = SimpleNamespace(route="api/v1/secrets/")
    answer.wsgi_request = SimpleNamespace(resolver_match=match)
    with pytest.raises(AssertionError, match=problem) if problem else nullcontext():
        check_described("get", answer)


class Seen(ResponseSerializer):
    reader = serializers.CharField(source="context.name", allow_null=True)
    parts = Part(many=True, source="context.parts")
    word = serializers.CharField()


def test_a_source_may_be_in_the_context() -> None:
    context = SimpleNamespace(name="ada", parts=[], word="not read")
    assert Seen.represent(SimpleNamespace(word="a"), context) == {"reader": "ada", "parts": [], "word": "a"}
    nobody = SimpleNamespace(name=None, parts=None)
    assert Seen.compose(nobody, word="b") == {"reader": None, "parts": None, "word": "b"}
