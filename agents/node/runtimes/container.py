"""Common part of podman and docker: command line, inspection, images, errors."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, cast

from agents.node import errors
from agents.node.errors import AgentError, invalid_spec
from agents.node.host import procfs
from agents.node.host.atomic_files import remove_file, write_atomic
from agents.node.runtimes import (
    CREATED,
    EXITED,
    RUNNING,
    ContainerConfig,
    ContainerInfo,
    Image,
    Runtime,
    WritablePaths,
    arguments,
)
from agents.node.runtimes.firewall import Firewall
from agents.node.runtimes.image_cuda import required_cuda_version
from agents.node.runtimes.podman_store import StoreFingerprint
from agents.node.runtimes.seccomp import SeccompProfiles, has_vsock
from agents.node.settings import RuntimeSettings, Settings
from agents.node.spec import egress
from agents.node.spec.environment import is_reserved
from agents.node.spec.image_names import normalize_image_name
from agents.node.spec.task_spec import FORBIDDEN_ENV
from agents.node.storage import project_quota
from agents.node.storage.volumes import find_mount

_COMMAND_WITHIN_S = 60.0
_PULL_WITHIN_S = 3600.0
_REMOVE_WITHIN_S = 120.0
_SAVE_WITHIN_S = 900.0
_MAX_ATTEMPTS = 3  # a container may disappear between two commands
_DISK_FULL_MESSAGES = ("no space left on device", "disk quota exceeded")
_NAME_TAKEN_MESSAGES = ("already in use", "already exists", "is in use")
_PORT_TAKEN_MESSAGES = ("address already in use", "port is already allocated")
_PROCESS_ENDED_MESSAGES = ("no such process",)
"""Podman fails when a container's process ends while it reads the process's control group."""
_INSPECT_RETRIES = 3
_NOT_FOUND_MESSAGES = (
    "no such container",
    "no such object",
    "no container with",
    "not found",
    "no such network",
)
_NO_NETWORK_MESSAGES = ("unable to find network", "network not found")
_IMMUTABLE_REFERENCE = re.compile(r"(sha256:)?[0-9a-f]{64}\Z|.*@sha256:[0-9a-f]{64}\Z")


class CommandResult(NamedTuple):
    code: int
    stdout: str
    stderr: str

    def mentions(self, phrases: Sequence[str]) -> bool:
        text = self.stderr.lower()
        return any(phrase in text for phrase in phrases)


class ImageConfig(NamedTuple):
    """Properties of an image needed to create a container."""

    image_id: str
    env: Tuple[str, ...]


class CachedImage(NamedTuple):
    """A cached inspection of an image, and the state of the store it is valid for."""

    facts: ImageConfig
    fingerprint: Optional[StoreFingerprint]  # None: always valid, because the name is the image's digest


class ContainerRuntime(Runtime):
    """A container engine used by command line: argument lists only, each with a time limit."""

    _version_arguments: Sequence[str] = ("--version",)

    def __init__(self, settings: Settings, own: RuntimeSettings) -> None:
        self.settings = settings
        self._runtime_settings = own
        self.rootless = os.geteuid() != 0 and own.program[0] != "sudo"
        self.engine = arguments.EngineOptions(
            own.kind,
            settings.loopback,
            self.rootless,
            own.create_flags,
            settings.max_log_mib,
            has_ipv6=os.path.isdir("/proc/sys/net/ipv6"),
        )
        self._version: Optional[str] = None
        self._store_path: Optional[str] = None
        self._limits_layers: Optional[bool] = None
        self._images: Dict[str, CachedImage] = {}
        self._prepared_images: Dict[str, ImageConfig] = {}
        self._seccomp = SeccompProfiles(settings.state_dir, own.seccomp_profile)
        self._firewall = Firewall(settings) if settings.firewall and os.geteuid() == 0 else None

    # -- the command line ---------------------------------------------------------------------------------

    def command(self, arguments: Sequence[str]) -> List[str]:
        return [*self._runtime_settings.program, *self._runtime_settings.global_flags, *arguments]

    def run(
        self,
        arguments: Sequence[str],
        *,
        timeout_s: float = _COMMAND_WITHIN_S,
        lock_fd: Optional[int] = None,
        stdin: Optional[IO[bytes]] = None,
    ) -> CommandResult:
        try:
            answer = subprocess.run(
                self.command(arguments),
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                capture_output=True,
                timeout=timeout_s,
                check=False,
                pass_fds=() if lock_fd is None else (lock_fd,),
            )
        except FileNotFoundError as error:
            raise AgentError(errors.ENGINE_ERROR, f"{self.kind} is not installed on this node.") from error
        except subprocess.TimeoutExpired as error:
            raise AgentError(
                errors.ENGINE_ERROR, f"{self.kind} {arguments[0]} did not respond within {timeout_s:.0f} s."
            ) from error
        return CommandResult(
            answer.returncode, answer.stdout.decode(errors="replace"), answer.stderr.decode(errors="replace")
        )

    def run_checked(self, words: Sequence[str], **how: Any) -> str:
        """Like :meth:`run`, but raise the matching AgentError on failure."""
        answer = self.run(words, **how)
        if answer.code != 0:
            raise self.error(words[0], answer)
        return answer.stdout

    def error(self, verb: str, answer: CommandResult) -> AgentError:
        last = (
            answer.stderr.strip().splitlines()[-1][:600]
            if answer.stderr.strip()
            else f"exit code {answer.code}"
        )
        if answer.mentions(_DISK_FULL_MESSAGES):
            return AgentError(errors.DISK_FULL, f"The disk of the node is full: {last}")
        if answer.mentions(_PORT_TAKEN_MESSAGES):
            return AgentError(errors.PORT_IN_USE, f"A port of the node was taken in the meantime: {last}")
        return AgentError(errors.ENGINE_ERROR, f"{self.kind} {verb} failed: {last}")

    # -- tasks --------------------------------------------------------------------------------------------

    def version(self) -> Optional[str]:
        if self._version is None:
            with contextlib.suppress(AgentError):
                answer = self.run(self._version_arguments, timeout_s=10.0)
                found = re.search(r"\d+\.\d+(\.\d+)?", answer.stdout)
                self._version = found.group(0) if answer.code == 0 and found else None
        return self._version

    def seccomp_fault(self) -> Optional[str]:
        try:
            path = self._seccomp_profile(user_namespaces=False)
        except AgentError as error:
            return error.message
        return self._seccomp.missing_message("AF_VSOCK") if path is None and has_vsock() else ""

    def _seccomp_profile(self, *, user_namespaces: bool) -> Optional[str]:
        """Return the profile for a container; None for the default of the engine, where that is strict enough.

        Raise AgentError where a container would have more rights than the policy allows.
        """
        path = self._seccomp.path(user_namespaces=user_namespaces)
        if path is None and not user_namespaces and not self._default_seccomp_is_strict():
            raise AgentError(errors.ENGINE_ERROR, self._seccomp.missing_message())
        return path

    def _default_seccomp_is_strict(self) -> bool:
        """Return True if the engine's own default refuses user namespaces and AF_VSOCK."""
        return False

    def prepare(self, config: ContainerConfig) -> None:
        spec = config.spec
        self._seccomp_profile(user_namespaces=spec.user_namespaces)
        fault = self.refresh_firewall()
        if fault != "" and spec.egress.mode != egress.OPEN:
            raise invalid_spec(
                f"This node cannot enforce network policies: {fault or 'its firewall chains are missing.'}"
            )
        if spec.network is not None and self.run(["network", "inspect", spec.network]).code != 0:
            # docker would fail only at the start, when other ranks have started
            raise invalid_spec(f"This node has no network {spec.network} of {self.kind}.")
        if config.network_exists:
            self._prepared_images[spec.name] = self.inspect_image(spec.image or "")
            return
        # each engine command takes about 40 ms, so the network is created during the image inspection; a
        # refused start removes the network again
        with ThreadPoolExecutor(max_workers=1) as executor:
            network = executor.submit(self._create_job_network, config)
            self._prepared_images[spec.name] = self.inspect_image(spec.image or "")
        network.result()

    def create(self, config: ContainerConfig) -> None:
        image = self._prepared_images.pop(config.spec.name, None) or self.inspect_image(
            config.spec.image or ""
        )
        remove_file(os.path.join(config.task_dir, "pid"))
        engine = self.engine._replace(gpu_mode=self._gpu_mode()) if config.real_gpus else self.engine
        profile = self._seccomp_profile(user_namespaces=config.spec.user_namespaces)
        engine = engine._replace(seccomp=profile)
        if config.spec.disk_mib is not None:
            engine = engine._replace(limits_layers=self.limits_layers())
        words = arguments.create(engine, config, image.image_id, image.env)
        variables = arguments.environment_file(engine, config).encode()
        write_atomic(arguments.environment_path(config.task_dir), variables, sync=False)
        try:
            answer = self.run(words, lock_fd=config.lock_fd)
            own = not config.spec.host_network and config.spec.network is None
            if own and answer.code != 0 and answer.mentions(_NO_NETWORK_MESSAGES):
                # the unused network was pruned by someone else
                self._create_job_network(config)
                answer = self.run(words, lock_fd=config.lock_fd)
        finally:
            self._remove_env_file(config.spec.name)
        if answer.code == 0:
            return
        if answer.mentions(_NAME_TAKEN_MESSAGES) and config.spec.name in answer.stderr:
            raise AgentError(errors.NAME_CONFLICT, f"{config.spec.name} already exists.")
        if answer.mentions(("image not known", "no such image", "unable to find image")):
            self._images.clear()
            raise AgentError(errors.IMAGE_MISSING, f"The image {config.spec.image} is not on this node.")
        raise self.error("create", answer)

    def _gpu_mode(self) -> str:
        return arguments.CDI

    def refresh_firewall(self) -> Optional[str]:
        return self._firewall.refresh() if self._firewall is not None else None

    def limits_layers(self) -> bool:
        """Return True when writable layers can be limited: overlay on XFS with project quotas."""
        if self._limits_layers is None:
            root = os.path.realpath(self.store_path() or "/")
            mounts = procfs.read_text("/proc/self/mountinfo") or ""
            able = (
                not self.rootless
                and find_mount(mounts, root)[1] == "xfs"
                and project_quota.is_supported(root)
            )
            driver = self._engine_info("Driver", "Store.GraphDriverName") if able else ""
            self._limits_layers = driver in ("overlay", "overlay2")
        return self._limits_layers

    def _engine_info(self, docker_field: str, podman_field: str) -> str:
        field = docker_field if self.kind == "docker" else podman_field
        return self.run_checked(["info", "--format", "{{." + field + "}}"], timeout_s=10.0).strip()

    def start(self, name: str) -> None:
        self._remove_env_file(name)  # left by an interrupted creation
        self.run_checked(["start", name])

    def _remove_env_file(self, name: str) -> None:
        remove_file(arguments.environment_path(os.path.join(self.settings.state_dir, "tasks", name)))

    def find(self, name: str) -> Optional[ContainerInfo]:
        found = self._inspect([name])
        return found[0] if found else None

    def tasks(self, cluster: str) -> List[ContainerInfo]:
        ids = self.run_checked(
            [
                "ps",
                "--all",
                "--no-trunc",
                "--filter",
                f"label=fairway.cluster={cluster}",
                "--format",
                "{{.ID}}",
            ]
        ).split()
        return [found for found in self._inspect(ids) if found.cluster == cluster] if ids else []

    def _inspect(self, names: Sequence[str]) -> List[ContainerInfo]:
        found = (parse_container(row) for row in self._inspect_rows(names))
        return [each for each in found if each is not None]

    def _inspect_rows(self, names: Sequence[str]) -> List[Dict[str, Any]]:
        for _ in range(1 + _INSPECT_RETRIES):
            answer = self.run(["container", "inspect", *names])
            if answer.code == 0 or not answer.mentions(_PROCESS_ENDED_MESSAGES):
                break
        try:
            rows: List[Dict[str, Any]] = json.loads(answer.stdout or "[]")
        except ValueError:
            rows = []
        if answer.code != 0 and not rows and not answer.mentions(_NOT_FOUND_MESSAGES):
            raise self.error("inspect", answer)
        return rows

    def signal(self, name: str, signal_name: str) -> None:
        self.run_checked(["kill", "--signal", signal_name, name])

    def kill(self, name: str, *, timeout_s: float) -> None:
        found = self.find(name)
        answer = self.run(["kill", "--signal", "KILL", name])
        if answer.code != 0 and not answer.mentions((*_NOT_FOUND_MESSAGES, "not running", "state improper")):
            raise self.error("kill", answer)
        deadline_s = time.monotonic() + timeout_s
        while found is not None and procfs.is_alive(found.pid, None) and time.monotonic() < deadline_s:
            time.sleep(0.01)

    def remove(self, name: str) -> None:
        if self._find_managed(name) is None:
            return
        at_once = ["--time", "0"] if self.kind == "podman" else []  # the grace period is already over
        answer = self.run(["rm", "--force", "--volumes", *at_once, name])
        if answer.code != 0 and not answer.mentions(_NOT_FOUND_MESSAGES):
            raise self.error("rm", answer)

    def writable_paths(self, name: str) -> Optional[WritablePaths]:
        for row in self._inspect_rows([name]):
            upper = ((row.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
            volumes = [each["Source"] for each in row.get("Mounts") or () if each.get("Type") == "volume"]
            if upper:  # docker creates anonymous volumes where an image declares them
                return WritablePaths(
                    [upper, *volumes], command_prefix=self.command(["unshare"]) if self.rootless else []
                )
        return None

    def shell(self, name: str) -> Dict[str, Any]:
        return {
            "command": self.command(arguments.shell(self.engine, name, terminal=True)),
            "piped": self.command(arguments.shell(self.engine, name, terminal=False)),
            "exec": self.command(["exec", name]),
            "hang_up": self.command(arguments.signal_in_container(name)),
        }

    def _create_job_network(self, order: ContainerConfig) -> None:
        self.create_network(
            order.network or "", order.subnet or "", job=order.spec.job, lock_fd=order.lock_fd
        )

    def create_network(
        self, name: str, subnet: str, *, job: Optional[str] = None, lock_fd: Optional[int] = None
    ) -> None:
        words = arguments.create_network(self.engine, name, self.settings.cluster, job, subnet)
        answer = self.edit_networks(words, lock_fd)
        if answer.code != 0 and not answer.mentions(_NAME_TAKEN_MESSAGES):
            raise self.error("network create", answer)

    def edit_networks(self, words: Sequence[str], lock_fd: Optional[int] = None) -> CommandResult:
        """Run the engine's command that creates or removes a network."""
        return self.run(words, lock_fd=lock_fd)

    def networks(self, cluster: str) -> List[str]:
        mine = f"label=fairway.cluster={cluster}"
        return self.run_checked(["network", "ls", "--filter", mine, "--format", "{{.Name}}"]).split()

    def external_networks(self) -> Optional[List[Dict[str, Any]]]:
        try:
            listed = self.run_checked(["network", "ls", "--format", "{{.Name}}"]).split()
            names = [each for each in listed if not each.startswith("fw-")]
            rows = json.loads(self.run(["network", "inspect", *names]).stdout) if names else []
        except (AgentError, ValueError):
            return None
        return [found for row in rows if (found := arguments.parse_external_network(row)) is not None]

    def remove_network(self, name: str) -> None:
        answer = self.edit_networks(["network", "rm", name])
        if answer.code != 0 and not answer.mentions(
            (*_NOT_FOUND_MESSAGES, "being used", "active endpoints", "has associated")
        ):
            raise self.error("network rm", answer)

    def _find_managed(self, name: str) -> Optional[ContainerInfo]:
        """Return the task of this name, None without one; refuse one without this cluster's label."""
        rows = self._inspect_rows([name])
        found = parse_container(rows[0]) if rows else None
        if rows and (found is None or found.cluster != self.settings.cluster):
            raise AgentError(errors.FORBIDDEN, f"{name} is not a container of this cluster.")
        return found

    # -- images -------------------------------------------------------------------------------------------

    def inspect_image(self, image: str) -> ImageConfig:
        """Return the image's id and variables; refuse a missing one, or one that sets loader variables."""
        known, stamp = self._images.get(image), self._store_fingerprint()
        if known is not None and (known.fingerprint is None or known.fingerprint == stamp):
            return known.facts
        answer = self.run(["image", "inspect", image])
        if answer.code != 0:
            raise AgentError(errors.IMAGE_MISSING, f"The image {image} is not on this node.")
        row = json.loads(answer.stdout)[0]
        if normalize_image_name(image) not in _parse_image(row).normalized_names:
            # podman also finds images by the end of a name, the start of an id, or the digest of another name
            raise AgentError(errors.IMAGE_MISSING, f"No image on this node has the name {image}.")
        names = tuple(each.split("=", 1)[0] for each in (row.get("Config") or {}).get("Env") or ())
        for name in names:
            if name in FORBIDDEN_ENV:
                raise invalid_spec(f"The image {image} sets {name}, which is not allowed.")
        facts = ImageConfig(image_id=row["Id"], env=tuple(name for name in names if is_reserved(name)))
        if _IMMUTABLE_REFERENCE.match(image):
            self._images[image] = CachedImage(facts, None)
        elif stamp is not None and self._is_cacheable(image, facts) and stamp == self._store_fingerprint():
            self._images[image] = CachedImage(facts, stamp)
        return facts

    def _store_fingerprint(self) -> Optional[StoreFingerprint]:
        """Return a value that changes whenever a name may refer to another image; None when unavailable."""
        return None

    def _is_cacheable(self, image: str, facts: ImageConfig) -> bool:
        return False

    def images(self) -> List[Image]:
        answer = self.run(["images", "--all=false", "--quiet", "--no-trunc"])
        ids = sorted(set(answer.stdout.split()))
        if answer.code != 0 or not ids:
            return []
        answer = self.run(["image", "inspect", *ids])
        return [_parse_image(row) for row in json.loads(answer.stdout or "[]")]

    def pull(self, image: str, progress: Callable[[str], None], login_folder: Optional[str]) -> Image:
        process = subprocess.Popen(
            self.command(arguments.pull(self.kind, image, login_folder)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        killer = threading.Timer(_PULL_WITHIN_S, process.kill)
        killer.daemon = True
        killer.start()
        last = ""
        with cast("IO[str]", process.stdout) as output:
            for line in output:
                last = line.strip() or last
                progress(last)
        killer.cancel()
        if process.wait() != 0:
            answer = CommandResult(process.returncode, "", last)
            if answer.mentions(_DISK_FULL_MESSAGES):
                raise self.error("pull", answer)
            raise AgentError(errors.IMAGE_MISSING, f"The image {image} could not be pulled: {last[:600]}")
        return self._image(image)

    def load(self, archive_path: str) -> Image:
        out = self.run_checked(["load", "--input", archive_path], timeout_s=_PULL_WITHIN_S)
        found = re.findall(r"Loaded image(?:\(s\)| ID)?: *(\S+)", out)
        if not found:
            raise AgentError(errors.ENGINE_ERROR, f"{self.kind} load did not report what it loaded.")
        return self._image(found[-1])

    def save(self, name: str, reference: str, max_mib: int) -> Tuple[Image, int]:
        self._find_managed(name)
        inspect = ["container", "inspect", "--size", name]
        (task,) = json.loads(self.run_checked(inspect, timeout_s=_SAVE_WITHIN_S))
        changed_mib = -(-int(task.get("SizeRw") or 0) // procfs.MIB)
        if changed_mib > max_mib:
            message = f"Its changed files are {changed_mib} MiB; at most {max_mib} MiB can be saved."
            raise AgentError(errors.TOO_LARGE, message)
        (base,) = json.loads(self.run_checked(["image", "inspect", task["Image"]]))
        settings = base.get("Config") or {}
        if self.kind == "podman":
            words = arguments.commit(name, reference, task["Config"], settings)
            self.run_checked(words, timeout_s=_SAVE_WITHIN_S)
        else:
            self._import(name, reference, arguments.import_image(reference, settings))
        return self._image(reference), changed_mib

    def _import(self, name: str, reference: str, words: Sequence[str]) -> None:
        """Make an image of the exported files of a container; mounts are not among them."""
        export = subprocess.Popen(
            self.command(["export", name]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            answer = self.run(words, timeout_s=_SAVE_WITHIN_S, stdin=export.stdout)
        finally:
            cast("IO[bytes]", export.stdout).close()
            try:
                export_code = export.wait(_COMMAND_WITHIN_S)
            except subprocess.TimeoutExpired:
                export.kill()
                export_code = export.wait()
        if answer.code != 0:
            raise self.error("import", answer)
        if export_code != 0:
            self.run(["rmi", reference])
            raise AgentError(errors.ENGINE_ERROR, f"{self.kind} export failed: exit code {export_code}")

    def _image(self, reference: str) -> Image:
        self._images.pop(reference, None)
        return _parse_image(json.loads(self.run_checked(["image", "inspect", reference]))[0])

    def store_path(self) -> Optional[str]:
        if self._store_path is None:
            self._store_path = self._engine_info("DockerRootDir", "Store.GraphRoot") or None
        return self._store_path

    def images_in_use(self) -> Set[str]:
        for _ in range(_MAX_ATTEMPTS):
            found = self.run_checked(["ps", "--all", "--quiet", "--no-trunc"]).split()
            if not found:
                return set()
            answer = self.run(["container", "inspect", "--format", "{{.Image}}", *found])
            if answer.code == 0:
                return {_prefixed_image_id(each) for each in answer.stdout.split()}
        raise AgentError(errors.ENGINE_ERROR, f"{self.kind} does not report which images its containers use.")

    def remove_image(self, image: Image) -> bool:
        self._images.clear()
        bare = image.image_id.split(":", 1)[-1]
        for words in (image.refs, [bare]):  # engines refuse to remove an id with several names
            if words:
                self.run(["rmi", *words], timeout_s=_REMOVE_WITHIN_S)
            if self.run(["image", "inspect", bare]).code != 0:
                return True
        return False


def _parse_image(row: Dict[str, Any]) -> Image:
    return Image(
        image_id=_prefixed_image_id(str(row["Id"])),
        refs=list(row.get("RepoTags") or ()),
        digests=list(row.get("RepoDigests") or ()),
        size_mib=int(row["Size"]) // procfs.MIB if row.get("Size") else None,
        cuda=required_cuda_version((row.get("Config") or {}).get("Env") or ()),
    )


def _prefixed_image_id(image_id: str) -> str:
    return image_id if image_id.startswith("sha256:") else "sha256:" + image_id


_STATES = {
    "created": CREATED,
    "configured": CREATED,
    "initialized": CREATED,
    "running": RUNNING,
    "paused": RUNNING,
    "stopping": RUNNING,
    "restarting": RUNNING,
    "removing": EXITED,
    "exited": EXITED,
    "stopped": EXITED,
    "dead": EXITED,
}


def parse_container(row: Dict[str, Any]) -> Optional[ContainerInfo]:
    """Parse a container of an engine's inspect; return None without this system's labels."""
    marks = (row.get("Config") or {}).get("Labels") or {}
    if not all(f"fairway.{label}" in marks for label in arguments.LABELS):
        return None
    facts = row["State"]
    state = _STATES.get(str(facts.get("Status", "")).lower(), RUNNING)
    started_s, ended_s = _parse_time_s(facts.get("StartedAt")), _parse_time_s(facts.get("FinishedAt"))
    if started_s and ended_s:
        # Docker notes the start after the process runs, so a very short one may end before its noted start.
        ended_s = max(started_s, ended_s)
    return ContainerInfo(
        name=str(row["Name"]).lstrip("/"),
        cluster=marks["fairway.cluster"],
        job=marks["fairway.job"],
        attempt=int(marks["fairway.attempt"]),
        task=int(marks["fairway.task"]),
        digest=marks["fairway.digest"],
        state=state,
        exit_code=facts.get("ExitCode") if state == EXITED else None,
        oom=bool(facts.get("OOMKilled")) if state == EXITED else None,
        pid=facts.get("Pid") or None,
        started_s=started_s,
        ended_s=ended_s if state == EXITED else None,
        owner=marks.get("fairway.owner"),
        project=marks.get("fairway.project"),
    )


_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)\Z")


def _parse_time_s(text: Optional[str]) -> Optional[float]:
    """Return Unix seconds of an engine's time; None for blank and zero times."""
    found = _TIME.match((text or "").replace(" ", "T", 1))
    if found is None or found.group(1).startswith("0001"):
        return None
    zone = "+0000" if found.group(3) == "Z" else found.group(3).replace(":", "")
    moment = datetime.datetime.strptime(found.group(1) + zone, "%Y-%m-%dT%H:%M:%S%z")
    return moment.timestamp() + float(found.group(2) or 0)
