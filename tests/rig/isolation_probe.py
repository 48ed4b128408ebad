"""Runs inside a container and writes down what can be seen and done from there, as JSON into the home."""

import ctypes
import errno
import json
import multiprocessing
import os
import resource
import socket
import stat
import subprocess
import sys
import threading
import time

PTRACE_ATTACH = 16
CLONE_NEWUSER = 0x10000000
SIGCHLD = 17
CALLS = {
    "x86_64": {"socket": 41, "clone": 56, "unshare": 272, "clone3": 435, "io_uring_setup": 425},
    "aarch64": {"socket": 198, "clone": 220, "unshare": 97, "clone3": 435, "io_uring_setup": 425},
}
NAMESPACES = ("pid", "net", "ipc", "uts", "mnt", "cgroup")


def read(path):
    try:
        with open(path, "rb") as stream:
            return stream.read(65536).decode(errors="replace")
    except OSError as error:
        return "!" + type(error).__name__


def write(path, text):
    with open(path, "w") as stream:
        stream.write(text)


def attempt(action):
    """Gives None when it worked, else the name of the error number."""
    try:
        action()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else type(error).__name__
    return None


def connect(address, port):
    with socket.create_connection((address, port), timeout=1.5) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        if not connection.recv(100):
            raise ConnectionResetError(104, "closed")


def suid_files():
    found = []
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/proc", "/sys")]
        for name in files:
            path = os.path.join(folder, name)
            try:
                if os.lstat(path).st_mode & (stat.S_ISUID | stat.S_ISGID):
                    found.append(path)
            except OSError:
                pass
    return found


def devices():
    found = {}
    for name in os.listdir("/dev"):
        facts = os.lstat(os.path.join("/dev", name))
        if stat.S_ISCHR(facts.st_mode) or stat.S_ISBLK(facts.st_mode):
            found[name] = [os.major(facts.st_rdev), os.minor(facts.st_rdev), stat.S_ISBLK(facts.st_mode)]
    return found


def sockets():
    found = []
    for top in ("/run", "/var", "/tmp", "/home"):
        for folder, _, files in os.walk(top):
            for name in files:
                path = os.path.join(folder, name)
                try:
                    if stat.S_ISSOCK(os.lstat(path).st_mode):
                        found.append(path)
                except OSError:
                    pass
    return found


def ptrace_attach(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_ATTACH, pid, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def system_call(name, *arguments):
    """Makes a system call in a child process; gives the name of its error, None when it worked."""
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        words = [ctypes.c_long(each) for each in arguments]
        answer = libc.syscall(ctypes.c_long(CALLS[os.uname().machine][name]), *words)
        os._exit(ctypes.get_errno() if answer == -1 else 0)
    status = os.waitpid(child, 0)[1]
    return errno.errorcode.get(os.waitstatus_to_exitcode(status))


def ordinary_programs():
    """What common programs need of the filtered system calls; gives the error of each that failed."""
    return {
        "unix": attempt(lambda: socket.socketpair()),
        "inet": attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()),
        "inet6": attempt(lambda: socket.socket(socket.AF_INET6).close()),
        "netlink": attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()),
        "program": attempt(lambda: subprocess.run(["true"], check=True)),
        "spawn": attempt(lambda: os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", "true"], {}), 0)),
        "processes": attempt(in_processes),
    }


def in_processes():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]


def most_threads(limit):
    stop, started = threading.Event(), []
    try:
        while len(started) < limit:
            thread = threading.Thread(target=stop.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        pass
    stop.set()
    return len(started)


def main():
    asked = json.loads(os.environ["PROBE"])
    shm = os.statvfs("/dev/shm")
    report = {
        "uid": os.getuid(),
        "gid": os.getgid(),
        "groups": os.getgroups(),
        "status": dict(
            line.split(":\t", 1) for line in read("/proc/self/status").splitlines() if ":\t" in line
        ),
        "suid": suid_files(),
        "namespaces": {name: os.readlink("/proc/self/ns/" + name) for name in NAMESPACES},
        "kcore": len(read("/proc/kcore")) if not read("/proc/kcore").startswith("!") else 0,
        "keys": read("/proc/keys"),
        "firmware": os.listdir("/sys/firmware") if os.path.isdir("/sys/firmware") else [],
        "write_sysctl": attempt(lambda: write("/proc/sys/kernel/hostname", "x")),
        "write_sysrq": attempt(lambda: write("/proc/sysrq-trigger", "h")),
        "proc_sys_read_only": bool(os.statvfs("/proc/sys").f_flag & os.ST_RDONLY),
        "sys_read_only": bool(os.statvfs("/sys").f_flag & os.ST_RDONLY),
        "cgroup_read_only": attempt(lambda: write(asked["pids_file"], "max")),
        "sockets": sockets(),
        "mountinfo": read("/proc/self/mountinfo").splitlines(),
        "devices": devices(),
        "mknod": attempt(
            lambda: os.mknod(os.environ["HOME"] + "/disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0))
        ),
        "cgroup": {name: read(path).strip() for name, path in asked["cgroup_files"].items()},
        "shm_bytes": shm.f_blocks * shm.f_frsize,
        "shm_files": os.listdir("/dev/shm"),
        "environment": dict(os.environ),
        "arguments": sys.argv[1:],
        "secrets": {
            name: [
                oct(os.stat("/run/fairway/" + name).st_mode & 0o777),
                os.stat("/run/fairway/" + name).st_uid,
            ]
            for name in os.listdir("/run/fairway")
        },
        "agent_files": [path for path in asked["agent_paths"] if os.path.exists(path)],
        "hostname": socket.gethostname(),
        "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
        "signal_outside": [attempt(lambda pid=pid: os.kill(pid, 0)) for pid in asked["outside_pids"]],
        "ptrace_outside": [attempt(lambda pid=pid: ptrace_attach(pid)) for pid in asked["outside_pids"]],
        "system_calls": {
            "unshare": system_call("unshare", CLONE_NEWUSER),
            "unshare more": system_call("unshare", CLONE_NEWUSER | 0x20000 | 0x40000000),
            "unshare by 64 bits": system_call("unshare", CLONE_NEWUSER | 1 << 32),
            "clone": system_call("clone", CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0),
            "clone by 64 bits": system_call("clone", CLONE_NEWUSER | SIGCHLD | 1 << 32, 0, 0, 0, 0),
            "clone3": system_call("clone3", 0, 0),
            "vsock": system_call("socket", 40, 1, 0),
            "vsock datagrams": system_call("socket", 40, 2 | 0x80000, 0),
            "vsock by 64 bits": system_call("socket", 40 | 1 << 32, 1, 0),
            "io_uring": system_call("io_uring_setup", 1, 0),
        },
        "programs": ordinary_programs(),
        "core_limit": resource.getrlimit(resource.RLIMIT_CORE),
        "connects": {
            f"{address}:{port}": attempt(lambda address=address, port=port: connect(address, port))
            for address, port in asked["connects"]
        },
    }
    report["threads"] = most_threads(asked["pids"] * 2)  # last: numbers of threads look like processes
    with open(os.environ["HOME"] + "/report.json.new", "w") as stream:
        json.dump(report, stream)
    os.rename(os.environ["HOME"] + "/report.json.new", os.environ["HOME"] + "/report.json")
    time.sleep(600)  # whoever reads the report looks at the container too


main()
