#!/bin/sh
# Updates the loader of an enrolled node: the only command that Fairway's keys may run there. Run it in a root shell of
# the node; it is idempotent. It does not change keys, settings or the agent.
set -eu
umask 022
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
target=@LOADER_PATH@
version=@LOADER_VERSION@

stop() { echo "fairway: stopped: $*" >&2; exit 1; }

[ "$(id -u)" -eq 0 ] || stop "this script needs a root shell."
[ -x "$target" ] && [ -r /etc/fairway/agent_signers ] || stop "this machine is no node: enrol it first."
loader=@LOADER@
printf '%s' "$loader" > "$target.new"
chown root:root "$target.new"
chmod 755 "$target.new"
mv -f "$target.new" "$target"
echo "fairway: the loader is version $version now; the next connection uses it"
