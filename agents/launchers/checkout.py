"""Checks out the code of a job in its container, as its account, before its command; or enters its folder.

git and ssh are those of the image, so the container's network rules, account and limits apply to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agents.launchers.gang import LaunchFile, LaunchSpec
from agents.node.spec.task_spec import SECRETS_PLACEHOLDER

KEY_FILE, TOKEN_FILE = "git_key", "git_token"
"""Files among a job's secrets with which it logs in to a git server: a private key, or a token."""
CODE_DIR = "/code"
_SCRIPT_FILE, _REQUEST_FILE, _SSH_FILE, _HOSTS_FILE = "checkout.sh", "checkout", "git_ssh_config", "git_hosts"
_SCRIPT = r"""# Usage: checkout.sh COMMAND...
# Checks out the code that $FAIRWAY_SECRETS/checkout describes, one value a line, and runs COMMAND there.
fail() { echo "fairway: the code was not checked out: $1" >&2; exit 1; }
{ read -r url; read -r login_url; read -r user; read -r ref; read -r folder; read -r limit_s; read -r limit_mib
} < "$FAIRWAY_SECRETS/checkout" || fail "its description cannot be read."
[ -n "$folder" ] || folder=${TMPDIR:-/tmp}/code
command -v git >/dev/null || fail "the image has no git. Install git in the image."
case $url in https:*) ;; *)
  command -v ssh >/dev/null || fail "the image has no ssh. Install openssh-client in the image."
  id -un >/dev/null 2>&1 || fail "account $(id -u) is not in /etc/passwd, as ssh requires. Use https, or podman." ;;
esac
notes=${TMPDIR:-/tmp}/fairway-checkout
mkdir -p "$folder" "$notes" || fail "cannot write to $folder."
export GIT_TERMINAL_PROMPT=0 GIT_ALLOW_PROTOCOL=https:ssh LC_ALL=C.UTF-8 FAIRWAY_GIT_USER="$user"
export GIT_SSH_COMMAND='ssh -F "$FAIRWAY_SECRETS/git_ssh_config"'
login='!f() { [ "$1" = get ] && [ -e "$FAIRWAY_SECRETS/git_token" ] || return 0
  echo "username=$FAIRWAY_GIT_USER"; echo "password=$(cat "$FAIRWAY_SECRETS/git_token")"; }; f'
run_git() {
  git -C "$folder" -c credential.helper= -c "credential.$login_url.helper=$login" -c core.askPass= \
    -c core.hooksPath=/dev/null -c gc.auto=0 "$@" 2>>"$notes/output"
}
check_out() {
  run_git init -q && run_git remote add origin "$url" || return
  if run_git fetch -q --no-tags --depth 1 origin "${ref:-HEAD}"; then
    target=FETCH_HEAD
  else  # a server may not serve a commit by its hash alone, and never by an abbreviation
    case $ref in *[!0-9a-f]* | '' | ? | ?? | ??? | ???? | ????? | ??????) return 1 ;; esac
    : > "$notes/output"
    run_git fetch -q origin '+refs/heads/*:refs/remotes/origin/*' '+refs/tags/*:refs/tags/*' || return
    target=$ref
    run_git rev-parse -q --verify "$target^{commit}" >/dev/null ||
      { echo "fatal: reference is not a tree: $ref" >> "$notes/output"; return 1; }
  fi
  run_git checkout -q --detach "$target"
}
is_too_large() {
  used_kib=$(du -sk "$folder" 2>/dev/null | cut -f 1)
  [ "${used_kib:-0}" -gt $((limit_mib * 1024)) ] || return
  echo "it is larger than the limit of $limit_mib MiB." > "$notes/limit"
}
watch() {
  trap 'kill "$nap" 2>/dev/null; exit' TERM
  second=0
  while :; do
    sleep 1 & nap=$!
    wait "$nap"
    second=$((second + 1))
    if is_too_large; then
      :
    elif [ "$second" -ge "$limit_s" ]; then
      echo "it took longer than the limit of $limit_s s." > "$notes/limit"
    else
      continue
    fi
    kill "$1"
    exit
  done
}
trap 'exit 143' TERM INT
check_out & worker=$!
watch "$worker" & watcher=$!
wait "$worker"
status=$?
kill "$watcher" 2>/dev/null
wait "$watcher"
[ "$status" -ne 0 ] || is_too_large
[ ! -e "$notes/limit" ] || fail "$(cat "$notes/limit")"
if [ "$status" -ne 0 ]; then
  tail -n 20 "$notes/output" >&2
  fail "git failed with exit code $status, see above."
fi
commit=$(run_git rev-parse HEAD) || fail "its commit is unknown."
rm -rf "$notes"
[ -z "$FAIRWAY_CODE_FILE" ] || echo "$commit" > "$FAIRWAY_CODE_FILE"
echo "fairway: code at commit $commit in $folder"
trap - TERM INT
unset GIT_TERMINAL_PROMPT GIT_ALLOW_PROTOCOL GIT_SSH_COMMAND FAIRWAY_GIT_USER
export FAIRWAY_CODE_DIR="$folder"
cd "$folder" || fail "cannot enter $folder."
exec "$@"
"""
_FOLDER_FILE = "code_folder.sh"
_FOLDER_SCRIPT = r"""# Usage: code_folder.sh FOLDER COMMAND...
# Runs COMMAND in FOLDER: blank is the unpacked archive of a process, a relative one is below the home.
case $1 in "") folder=${TMPDIR:-/tmp}/code ;; /*) folder=$1 ;; *) folder=$HOME/$1 ;; esac
shift
cd "$folder" || { echo "fairway: the folder of the code, $folder, cannot be entered." >&2; exit 1; }
export FAIRWAY_CODE_DIR="$folder"
exec "$@"
"""
_SSH_CONFIG = f"""Host *
  IdentityFile {SECRETS_PLACEHOLDER}/{KEY_FILE}
  IdentitiesOnly yes
  UserKnownHostsFile {SECRETS_PLACEHOLDER}/{_HOSTS_FILE}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 30
  ServerAliveInterval 15
"""


@dataclass(frozen=True)
class Checkout:
    """What is checked out, and where; no value contains a line break.

    ``login_url``: scheme and host to which the token is sent. ``ref``: branch, tag or commit; blank: the default
    branch. ``folder``: blank for a folder in the task's own temporary directory. ``known_hosts``: lines of ssh.
    """

    url: str
    login_url: str
    user: str
    ref: str
    folder: str
    limit_s: int
    limit_mib: int
    known_hosts: str


@dataclass(frozen=True)
class CodeFolder:
    """Code that is there before the command: an unpacked archive, or a path in the home or in a volume.

    ``folder``: as of ``Checkout``; relative to the home unless it begins with a slash. ``sha256``: of the archive.
    """

    folder: str
    sha256: str = ""
    limit_mib: int = 0


Code = Checkout | CodeFolder


def with_code(launch: LaunchSpec, code: Code) -> LaunchSpec:
    """Return a launch that runs its command in the folder of the code, after its checkout."""
    if isinstance(code, Checkout):
        return _with_checkout(launch, code)
    command = ("/bin/sh", f"{SECRETS_PLACEHOLDER}/{_FOLDER_FILE}", code.folder, *launch.command)
    return replace(launch, command=command, files=launch.files | {_FOLDER_FILE: LaunchFile(_FOLDER_SCRIPT)})


def _with_checkout(launch: LaunchSpec, checkout: Checkout) -> LaunchSpec:
    values = (
        checkout.url, checkout.login_url, checkout.user, checkout.ref, checkout.folder, str(checkout.limit_s),
        str(checkout.limit_mib),
    )  # fmt: skip
    files = {
        _SCRIPT_FILE: LaunchFile(_SCRIPT),
        _REQUEST_FILE: LaunchFile("".join(f"{value}\n" for value in values)),
        _SSH_FILE: LaunchFile(_SSH_CONFIG),
        _HOSTS_FILE: LaunchFile(checkout.known_hosts),
    }
    command = ("/bin/sh", f"{SECRETS_PLACEHOLDER}/{_SCRIPT_FILE}", *launch.command)
    return replace(launch, command=command, files=launch.files | files)
