"""Launchers whose tasks log in to each other: keys, configuration and a script that runs sshd in each task.

sshd runs as the user of the task, on the port ``ssh`` of the member, and accepts only the key of the attempt
(https://man.openbsd.org/sshd_config). Programs find ``ssh`` and ``scp`` with the configuration of the job first
in PATH, so that nothing is written to the user's home. A session has the environment of its task.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.gang import GangMember, GangShape, LaunchFile
from agents.node.spec.task_spec import SECRETS_PLACEHOLDER

SSH_PORT = "ssh"
HOSTFILE = "hostfile"
KEY_FILE = "ssh_key"
CONFIG_FILE = "ssh_config"
_SCRIPT_FILE = "launch.sh"
_HOST_KEY_ALIAS = "fairway"

SCRIPT = r"""# Runs sshd, and by its first argument: serve (until the task with the command has ended),
# first (waits for the other tasks, runs the command, and ends them), or all (every task runs the command).
umask 077
fail() { echo "fairway: $1" >&2; exit 127; }
mode=$1
shift
secrets=$FAIRWAY_SECRETS
FAIRWAY_RUN=${TMPDIR:-/tmp}/fairway-launch
FAIRWAY_DIR=$PWD
sshd=$(PATH=$PATH:/usr/sbin:/usr/local/sbin command -v sshd) ||
  fail "The image has no sshd, which the launcher needs. Install openssh-server in the image."
command -v ssh >/dev/null ||
  fail "The image has no ssh, which the launcher needs. Install openssh-client in the image."
id -un >/dev/null 2>&1 ||
  fail "Account $(id -u) is not in /etc/passwd, as ssh requires. Use an environment that runs with podman."
mkdir -p "$FAIRWAY_RUN/bin" || fail "Cannot write to $FAIRWAY_RUN."
for each in ssh scp; do
  program=$(command -v "$each") || continue
  printf '#!/bin/sh\nexec %s -F %s/ssh_config "$@"\n' "$program" "$secrets" > "$FAIRWAY_RUN/bin/$each"
done
cat > "$FAIRWAY_RUN/bin/discover_hosts.sh" <<'END'
#!/bin/sh
# Prints the hosts of the job that accept connections; one that has just been added may not yet.
while read -r line; do
  host=${line%:*}
  [ -e "$FAIRWAY_RUN/reached/$host" ] || ssh -n "$host" ': > /dev/null' 2>/dev/null || continue
  : > "$FAIRWAY_RUN/reached/$host"
  echo "$line"
done < "$FAIRWAY_SECRETS/hosts"
END
mkdir -p "$FAIRWAY_RUN/reached"
printf '. "$1"\ncd "$FAIRWAY_DIR"\neval "${SSH_ORIGINAL_COMMAND:-exec /bin/sh}"\n' > "$FAIRWAY_RUN/session.sh"
chmod 700 "$FAIRWAY_RUN"/bin/*
PATH=$FAIRWAY_RUN/bin:$PATH
export PATH FAIRWAY_RUN FAIRWAY_DIR
export -p > "$FAIRWAY_RUN/environment"
"$sshd" -D -e -f "$secrets/sshd_config" \
  -o "ForceCommand=/bin/sh $FAIRWAY_RUN/session.sh $FAIRWAY_RUN/environment" &
sshd_pid=$!
if [ "$mode" = serve ]; then
  trap 'kill "$sshd_pid"; exit 143' TERM INT
  until [ -e "$FAIRWAY_RUN/finished" ]; do
    kill -0 "$sshd_pid" 2>/dev/null || fail "sshd has ended."
    sleep 1 & wait $!
  done
  kill "$sshd_pid"
  exit 0
fi
list=$secrets/hostfile
[ -e "$secrets/hosts" ] && list=$secrets/hosts
hosts() { sed 's/ .*//;t;s/:[^:]*$//' "$list"; }
for host in $(hosts); do
  tries=0
  until ssh -n "$host" true 2>"$FAIRWAY_RUN/error"; do
    kill -0 "$sshd_pid" 2>/dev/null || fail "sshd has ended."
    tries=$((tries + 1))
    [ "$tries" -lt 30 ] || fail "No SSH connection to $host: $(cat "$FAIRWAY_RUN/error")"
    sleep 1
  done
done
"$@" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM INT
wait "$child"
status=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; status=$?; done
: > "$FAIRWAY_RUN/finished"
for host in $(hosts); do
  if [ "$mode" = first ]; then
    ssh -n "$host" ': > "$FAIRWAY_RUN/finished"' 2>/dev/null
  elif [ "$status" -eq 0 ]; then  # the others may still need this task
    while ssh -n "$host" '[ ! -e "$FAIRWAY_RUN/finished" ]' 2>/dev/null; do sleep 1; done
  fi
done
kill "$sshd_pid" 2>/dev/null
exit "$status"
"""
"""Runs in each task; the session of a login has the environment and the folder of its task."""

_CLIENT_CONFIG = f"""Host *
  IdentityFile {SECRETS_PLACEHOLDER}/{KEY_FILE}
  IdentitiesOnly yes
  UserKnownHostsFile {SECRETS_PLACEHOLDER}/ssh_known_hosts
  GlobalKnownHostsFile /dev/null
  HostKeyAlias {_HOST_KEY_ALIAS}
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 10
  LogLevel ERROR
"""

_SERVER_CONFIG = f"""HostKey {SECRETS_PLACEHOLDER}/ssh_host_key
AuthorizedKeysFile {SECRETS_PLACEHOLDER}/authorized_keys
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowTcpForwarding no
X11Forwarding no
PermitUserEnvironment no
PrintMotd no
PidFile none
MaxStartups 200
LogLevel ERROR
"""


def host_names(gang: GangShape) -> dict[int, str]:
    """Return the name of each rank for ssh: its address, or ``rank-N`` where tasks share one or may come and go.

    Raise ValueError when the tasks cannot reach each other.
    """
    addresses = [each.address for each in gang.members]
    if None in addresses:
        raise ValueError("a launcher that uses SSH needs the addresses of all tasks")
    shared = gang.is_elastic or len(set(addresses)) < len(addresses)
    return {each.rank: f"rank-{each.rank}" if shared else str(each.address) for each in gang.members}


def slots(member: GangMember) -> int:
    """Return the number of processes of a task: one per GPU, at least one."""
    return max(1, member.gpus)


def hostfile(gang: GangShape) -> str:
    """Return a line ``host slots=N`` for each task, as Open MPI, Horovod and DeepSpeed read it."""
    names = host_names(gang)
    return "".join(f"{names[each.rank]} slots={slots(each)}\n" for each in gang.members)


def host_list(gang: GangShape, separator: str = ",") -> str:
    """Return ``host:slots`` of each task."""
    names = host_names(gang)
    return separator.join(f"{names[each.rank]}:{slots(each)}" for each in gang.members)


def ssh_port(gang: GangShape) -> int | None:
    """Return the port of sshd if it is the same in all tasks."""
    ports = {each.ports.get(SSH_PORT) for each in gang.members}
    return ports.pop() if len(ports) == 1 else None


def ssh_files(gang: GangShape, rank: int) -> dict[str, LaunchFile]:
    """Return the files of one rank: script, hostfile, keys and configuration."""
    names, member, keys = host_names(gang), gang.member(rank), gang.keys
    if keys is None:
        raise ValueError("the attempt has no SSH keys; it was started by an older version")
    hosts = "".join(
        f"Host {names[each.rank]}\n  HostName {each.address}\n  Port {each.ports[SSH_PORT]}\n"
        for each in gang.members
    )
    listen = f"Port {member.ports[SSH_PORT]}\nListenAddress {member.address}\n"
    return {
        _SCRIPT_FILE: LaunchFile(SCRIPT),
        HOSTFILE: LaunchFile(hostfile(gang)),
        CONFIG_FILE: LaunchFile(hosts + _CLIENT_CONFIG),
        "sshd_config": LaunchFile(listen + _SERVER_CONFIG),
        "ssh_known_hosts": LaunchFile(f"{_HOST_KEY_ALIAS} {keys.host_public_key}\n"),
        "authorized_keys": LaunchFile(f"restrict,pty {keys.public_key}\n"),
        KEY_FILE: LaunchFile(keys.private_key, private=True),
        "ssh_host_key": LaunchFile(keys.host_private_key, private=True),
    }


def serve_command() -> tuple[str, ...]:
    """Return the command of a task that only serves SSH."""
    return ("/bin/sh", f"{SECRETS_PLACEHOLDER}/{_SCRIPT_FILE}", "serve")


def run_command(command: Sequence[str], mode: str = "first") -> tuple[str, ...]:
    """Return the command of a task that runs ``command``; ``mode``: ``first`` alone, or ``all`` tasks do."""
    return ("/bin/sh", f"{SECRETS_PLACEHOLDER}/{_SCRIPT_FILE}", mode, *command)
