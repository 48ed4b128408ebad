"""Ranges of files whose node is older, or that change while they are opened."""

from __future__ import annotations

from typing import Any, cast

import pytest
from django.test import RequestFactory

from portal.downloads import file_response
from portal.services.jobs.files import Download, FileChunks


class Chunks:
    """The content of a file as a node sends it, in small pieces; ``closed`` once nobody reads it."""

    def __init__(self, content: bytes) -> None:
        self._pieces = iter([content[at : at + 3] for at in range(0, len(content), 3)])
        self.closed = False

    def __iter__(self) -> Chunks:
        return self

    def __next__(self) -> bytes:
        return next(self._pieces)

    def close(self) -> None:
        self.closed = True


class NodeFile:
    """A file on a node: its content at each opening, the last one from then on."""

    def __init__(self, *contents: bytes, is_older: bool = False) -> None:
        self.contents, self.is_older = list(contents), is_older
        self.opened: list[Chunks] = []

    def open(self, offset: int) -> Download:
        content = self.contents.pop(0) if len(self.contents) > 1 else self.contents[0]
        chunks = Chunks(content if self.is_older else content[offset:])
        self.opened.append(chunks)
        known = None if self.is_older else offset
        return Download("f", len(content), cast("FileChunks", chunks), float(len(content)), known)

    def get(self, asked: str, **headers: str) -> Any:
        answer = file_response(RequestFactory().get("/", headers={"Range": asked, **headers}), self.open)
        found = answer.status_code, answer.headers.get("Content-Range"), answer.getvalue()  # type: ignore[attr-defined]
        answer.close()
        assert all(chunks.closed for chunks in self.opened), "a stream on the node stays open"
        return found


CONTENT = b"0123456789"
ASKED = ("bytes=2-4", "bytes=2-", "bytes=-3", "bytes=99-", "bytes=4-2", "bytes=0-1,3-4", "bytes=-")


@pytest.mark.parametrize("asked", ASKED)
def test_an_older_node_sends_the_whole_file(asked: str) -> None:
    assert NodeFile(CONTENT, is_older=True).get(asked) == (200, None, CONTENT)


@pytest.mark.parametrize(
    ("asked", "part"), [("bytes=2-4", b"234"), ("bytes=2-", b"23456789"), ("bytes=-3", b"789")]
)
def test_a_range_that_is_there_is_sent_alone(asked: str, part: bytes) -> None:
    status, content_range, content = NodeFile(CONTENT).get(asked)
    assert (status, content) == (206, part) and content_range.endswith("/10")


@pytest.mark.parametrize("later", [b"", b"0", CONTENT * 2])
def test_a_file_that_changes_while_the_end_is_looked_up_is_sent_whole(later: bytes) -> None:
    assert NodeFile(CONTENT, later).get("bytes=-3") == (200, None, later)


@pytest.mark.parametrize("asked", ["bytes=0-", "bytes=-3", "bytes=5-6"])
def test_no_range_of_an_empty_file_exists(asked: str) -> None:
    assert NodeFile(b"").get(asked)[:2] == (416, "bytes */0")


@pytest.mark.parametrize("validator", ['"other"', 'W/"10-0x1p+3"', "Sat, 28 Nov 2026 23:16:07 GMT", ""])
def test_another_validator_gets_the_whole_file(validator: str) -> None:
    assert NodeFile(CONTENT).get("bytes=2-4", **{"If-Range": validator}) == (200, None, CONTENT)
