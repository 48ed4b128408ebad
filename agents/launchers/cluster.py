"""Launchers with a head and members: a script that starts the service of a task and ends it with the head."""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.gang import LaunchFile, RendezvousPoint
from agents.node.spec.task_spec import SECRETS_PLACEHOLDER

_SCRIPT_FILE = "launch.sh"
READY_FILE = "ready.py"

SCRIPT = r"""# Usage: launch.sh ADDRESS PORT SERVICE... [-- COMMAND...]; ADDRESS and PORT are those of the head.
# With a command: starts the service of the head, waits for it, runs the command, and ends the service.
# Without: runs the service of a member until the head is gone.
fail() { echo "fairway: $1" >&2; exit 127; }
address=$1 port=$2
shift 2
service=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do service+=("$1"); shift; done
command -v "${service[0]}" >/dev/null ||
  fail "The image has no ${service[0]}, which the launcher needs."
reachable() { (exec 3<>"/dev/tcp/$address/$port") 2>/dev/null; }
wait_for_head() {
  for _ in {1..120}; do
    reachable && return
    [ -z "$1" ] || kill -0 "$1" 2>/dev/null || fail "${service[0]} has ended before it accepted connections."
    sleep 1
  done
  fail "Nothing listens at $address port $port after 120 s."
}
[ $# -gt 0 ] || wait_for_head
"${service[@]}" &
service_pid=$!
if [ $# -eq 0 ]; then
  trap 'kill "$service_pid"; exit 143' TERM INT
  missed=0
  while kill -0 "$service_pid" 2>/dev/null && [ "$missed" -lt 3 ]; do
    if reachable; then missed=0; else missed=$((missed + 1)); fi
    sleep 1 & wait $!
  done
  kill "$service_pid" 2>/dev/null && [ "$missed" -ge 3 ] && exit 0
  wait "$service_pid"
  status=$?
  reachable || exit 0
  fail "${service[0]} has ended with the exit code $status."
fi
shift
wait_for_head "$service_pid"
[ ! -e "$FAIRWAY_SECRETS/ready.py" ] || python3 "$FAIRWAY_SECRETS/ready.py" ||
  fail "The members have not joined."
"$@" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM INT
wait "$child"
status=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; status=$?; done
kill "$service_pid" 2>/dev/null
exit "$status"
"""


def cluster_command(
    head: RendezvousPoint, service: Sequence[str], command: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the command of the head, which runs ``command``, or of a member (None)."""
    words = ("/bin/bash", f"{SECRETS_PLACEHOLDER}/{_SCRIPT_FILE}", head.address, str(head.port), *service)
    return words if command is None else (*words, "--", *command)


def cluster_files() -> dict[str, LaunchFile]:
    return {_SCRIPT_FILE: LaunchFile(SCRIPT)}
