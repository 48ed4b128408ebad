"""A Slurm of one node on this machine, tuned for throughput, for ``bench jobs``."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo")
TUNED = "sched_min_interval=100000,bf_interval=5,batch_sched_delay=0,sched_interval=1"
"""The first two options are those of the published figure; the other two raise throughput by half."""
_READY_WITHIN_S = 30.0

_CONFIGURATION = """
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters={tuned}
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=300
MaxJobCount=20000
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={slots} RealMemory=4000 State=UNKNOWN
PartitionName=bench Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


def missing_slurm() -> str | None:
    """Return why Slurm cannot run here, as a message; None when it can."""
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"{', '.join(lacking)} missing: apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """Slurm commands for this controller."""

    def __init__(self, folder: Path) -> None:
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """Return the output of one command."""
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def submit(self, *command: str, tasks: int = 0) -> None:
        """Submit a job of one slot without output, or an array of ``tasks``."""
        array = [f"--array=0-{tasks - 1}"] if tasks else []
        self.run(
            "sbatch", "--quiet", "--output=/dev/null", "--chdir=/", *array, f"--wrap={' '.join(command)}"
        )

    def unfinished(self) -> int:
        """Return the number of pending and running jobs."""
        states = "PENDING,RUNNING,COMPLETING,CONFIGURING"
        return len(self.run("squeue", "--noheader", "--format=%i", f"--states={states}").split())


@contextlib.contextmanager
def slurm(folder: Path, slots: int) -> Iterator[Slurm]:
    """Run a controller and a node with this many slots."""
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    text = _CONFIGURATION.format(
        host=host, controller=_free(), daemon=_free(), folder=folder, tuned=TUNED, slots=slots
    )
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    configured = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    places = [
        f"--{name}={folder}/munge.{ending}"
        for name, ending in (
            ("socket", "sock"),
            ("pid-file", "pid"),
            ("log-file", "log"),
            ("seed-file", "seed"),
        )
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_running("munged", "--foreground", "--force", f"--key-file={key}", *places))
        _until(lambda: (folder / "munge.sock").exists(), folder)
        stack.enter_context(_running("slurmctld", "-D", environment=configured))
        stack.enter_context(_running("slurmd", "-D", "-N", host, environment=configured))
        made = Slurm(folder)
        _until(lambda: _idle(made), folder)
        yield made


def _idle(made: Slurm) -> bool:
    with contextlib.suppress(subprocess.CalledProcessError):
        return made.run("sinfo", "--noheader", "--format=%T").strip() == "idle"
    return False


@contextlib.contextmanager
def _running(*command: str, environment: dict[str, str] | None = None) -> Iterator[None]:
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until(met: object, folder: Path) -> None:
    assert callable(met)
    deadline_s = time.monotonic() + _READY_WITHIN_S
    while not met():
        if time.monotonic() > deadline_s:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
            raise SystemExit(f"Slurm does not come up:\n{logs}")
        time.sleep(0.2)


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
