"""What ``fairway ssh`` passes to the OpenSSH client: ids are checked, and nothing is read as an option."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from client import Fairway, cli
from client.ssh import config_block, proxy, ssh_command

SERVER = Fairway("https://portal.example.org", "token")
NO_IDS = [
    *("-oKnownHostsCommand=touch x", "-F/dev/null", "--", "", ".", "a b", "a;b", "$(id)", "a`id`", "a/b"),
    *("ü", "A1", "a\n", "²", "a" * 33),
]


def settings_of(arguments: list[str]) -> dict[str, str]:
    """Return the settings that ssh reads from its arguments, without a connection."""
    words = [arguments[0], "-G", *arguments[1:]]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    return dict(line.partition(" ")[::2] for line in shown.stdout.splitlines())


@pytest.mark.parametrize("job", NO_IDS)
def test_what_is_no_id_is_refused_before_ssh_runs(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.execvp", lambda *words: pytest.fail(f"runs {words}"))
    monkeypatch.setenv("FAIRWAY_URL", "https://portal.example.org")
    monkeypatch.setenv("FAIRWAY_TOKEN", "token")
    for name in (job, "a.1"):
        with pytest.raises(ValueError, match="is not the id of a job"):
            ssh_command(SERVER, name, 0, [])
    words = ["ssh", job]
    try:
        assert cli.main(words) == cli.USAGE
    except SystemExit as error:  # argparse read it as an option of its own
        assert error.code == cli.USAGE
    assert capsys.readouterr().err


@pytest.mark.parametrize("job", NO_IDS)
def test_the_proxy_refuses_what_is_no_host(job: str) -> None:
    for host in (f"{job}.fairway", f"{job}.1.fairway", "abc.-1.fairway", "abc.1.2.fairway", "abc.².fairway"):
        with pytest.raises(ValueError, match=r"is not JOB\.fairway"):
            proxy(SERVER, host, None, None)  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the OpenSSH client")
def test_ssh_reads_no_option_from_the_command() -> None:
    expected = settings_of(ssh_command(SERVER, "abc123", 2, []))
    assert expected["host"] == "abc123.2.fairway"
    for command in (["-oUser=evil"], ["--", "-oUser=evil"], ["-l", "evil"], ["ls", "-oProxyCommand=evil"]):
        assert settings_of(ssh_command(SERVER, "abc123", 2, command)) == expected
    with pytest.raises(ValueError, match="is not a rank"):
        ssh_command(SERVER, "abc123", -1, [])


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the OpenSSH client")
def test_the_block_has_no_host_on_which_a_shell_acts(tmp_path: Path) -> None:
    """A name may come from elsewhere, such as the address of a git submodule."""
    config = tmp_path / "config"
    config.write_text(config_block(SERVER))
    for name in ("abc123.fairway", "abc123.12.fairway"):
        assert "ssh-proxy" in settings_of(["ssh", "-F", str(config), name])["proxycommand"]
    for part in ("$(id)", "`id`", "a;id", "a&id", "a|id", "a>x", "a<x"):
        shown = subprocess.run(["ssh", "-F", str(config), "-G", f"{part}.fairway"], capture_output=True, text=True,
                               timeout=20, check=False)  # fmt: skip
        assert "ssh-proxy" not in shown.stdout, part  # newer versions refuse such a name themselves
