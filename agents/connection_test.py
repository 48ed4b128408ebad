"""Live connection test of a node: yields the result of each step as it ends."""

from __future__ import annotations

import enum
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agents.keys import Purpose, fingerprint
from agents.link import AgentError, OutcomeUnknownError
from agents.ssh import (
    HostKeyMismatchError,
    Role,
    SshError,
    SshTarget,
    connect_tcp,
    connect_with_key,
    open_ssh,
    scan_host_key,
)
from agents.tunnel.openssh import check_key_file, check_ssh_installed
from agents.wire.messages import Hello

HELLO_TIMEOUT_S = 15.0
SKEW_WARNING_S = 2.0
DISK_WARNING_MIB = 5 * 1024


class StepOutcome(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class StepResult:
    """Result of one step: a name for programs, a title and a message for users."""

    name: str
    title: str
    outcome: StepOutcome
    message: str
    duration_s: float


class _StepFailedError(Exception):
    """A step failed; the message is for users."""


_STEP_TITLES = {
    "resolve": "Name",
    "connect": "TCP connection",
    "host_key": "Host key",
    "control": "Control key",
    "watch": "Watch key",
    "tunnel": "Tunnel key",
    "agent": "Agent",
    "runtime": "Runtime",
    "gpus": "GPUs",
    "disk": "Disk",
    "clock": "Clock",
}
_MACHINE_STEP = {"machine": "Machine"}


def run_connection_test(
    target: SshTarget,
    keys: Mapping[Purpose, Path],
    cluster: str,
    *,
    boot_id: str | None = None,
    now: Callable[[], float] = time.time,
) -> Iterator[StepResult]:
    """Test the connection to a node; yield each step as it ends, in page order.

    A step is skipped when an earlier one failed, or when this process does not have the key. Takes at most
    about a minute. With ``boot_id``, the last step is that the machine is the one that reports it: machines that
    were made from one disk image may have the same host key.
    """
    test = _ConnectionTest(target, keys, cluster, now, boot_id)
    titles = _STEP_TITLES if boot_id is None else _STEP_TITLES | _MACHINE_STEP
    blocked_by: str | None = None
    for name, title in titles.items():
        if blocked_by is not None and name not in test.steps_independent_of(blocked_by):
            yield StepResult(
                name,
                title,
                StepOutcome.SKIPPED,
                f"Skipped: {titles[blocked_by].lower()} failed.",
                0.0,
            )
            continue
        began_s = time.monotonic()
        try:
            outcome, message = getattr(test, f"step_{name}")()
        except (SshError, _StepFailedError, OutcomeUnknownError) as error:
            outcome, message = StepOutcome.FAILED, str(error)
        except AgentError as error:
            outcome, message = StepOutcome.FAILED, error.message
        yield StepResult(name, title, outcome, message, time.monotonic() - began_s)
        if outcome is StepOutcome.FAILED and blocked_by is None:
            blocked_by = name


OutcomeMessage = tuple[StepOutcome, str]


class _ConnectionTest:
    """The steps, and results that later steps need."""

    def __init__(
        self,
        target: SshTarget,
        keys: Mapping[Purpose, Path],
        cluster: str,
        now: Callable[[], float],
        boot_id: str | None,
    ) -> None:
        self._target = target
        self._keys = keys
        self._cluster = cluster
        self._now = now
        self._boot_id = boot_id
        self._hello: Hello | None = None
        self._request_sent_s = self._reply_received_s = 0.0

    @staticmethod
    def steps_independent_of(failed: str) -> tuple[str, ...]:
        """Return the steps that can run although ``failed`` failed."""
        if failed in ("control", "watch", "tunnel"):
            return ("watch", "tunnel")
        return ("gpus", "disk", "clock", "machine") if failed in ("runtime", "gpus", "disk") else ()

    def step_resolve(self) -> OutcomeMessage:
        try:
            found = socket.getaddrinfo(self._target.host, self._target.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise _StepFailedError(f"No address is known for {self._target.host}.") from error
        addresses = sorted({str(entry[4][0]) for entry in found})
        return StepOutcome.OK, f"{self._target.host} is {', '.join(addresses)}."

    def step_connect(self) -> OutcomeMessage:
        began_s = time.monotonic()
        connect_tcp(self._target.host, self._target.port).close()
        took_ms = (time.monotonic() - began_s) * 1000
        return (
            StepOutcome.OK,
            f"{self._target.host} accepts connections on port {self._target.port} ({took_ms:.1f} ms).",
        )

    def step_host_key(self) -> OutcomeMessage:
        key_type, _, _ = self._target.host_key.partition(" ")
        shown = scan_host_key(self._target.host, self._target.port, key_type)
        if shown.line != " ".join(self._target.host_key.split()[:2]):
            raise HostKeyMismatchError(
                f"The node presents {shown.fingerprint}, but {fingerprint(self._target.host_key)} was "
                "confirmed: it is another machine, or it was reinstalled.",
                shown.line,
            )
        return StepOutcome.OK, f"It presents the confirmed key {shown.fingerprint} ({shown.key_type})."

    def step_control(self) -> OutcomeMessage:
        return self._try_key("control", "to start and stop tasks")

    def step_watch(self) -> OutcomeMessage:
        return self._try_key("watch", "to read its state and metrics")

    def step_tunnel(self) -> OutcomeMessage:
        check_ssh_installed()
        if "tunnel" in self._keys:
            check_key_file(self._keys["tunnel"])
        return self._try_key("tunnel", "to reach the ports of jobs")

    def step_agent(self) -> OutcomeMessage:
        purpose: Purpose = "control" if "control" in self._keys else "watch"
        if purpose not in self._keys:
            return StepOutcome.SKIPPED, "Skipped: this process has no key for the agent."
        role: Role = "control" if purpose == "control" else "watch"
        self._request_sent_s = self._now()
        link = open_ssh(
            self._target, self._keys[purpose], role, cluster=self._cluster, hello_timeout_s=HELLO_TIMEOUT_S
        )
        self._reply_received_s = self._now()
        link.close()
        self._hello = hello = link.hello
        message = f"Agent {hello.agent_version} responds on {hello.hostname} (Python {hello.python})."
        if hello.version_warnings:
            return StepOutcome.WARNING, f"{message} {' '.join(hello.version_warnings)}"
        return StepOutcome.OK, message

    def step_runtime(self) -> OutcomeMessage:
        runtimes = self._require_hello().runtimes
        if not runtimes:
            raise _StepFailedError(
                "It has no runtime for tasks: install podman and run the enrolment script again."
            )
        silent = [kind for kind, version in runtimes if version is None and kind != "process"]
        if silent:
            raise _StepFailedError(f"{silent[0]} does not respond there: install or repair it.")
        named = ", ".join(f"{kind} {version or ''}".strip() for kind, version in runtimes)
        return StepOutcome.OK, f"It runs tasks with {named}."

    def step_gpus(self) -> OutcomeMessage:
        gpus = self._require_hello().gpus
        silent = self._require_hello().gpu_driver_error
        if silent is not None:
            return StepOutcome.WARNING, f"{silent} Until it does, no new task is placed on its GPUs."
        if not gpus:
            return StepOutcome.WARNING, "It reports no GPU: jobs that request one are not placed here."
        models = ", ".join(sorted({gpu.model for gpu in gpus}))
        simulated = " (simulated)" if any(gpu.simulated for gpu in gpus) else ""
        message = f"{len(gpus)} x {models}{simulated}, driver {self._require_hello().driver or 'unknown'}."
        ill = [gpu.uuid for gpu in gpus if gpu.health != "ok"]
        if ill:
            message = f"{message} Not healthy: {', '.join(ill)}."
        reported = sorted({gpu.health_message for gpu in gpus if gpu.health_message})
        return (StepOutcome.WARNING if ill or reported else StepOutcome.OK), " ".join([message, *reported])

    def step_disk(self) -> OutcomeMessage:
        free_mib = self._require_hello().disk_free_mib
        if free_mib is None:
            return StepOutcome.WARNING, "It could not report the free disk space."
        message = f"{free_mib / 1024:.1f} GiB are free in the agent's state folder."
        return (StepOutcome.WARNING if free_mib < DISK_WARNING_MIB else StepOutcome.OK), message

    def step_clock(self) -> OutcomeMessage:
        clock_s = self._require_hello().clock_s
        # the reply was written between request and reply; only time outside that interval is skew
        skew_s = max(self._request_sent_s - clock_s, clock_s - self._reply_received_s, 0.0)
        if skew_s > SKEW_WARNING_S:
            way = "behind" if clock_s < self._request_sent_s else "ahead of"
            return (
                StepOutcome.WARNING,
                f"Its clock is {skew_s:.0f} s {way} the portal's; check its time service.",
            )
        return StepOutcome.OK, f"Its clock matches the portal's within {max(skew_s, 0.1):.1f} s."

    def step_machine(self) -> OutcomeMessage:
        if self._require_hello().boot_id != self._boot_id:
            raise _StepFailedError(
                "It is another machine with a copy of the host key: the node still answers at its old address, "
                "and was started at another time."
            )
        return StepOutcome.OK, "It is the machine that answers at the old address, too."

    def _try_key(self, purpose: Purpose, use: str) -> OutcomeMessage:
        if purpose not in self._keys:
            return StepOutcome.SKIPPED, f"Skipped: this process does not have the {purpose} key."
        connect_with_key(self._target, self._keys[purpose]).close()
        return StepOutcome.OK, f"The account {self._target.user} accepts the key {use}."

    def _require_hello(self) -> Hello:
        if self._hello is None:
            raise _StepFailedError("The agent was not contacted.")
        return self._hello
