"""Kinds and states of the requests that users make and managers or administrators answer."""

from __future__ import annotations

from enum import StrEnum

from portal.domain.states import Role


class RequestKind(StrEnum):
    QUOTA = "quota"
    TIME = "time"  # an extension of the time limit of a running job
    PROJECT = "project"  # a role in a project
    ENVIRONMENT = "environment"  # use of a restricted environment in a project


class RequestState(StrEnum):
    OPEN = "open"
    APPROVED = "approved"
    DENIED = "denied"
    WITHDRAWN = "withdrawn"  # by the user who made it
    EXPIRED = "expired"  # nobody answered while it made sense


REQUESTABLE_ROLES = (Role.VIEWER, Role.MEMBER)
"""Roles that can be requested; managers are appointed."""
