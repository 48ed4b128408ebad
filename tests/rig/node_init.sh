#!/bin/sh
# Process 1 of a rig node: gives the node a root of its own over the machine's files, then waits for children.
# Arguments: the node's folder, its host name, then folders of images to share read-only.
# Runs in fresh mount, pid, uts, ipc and network namespaces. Everything the node writes lands in its folder.
set -eu
node=$1 name=$2
shift 2

mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=/,upperdir=$node/upper,workdir=$node/work,index=off" "$node/root"
cd "$node/root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount --rbind /sys/fs/cgroup sys/fs/cgroup
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 tmpfs dev/shm  # podman keeps its locks there
mount -t tmpfs -o mode=755 tmpfs run
# As udev sets it: any account may open it, as the network of rootless podman needs.
if [ -c dev/net/tun ]; then
    mknod -m 666 run/tun c 10 200
    mount --bind run/tun dev/net/tun
fi
mount -t tmpfs -o mode=1777 tmpfs tmp

# Nothing of the host beyond the operating system is to be seen: each other folder is replaced by an empty one.
for folder in *; do
    case $folder in
        bin|boot|dev|etc|lib|lib32|lib64|libx32|proc|run|sbin|sys|tmp|usr|var) ;;
        *) [ -h "$folder" ] || [ ! -d "$folder" ] || mount -t tmpfs -o mode=755 tmpfs "$folder" ;;
    esac
done
# What a real machine keeps over a reboot: the homes, the containers, the agent's state.
mkdir -p home var/lib/containers var/lib/fairway-node
mount --bind "$node/disk/containers" var/lib/containers
mount --bind "$node/disk/home" home
mount --bind "$node/disk/state" var/lib/fairway-node
images=0
for store in "$@"; do
    images=$((images + 1))
    mkdir -p "run/rig/images/$images"
    mount --bind "$store" "run/rig/images/$images"
    mount -o remount,bind,ro "run/rig/images/$images"
done
mount -t tmpfs -o mode=1777 tmpfs var/tmp

hostname "$name"
mkdir -p run/rig/old run/sshd run/lock
cat /proc/sys/kernel/random/uuid > run/rig/boot_id
pivot_root . run/rig/old
echo up > "/run/rig/old$node/up"
umount -l /run/rig/old
sleep infinity &
# dash reaps every orphan while it waits, as process 1 must.
wait
