"""The checkout of code runs with the real git and ssh against real servers, and ends with a clear message."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agents.launchers.checkout import KEY_FILE, TOKEN_FILE, Checkout, with_code
from agents.launchers.gang import LaunchSpec
from agents.node.spec.task_spec import SECRETS_PLACEHOLDER
from portal.domain.jobs.code import HOST_KEYS, parse_repository
from tests.git_servers import Repository, https_server, make_key, silent_server, ssh_server

TOKEN = "t0ken-of-the-project"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "served")


@pytest.fixture(params=["https", "ssh"])
def served(
    request, repository: Repository, tmp_path: Path
) -> Iterator[tuple[Checkout, dict[str, str], dict[str, str]]]:
    """A checkout, the secret files and the variables that it needs, for each kind of server."""
    if request.param == "https":
        with https_server(repository.bare.parents[1], TOKEN) as (url, certificate):
            yield (
                describe(f"{url}/lab/vit.git"),
                {TOKEN_FILE: TOKEN + "\n"},
                {"GIT_SSL_CAINFO": str(certificate)},
            )
    else:
        with ssh_server(tmp_path) as (url, key, host_key):
            yield describe(f"{url}{repository.bare}", host_key), {KEY_FILE: key}, {}


def describe(url: str, host_key: str = "", **values: object) -> Checkout:
    parts = parse_repository(url)
    assert parts is not None
    plain = Checkout(url, parts.login_url, parts.user, "", "", 60, 100, parts.known_hosts(host_key))
    return replace(plain, **values)


def check_out(
    tmp_path: Path, checkout: Checkout, secrets: dict[str, str], variables: dict[str, str], path: str = ""
) -> tuple[int, str, str]:
    """Run a command behind the checkout as a task does; return exit code, output and reported commit."""
    launch = with_code(LaunchSpec((sys.executable, "train.py")), checkout)
    folder, temporary, report = tmp_path / "secrets", tmp_path / "tmp", tmp_path / "code"
    folder.mkdir(mode=0o700, exist_ok=True)
    subprocess.run(["rm", "-rf", str(temporary)], check=True)
    temporary.mkdir()
    report.write_text("")
    for name, content in (
        secrets.items() | {name: file.content for name, file in launch.files.items()}.items()
    ):
        (folder / name).write_text(content.replace(SECRETS_PLACEHOLDER, str(folder)))
        (folder / name).chmod(0o600)
    output = tmp_path / "output"
    with output.open("w") as stream, contextlib.suppress(ProcessLookupError):
        ran = subprocess.Popen(
        [word.replace(SECRETS_PLACEHOLDER, str(folder)) for word in launch.command],
        env={
            "PATH": path or os.environ["PATH"], "FAIRWAY_SECRETS": str(folder), "TMPDIR": str(temporary),
            "FAIRWAY_CODE_FILE": str(report), "HOME": str(tmp_path), **variables,
        },
        stdout=stream, stderr=stream, start_new_session=True,
      )  # fmt: skip
        ran.wait(60)
        os.killpg(ran.pid, signal.SIGKILL)  # as the end of a container does
    return ran.returncode, output.read_text(), report.read_text().strip()


@pytest.mark.parametrize("named", ["", "main", "v1", "commit", "abbreviation"])
def test_a_branch_a_tag_and_a_commit_are_checked_out(
    served, repository: Repository, tmp_path: Path, named: str
) -> None:
    second = repository.commit("train.py", "print('second version')\n")
    repository.publish()
    checkout, secrets, variables = served
    ref = {"commit": repository.first, "abbreviation": repository.first[:9]}.get(named, named)
    code, output, reported = check_out(tmp_path, replace(checkout, ref=ref), secrets, variables)
    old = named in ("v1", "commit", "abbreviation")
    assert code == 0, output
    assert output.splitlines()[-1] == f"{'first' if old else 'second'} version"
    assert reported == (repository.first if old else second)
    assert TOKEN not in output and TOKEN not in (tmp_path / "tmp/code/.git/config").read_text()
    assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == ["code"]


def test_a_branch_that_does_not_exist_is_named(served, tmp_path: Path) -> None:
    checkout, secrets, variables = served
    code, output, reported = check_out(tmp_path, replace(checkout, ref="nowhere"), secrets, variables)
    assert (code, reported) == (1, "")
    assert "fatal: couldn't find remote ref nowhere" in output
    assert output.splitlines()[-1].startswith("fairway: the code was not checked out: git failed")


def test_a_commit_that_the_repository_lost_is_named(served, repository: Repository, tmp_path: Path) -> None:
    repository.forget_history()
    checkout, secrets, variables = served
    code, output, _ = check_out(tmp_path, replace(checkout, ref=repository.first), secrets, variables)
    assert code == 1 and f"fatal: reference is not a tree: {repository.first}" in output


def test_a_wrong_key_and_a_wrong_token_are_refused(served, tmp_path: Path) -> None:
    checkout, _, variables = served
    other, _ = make_key(tmp_path / "other_key")
    code, output, _ = check_out(tmp_path, checkout, {KEY_FILE: other, TOKEN_FILE: "wrong"}, variables)
    assert code == 1
    assert "Permission denied (publickey" in output or "fatal: Authentication failed for" in output


def test_a_host_with_another_key_gets_no_connection(repository: Repository, tmp_path: Path) -> None:
    with ssh_server(tmp_path) as (url, key, _):
        _, other = make_key(tmp_path / "other_host_key")
        checkout = describe(f"{url}{repository.bare}", other)
        code, output, _ = check_out(tmp_path, checkout, {KEY_FILE: key}, {})
    assert code == 1 and "Host key verification failed." in output


def test_a_token_is_not_sent_to_another_host(repository: Repository, tmp_path: Path) -> None:
    with https_server(repository.bare.parents[1], TOKEN) as (url, certificate):
        elsewhere = replace(describe(f"{url}/lab/vit.git"), login_url="https://git.example.org")
        variables = {"GIT_SSL_CAINFO": str(certificate)}
        code, output, _ = check_out(tmp_path, elsewhere, {TOKEN_FILE: TOKEN}, variables)
    assert code == 1 and "could not read Username" in output


def test_a_certificate_that_no_authority_signed_is_refused(repository: Repository, tmp_path: Path) -> None:
    with https_server(repository.bare.parents[1]) as (url, _):
        code, output, _ = check_out(tmp_path, describe(f"{url}/lab/vit.git"), {}, {})
    assert code == 1 and "certificate" in output


def test_a_server_that_hangs_ends_the_start(tmp_path: Path) -> None:
    with silent_server() as url:
        code, output, reported = check_out(tmp_path, describe(f"{url}/lab/vit.git", limit_s=2), {}, {})
    assert (code, reported) == (1, "")
    assert output.splitlines()[-1] == (
        "fairway: the code was not checked out: it took longer than the limit of 2 s."
    )


def test_a_repository_above_the_limit_ends_the_start(served, repository: Repository, tmp_path: Path) -> None:
    repository.commit("data.bin", os.urandom(40 * 2**20))
    repository.publish()
    checkout, secrets, variables = served
    slow = tmp_path / "bin"  # so that git is still at work when the size is measured
    slow.mkdir()
    (slow / "git").write_text(
        '#!/bin/sh\n/usr/bin/git "$@"\ncode=$?\ncase "$*" in *fetch*) sleep 3;; esac\nexit $code\n'
    )
    (slow / "git").chmod(0o755)
    path = f"{slow}:{os.environ['PATH']}"
    code, output, _ = check_out(tmp_path, replace(checkout, limit_mib=10), secrets, variables, path)
    assert code == 1
    assert output.splitlines()[-1] == (
        "fairway: the code was not checked out: it is larger than the limit of 10 MiB."
    )


def test_an_image_without_git_is_named(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "cat", "id"):
        (tools / name).symlink_to(f"/bin/{name}")
    checkout = describe("https://git.example.org/lab/vit.git")
    code, output, _ = check_out(tmp_path, checkout, {}, {}, str(tools))
    assert (code, output.strip()) == (
        1, "fairway: the code was not checked out: the image has no git. Install git in the image.",
    )  # fmt: skip


def test_a_stop_ends_a_checkout_immediately(tmp_path: Path) -> None:
    with silent_server() as url:
        checkout = describe(f"{url}/lab/vit.git")
        (tmp_path / "secrets").mkdir()
        launch = with_code(LaunchSpec(("true",)), checkout)
        for name, file in launch.files.items():
            (tmp_path / "secrets" / name).write_text(file.content)
        process = subprocess.Popen(
            ["/bin/sh", str(tmp_path / "secrets/checkout.sh"), "true"],
            env={"PATH": os.environ["PATH"], "FAIRWAY_SECRETS": str(tmp_path / "secrets"), "TMPDIR": str(tmp_path)},
            start_new_session=True,
        )  # fmt: skip
        while not (tmp_path / "code/.git/config").exists():
            assert process.poll() is None
        process.terminate()
        assert process.wait(10) == 143
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_hosts_with_published_keys_need_none() -> None:
    known = parse_repository("git@github.com:lab/vit.git")
    assert known is not None and known.known_hosts("") == f"github.com {HOST_KEYS['github.com']}\n"
    other = parse_repository("ssh://git@git.example.org:2222/lab/vit.git")
    assert other is not None and other.known_hosts("") == ""
    assert other.known_hosts("ssh-ed25519 AAAA") == "[git.example.org]:2222 ssh-ed25519 AAAA\n"
