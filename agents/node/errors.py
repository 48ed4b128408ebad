"""Errors of the agent: a stable code and a message for users."""

from __future__ import annotations

STALE_EPOCH = "stale_epoch"
TOMBSTONED = "tombstoned"
GPU_OVERCOMMITTED = "gpu_overcommitted"
UNKNOWN_GPU = "unknown_gpu"
NAME_CONFLICT = "name_conflict"
INVALID_SPEC = "invalid_spec"
IMAGE_MISSING = "image_missing"
CODE_MISSING = "code_missing"
CODE_REFUSED = "code_refused"
DISK_FULL = "disk_full"
ENGINE_ERROR = "engine_error"
UNKNOWN_VERB = "unknown_verb"
FORBIDDEN = "forbidden"
NO_SUCH_CONTAINER = "no_such_container"
NO_SUCH_FILE = "no_such_file"
NOT_PERMITTED = "file_not_permitted"
NOT_A_FILE = "not_a_file"
NAME_TOO_LONG = "name_too_long"
READ_ONLY = "read_only"
FILE_EXISTS = "file_exists"
TOO_MANY_ENTRIES = "too_many_entries"
TOO_LARGE = "too_large"
PORT_IN_USE = "port_in_use"
RENDEZVOUS_PORT_IN_USE = "rendezvous_port_in_use"
PROTOCOL_VERSION = "protocol_version"


class AgentError(Exception):
    """The node refuses a request; nothing was done that a repetition would not fix."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class RecreateContainerError(AgentError):
    """The cause of a failed start is removed; the container must be created again."""


def invalid_spec(message: str) -> AgentError:
    """Return the refusal of a request that is invalid in every state of the node."""
    return AgentError(INVALID_SPEC, message)
