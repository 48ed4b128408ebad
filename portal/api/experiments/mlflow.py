"""MLflow's REST API below ``/api/mlflow/``: authorizes each request, then passes it to the tracking server.

A request concerns one project: that of the address, of MLflow's workspace header, or of the job's token. Errors
have MLflow's form, so that its client shows the message.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, cast

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.views.decorators.csrf import csrf_exempt
from rest_framework.exceptions import Throttled
from rest_framework.request import Request

from portal.access import AccessPolicy, Permission, access_policy, require_permission, visible_projects
from portal.api.experiments.mlflow_bodies import checked_body
from portal.api.framework.authentication import BearerTokenAuthentication, client_key
from portal.database.pool_middleware import release_connection
from portal.downloads import ARTIFACT_STATUSES, artifact_response, range_headers
from portal.errors import FairwayError, Forbidden, InvalidRequest, NotFound, TooLarge, Unauthenticated
from portal.models import ApiToken, Job, Project, User
from portal.selectors.lookup import get_first
from portal.services.accounts.tokens import Scope, has_scope
from portal.services.jobs.tracking import TOKEN_PREFIX, get_token_job
from portal.tracking.client import TIMEOUT_S, WORKSPACE_HEADER, call, send
from portal.tracking.endpoints import (
    ARTIFACT_TIMEOUT_S,
    Endpoint,
    EndpointAccess,
    artifact_path_problem,
    find_endpoint,
)
from portal.valkey import rate_limits

log = logging.getLogger(__name__)

_ERROR_CODES = {
    400: "INVALID_PARAMETER_VALUE",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    413: "INVALID_PARAMETER_VALUE",
    429: "REQUEST_LIMIT_EXCEEDED",
    503: "TEMPORARILY_UNAVAILABLE",
}


@dataclass(frozen=True)
class RequestIdentity:
    """Who sends a request: the owner of a token, and the job of a job's token."""

    user: User
    token: ApiToken | None = None
    job: Job | None = None


@csrf_exempt  # no cookie is read
@access_policy(AccessPolicy.SIGNED_IN)
def mlflow_api(request: HttpRequest, path: str, project: str = "") -> HttpResponseBase:
    """Answer a request of MLflow's client."""
    try:
        caller = _authenticate(request)
        endpoint = find_endpoint(request.method or "", path)
        if endpoint is None:
            raise NotFound(f"{request.method} {path} is not part of the MLflow API that Fairway offers.")
        row = _authorize(caller, endpoint, project or request.headers.get(WORKSPACE_HEADER, ""))
        _check_artifact_path(request, endpoint)
        return _forward(request, caller, endpoint, row, path)
    except Throttled as limit:
        return _error(429, "Too many invalid tokens.", retry_after_s=float(getattr(limit, "wait", None) or 1))
    except FairwayError as refusal:
        return _error(refusal.status, refusal.message, retry_after_s=refusal.retry_after_s)


mlflow_api.checks_policy_itself = True  # type: ignore[attr-defined]


def _authenticate(request: HttpRequest) -> RequestIdentity:
    drf_request = cast("Request", request)  # only META is read
    text = request.META.get("HTTP_AUTHORIZATION", "").partition(" ")[2].strip()
    if text.startswith(TOKEN_PREFIX):
        try:
            job = get_token_job(text)
        except Unauthenticated:
            wait_s = rate_limits.consume(rate_limits.INVALID_TOKENS, client_key(drf_request))
            if wait_s > 0:
                raise Throttled(wait_s) from None
            raise
        return RequestIdentity(job.owner, job=job)
    found = BearerTokenAuthentication().authenticate(drf_request)
    if found is None:
        raise Unauthenticated("Set MLFLOW_TRACKING_TOKEN to a token of your account.")
    return RequestIdentity(*found)


def _authorize(caller: RequestIdentity, endpoint: Endpoint, project: str) -> Project:
    """Return the project of the request if the caller may use it so."""
    if caller.job is not None:
        if project not in ("", caller.job.project.public_id):
            raise NotFound("This token belongs to a job of another project.")
        row = caller.job.project
    else:
        if not project:
            raise InvalidRequest(
                "Name the project: end the tracking URI with /api/mlflow/<id>, or set MLFLOW_WORKSPACE to its id."
            )
        row = get_first(visible_projects(caller.user).filter(public_id=project), "There is no such project.")
    reads = endpoint.access is EndpointAccess.READ
    scopes = (Scope.EXPERIMENTS, Scope.READ) if reads else (Scope.EXPERIMENTS,)
    if caller.token is not None and not any(has_scope(caller.token, scope) for scope in scopes):
        raise Forbidden("This token lacks the scope experiments.", code="scope_missing")
    require_permission(caller.user, Permission.VIEW if reads else Permission.SUBMIT, row)
    return row


def _check_artifact_path(request: HttpRequest, endpoint: Endpoint) -> None:
    if endpoint.is_artifact:
        paths, of_file = [endpoint.name.partition("/")[2]], request.method != "DELETE"
    else:  # a list; of a repeated parameter MLflow reads the first value
        paths, of_file = [path for path in request.GET.getlist("path") if path], False
    for path in paths:
        if problem := artifact_path_problem(path, of_file=of_file):
            raise InvalidRequest(f"“{path[:200]}” cannot be the path of an artifact: {problem}.")


def _forward(
    request: HttpRequest, caller: RequestIdentity, endpoint: Endpoint, project: Project, path: str
) -> HttpResponseBase:
    downloads = endpoint.is_artifact and request.method == "GET"
    headers = {"Content-Type": "application/octet-stream" if endpoint.is_artifact else "application/json"}
    headers |= range_headers(request) if downloads else {}
    body: bytes | IO[bytes] | None = None
    if endpoint.is_artifact and request.method == "PUT":
        if int(request.META.get("CONTENT_LENGTH") or 0) > settings.MAX_ARTIFACT_BYTES:
            raise TooLarge(f"An artifact may have at most {settings.MAX_ARTIFACT_BYTES // 2**20} MiB.")
        body = cast("IO[bytes]", request)
    elif request.method != "GET":
        try:
            body = checked_body(request.body, endpoint.name, caller.user, caller.job)
        except RequestDataTooBig as refused:
            raise TooLarge("The request exceeds 1 MiB. Log in smaller batches.") from refused
    release_connection()  # the answer may take seconds
    if caller.job is not None and endpoint.name == "experiments/get-by-name":
        _ensure_default_experiment(project, request.GET.get("experiment_name", ""))
    answer = send(
        project.public_id,
        request.method or "GET",
        f"/api/{path}",
        query=request.META.get("QUERY_STRING", ""),
        body=body,
        headers=headers,
        timeout_s=ARTIFACT_TIMEOUT_S if endpoint.is_artifact else TIMEOUT_S,
    )
    if downloads and answer.status in ARTIFACT_STATUSES:
        return artifact_response(request, answer, path.rpartition("/")[2])
    with answer:
        content = answer.read()
    if answer.status >= 500 and not content.startswith(b"{"):
        log.error("the tracking server failed to answer %s %s: %s", request.method, path, content[:500])
        return _error(500, "The tracking server failed to handle this request. It has been logged.")
    found = HttpResponse(content, status=answer.status, content_type="application/json")
    found["Cache-Control"] = "no-store"
    return found


def _ensure_default_experiment(project: Project, name: str) -> None:
    """Create the experiment that jobs log to by default, before several ranks of a job try to."""
    if name != project.name:
        return
    try:
        call(project.public_id, "GET", "experiments/get-by-name", experiment_name=name)
    except NotFound:
        with suppress(InvalidRequest):  # another request was faster
            call(project.public_id, "POST", "experiments/create", {"name": name})


def _error(status: int, message: str, *, retry_after_s: float | None = None) -> HttpResponse:
    answer = JsonResponse(
        {"error_code": _ERROR_CODES.get(status, "INTERNAL_ERROR"), "message": message}, status=status
    )
    if retry_after_s:
        answer["Retry-After"] = str(round(retry_after_s))
    return answer
