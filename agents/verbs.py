"""Verbs of a node's agent, one row each: who may use it, how agents announce it, how long a reply takes, its fields.

Both sides derive from this table: the agent its check of roles and the capabilities of its hello, the portal its
time limits. The program of a node imports it: Python 3.8, standard library only. Replies are described in
docs/agent-protocol.md and read by ``agents.engines.replies``.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Tuple

REPLY_TIMEOUT_S = 20.0
CONTROL, EVERYBODY = ("control",), ("control", "bulk", "watch")
_IMAGES = ("control", "bulk")

CAN_STOP_TASKS = "stop.tasks"
"""Extension: field ``tasks`` of ``stop``; an agent without it would stop all tasks."""
CAN_USE_REGISTRY_LOGINS = "pull.login"
"""Extension: field ``login`` of ``pull``."""
CAN_CHECK_FABRIC = "preflight.fabric"
"""Extension: field ``fabric`` of ``preflight``."""
CAN_LIST_OWN_CHECKPOINTS = "checkpoints.own"
"""Extension: field ``own_only`` of ``checkpoints``."""
CAN_CHANGE_FILES = "files.change"
"""Extension: actions of ``files`` that write and delete."""


class Verb(NamedTuple):
    """A verb. ``timeout_s``: how long the portal waits for a reply; afterwards the outcome is unknown."""

    name: str
    roles: Tuple[str, ...]
    capability: str
    """In the hello of agents that have the verb; blank: every agent has it."""
    timeout_s: float
    fields: Dict[str, str]
    """What each field of a request is. A missing one has its default or is refused as ``invalid_spec``."""
    extensions: Tuple[str, ...]
    """Capabilities of agents that support fields or values that came after the verb."""


VERBS: Dict[str, Verb] = {}


def _verb(
    name: str,
    fields: Dict[str, str],
    *,
    roles: Tuple[str, ...] = CONTROL,
    timeout_s: float = REPLY_TIMEOUT_S,
    of_every_agent: bool = False,
    extensions: Tuple[str, ...] = (),
) -> Verb:
    """Add a row. Agents announce the verb by its name, unless the first ones had it already."""
    row = VERBS[name] = Verb(name, roles, "" if of_every_agent else name, timeout_s, fields, extensions)
    return row


_EPOCH = {"epoch": "epoch of the leader; an older one than the node has seen is refused"}
_ATTEMPT = {"job": "public id of the job", "attempt": "number of the attempt, from 1"}
_TASK = {"job": "public id of the job", "attempt": "number of the attempt, from 1", "task": "rank, from 0"}
_ACCOUNT = {"uid": "account that reads", "gid": "its group"}
_MOUNT = {"mount": "mount as in a spec"}
_PATH = {"path": "below the mount; % and two hexadecimal digits are a byte"}

# -- of every role -----------------------------------------------------------------------------------

HELLO = _verb("hello", {}, roles=EVERYBODY, of_every_agent=True)
"""Return what the agent said when the session was opened, as it is now."""
LIST = _verb("list", {}, roles=EVERYBODY, of_every_agent=True)
"""Return all tasks of this cluster: prepared, running, or ended and not yet removed."""
LOGS = _verb(
    "logs",
    {**_TASK, "offset": "first byte", "limit": "bytes at most, up to 262,144"},
    roles=EVERYBODY,
    of_every_agent=True,
)
"""Return bytes of a task's log; ``eof`` only when it has ended and nothing follows. ``no_such_container``: unknown
task."""
STATS = _verb(
    "stats",
    {
        "subscribe": "samples each second, as events; true if missing",
        "once": "return one sample instead",
        "phase_s": "when in each second of the node's clock samples are taken, from 0 to below 1",
    },
    roles=("control", "watch"),
    of_every_agent=True,
)

# -- tasks -------------------------------------------------------------------------------------------

START = _verb("start", {**_EPOCH, "spec": "task spec"}, timeout_s=60.0, of_every_agent=True)
"""Start a task. When it was started with an equal spec: same reply with ``already``.

When it has ended: state exited. Refused, keeping nothing, when it was stopped (tombstone), for an older attempt or
epoch, for lack of free GPU capacity, a missing image or a full disk.
"""
PREPARE = _verb("prepare", dict(START.fields), timeout_s=START.timeout_s)
"""Execute all steps of a start but the last; the task then waits for start or stop.

Same refusals and idempotence as ``start``; a task that was started meanwhile reports that by its state.
"""
STOP = _verb(
    "stop",
    {
        **_EPOCH,
        **_ATTEMPT,
        "grace_s": "seconds until its tasks are killed; 10 if missing",
        "tombstone": "refuse the attempt from now on; true if missing",
        "tasks": "these ranks alone; all if missing",
    },
    of_every_agent=True,
    extensions=(CAN_STOP_TASKS,),
)
"""Ask the tasks of an attempt to end. Never started, or ended: gone. Still ending: not gone; an event ``exited``
follows for each task, and a repetition reports whether all are gone."""
REMOVE = _verb("remove", {**_EPOCH, **_ATTEMPT}, of_every_agent=True)
"""Remove the remains of an ended attempt, including logs; nothing left is no error."""
SIGNAL = _verb(
    "signal",
    {
        **_EPOCH,
        **_ATTEMPT,
        "task": "this rank alone; every running one if missing",
        "signal": "name such as USR1",
    },
    of_every_agent=True,
)
"""Send a signal to running tasks; each repetition sends it again. ``no_such_container``: none runs."""
UPDATE_FILES = _verb("update_files", {**_TASK, "files": "content by name"})
"""Replace launch files of a running task, where they differ. Every agent that accepts launch files has it.

``no_such_container``: the task does not run.
"""
PROBE = _verb("probe", {**_TASK, "port": "of the task", "path": "of the request"}, of_every_agent=True)
"""Return the HTTP status from a port of a running task; null while nothing answers."""
LISTENING = _verb("listening", {**_TASK, "ports": "TCP ports"})
"""Return whether each of the ports has a listener in the network of a running task."""
CHECK_RENDEZVOUS = _verb(
    "check_rendezvous",
    {
        **_ATTEMPT,
        "address": "IP address of the listener",
        "port": "its port",
        "within_s": "seconds to connect, at most 10",
        "measure_s": "seconds for which data is sent, at most 2; 0: none",
    },
)
"""Connect to the rendezvous of a gang, and measure the bandwidth to it."""
TERMINAL = _verb(
    "terminal",
    {
        **_TASK,
        "secret": "what its client must know",
        "cols": "width",
        "rows": "height",
        "idle_s": "seconds without input after which it ends",
    },
)
"""Open a terminal in a running task; return the port where it waits for a client. An unused one ends by itself."""
STREAMS = _verb("streams", {**_TASK, "secret": "what its client must know"})
"""Open the node's side of an SSH connection to a running task; return its port, as of ``terminal``.

Each of its peers gets one shell, command or connection (``agents.node.terminals.frames``).
"""
ENVIRONMENT = _verb(
    "environment", {**_TASK, "interpreters": "commands, tried in their order"}, timeout_s=60.0
)
"""Return what a program finds in a running task about its code and packages: JSON lines, in at most 25 s.

Blank if none of the interpreters is there. ``no_such_container``: the task does not run.
"""
SAVE_IMAGE = _verb(
    "save_image",
    {**_TASK, "image": "name of the new image", "max_mib": "most that may differ from its own image"},
    timeout_s=1200.0,
)
"""Save the file system of a running task as an image; a repetition replaces it. ``too_large``: more has changed."""

# -- files of jobs -----------------------------------------------------------------------------------

CHECKPOINTS = _verb(
    "checkpoints",
    {
        **_EPOCH,
        **_MOUNT,
        "path": "below the mount",
        **_ACCOUNT,
        "remove": "name and time of each to remove",
        "own_only": "leave out checkpoints of other accounts",
    },
    extensions=(CAN_LIST_OWN_CHECKPOINTS,),
)
"""Remove checkpoints of a job by name and time, then list those that are there."""
FILES = _verb(
    "files",
    {
        "action": "list, read, archive; write, mkdir, delete",
        **_MOUNT,
        **_PATH,
        **_ACCOUNT,
        "offset": "of a list: entries; of ``read``: bytes",
        "overwrite": "whether ``write`` may replace a file",
        "stream": "open stream to continue, instead of an action",
        "close": "end the stream; a file that is written is not kept",
        "data_b64": "next bytes to write",
        "commit": "complete the written file",
    },
    extensions=(CAN_CHANGE_FILES,),
)
"""List a directory of a job, open a stream and continue it, or change a file.

A stream ends after a minute without requests. Refusals have messages for users; their codes are ``no_such_file``,
``file_not_permitted``, ``not_a_file``, ``file_exists``, ``name_too_long``, ``too_large`` and ``too_many_entries``.
"""
NOTEBOOKS = _verb("notebooks", {"mount": "home, as in a spec", **_ACCOUNT})
"""List the notebooks of a home."""
FOLDER_SIZE = _verb("folder_size", {**_MOUNT, **_PATH, **_ACCOUNT})
"""Start to measure a directory or file of a volume, and wait for at most 2 s; repeat it until it is done.

``forbidden``: the node is busy with others.
"""
STORAGE_USAGE = _verb(
    "storage_usage", {"roots": "folders of the node; a blank one is that of its homes"}, timeout_s=330.0
)
"""Return the usage of each folder in some folders of the node. Takes up to 300 s where the file system does not
count."""

# -- images ------------------------------------------------------------------------------------------

IMAGES = _verb("images", {}, roles=_IMAGES, of_every_agent=True)
PULL = _verb(
    "pull",
    {
        "image": "reference",
        "runtime": "kind of the engine, if the node has several",
        "login": "username and password",
    },
    roles=_IMAGES,
    timeout_s=3600.0,
    of_every_agent=True,
    extensions=(CAN_USE_REGISTRY_LOGINS,),
)
"""Pull an image from its registry; does nothing when it is present."""
LOAD = _verb(
    "load",
    {
        "upload": "name of the archive",
        "offset": "of the piece, bytes",
        "data_b64": "piece; missing: only ask for the size",
        "last": "the archive is complete",
        "sha256": "of the archive",
        "runtime": "kind of the engine, if the node has several",
    },
    roles=_IMAGES,
    of_every_agent=True,
)
"""Store a piece of an archive; return the bytes received. The last piece may take as long as ``pull``."""

# -- the node ----------------------------------------------------------------------------------------

PREFLIGHT = _verb(
    "preflight",
    {"fabric": "runtime, interface, network and devices that the pool names for gangs"},
    timeout_s=60.0,
    of_every_agent=True,
    extensions=(CAN_CHECK_FABRIC,),
)
"""Run checks on the machine; may take some seconds."""
DENY_EGRESS = _verb("deny_egress", {"networks": "addresses and networks"})
"""Block connections from all containers, including running ones, to these."""
GC = _verb(
    "gc",
    {
        "min_age_s": "age from which remains of jobs are removed",
        "images": "policy of image removal; missing: none is removed",
    },
    timeout_s=180.0,
    of_every_agent=True,
)
"""Remove unused files and images; return what was removed."""
UPGRADE = _verb(
    "upgrade",
    {
        "offset": "of the piece, bytes",
        "data_b64": "piece of the program",
        "last": "the program is complete",
        "signature": "by the key of the enrolment",
        "confirm_within_s": "seconds after which the node restores the previous program",
        "confirm": "digest of the new program, which ends that period",
    },
    roles=_IMAGES,
    timeout_s=60.0,
    of_every_agent=True,
)
"""Install another agent, which the next connection reaches; running tasks are not affected."""


def announced() -> Tuple[str, ...]:
    """Return the capabilities by which an agent with all of these verbs announces them."""
    rows = VERBS.values()
    later = tuple(row.capability for row in rows if row.capability)
    return later + tuple(each for row in rows for each in row.extensions)
