"""Many sign-ins at once: bounded memory, quick refusals, and a health check that never waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from django.conf import settings as django_settings
from django.contrib.auth.hashers import Argon2PasswordHasher, make_password
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

import portal.asgi
from portal.models import Invitation, User
from portal.services.accounts import users
from portal.services.accounts.password_hasher import MAX_CONCURRENT_HASHES, BoundedArgon2, hashing_slot
from portal.valkey import rate_limits
from tests import factories
from tests.process_environment import service_environment
from tests.standalone.waiting import eventually

ROOT = Path(__file__).parent.parent.parent
AT_ONCE = 45
SLOW = "so check before you submit it again"
"""In the answer to a request that took longer than its time limit."""
HASHER = "portal.services.accounts.password_hasher.BoundedArgon2"


@pytest.fixture(autouse=True)
def real_hashes(settings, monkeypatch) -> None:
    settings.PASSWORD_HASHERS = [HASHER]
    monkeypatch.setattr(rate_limits, "PREFIX", f"test:rate:{os.urandom(6).hex()}")


@pytest.fixture
def all_slots_in_use() -> Iterator[None]:
    """Other threads hash as many passwords as may be hashed at once."""
    held, leave = threading.Barrier(MAX_CONCURRENT_HASHES + 1), threading.Event()

    def hold() -> None:
        with hashing_slot():
            held.wait(10)
            leave.wait(30)

    with ThreadPoolExecutor(MAX_CONCURRENT_HASHES) as threads:
        for _ in range(MAX_CONCURRENT_HASHES):
            threads.submit(hold)
        held.wait(10)
        yield
        leave.set()


@pytest.fixture
def web(transactional_db: None) -> Iterator[tuple[str, int]]:
    """The web process, as `up` starts it: its socket and its process number."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = f"{folder}/web.sock"
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "portal.asgi:application", "--uds", path, "--lifespan", "off"],
            cwd=ROOT, env=service_environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
        assert eventually(lambda: Path(path).exists(), 60)
        yield path, process.pid


def browser(path: str) -> httpx.Client:
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=path), base_url="http://localhost:8000", timeout=60, trust_env=False
    )


def sessions_of(names: list[str]) -> list[str]:
    """Return the cookie of a new session of each user."""
    found = []
    for user in User.objects.filter(username__in=names):
        client = Client()
        client.force_login(user)
        found.append(client.cookies[django_settings.SESSION_COOKIE_NAME].value)
    return found


def statuses(answers: list[httpx.Response]) -> Counter[int]:
    """Return the number of answers by status, without those that a busy machine did not finish in time."""
    return Counter(answer.status_code for answer in answers if SLOW not in answer.text)


def peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


def test_parallel_sign_ins_are_bounded_and_the_health_check_still_answers(web):
    path, pid = web
    password = make_password(factories.PASSWORD)
    for number in range(AT_ONCE):
        User.objects.filter(pk=factories.user(f"ada-{number}").pk).update(password=password)
    with browser(path) as first:
        token = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', first.get("/sign-in/").text)[0]
        crumb = "; ".join(f"{name}={value}" for name, value in first.cookies.items())
    before_mib = peak_mib(pid)
    finished = threading.Event()

    def sign_in(number: int) -> httpx.Response:
        fields = {
            "username": f"ada-{number}",
            "password": factories.PASSWORD if number % 3 else "a wrong guess",
            "csrfmiddlewaretoken": token,
        }
        with browser(path) as own:
            return own.post("/sign-in/", data=fields, headers={"Cookie": crumb})

    def look() -> list[int]:
        seen = []
        with browser(path) as own:
            while not finished.wait(0.02):
                seen.append(own.get("/healthz").status_code)
        return seen

    with ThreadPoolExecutor(AT_ONCE + 1) as threads:
        looking = threads.submit(look)
        answers = list(threads.map(sign_in, range(AT_ONCE)))
        finished.set()
    counts = statuses(answers)
    assert set(counts) <= {302, 403, 429}, counts
    assert counts[302], counts
    for answer in answers:
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "1"
            assert "Too many passwords are being checked" in answer.text
    assert set(looking.result()) == {200}

    def change(session: str) -> httpx.Response:
        fields = {
            "old": factories.PASSWORD,
            "password": "another long password",
            "csrfmiddlewaretoken": token,
        }
        with browser(path) as own:
            cookie = f"{crumb}; {django_settings.SESSION_COOKIE_NAME}={session}"
            return own.post("/account/password/", data=fields, headers={"Cookie": cookie})

    with ThreadPoolExecutor(AT_ONCE) as threads:
        changed = list(threads.map(change, sessions_of([f"ada-{number}" for number in range(AT_ONCE)])))
    counts = statuses(changed)
    assert set(counts) <= {302, 429} and counts[302], (
        counts,
        [a.text[-900:] for a in changed if a.status_code == 503],
    )
    assert {answer.headers["retry-after"] for answer in changed if answer.status_code == 429} <= {"1"}
    assert peak_mib(pid) - before_mib < 150, "two hashes of 19 MiB, and the threads of the requests"


@pytest.mark.django_db
@pytest.mark.parametrize("who", ["known", "unknown", "inactive", "without a password"])
def test_with_all_slots_in_use_every_name_is_refused_and_no_attempt_counted(all_slots_in_use, who):
    user = factories.user("ada-love")
    user.password = make_password(None) if who == "without a password" else user.password
    user.is_active = who != "inactive"
    user.save()
    fields = {"username": "nobody-here" if who == "unknown" else "ada-love", "password": "a guess"}
    for _ in range(rate_limits.SIGN_IN.limit + 1):
        answer = Client().post("/sign-in/", fields)
        assert (answer.status_code, answer["Retry-After"]) == (429, "1")
        assert "Too many passwords are being checked" in answer.content.decode()


@pytest.mark.django_db
def test_with_all_slots_in_use_other_hashing_is_refused_and_changes_nothing(all_slots_in_use, settings):
    settings.PASSWORD_HASHERS = ["tests.fast_password_hasher.FastArgon2Hasher", HASHER]
    admin = factories.user("boss", admin=True, password=factories.PASSWORD)
    _, code = users.do_create_invitation(admin, full_name="Ada")
    settings.PASSWORD_HASHERS = [HASHER]
    fields = {"code": code, "username": "ada-love", "password": factories.PASSWORD, "timezone": "UTC"}
    joined = Client().post("/invitation/", fields)
    assert (joined.status_code, joined["Retry-After"]) == (429, "1")
    again = "Reload this page to send the form again."  # a link would lose what was typed, or answer 405
    assert again in joined.content.decode() and "<a " not in joined.content.decode()
    assert Invitation.objects.get().used_at is None
    assert not User.objects.filter(username="ada-love").exists()
    client = Client()
    client.force_login(admin)
    for _ in range(rate_limits.SIGN_IN.limit + 1):  # the password was not checked, so no attempt counts
        changed = client.post(
            reverse("account-password"), {"old": factories.PASSWORD, "password": "another long one"}
        )
        assert (changed.status_code, changed["Retry-After"]) == (429, "1")
        assert "Too many passwords are being checked" in changed.content.decode()
        assert again in changed.content.decode() and "<a " not in changed.content.decode()
    with CaptureQueriesContext(connection) as seen:
        client.post(reverse("account-password"), {"old": "x", "password": "another long one"})
    texts = [query["sql"] for query in seen.captured_queries]
    assert len(texts) <= 3, "a refusal only reads session and user: connections are scarce then"
    assert User.objects.get(pk=admin.pk).password == admin.password


@pytest.mark.django_db
def test_hash_of_former_parameters_opens_and_is_replaced():
    user = factories.user("ada-love")
    former = Argon2PasswordHasher().encode(factories.PASSWORD, "a-salt-of-its-own")
    User.objects.filter(pk=user.pk).update(password=former)
    answer = Client().post("/sign-in/", {"username": "ada-love", "password": factories.PASSWORD})
    assert answer.status_code == 302
    user.refresh_from_db()
    made = BoundedArgon2().decode(user.password)
    assert (made["memory_cost"], made["time_cost"], made["parallelism"]) == (19_456, 2, 1)
    assert (
        Client().post("/sign-in/", {"username": "ada-love", "password": factories.PASSWORD}).status_code
        == 302
    )


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_the_health_check_answers_while_django_is_blocked(monkeypatch, method):
    async def never(*_: object) -> None:
        raise AssertionError("asked Django")

    monkeypatch.setattr(portal.asgi, "_http_app", never)
    said: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        said.append(message)

    crumb = [(b"cookie", f"{django_settings.SESSION_COOKIE_NAME}={'a' * 32}".encode())]
    scope = {"type": "http", "method": method, "path": "/healthz", "headers": crumb}
    await portal.asgi.application(scope, None, send)
    assert said[0]["status"] == 200
    assert said[1]["body"] == (b"" if method == "HEAD" else b'{"ok": true}')
