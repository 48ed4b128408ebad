"""Where the code of a job comes from: URL of a git repository, branch, tag or commit, and keys of hosts."""

from __future__ import annotations

import re
from typing import NamedTuple

_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])"
_USER = r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,62}"
_PATH = r"[A-Za-z0-9._~/+%@-]+"
_URL = re.compile(rf"(https|ssh)://(?:({_USER})@)?({_HOST})(?::([0-9]{{1,5}}))?/{_PATH}")
_SCP = re.compile(rf"({_USER})@({_HOST}):(?!-){_PATH}")
URL_PATTERN = rf"(https|ssh)://({_USER}@)?{_HOST}(:[0-9]{{1,5}})?/{_PATH}|{_USER}@{_HOST}:(?!-){_PATH}"
REF_PATTERN = r"(?!.*(\.\.|//|/\.|\.lock(/|$)|@\{))[A-Za-z0-9_][A-Za-z0-9._/@+#-]*(?<![./])"
"""A name that git accepts (git-check-ref-format), which is no option and no range."""
HOST_KEY_PATTERN = r"(ssh|ecdsa|sk)-[a-z0-9@.-]{3,60} [A-Za-z0-9+/]{40,800}={0,2}"
HOST_KEYS = {
    "github.com": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl",
    "gitlab.com": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAfuCHKVTjquxvt6CM6tdG4SLp1Btn/nOeHHE5UOzRdf",
    "bitbucket.org": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIazEu89wgQZ4bqs3d63QSMzYVa0MuJ2e2gKTKqu+UUO",
}
"""Keys that these hosts publish; a job may name another one."""
DEFAULT_USER = "git"
MAX_ARCHIVE_BYTES = 64 * 2**20
"""Size of an uploaded archive."""
MAX_UNPACKED_MIB = 1024
MAX_UNUSED_BYTES = 2**30
"""Size of the archives of one user that no job has."""


class RepositoryUrl(NamedTuple):
    """Parts of a URL; ``port``: blank for the default one."""

    scheme: str
    user: str
    host: str
    port: str

    @property
    def login_url(self) -> str:
        return f"{self.scheme}://{self.host}{':' if self.port else ''}{self.port}"

    def known_hosts(self, host_key: str) -> str:
        """Return the line of ssh with the key of the host; blank without a key."""
        key = host_key or HOST_KEYS.get(self.host.lower(), "")
        bare = self.host.strip("[]")
        name = f"[{bare}]:{self.port}" if self.port not in ("", "22") else bare
        return f"{name} {key}\n" if key and self.scheme == "ssh" else ""


def parse_repository(url: str) -> RepositoryUrl | None:
    """Return the parts of a repository's URL, also of the form user@host:path; None for another text."""
    if found := _URL.fullmatch(url):
        scheme, user, host, port = found.groups()
        return RepositoryUrl(scheme, user or DEFAULT_USER, host, port or "")
    if found := _SCP.fullmatch(url):
        return RepositoryUrl("ssh", found.group(1), found.group(2), "")
    return None


def code_errors(
    repository: str, ref: str, host_key: str, files: set[str], key_file: str, token_file: str
) -> dict[str, str]:
    """Return what is wrong with the code of a request, by field; ``files``: names of its secret files."""
    if not repository:
        given = {"code_ref": ref, "code_host_key": host_key}
        return {name: "Enter the repository, too." for name, value in given.items() if value}
    url = parse_repository(repository)
    if url is None or url.scheme != "ssh":
        return {}
    if key_file not in files:
        message = f"An SSH URL needs a deploy key: add a secret as the file {key_file}."
        hint = f" A token in {token_file} is for https." if token_file in files else ""
        return {"code_repository": message + hint}
    if not url.known_hosts(host_key):
        return {"code_host_key": f"Enter the host key of {url.host}, as ssh-keyscan prints it."}
    return {}
