"""One rig node: a machine of its own as far as SSH, containers, accounts and reboots can tell."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.rig import network, records
from tests.rig.faults import NodeFaults

INIT = Path(__file__).with_name("node_init.sh")
BOOT_ID_PATH = "/run/rig/boot_id"
GPUS_PATH = "/etc/fairway-rig/gpus.json"
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SSH_PORT = 22
DISK_FLOOR_MIB = 64
# In a virtual machine CAP_SYS_RESOURCE may be missing, and then runc cannot raise limits to podman's defaults.
CREATE_FLAGS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
HIDDEN = (
    "/etc/fairway",
    "/etc/sudoers.d/fairway",
    "/usr/local/lib/fairway",
    "/var/lib/fairway",
    "/var/lib/fairway-homes",
)


@dataclass
class RigNode(NodeFaults):
    """A started or stopped node. `folder` is its disk as seen from this machine."""

    run: records.RunRecord
    record: records.NodeRecord
    address: str
    gateway: str
    image_stores: tuple[Path, ...]
    state_disk_mib: int
    gpu_count: int
    port: int = SSH_PORT
    _unshare: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def folder(self) -> Path:
        return self.run.path / self.record.name

    def make(self) -> None:
        """Lays out the node's empty disk and what an installer would have put on it."""
        for part in ("upper/etc/ssh", "work", "root", "disk/containers", "disk/home", "disk/state"):
            (self.folder / part).mkdir(parents=True)
        for path in (
            self.folder,
            self.folder / "upper",
            self.folder / "upper/etc",
            self.folder / "upper/etc/ssh",
        ):
            path.chmod(0o755)
        state = self.folder / "disk/state"
        self.record.mounts.append(str(state))
        self.run.save()
        size = f"size={self.state_disk_mib}m,mode=755"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(state)], check=True, timeout=10)
        etc = self.folder / "upper/etc"
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        (etc / "resolv.conf").write_text("")  # nobody to ask: a name that is unknown is so at once
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        self._hide_fairway()
        self._write_local_settings()
        self._configure_engine()
        self.write_gpus()

    def boot(self) -> None:
        """Starts the node as a machine starts: new boot id, empty /run, network up, sshd listening."""
        network.make_veth(self.record.netns, self.record.veth, self.run.bridge, self.address, self.gateway)
        (self.folder / "up").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        (self.folder / "work").mkdir()
        with (self.folder / "init.log").open("ab") as log:
            self._unshare = subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{self.record.netns}"),
                    *("unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"),
                    *("sh", str(INIT), str(self.folder), self.name, *map(str, self.image_stores)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": SEARCH_PATH},
                start_new_session=True,
            )
        self._record_pids([self._unshare.pid])
        self._wait_for_init()
        self.start_sshd()

    def shut_down(self) -> None:
        """Pulls the plug: every process of the node dies at once."""
        records.end_node(self.run, self.record)
        if self._unshare is not None:
            self._unshare.wait(timeout=10)
        self.record.pids = []
        self.run.save()

    def reboot(self) -> None:
        """Pulls the plug and starts again; containers are gone, files stay, the boot id is another."""
        self.shut_down()
        self.boot()

    def reinstall(self) -> None:
        """Pulls the plug and starts from an empty disk: another host key; no account, agent, state or containers."""
        self.shut_down()
        state = self.folder / "disk/state"
        subprocess.run(["umount", str(state)], check=True, timeout=10)
        self.record.mounts.remove(str(state))
        for part in ("upper", "work", "root", "disk"):
            shutil.rmtree(self.folder / part)
        self.make()
        self.boot()

    def execute(
        self,
        *command: str,
        text_in: str | None = None,
        check: bool = True,
        timeout_s: float = 60,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as root inside the node, as someone at its console would."""
        env = {"PATH": SEARCH_PATH, "HOME": "/root", "LANG": "C.UTF-8", **(environment or {})}
        done = subprocess.run(
            [*self.console(), *command],
            input=text_in,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=env,
        )
        if check and done.returncode != 0:
            raise RuntimeError(
                f"{self.name}: {' '.join(command)}: rc {done.returncode}: {done.stdout}{done.stderr}"
            )
        return done

    def console(self) -> Sequence[str]:
        """Gives the beginning of an argument list that runs what follows inside the node."""
        _, (init_pid, _) = self.record.pids
        return ("nsenter", "--target", str(init_pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--")

    def podman(self, *arguments: str, check: bool = True, timeout_s: float = 60) -> str:
        """Runs the node's rootful podman and gives what it printed."""
        return self.execute("podman", *arguments, check=check, timeout_s=timeout_s).stdout

    def host_key(self) -> str:
        """Gives the public host key as sshd holds it: type and base64, as a pinned key is written."""
        shown = self.execute("cat", "/etc/ssh/ssh_host_ed25519_key.pub").stdout
        return " ".join(shown.split()[:2])

    def boot_id(self) -> str:
        return self.execute("cat", BOOT_ID_PATH).stdout.strip()

    def start_sshd(self) -> None:
        """Starts sshd with the distribution's own configuration and waits until it listens."""
        self.execute("/usr/sbin/sshd", "-E", "/var/log/sshd.log")
        deadline_s = time.monotonic() + 5
        while time.monotonic() < deadline_s:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((self.address, self.port), timeout=0.5),
            ):
                return
            time.sleep(0.02)
        raise RuntimeError(f"{self.name}: sshd does not listen on {self.address}:{self.port}")

    def stop_sshd(self) -> None:
        """Stops the listening sshd; open sessions live on, as they do when the service is restarted."""
        pid = self.execute("cat", "/run/sshd.pid").stdout.strip()
        self.execute("sh", "-c", f"kill {pid}; while kill -0 {pid}; do sleep 0.01; done 2> /dev/null; true")

    def change_host_key(self) -> None:
        """Gives the node another host key, as a machine that someone put in its place would have."""
        self.stop_sshd()
        self.execute("sh", "-c", "rm -f /etc/ssh/ssh_host_*")
        self._make_host_key()
        self.start_sshd()

    def set_local(self, **settings: object) -> None:
        """Changes the node's own settings; the next enrolment puts them in force. None takes one back."""
        path = "/etc/fairway/node.local.json"
        local = {**json.loads(self.execute("cat", path).stdout), **settings}
        kept = {key: value for key, value in local.items() if value is not None}
        self.execute("sh", "-c", f"cat > {path}", text_in=json.dumps(kept))

    def add_admin(self, name: str, password: str) -> None:
        """Adds a person who may use sudo with a password, for the one-time sudo login."""
        self.execute("useradd", "--create-home", "--shell", "/bin/sh", name)
        self.execute("chpasswd", text_in=f"{name}:{password}\n")
        self.execute(
            "sh",
            "-c",
            f"echo '{name} ALL=(ALL) ALL' > /etc/sudoers.d/{name}; chmod 440 /etc/sudoers.d/{name}",
        )

    def write_gpus(self, **changes: object) -> None:
        """Writes the node's pretend GPUs for the `file:` provider; `changes` go into the first one."""
        gpus = [
            {
                "uuid": f"GPU-{self.run.run}-{self.name}-{index}",
                "index": index,
                "model": "Pretend A100",
                "memory_mib": 40960,
                "health": "ok",
            }
            for index in range(self.gpu_count)
        ]
        if gpus:
            gpus[0].update(changes)
        target = self.folder / "upper" / GPUS_PATH.lstrip("/")
        if self._unshare is not None and self.record.pids:
            self.execute("sh", "-c", f"cat > {GPUS_PATH}", text_in=json.dumps({"gpus": gpus}))
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"gpus": gpus}))

    def _wait_for_init(self) -> None:
        assert self._unshare is not None
        deadline_s = time.monotonic() + 10
        while not (self.folder / "up").exists():
            if self._unshare.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.name} did not start: {(self.folder / 'init.log').read_text()}")
            time.sleep(0.005)
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        self._record_pids([self._unshare.pid, int(children[0])])
        if not self.execute("sh", "-c", "ls /etc/ssh/rig_host_key_made", check=False).stdout:
            self.execute("sh", "-c", "rm -f /etc/ssh/ssh_host_*; touch /etc/ssh/rig_host_key_made")
            self._make_host_key()

    def _make_host_key(self) -> None:
        path = "/etc/ssh/ssh_host_ed25519_key"
        self.execute("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", path)

    def _record_pids(self, pids: list[int]) -> None:
        self.record.pids = [(pid, records.process_start(pid) or "") for pid in pids]
        self.run.save()

    def _hide_fairway(self) -> None:
        """Hides what this machine has of Fairway, since it may itself be a portal or a node."""
        etc = self.folder / "upper/etc"
        for name in ("passwd", "group", "shadow", "gshadow", "subuid", "subgid"):
            source = Path("/etc") / name
            if source.exists():
                lines = source.read_text().splitlines(keepends=True)
                (etc / name).write_text("".join(line for line in lines if not line.startswith("fairway")))
                (etc / name).chmod(source.stat().st_mode & 0o777)
                os.chown(etc / name, source.stat().st_uid, source.stat().st_gid)
        for hidden in HIDDEN:
            if Path(hidden).exists():
                cover = self.folder / "upper" / hidden.lstrip("/")
                if Path(hidden).is_dir():
                    cover.mkdir(parents=True, exist_ok=True)
                    os.setxattr(cover, "trusted.overlay.opaque", b"y")
                else:
                    cover.parent.mkdir(parents=True, exist_ok=True)
                    os.mknod(cover, stat.S_IFCHR, os.makedev(0, 0))  # as overlayfs marks what was deleted

    def _write_local_settings(self) -> None:
        """Writes what an agent must know of this machine alone, where the enrolment script looks for it."""
        local = self.folder / "upper/etc/fairway/node.local.json"
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_text(
            json.dumps(
                {
                    "boot_id_path": BOOT_ID_PATH,
                    "gpu_provider": f"file:{GPUS_PATH}",
                    "min_free_disk_mib": DISK_FLOOR_MIB,
                    "runtimes": [{"kind": "podman", "create_flags": list(CREATE_FLAGS)}],
                }
            )
        )

    def _configure_engine(self) -> None:
        """Writes what an administrator sets for podman on a machine like this (see the record on the rig)."""
        containers = self.folder / "upper/etc/containers"
        containers.mkdir(parents=True)
        stores = ", ".join(f'"/run/rig/images/{number + 1}"' for number in range(len(self.image_stores)))
        (containers / "storage.conf").write_text(
            '[storage]\ndriver = "overlay"\ngraphroot = "/var/lib/containers/storage"\n'
            'runroot = "/run/containers/storage"\n'
            f"[storage.options]\nadditionalimagestores = [{stores}]\n"
        )
        (containers / "containers.conf").write_text(
            '[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\nevents_logger = "file"\n'
            '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
        )
        os.chmod(containers, 0o755)
