"""What podman and docker share: running their command line, reading what they say, images, refusals."""

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

from agents.node import egress, machine, quota, refusals
from agents.node.durable import write_whole
from agents.node.environment import is_ours
from agents.node.image_cuda import cuda_wanted
from agents.node.refusals import Refusal, bad_spec
from agents.node.runtimes import CREATED, EXITED, RUNNING, Found, Image, Order, Runtime, Written, arguments
from agents.node.runtimes.firewall import Firewall
from agents.node.runtimes.image_store import Stamp
from agents.node.settings import RuntimeSettings, Settings
from agents.node.spec import REFUSED_ENV
from agents.node.volumes import mounted_at

_COMMAND_WITHIN_S = 60.0
_PULL_WITHIN_S = 3600.0
_REMOVE_WITHIN_S = 120.0
_LOOKS = 3  # a container may go between two questions
_FULL = ("no space left on device", "disk quota exceeded")
_TAKEN = ("already in use", "already exists", "is in use")
_PORT_TAKEN = ("address already in use", "port is already allocated")
_NOT_THERE = ("no such container", "no such object", "no container with", "not found", "no such network")
_NO_NETWORK = ("unable to find network", "network not found")
_FIXED = re.compile(r"(sha256:)?[0-9a-f]{64}\Z|.*@sha256:[0-9a-f]{64}\Z")


class Answer(NamedTuple):
    """How a command line ended."""

    code: int
    out: str
    err: str

    def says(self, phrases: Sequence[str]) -> bool:
        text = self.err.lower()
        return any(phrase in text for phrase in phrases)


class ImageFacts(NamedTuple):
    """What must be known of an image before a container is made of it."""

    image_id: str
    env: Tuple[str, ...]


class KnownImage(NamedTuple):
    """What an engine said of an image, and the state of its store that it spoke of."""

    facts: ImageFacts
    stamp: Optional[Stamp]  # None: it holds for ever, for the name is the image's own digest


class EngineRuntime(Runtime):
    """A container engine by its command line: argument lists only, each with a time limit."""

    _version_words: Sequence[str] = ("--version",)

    def __init__(self, settings: Settings, own: RuntimeSettings) -> None:
        self.settings = settings
        self._own = own
        self.rootless = os.geteuid() != 0 and own.program[0] != "sudo"
        self.engine = arguments.Engine(
            own.kind,
            settings.loopback,
            self.rootless,
            own.create_flags,
            settings.log_mib,
            has_ipv6=os.path.isdir("/proc/sys/net/ipv6"),
        )
        self._version: Optional[str] = None
        self._store_path: Optional[str] = None
        self._bounds_layers: Optional[bool] = None
        self._images: Dict[str, KnownImage] = {}
        self._prepared: Dict[str, ImageFacts] = {}
        self._firewall = Firewall(settings) if settings.firewall and os.geteuid() == 0 else None

    # -- the command line ---------------------------------------------------------------------------------

    def command(self, words: Sequence[str]) -> List[str]:
        return [*self._own.program, *self._own.global_flags, *words]

    def call(
        self, words: Sequence[str], *, within_s: float = _COMMAND_WITHIN_S, keep_fd: Optional[int] = None
    ) -> Answer:
        """Runs one command of the engine to its end."""
        try:
            answer = subprocess.run(
                self.command(words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=within_s,
                check=False,
                pass_fds=() if keep_fd is None else (keep_fd,),
            )
        except FileNotFoundError as error:
            raise Refusal(refusals.ENGINE_ERROR, f"{self.kind} is not installed on this node.") from error
        except subprocess.TimeoutExpired as error:
            raise Refusal(
                refusals.ENGINE_ERROR, f"{self.kind} {words[0]} did not answer within {within_s:.0f} s."
            ) from error
        return Answer(
            answer.returncode, answer.stdout.decode(errors="replace"), answer.stderr.decode(errors="replace")
        )

    def must(self, words: Sequence[str], **how: Any) -> str:
        """As :meth:`call`; anything but success is the fitting refusal."""
        answer = self.call(words, **how)
        if answer.code != 0:
            raise self.refusal(words[0], answer)
        return answer.out

    def refusal(self, verb: str, answer: Answer) -> Refusal:
        """The refusal that says what an engine meant."""
        last = answer.err.strip().splitlines()[-1][:600] if answer.err.strip() else f"exit code {answer.code}"
        if answer.says(_FULL):
            return Refusal(refusals.DISK_FULL, f"The disk of the node is full: {last}")
        if answer.says(_PORT_TAKEN):
            return Refusal(refusals.PORT_IN_USE, f"A port of the node was taken meanwhile: {last}")
        return Refusal(refusals.ENGINE_ERROR, f"{self.kind} {verb} failed: {last}")

    # -- tasks --------------------------------------------------------------------------------------------

    def version(self) -> Optional[str]:
        if self._version is None:
            with contextlib.suppress(Refusal):
                answer = self.call(self._version_words, within_s=10.0)
                found = re.search(r"\d+\.\d+(\.\d+)?", answer.out)
                self._version = found.group(0) if answer.code == 0 and found else None
        return self._version

    def prepare(self, order: Order) -> None:
        spec = order.spec
        fault = self.refresh_firewall()
        if fault != "" and spec.egress.mode != egress.OPEN:
            raise bad_spec(
                f"This node cannot hold containers to a network policy: {fault or 'it has no firewall of ours.'}"
            )
        if spec.network is not None and self.call(["network", "inspect", spec.network]).code != 0:
            # docker would find out at the start, when others of its gang have begun
            raise bad_spec(f"This node has no network {spec.network} of {self.kind}.")
        if order.network_is_made:
            self._prepared[spec.name] = self.image_facts(spec.image or "")
            return
        # Each command of an engine takes some 40 ms, so the network is made while the image is looked up;
        # whoever refuses the start removes the network again.
        with ThreadPoolExecutor(max_workers=1) as aside:
            network = aside.submit(self._make_network_of, order)
            self._prepared[spec.name] = self.image_facts(spec.image or "")
        network.result()

    def create(self, order: Order) -> None:
        image = self._prepared.pop(order.spec.name, None) or self.image_facts(order.spec.image or "")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(order.folder, "pid"))
        engine = self.engine._replace(gpus_by=self._gpus_by()) if order.real_gpus else self.engine
        if order.spec.disk_mib is not None:
            engine = engine._replace(bounds_layers=self.bounds_layers())
        words = arguments.create(engine, order, image.image_id, image.env)
        variables = arguments.environment_file(engine, order).encode()
        write_whole(arguments.environment_path(order.folder), variables, sync=False)
        try:
            answer = self.call(words, keep_fd=order.hold_fd)
            own = not order.spec.node_network and order.spec.network is None
            if own and answer.code != 0 and answer.says(_NO_NETWORK):
                # it was pruned by somebody who saw networks that nobody used yet
                self._make_network_of(order)
                answer = self.call(words, keep_fd=order.hold_fd)
        finally:
            self._drop_environment(order.spec.name)
        if answer.code == 0:
            return
        if answer.says(_TAKEN) and order.spec.name in answer.err:
            raise Refusal(refusals.NAME_CONFLICT, f"{order.spec.name} exists already.")
        if answer.says(("image not known", "no such image", "unable to find image")):
            self._images.clear()
            raise Refusal(refusals.IMAGE_MISSING, f"The image {order.spec.image} is not on this node.")
        raise self.refusal("create", answer)

    def _gpus_by(self) -> str:
        return arguments.CDI

    def refresh_firewall(self) -> Optional[str]:
        return self._firewall.refresh() if self._firewall is not None else None

    def bounds_layers(self) -> bool:
        """Whether the file system holds writable layers to a limit: overlay on XFS with project quotas."""
        if self._bounds_layers is None:
            root = os.path.realpath(self.store_path() or "/")
            mounts = machine.read_text("/proc/self/mountinfo") or ""
            able = not self.rootless and mounted_at(mounts, root)[1] == "xfs" and quota.holds(root)
            driver = self.must(arguments.storage_driver(self.kind), within_s=10.0).strip() if able else ""
            self._bounds_layers = driver in ("overlay", "overlay2")
        return self._bounds_layers

    def start(self, name: str) -> None:
        self._drop_environment(name)  # of a creation that was killed before its end
        self.must(["start", name])

    def _drop_environment(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(arguments.environment_path(os.path.join(self.settings.state_dir, "tasks", name)))

    def find(self, name: str) -> Optional[Found]:
        found = self._inspect([name])
        return found[0] if found else None

    def tasks(self, cluster: str) -> List[Found]:
        answer = self.call(arguments.listing(cluster))
        if answer.code != 0:
            raise self.refusal("ps", answer)
        ids = answer.out.split()
        return [found for found in self._inspect(ids) if found.cluster == cluster] if ids else []

    def _inspect(self, names: Sequence[str]) -> List[Found]:
        found = (found_in(row) for row in self._rows(names))
        return [each for each in found if each is not None]

    def _rows(self, names: Sequence[str]) -> List[Dict[str, Any]]:
        answer = self.call(arguments.inspect(names))
        try:
            rows: List[Dict[str, Any]] = json.loads(answer.out or "[]")
        except ValueError:
            rows = []
        if answer.code != 0 and not rows and not answer.says(_NOT_THERE):
            raise self.refusal("inspect", answer)
        return rows

    def signal(self, name: str, signal_name: str) -> None:
        self.must(["kill", "--signal", signal_name, name])

    def kill(self, name: str, *, within_s: float) -> None:
        found = self.find(name)
        answer = self.call(["kill", "--signal", "KILL", name])
        if answer.code != 0 and not answer.says((*_NOT_THERE, "not running", "state improper")):
            raise self.refusal("kill", answer)
        deadline_s = time.monotonic() + within_s
        while found is not None and machine.is_alive(found.pid, None) and time.monotonic() < deadline_s:
            time.sleep(0.01)

    def remove(self, name: str) -> None:
        if self._ours(name) is None:
            return
        answer = self.call(arguments.remove(self.engine, name))
        if answer.code != 0 and not answer.says(_NOT_THERE):
            raise self.refusal("rm", answer)

    def written(self, name: str) -> Optional[Written]:
        for row in self._rows([name]):
            upper = ((row.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
            volumes = [each["Source"] for each in row.get("Mounts") or () if each.get("Type") == "volume"]
            if upper:  # docker makes volumes of its own where an image says so
                return Written([upper, *volumes], by=self.command(["unshare"]) if self.rootless else [])
        return None

    def shell(self, name: str) -> Dict[str, Any]:
        return {
            "command": self.command(arguments.shell(self.engine, name)),
            "hang_up": self.command(arguments.signal_inside(name)),
        }

    def _make_network_of(self, order: Order) -> None:
        self.make_network(order.network or "", order.subnet or "", job=order.spec.job, keep_fd=order.hold_fd)

    def make_network(
        self, name: str, subnet: str, *, job: Optional[str] = None, keep_fd: Optional[int] = None
    ) -> None:
        words = arguments.create_network(self.engine, name, self.settings.cluster, job, subnet)
        answer = self.call(words, keep_fd=keep_fd)
        if answer.code != 0 and not answer.says(_TAKEN):
            raise self.refusal("network create", answer)

    def networks(self, cluster: str) -> List[str]:
        return self.must(arguments.networks(cluster)).split()

    def outer_networks(self) -> Optional[List[Dict[str, Any]]]:
        try:
            names = [
                each for each in self.must(arguments.every_network()).split() if not each.startswith("fw-")
            ]
            rows = json.loads(self.call(["network", "inspect", *names]).out) if names else []
        except (Refusal, ValueError):
            return None
        return [found for row in rows if (found := arguments.outer_network(row)) is not None]

    def remove_network(self, name: str) -> None:
        answer = self.call(arguments.remove_network(name))
        if answer.code != 0 and not answer.says(
            (*_NOT_THERE, "being used", "active endpoints", "has associated")
        ):
            raise self.refusal("network rm", answer)

    def _ours(self, name: str) -> Optional[Found]:
        """The task of this name, None when there is none; one without our label is refused."""
        rows = self._rows([name])
        found = found_in(rows[0]) if rows else None
        if rows and (found is None or found.cluster != self.settings.cluster):
            raise Refusal(refusals.NOT_ALLOWED, f"{name} is not a container of this cluster.")
        return found

    # -- images -------------------------------------------------------------------------------------------

    def image_facts(self, image: str) -> ImageFacts:
        """The id of an image and the names of its variables; refused when missing or setting a loader's."""
        known, stamp = self._images.get(image), self._stamp_of_images()
        if known is not None and (known.stamp is None or known.stamp == stamp):
            return known.facts
        answer = self.call(["image", "inspect", image])
        if answer.code != 0:
            raise Refusal(refusals.IMAGE_MISSING, f"The image {image} is not on this node.")
        row = json.loads(answer.out)[0]
        names = tuple(each.split("=", 1)[0] for each in (row.get("Config") or {}).get("Env") or ())
        for name in names:
            if name in REFUSED_ENV:
                raise bad_spec(f"The image {image} sets {name}, which is refused.")
        facts = ImageFacts(image_id=row["Id"], env=tuple(name for name in names if is_ours(name)))
        if _FIXED.match(image):
            self._images[image] = KnownImage(facts, None)
        elif stamp is not None and self._may_be_kept(image, facts) and stamp == self._stamp_of_images():
            self._images[image] = KnownImage(facts, stamp)
        return facts

    def _stamp_of_images(self) -> Optional[Stamp]:
        """Changes whenever a name may mean another image; None when that cannot be seen from outside."""
        return None

    def _may_be_kept(self, image: str, facts: ImageFacts) -> bool:
        return False

    def images(self) -> List[Image]:
        answer = self.call(["images", "--all=false", "--quiet", "--no-trunc"])
        ids = sorted(set(answer.out.split()))
        if answer.code != 0 or not ids:
            return []
        answer = self.call(["image", "inspect", *ids])
        return [_image(row) for row in json.loads(answer.out or "[]")]

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
            answer = Answer(process.returncode, "", last)
            if answer.says(_FULL):
                raise self.refusal("pull", answer)
            raise Refusal(refusals.IMAGE_MISSING, f"The image {image} could not be brought: {last[:600]}")
        return self._image(image)

    def load(self, archive_path: str) -> Image:
        out = self.must(["load", "--input", archive_path], within_s=_PULL_WITHIN_S)
        found = re.findall(r"Loaded image(?:\(s\)| ID)?: *(\S+)", out)
        if not found:
            raise Refusal(refusals.ENGINE_ERROR, f"{self.kind} load did not say what it loaded.")
        return self._image(found[-1])

    def _image(self, reference: str) -> Image:
        self._images.pop(reference, None)
        return _image(json.loads(self.must(["image", "inspect", reference]))[0])

    def store_path(self) -> Optional[str]:
        if self._store_path is None:
            self._store_path = self.must(arguments.store(self.kind), within_s=10.0).strip() or None
        return self._store_path

    def images_in_use(self) -> Set[str]:
        for _ in range(_LOOKS):
            found = self.must(["ps", "--all", "--quiet", "--no-trunc"]).split()
            if not found:
                return set()
            answer = self.call(["container", "inspect", "--format", "{{.Image}}", *found])
            if answer.code == 0:
                return {_whole_id(each) for each in answer.out.split()}
        raise Refusal(refusals.ENGINE_ERROR, f"{self.kind} does not say which images its containers use.")

    def remove_image(self, image: Image) -> bool:
        self._images.clear()
        bare = image.image_id.split(":", 1)[-1]
        for words in (image.refs, [bare]):  # an engine refuses an id that has several names
            if words:
                self.call(["rmi", *words], within_s=_REMOVE_WITHIN_S)
            if self.call(["image", "inspect", bare]).code != 0:
                return True
        return False


def _image(row: Dict[str, Any]) -> Image:
    return Image(
        image_id=_whole_id(str(row["Id"])),
        refs=list(row.get("RepoTags") or ()),
        digests=list(row.get("RepoDigests") or ()),
        size_mib=int(row["Size"]) // machine.MIB if row.get("Size") else None,
        cuda=cuda_wanted((row.get("Config") or {}).get("Env") or ()),
    )


def _whole_id(image_id: str) -> str:
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


def found_in(row: Dict[str, Any]) -> Optional[Found]:
    """A container as an engine's inspect tells it; None for one that is not ours."""
    marks = (row.get("Config") or {}).get("Labels") or {}
    if not all(f"fairway.{label}" in marks for label in arguments.LABELS):
        return None
    facts = row["State"]
    state = _STATES.get(str(facts.get("Status", "")).lower(), RUNNING)
    return Found(
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
        started_s=_seconds(facts.get("StartedAt")),
        ended_s=_seconds(facts.get("FinishedAt")) if state == EXITED else None,
        owner=marks.get("fairway.owner"),
        project=marks.get("fairway.project"),
    )


_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)\Z")


def _seconds(text: Optional[str]) -> Optional[float]:
    """Unix seconds of an engine's time; None for none and for the zero time."""
    found = _TIME.match((text or "").replace(" ", "T", 1))
    if found is None or found.group(1).startswith("0001"):
        return None
    zone = "+0000" if found.group(3) == "Z" else found.group(3).replace(":", "")
    moment = datetime.datetime.strptime(found.group(1) + zone, "%Y-%m-%dT%H:%M:%S%z")
    return moment.timestamp() + float(found.group(2) or 0)
