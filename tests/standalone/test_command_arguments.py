"""Wrong arguments of the commands that work on a data folder: each ends in one plain sentence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from django.core.management import load_command_class

from portal.config.data_paths import apply_data_dir_option, redis_url, sockets_dir
from portal.standalone.address import check_bind_options, portal_url, ssh_forward_command
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from portal.standalone.process_table import ListenOptions
from tests.process_environment import SERVER_VARIABLES, without_servers

ROOT = Path(__file__).parent.parent.parent
NO_FOLDER = "cannot be used: "


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that arguments name."""
    folder = tmp_path_factory.mktemp("arguments")
    (folder / "a file").write_text("text")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "used").mkdir()
    (folder / "used" / "thesis.tex").touch()
    (folder / "foreign").mkdir()
    if os.geteuid() == 0:
        os.chown(folder / "foreign", 12345, -1)
    else:
        (folder / "foreign").rmdir()
        (folder / "foreign").symlink_to("/var/empty" if Path("/var/empty").exists() else "/mnt")
    for name in ("one", "other"):
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
        ]
        command += ["-subj", "/CN=a", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)
    locked = ["openssl", "ec", "-in", "one.key", "-aes256", "-passout", "pass:x", "-out", "locked.key"]
    subprocess.run(locked, check=True, capture_output=True, cwd=folder)
    return folder


@pytest.fixture
def place(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory; the process gets its umask and data folder back."""
    for name in (*SERVER_VARIABLES, "FAIRWAY_PORTAL_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FAIRWAY_DATA_DIR", str(files / "empty"))
    monkeypatch.chdir(files)
    umask = os.umask(0o022)
    yield files
    os.umask(umask)


@pytest.fixture
def refusal(place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command line and return the sentence that it ends with; only the usage may precede it."""
    port = free_port()

    def run(name: str, *arguments: str) -> str:
        argv = ["manage.py", name, *(str(port) if each == "PORT" else each for each in arguments)]
        apply_data_dir_option(argv)
        with pytest.raises(SystemExit) as ended:
            load_command_class("portal", name).run_from_argv(argv)
        assert ended.value.code
        *usage, sentence = capsys.readouterr().err.strip().splitlines()
        assert not usage or (
            usage[0].startswith("usage: ") and all(line.startswith(" ") for line in usage[1:])
        )
        return sentence

    return run


TLS = ("--bind", "0.0.0.0", "--tls-cert")
WRONG = [
    *[("up", ("--port", port), "is not a port: use a number from 1 to 65535") for port in
      ("0", "-1", "65536", "99999", "abc", "", " 80", "8e3", "0x50", "1_000", "٣", "9" * 5000)],
    *[("up", ("--bind", bind), "is not an address of this machine") for bind in
      ("", "[::1", "::1]", ":::", "[localhost]", "localhost:8000", "127.0.0.1:80", "[::1]:80", "300.1.1.1", "127.1",
       "1", "a b", "ü", "a..b", "http://localhost", "0.0.0.0/0", "x" * 300)],
    ("up", ("--bind", "127.0.0.2"), "of the loopback addresses use 127.0.0.1 or ::1"),
    ("up", ("--bind", "::ffff:127.0.0.3"), "of the loopback addresses use 127.0.0.1 or ::1"),
    *[("up", ("--bind", bind, "--tls-cert", "one.pem", "--tls-key", "one.key"), said) for bind, said in (
        ("nowhere.invalid", "nowhere.invalid has no address"), ("192.0.2.1", "Choose another with --bind"),
        ("2001:db8::1", "Choose another with --bind"))],
    *[("up", ("--bind", bind), "needs --tls-cert and --tls-key") for bind in ("0.0.0.0", "::", "[::]", "192.0.2.1")],
    ("up", (*TLS, "one.pem"), "--tls-cert and --tls-key must be used together"),
    ("up", ("--tls-key", "one.key"), "--tls-cert and --tls-key must be used together"),
    ("up", (*TLS, "none.pem", "--tls-key", "one.key"), "none.pem cannot be read"),
    ("up", (*TLS, "one.pem", "--tls-key", "loop"), "loop cannot be read"),
    ("up", (*TLS, ".", "--tls-key", "one.key"), "cannot be read"),
    ("up", (*TLS, "", "--tls-key", "one.key"), "is not a path"),
    ("up", (*TLS, "a file", "--tls-key", "one.key"), "are not a certificate chain and its private key"),
    ("up", (*TLS, "one.pem", "--tls-key", "other.key"), "is not the private key of the certificate"),
    ("up", (*TLS, "one.pem", "--tls-key", "locked.key"), "is encrypted with a password"),
    ("up", ("--demo=1",), "ignored explicit argument"),
    ("up", ("--quiet", "x"), "unrecognized arguments"),
    ("backup", (), "arguments are required: file"),
    ("backup", ("",), "is not a path"),
    ("backup", ("a file",), "a backup never overwrites a file"),
    ("backup", (".",), "a backup never overwrites a file"),
    ("backup", ("none/b",), "There is no folder"),
    ("backup", ("a file/b",), "There is no folder"),
    ("backup", ("x" * 300,), "File name too long"),
    ("backup", ("new",), "has no installation of Fairway"),
    ("restore", (), "arguments are required: file"),
    ("restore", ("none",), "There is no file"),
    ("restore", (".",), "There is no file"),
    ("restore", ("loop",), "There is no file"),
    ("restore", ("x" * 300,), "File name too long"),
    ("restore", ("a file",), "is not a readable backup"),
    ("restore", ("/dev/zero",), "There is no file"),
    ("node_setup", ("--engine", "x"), "invalid choice"),
    ("node_setup", ("--runtime", "x"), "invalid choice"),
    ("node_setup", (), "has no keys yet"),
    *[("node_setup", ("--host", host), "Enter a host name or an address") for host in ("a b", "x" * 300, "-x/", "ü")
      if not host.startswith("-")],
    ("node_setup", ("--host", "nowhere.invalid"), "nowhere.invalid has no address"),
    ("node_setup", ("--account", "a b"), "account"),
    *[(name, (*more, "--data-dir", ""), "is not a path") for name, more in
      (("up", ()), ("backup", ("new",)), ("restore", ("a file",)), ("node_setup", ()))],
    *[(name, (*more, "--data-dir"), "expected one argument") for name, more in
      (("up", ()), ("backup", ("new",)), ("restore", ("a file",)), ("node_setup", ()))],
    *[(name, (*more, "--data", "elsewhere"), "unrecognized arguments") for name, more in
      (("up", ()), ("backup", ("new",)), ("restore", ("a file",)), ("node_setup", ()))],
    *[("up", ("--port", "PORT", "--data-dir", folder), said) for folder, said in (
        ("a file", NO_FOLDER), ("a file/data", NO_FOLDER), ("dangling", NO_FOLDER), ("loop", NO_FOLDER),
        ("foreign", "foreign belongs to "), ("used", "but no installation"),
        ("x" * 300, NO_FOLDER), ("/proc/data", NO_FOLDER),
        ("line\nbreak", "is not a path"), ("b\udcff", "is not a path"))],
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "said"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_argument_ends_in_one_sentence(
    refusal: Callable[..., str], name: str, arguments: tuple[str, ...], said: str
) -> None:
    line = refusal(name, *arguments)
    assert said in line


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("up", ("--port", "PORT")), ("backup", ("new",)), ("restore", ("a file",)), ("node_setup", ())],
)
def test_a_data_folder_in_the_environment_is_checked_as_well(
    refusal: Callable[..., str], name: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRWAY_DATA_DIR", "/nowhere/line\nbreak")
    assert "cannot be printed" in refusal(name, *arguments)


@pytest.mark.parametrize("name", ["keys", "logs", "artifacts"])
def test_a_private_folder_that_is_a_link_leads_to_a_private_folder(name: str, tmp_path: Path) -> None:
    data, elsewhere = DataDir(tmp_path / "data", None), tmp_path / "elsewhere"
    data.root.mkdir()
    elsewhere.mkdir()
    (data.root / name).symlink_to(elsewhere)
    for mode in (0o755, 0o710, 0o701):
        elsewhere.chmod(mode)
        with pytest.raises(
            StartError, match=f"{name} is a link to .*/elsewhere, which other accounts may enter"
        ):
            data.prepare()
        assert elsewhere.stat().st_mode & 0o777 == mode
    elsewhere.chmod(0o700)
    data.prepare()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FAIRWAY_MAX_ARTIFACT_MIB", "1 GiB"),
        ("FAIRWAY_DATABASE_POOL", "-1"),
        ("DATABASE_URL", "nonsense"),
        ("DATABASE_URL", "postgres://u:secret@host:abc/fairway"),
        ("DATABASE_OWNER_URL", "postgres://u:secret@[::1/fairway"),
        ("DATABASE_OWNER_URL", "mysql://u:secret@host/fairway"),
        ("REDIS_URL", "localhost:6379"),
        ("REDIS_URL", "redis://:secret@host:99999/0"),
        ("FAIRWAY_SMTP_URL", "mail.example.org"),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(variable: str, value: str, files: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "backup", "new", "--data-dir", "empty"],
        cwd=files, env=without_servers() | {variable: value}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(f"CommandError: {variable} ") and done.stderr.count("\n") == 1, done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize("settings", ["nowhere", "nowhere.settings", "portal.config.nowhere"])
def test_settings_that_do_not_exist_are_named(settings: str, files: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "check", "--settings", settings],
        cwd=files, env=without_servers(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, f"CommandError: There are no settings {settings}.\n")


@pytest.mark.parametrize("name", ["up", "restore"])
def test_an_unreadable_data_folder_ends_in_one_sentence(name: str, files: Path) -> None:
    """The settings are read before the arguments."""
    arguments = {"up": ("--port", str(free_port())), "restore": ("a file",)}[name]
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), name, *arguments, "--data-dir", "a file/" + "x" * 300],
        cwd=files, env=without_servers(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("CommandError: ") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("bind", "forward"),
    [
        ("127.0.0.1", "8123:127.0.0.1:8123"),
        ("::1", "'8123:[::1]:8123'"),
        ("localhost", "8123:localhost:8123"),
    ],
)
def test_the_printed_tunnel_ends_where_the_portal_listens(bind: str, forward: str) -> None:
    listening = ListenOptions(bind, 8123)
    assert ssh_forward_command(listening).startswith(f"ssh -L {forward} ")
    assert portal_url(listening, None) == "http://localhost:8123"


def test_an_address_of_ipv6_has_brackets_in_the_url(place: Path) -> None:
    listening = ListenOptions("2001:db8::1", 443, place / "one.pem", place / "one.key")
    assert portal_url(listening, None) == "https://[2001:db8::1]"


@pytest.mark.parametrize("bind", ["::1", "127.0.0.1", "localhost"])
def test_a_taken_port_is_refused(bind: str) -> None:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.create_server((bind, 0), family=family) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"Port {port} on {bind} cannot be used .* with --port"):
            check_bind_options(ListenOptions(bind, port))


def test_sockets_are_where_every_address_of_them_is_valid() -> None:
    """A server's path is at most 107 bytes; libpq and PostgreSQL split at a comma, URLs end at ? and #."""
    for name in ("plain", "a b", "x" * 200, "ü" * 60, "a,b", "a?b#c", "a%2Fb", "a@b"):
        data = Path("/var/lib") / name
        folder = sockets_dir(data)
        assert len(os.fsencode(folder / ".s.PGSQL.5432")) < 108
        assert (folder == data / "run" / "sockets") == (name in ("plain", "a@b"))
        assert (
            redis.Redis.from_url(redis_url(data))
            .connection_pool.connection_kwargs["path"]
            .startswith(str(folder))
        )
