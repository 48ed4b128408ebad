"""The files of pages: theirs alone, sent piece by piece, also by the server that production uses."""

from __future__ import annotations

import asyncio
import gc

import pytest
from django.test import AsyncClient, Client
from django.test.utils import override_settings

from portal.config import settings as own
from portal.web.middleware import static_files

NAME = "test-of-pieces.js"
WHOLE = b"0123456789" * 100


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / NAME).write_bytes(WHOLE)
    monkeypatch.setattr(static_files, "CHUNK_BYTES", 300)
    with override_settings(STATIC_ROOT=tmp_path, WHITENOISE_USE_FINDERS=False, WHITENOISE_AUTOREFRESH=False):
        yield f"{own.STATIC_URL}{NAME}"


async def _pieces(address: str, **headers: str):
    answer = await AsyncClient().get(address, headers=headers)
    return answer, [piece async for piece in answer.streaming_content]


@pytest.mark.filterwarnings("error")
def test_a_file_is_sent_piece_by_piece(file):
    answer, pieces = asyncio.run(_pieces(file))
    assert [len(piece) for piece in pieces] == [300, 300, 300, 100]
    assert answer.headers["Content-Length"] == "1000" and answer.headers["Content-Type"].startswith(
        "text/javascript"
    )
    part, pieces = asyncio.run(_pieces(file, range="bytes=10-14"))
    assert (part.status_code, b"".join(pieces)) == (206, b"01234")
    same = Client().get(file, headers={"if-none-match": answer.headers["ETag"]})
    assert same.status_code == 304


@pytest.mark.filterwarnings("error")
@pytest.mark.django_db  # the end of a request looks at the connection
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_browsers_keep_a_file_with_a_version(file, client):
    def age(address: str) -> str:
        answer = client().get(address)
        answer = asyncio.run(answer) if client is AsyncClient else answer
        answer.close()
        return answer.headers["Cache-Control"]

    assert age(file) == "max-age=60, public"
    assert age(f"{file}?v=1") == "max-age=315360000, public, immutable"
    gc.collect()  # a file that is not closed is an error here


def test_compressed_copies_are_sent_to_browsers_that_accept_them(file, tmp_path):
    (tmp_path / f"{NAME}.br").write_bytes(b"brotli")
    plain, packed = (Client().get(file, headers={"accept-encoding": each}) for each in ("", "gzip, br"))
    assert (plain.getvalue(), packed.getvalue()) == (WHOLE, b"brotli")
    assert packed.headers["Content-Encoding"] == "br" and packed.headers["Vary"] == "Accept-Encoding"


def test_other_origins_may_not_read_it(file):
    answer = Client().get(file, headers={"origin": "http://evil.example"})
    assert answer.getvalue() == WHOLE
    assert not [name for name in answer.headers if name.lower().startswith("access-control-")]
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"


@pytest.mark.filterwarnings("error")
def test_a_missing_folder_is_not_an_error(tmp_path):
    with override_settings(
        STATIC_ROOT=tmp_path / "none", WHITENOISE_USE_FINDERS=False, WHITENOISE_AUTOREFRESH=False
    ):
        assert static_files.StaticFilesMiddleware(lambda request: None).files == {}
