"""The live connection test of a node: one step after another, each with its result, as a page shows them."""

from __future__ import annotations

import enum
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agents.keys import Purpose, fingerprint
from agents.link import LinkUnknown, Refused
from agents.openssh import check_key, check_program
from agents.samples import Hello
from agents.ssh import (
    HostKeyMismatch,
    Role,
    SshError,
    SshTarget,
    connect_with_key,
    dial,
    open_ssh,
    scan_host_key,
)

HELLO_LIMIT_S = 15.0
SKEW_WARNING_S = 2.0
DISK_WARNING_MIB = 5 * 1024


class Outcome(enum.StrEnum):
    """How a step ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Step:
    """One step of the test: its name for programs, a title and a sentence for people."""

    name: str
    title: str
    outcome: Outcome
    sentence: str
    duration_s: float


class _StepFailed(Exception):
    """A step found what it looks for to be missing; the message is the sentence."""


_TITLES = {
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


def check_node(
    target: SshTarget,
    keys: Mapping[Purpose, Path],
    cluster: str,
    *,
    now: Callable[[], float] = time.time,
) -> Iterator[Step]:
    """Tries the way to a node and yields each step as it ends; all are yielded, in the order of the page.

    A step that cannot be tried because an earlier one failed, or because this process does not hold the key,
    is skipped and says so. The whole takes at most about a minute.
    """
    test = _Test(target, keys, cluster, now)
    blocked_by: str | None = None
    for name, title in _TITLES.items():
        if blocked_by is not None and name not in test.independent_of(blocked_by):
            yield Step(name, title, Outcome.SKIPPED, f"Not tried: {_TITLES[blocked_by].lower()} failed.", 0.0)
            continue
        began_s = time.monotonic()
        try:
            outcome, sentence = getattr(test, f"step_{name}")()
        except (SshError, _StepFailed, LinkUnknown) as failure:
            outcome, sentence = Outcome.FAILED, str(failure)
        except Refused as refused:
            outcome, sentence = Outcome.FAILED, refused.message
        yield Step(name, title, outcome, sentence, time.monotonic() - began_s)
        if outcome is Outcome.FAILED and blocked_by is None:
            blocked_by = name


Result = tuple[Outcome, str]


class _Test:
    """The steps, and what earlier ones have found for later ones."""

    def __init__(
        self, target: SshTarget, keys: Mapping[Purpose, Path], cluster: str, now: Callable[[], float]
    ) -> None:
        self._target = target
        self._keys = keys
        self._cluster = cluster
        self._now = now
        self._hello: Hello | None = None
        self._asked_s = self._answered_s = 0.0

    @staticmethod
    def independent_of(failed: str) -> tuple[str, ...]:
        """Gives the steps that can be tried although that one failed."""
        if failed in ("control", "watch", "tunnel"):
            return ("watch", "tunnel")
        return ("gpus", "disk", "clock") if failed in ("runtime", "gpus", "disk") else ()

    def step_resolve(self) -> Result:
        try:
            found = socket.getaddrinfo(self._target.host, self._target.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise _StepFailed(f"No address is known for {self._target.host}.") from error
        addresses = sorted({str(entry[4][0]) for entry in found})
        return Outcome.OK, f"{self._target.host} is {', '.join(addresses)}."

    def step_connect(self) -> Result:
        began_s = time.monotonic()
        dial(self._target).close()
        took_ms = (time.monotonic() - began_s) * 1000
        return (
            Outcome.OK,
            f"{self._target.host} takes connections on port {self._target.port} ({took_ms:.1f} ms).",
        )

    def step_host_key(self) -> Result:
        key_type, _, _ = self._target.host_key.partition(" ")
        shown = scan_host_key(self._target.host, self._target.port, key_type)
        if shown.line != " ".join(self._target.host_key.split()[:2]):
            raise HostKeyMismatch(
                f"The node shows {shown.fingerprint}, but {fingerprint(self._target.host_key)} was confirmed: "
                "another machine answers, or it was installed anew.",
                shown.line,
            )
        return Outcome.OK, f"It shows the confirmed key {shown.fingerprint} ({shown.key_type})."

    def step_control(self) -> Result:
        return self._try_key("control", "to start and stop tasks")

    def step_watch(self) -> Result:
        return self._try_key("watch", "to read its state and its meters")

    def step_tunnel(self) -> Result:
        check_program()
        if "tunnel" in self._keys:
            check_key(self._keys["tunnel"])
        return self._try_key("tunnel", "to reach the ports of jobs")

    def step_agent(self) -> Result:
        purpose: Purpose = "control" if "control" in self._keys else "watch"
        if purpose not in self._keys:
            return Outcome.SKIPPED, "Not tried: this process holds no key that opens the agent."
        role: Role = "control" if purpose == "control" else "watch"
        self._asked_s = self._now()
        link = open_ssh(
            self._target, self._keys[purpose], role, cluster=self._cluster, hello_within_s=HELLO_LIMIT_S
        )
        self._answered_s = self._now()
        link.close()
        self._hello = hello = link.hello
        sentence = f"Agent {hello.agent_version} answers on {hello.hostname} (Python {hello.python})."
        if hello.below_floor:
            return Outcome.WARNING, f"{sentence} {' '.join(hello.below_floor)}"
        return Outcome.OK, sentence

    def step_runtime(self) -> Result:
        runtimes = self._facts().runtimes
        if not runtimes:
            raise _StepFailed(
                "It has no way to run tasks: install podman and run the enrolment script again."
            )
        silent = [kind for kind, version in runtimes if version is None and kind != "process"]
        if silent:
            raise _StepFailed(f"{silent[0]} does not answer there: install or mend it.")
        named = ", ".join(f"{kind} {version or ''}".strip() for kind, version in runtimes)
        return Outcome.OK, f"It runs tasks with {named}."

    def step_gpus(self) -> Result:
        gpus = self._facts().gpus
        silent = self._facts().gpus_silent
        if silent is not None:
            return Outcome.WARNING, f"{silent} Until it does, no new work is placed on its GPUs."
        if not gpus:
            return Outcome.WARNING, "It reports no GPU: jobs that ask for one will not be placed here."
        models = ", ".join(sorted({gpu.model for gpu in gpus}))
        simulated = " (simulated)" if any(gpu.simulated for gpu in gpus) else ""
        sentence = f"{len(gpus)} x {models}{simulated}, driver {self._facts().driver or 'unknown'}."
        ill = [gpu.uuid for gpu in gpus if gpu.health != "ok"]
        if ill:
            sentence = f"{sentence} Not healthy: {', '.join(ill)}."
        told = sorted({gpu.health_sentence for gpu in gpus if gpu.health_sentence})
        return (Outcome.WARNING if ill or told else Outcome.OK), " ".join([sentence, *told])

    def step_disk(self) -> Result:
        free_mib = self._facts().disk_free_mib
        if free_mib is None:
            return Outcome.WARNING, "It could not say how much disk is free."
        sentence = f"{free_mib / 1024:.1f} GiB are free where the agent keeps its state."
        return (Outcome.WARNING if free_mib < DISK_WARNING_MIB else Outcome.OK), sentence

    def step_clock(self) -> Result:
        clock_s = self._facts().clock_s
        # The answer was written between question and answer; only what lies outside is skew.
        skew_s = max(self._asked_s - clock_s, clock_s - self._answered_s, 0.0)
        if skew_s > SKEW_WARNING_S:
            way = "behind" if clock_s < self._asked_s else "ahead of"
            return (
                Outcome.WARNING,
                f"Its clock is {skew_s:.0f} s {way} the portal's; check its time service.",
            )
        return Outcome.OK, f"Its clock agrees with the portal's within {max(skew_s, 0.1):.1f} s."

    def _try_key(self, purpose: Purpose, use: str) -> Result:
        if purpose not in self._keys:
            return Outcome.SKIPPED, f"Not tried: this process does not hold the {purpose} key."
        connect_with_key(self._target, self._keys[purpose]).close()
        return Outcome.OK, f"The account {self._target.account} takes the key {use}."

    def _facts(self) -> Hello:
        if self._hello is None:
            raise _StepFailed("The agent was not asked.")
        return self._hello
