#!/bin/sh
# Enrols this machine as a node of a Fairway cluster. Run it in a root shell; it is idempotent.
#
# It creates an account without a password, installs the loader and the signed agent, authorizes three keys with
# restricted commands, and prints what it found. It opens no port and does not change sshd's configuration.
set -eu
umask 022
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
LC_ALL=C
export LC_ALL

# Each value from the portal is one quoted word that is only assigned to a variable.
cluster=@CLUSTER@
account=@ACCOUNT@
engine=@ENGINE@
runtime=@RUNTIME@
install_runtime=@INSTALL_RUNTIME@
home_root=@HOME_ROOT@
signing_key=@SIGNING_KEY@
portal_settings=@SETTINGS@
authorized_keys=@AUTHORIZED_KEYS@
library=/usr/local/lib/fairway
config=/etc/fairway
place=/var/lib/fairway-node

say() { echo "fairway: $*"; }
stop() { echo "fairway: stopped: $*" >&2; exit 1; }

# ---- requirements ------------------------------------------------------------------------------------------
[ "$(id -u)" -eq 0 ] || stop "this script needs a root shell."
command -v python3 > /dev/null || stop "python3 is missing; install it and run this script again."
python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' ||
    stop "Python 3.8 or newer is needed; this is $(python3 -V 2>&1)."
command -v ssh-keygen > /dev/null || stop "ssh-keygen is missing; install OpenSSH and run this script again."
command -v useradd > /dev/null || stop "useradd is missing."
if [ "$engine" = auto ]; then
    # Rootless containers have resource limits only where systemd delegates a cgroup v2 subtree to the account.
    if [ "$runtime" = podman ] && [ -f /sys/fs/cgroup/cgroup.controllers ] && [ -d /run/systemd/system ]; then
        engine=rootless
    else
        engine=rootful
    fi
fi
if [ "$engine" = rootful ]; then
    command -v sudo > /dev/null || stop "sudo is missing; it is needed for the engine access you chose."
fi

if [ "$runtime" != process ] && ! command -v "$runtime" > /dev/null; then
    [ "$install_runtime" = yes ] || stop "$runtime is missing; install it and run this script again."
    package=$runtime
    say "installing $runtime"
    if command -v apt-get > /dev/null; then
        [ "$runtime" = docker ] && package=docker.io
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q "$package" uidmap iptables > /dev/null ||
            stop "apt-get could not install $package."
    elif command -v dnf > /dev/null; then
        dnf install -y -q "$package" iptables || stop "dnf could not install $package."
    elif command -v zypper > /dev/null; then
        zypper --non-interactive --quiet install "$package" iptables || stop "zypper could not install $package."
    else
        stop "$runtime is missing and this machine has no package manager that this script knows."
    fi
fi

if [ "$engine" = rootless ]; then
    version=$(podman --version | sed 's/[^0-9]*\([0-9][0-9.]*\).*/\1/')
    [ "${version%%.*}" -ge 4 ] ||
        stop "podman $version does not remove the networks of ended jobs without root: install podman 4.0 or newer," \
            "or choose root access to the engine for it."
fi

# Two clusters would give the same GPUs to different jobs, and the later would lock the earlier out.
if [ -e "$config/node.json" ]; then
    other=$(python3 -I -c 'import json, sys; print(json.load(open(sys.argv[1])).get("cluster", ""))' "$config/node.json") ||
        stop "$config/node.json is not a JSON object; remove it if this machine belongs to no other cluster."
    [ -n "$other" ] || stop "$config/node.json names no cluster; remove it if this machine belongs to no other cluster."
    [ "$other" = "$cluster" ] || stop "this machine is a node of the cluster $other. Retire it there, then remove" \
        "$config/node.json and run this script again."
fi

# ---- account -----------------------------------------------------------------------------------------------
mkdir -p "$place"
chmod 755 "$place"
if ! id "$account" > /dev/null 2>&1; then
    useradd --system --user-group --home-dir "$place/home" --no-create-home --shell /bin/sh \
        --comment "Fairway agent" "$account"
    say "made the account $account"
fi
# '*' matches no password; sshd still accepts keys, unlike for an account locked with '!'.
usermod --password '*' --shell /bin/sh "$account"
home=$(getent passwd "$account" | cut -d: -f6)
mkdir -p "$home"
if [ "$engine" = rootless ]; then
    chown "$account:$account" "$home"
    chmod 700 "$home"
    for file in /etc/subuid /etc/subgid; do
        touch "$file"
        grep -q "^$account:" "$file" && continue
        first=$(awk -F: 'BEGIN { top = 100000 } { if ($2 + $3 > top) top = $2 + $3 } END { print top }' "$file")
        echo "$account:$first:65536" >> "$file"
    done
    if command -v loginctl > /dev/null && [ -d /run/systemd/system ]; then
        loginctl enable-linger "$account" || stop "loginctl could not let $account's containers outlive a login."
    fi
    # Podman covers this directory in its network namespace, or, where it is missing, all of /var/lib with $home in it;
    # with netavark it then does not find its networks.
    mkdir -p /var/lib/cni
    owner=$account
else
    chown "root:$account" "$home"
    chmod 750 "$home"
    owner=root
fi

# ---- loader, agent and settings, owned by root -------------------------------------------------------------
put() {  # put MODE TARGET: write stdin to TARGET atomically
    cat > "$2.new"
    chown root:root "$2.new"
    chmod "$1" "$2.new"
    mv -f "$2.new" "$2"
}

mkdir -p "$library" "$config"
chown root:root "$library" "$config"
chmod 755 "$library" "$config"

loader=@LOADER@
printf '%s' "$loader" | put 755 "$library/fairway-node"
echo "$engine" | put 644 "$config/engine"
printf 'fairway-upgrade namespaces="fairway-node" %s\n' "$signing_key" | put 644 "$config/agent_signers"
# Local settings (GPU provider, engine flags) are in node.local.json and take precedence.
merge='
import json, os, sys
settings = json.load(sys.stdin)
if os.path.exists(sys.argv[1]):
    with open(sys.argv[1]) as local:
        settings.update(json.load(local))
print(json.dumps(settings, indent=2, sort_keys=True))
'
settings=$(printf '%s' "$portal_settings" | python3 -I -c "$merge" "$config/node.local.json") ||
    stop "$config/node.local.json is not a JSON object."
printf '%s\n' "$settings" | put 644 "$config/node.json"

mkdir -p "$place/agent" "$place/state"
chown "$owner:$owner" "$place/agent" "$place/state"
chmod 755 "$place/agent"
chmod 711 "$place/state"
mkdir -p "$home_root"
chown "$owner:$owner" "$home_root"
chmod 711 "$home_root"

agent=@AGENT@
agent_signature=@AGENT_SIGNATURE@
draft=$place/agent/enrolled.pyz
printf '%s\n' "$agent" | base64 -d > "$draft"
printf '%s' "$agent_signature" > "$draft.sig"
ssh-keygen -q -Y verify -f "$config/agent_signers" -I fairway-upgrade -n fairway-node -s "$draft.sig" \
    < "$draft" > /dev/null || stop "the agent in this script does not carry its signature; get the script again."
chown "$owner:$owner" "$draft" "$draft.sig"
chmod 644 "$draft" "$draft.sig"
if [ -e "$place/agent/agent.pyz" ] && ! cmp -s "$draft" "$place/agent/agent.pyz"; then
    for ending in "" .sig; do
        ln -f "$place/agent/agent.pyz$ending" "$place/agent/agent.pyz.previous$ending"
    done
fi
mv -f "$draft.sig" "$place/agent/agent.pyz.sig"
mv -f "$draft" "$place/agent/agent.pyz"

# ---- engine access -----------------------------------------------------------------------------------------
if [ "$engine" = rootful ]; then
    rule=$(mktemp)
    cat > "$rule" <<END_OF_RULE
# Fairway: the account $account may run exactly the loader, nothing else.
Defaults:$account !requiretty, env_reset
$account ALL=(root) NOPASSWD: $library/fairway-node control, $library/fairway-node watch
END_OF_RULE
    visudo -cqf "$rule" || { rm -f "$rule"; stop "visudo refuses the rule for $account."; }
    mkdir -p /etc/sudoers.d
    put 440 /etc/sudoers.d/fairway < "$rule"
    rm -f "$rule"
else
    rm -f /etc/sudoers.d/fairway
fi

# ---- keys --------------------------------------------------------------------------------------------------
mkdir -p "$home/.ssh"
printf '%s' "$authorized_keys" | put 644 "$home/.ssh/authorized_keys"
chown root:root "$home/.ssh"
chmod 755 "$home/.ssh"

# ---- report ------------------------------------------------------------------------------------------------
case $engine in
    rootless) access="rootless: the account runs containers itself" ;;
    *) access="rootful: a sudoers line for exactly the loader" ;;
esac
say "account: $account (uid $(id -u "$account"))"
say "engine access: $access"
say "python: $(python3 -V 2>&1)"
case $runtime in
    process) say "runtime: process (no container engine)" ;;
    *) say "runtime: $("$runtime" --version 2> /dev/null | head -n 1)" ;;
esac
if command -v nvidia-smi > /dev/null; then
    say "gpus: $(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | wc -l)," \
        "driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | head -n 1)"
else
    say "gpus: nvidia-smi is not here"
fi
for key in /etc/ssh/ssh_host_*_key.pub; do
    [ -r "$key" ] && say "host key: $(ssh-keygen -lf "$key" | awk '{ print $4, $2 }')"
done
say "enrolled in $cluster: compare the host key above with the one that the page shows, then confirm it there"
