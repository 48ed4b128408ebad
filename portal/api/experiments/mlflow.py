"""MLflow's REST API below ``/api/mlflow/``: authorizes each request, then passes it to the tracking server.

A request concerns one project: that of the address, of MLflow's workspace header, or of the job's token. Errors
have MLflow's form, so that its client shows the message.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import IO, Any, cast
from urllib.parse import urlencode

from django.conf import settings
from django.core.exceptions import RequestDataTooBig, TooManyFieldsSent
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.views.decorators.csrf import csrf_exempt
from rest_framework.exceptions import Throttled
from rest_framework.request import Request

from portal.access import AccessPolicy, Permission, access_policy, can, require_permission, visible_projects
from portal.api.experiments.mlflow_bodies import checked_body, run_name, write_body
from portal.api.framework.authentication import BearerTokenAuthentication, client_key
from portal.database.pool_middleware import release_connection
from portal.domain.experiments.tracking import (
    CONTINUE_ENDPOINT,
    FIRST_NAME_TAG,
    REPLACE_PARAMS_HEADER,
    RUN_NAME_TAG,
)
from portal.domain.states import JobKind
from portal.downloads import ARTIFACT_STATUSES, artifact_response, range_headers
from portal.errors import FairwayError, Forbidden, InvalidRequest, NotFound, TooLarge, Unauthenticated
from portal.models import ApiToken, Attempt, Project, User
from portal.selectors.lookup import get_first
from portal.services.accounts.tokens import Scope, has_scope
from portal.services.jobs.tracking import TOKEN_PREFIX, get_token_attempt
from portal.tracking.client import TIMEOUT_S, WORKSPACE_HEADER, call, send
from portal.tracking.default_experiments import (
    DEFAULT_ID,
    DEFAULT_NAME,
    default_experiment,
    ensure_experiment,
    experiment_of,
    names_default,
    replace_default,
)
from portal.tracking.endpoints import (
    ARTIFACT_TIMEOUT_S,
    Endpoint,
    EndpointAccess,
    artifact_path_problem,
    find_endpoint,
    reason_not_offered,
    without_dots,
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
    """Who sends a request: the owner of a token, and the attempt of a job's token."""

    user: User
    token: ApiToken | None = None
    attempt: Attempt | None = None

    @property
    def is_later_attempt(self) -> bool:
        """Whether it is an attempt of a training that continues an earlier one."""
        attempt = self.attempt
        return attempt is not None and attempt.number > 1 and attempt.job.kind == JobKind.TRAINING


@csrf_exempt  # no cookie is read
@access_policy(AccessPolicy.SIGNED_IN)
def mlflow_api(request: HttpRequest, path: str, project: str = "") -> HttpResponseBase:
    """Answer a request of MLflow's client."""
    try:
        caller = _authenticate(request)
        endpoint = find_endpoint(request.method or "", path)
        if endpoint is None:
            reason = reason_not_offered(f"api/{path}")
            raise NotFound(
                f"{request.method} {path} is not part of the MLflow API that Fairway offers. {reason}".strip()
            )
        row = _authorize(caller, endpoint, project or request.headers.get(WORKSPACE_HEADER, ""))
        _check_artifact_path(request, endpoint)
        return _forward(request, caller, endpoint, row, path)
    except Throttled as error:
        return _error(429, "Too many invalid tokens.", retry_after_s=float(getattr(error, "wait", None) or 1))
    except TooManyFieldsSent:
        return _error(400, f"A query may have at most {settings.DATA_UPLOAD_MAX_NUMBER_FIELDS} parameters.")
    except FairwayError as error:
        return _error(error.status, error.message, retry_after_s=error.retry_after_s)


mlflow_api.checks_policy_itself = True  # type: ignore[attr-defined]


def _authenticate(request: HttpRequest) -> RequestIdentity:
    drf_request = cast("Request", request)  # only META is read
    text = request.META.get("HTTP_AUTHORIZATION", "").partition(" ")[2].strip()
    if text.startswith(TOKEN_PREFIX):
        try:
            attempt = get_token_attempt(text)
        except Unauthenticated:
            wait_s = rate_limits.consume(rate_limits.INVALID_TOKENS, client_key(drf_request))
            if wait_s > 0:
                raise Throttled(wait_s) from None
            raise
        return RequestIdentity(attempt.job.owner, attempt=attempt)
    found = BearerTokenAuthentication().authenticate(drf_request)
    if found is None:
        raise Unauthenticated("Set MLFLOW_TRACKING_TOKEN to a token of your account.")
    return RequestIdentity(*found)


def _authorize(caller: RequestIdentity, endpoint: Endpoint, project: str) -> Project:
    """Return the project of the request if the caller may use it so."""
    if caller.attempt is not None:
        row = caller.attempt.job.project
        if project not in ("", row.public_id):
            raise NotFound("This token belongs to a job of another project.")
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
        paths, of_file = _listed_paths(request), False
    for path in paths:
        if problem := artifact_path_problem(path, of_file=of_file):
            raise InvalidRequest(f"“{path[:200]}” cannot be the path of an artifact: {problem}.")


def _listed_paths(request: HttpRequest) -> list[str]:
    """Return the paths of a list without the name `.`, which MLflow's client sends for the folder itself."""
    return [plain for path in request.GET.getlist("path") if (plain := without_dots(path))]


def _query(request: HttpRequest) -> str:
    """Return the query for the tracking server, with the paths that were checked."""
    paths = _listed_paths(request)
    if paths == [path for path in request.GET.getlist("path") if path]:
        return str(request.META.get("QUERY_STRING", ""))
    return urlencode({**dict(request.GET.lists()), "path": paths}, doseq=True)


def _forward(
    request: HttpRequest, caller: RequestIdentity, endpoint: Endpoint, project: Project, path: str
) -> HttpResponseBase:
    downloads = endpoint.is_artifact and request.method == "GET"
    headers = {"Content-Type": "application/octet-stream" if endpoint.is_artifact else "application/json"}
    headers |= range_headers(request) if downloads else {}
    query = _query(request)
    content: dict[str, Any] | None = None
    if endpoint.is_artifact and request.method == "PUT":
        if int(request.META.get("CONTENT_LENGTH") or 0) > settings.MAX_ARTIFACT_BYTES:
            raise TooLarge(f"An artifact may have at most {settings.MAX_ARTIFACT_BYTES // 2**20} MiB.")
    elif request.method != "GET":
        try:
            content = checked_body(request.body, endpoint.name, caller.user, caller.attempt)
        except RequestDataTooBig as error:
            raise TooLarge("The request exceeds 1 MiB. Log in smaller batches.") from error
    uses_default = _uses_default(request, caller, endpoint, content)
    may_create = endpoint.access is EndpointAccess.WRITE or (
        uses_default and can(caller.user, Permission.SUBMIT, project)
    )
    release_connection()  # the answer may take seconds
    if uses_default:
        with nullcontext() if may_create else suppress(NotFound):
            query = _name_default(request, endpoint, project, content, create=may_create) or query
    if content is not None and caller.attempt is not None and caller.is_later_attempt:
        headers[REPLACE_PARAMS_HEADER] = caller.attempt.job.public_id
        if endpoint.name == "runs/create" and (run := _continued_run(caller.attempt, project, content)):
            return _json_answer(run)
    body: bytes | IO[bytes] | None = None if content is None else write_body(content)
    if endpoint.is_artifact and request.method == "PUT":
        body = cast("IO[bytes]", request)
    answer = send(
        project.public_id,
        request.method or "GET",
        f"/api/{path}",
        query=query,
        body=body,
        headers=headers,
        timeout_s=ARTIFACT_TIMEOUT_S if endpoint.is_artifact else TIMEOUT_S,
    )
    if downloads and answer.status in ARTIFACT_STATUSES:
        return artifact_response(request, answer, path.rpartition("/")[2])
    with answer:
        received = answer.read()
    if answer.status >= 500 and not received.startswith(b"{"):
        log.error("the tracking server failed to answer %s %s: %s", request.method, path, received[:500])
        return _error(500, "The tracking server failed to handle this request. It has been logged.")
    found = HttpResponse(received, status=answer.status, content_type="application/json")
    found["Cache-Control"] = "no-store"
    return found


def _uses_default(
    request: HttpRequest, caller: RequestIdentity, endpoint: Endpoint, content: dict[str, Any] | None
) -> bool:
    """Return whether the request is about an experiment that programs use without creating it.

    Those are MLflow's own default, with the id 0, and the one of the name of the project, to which jobs log.
    """
    if endpoint.name == "experiments/get-by-name":
        names = (DEFAULT_NAME, caller.attempt.job.project.name if caller.attempt else "")
        return _queried(request, "experiment_name", "experimentName") in names
    if endpoint.name == "experiments/search":
        return caller.attempt is None
    if content is not None:
        return names_default(content, endpoint.name)
    return _queried(request, "experiment_id", "experimentId") == DEFAULT_ID


def _name_default(
    request: HttpRequest,
    endpoint: Endpoint,
    project: Project,
    content: dict[str, Any] | None,
    *,
    create: bool,
) -> str:
    """Name the experiment by its id in the request, and create it if needed, before several ranks of a job try to.

    Return the query if it changed. Raise NotFound without ``create``.
    """
    if endpoint.name == "experiments/get-by-name":
        if create:
            ensure_experiment(project.public_id, _queried(request, "experiment_name", "experimentName"))
        return ""
    experiment = default_experiment(project.public_id, create=create)
    if content is not None:
        replace_default(content, endpoint.name, experiment)
        return ""
    fields = {name: values for name, values in request.GET.lists() if name != "experimentId"}
    return (
        urlencode({**fields, "experiment_id": experiment}, doseq=True)
        if endpoint.name == "experiments/get"
        else ""
    )


def _queried(request: HttpRequest, *names: str) -> str:
    return next((value for name in names if (value := request.GET.get(name))), "")


def _continued_run(attempt: Attempt, project: Project, content: dict[str, Any]) -> dict[str, Any] | None:
    """Return the run of an earlier attempt that this one continues instead of creating a run; None to create it."""
    parents = [tag.get("value") for tag in content["tags"] if tag.get("key") == "mlflow.parentRunId"]
    wanted = {
        "job": attempt.job.public_id,
        "attempt": attempt.number,
        "started_ms": int(attempt.created_at.timestamp() * 1000),
        "experiment": int(experiment) if (experiment := experiment_of(content)).isdecimal() else -1,
        "name": run_name(content),
        "parent": str(parents[0]) if parents else "",
    }
    run = call(project.public_id, "POST", CONTINUE_ENDPOINT, wanted).get("run_id")
    if not run:
        return None
    kept = (RUN_NAME_TAG, FIRST_NAME_TAG)
    tags = [tag for tag in content["tags"] if tag.get("key") not in kept]
    call(project.public_id, "POST", "runs/log-batch", {"run_id": run, "tags": tags})
    return call(project.public_id, "GET", "runs/get", run_id=run)


def _json_answer(content: dict[str, Any]) -> HttpResponse:
    answer = JsonResponse(content)
    answer["Cache-Control"] = "no-store"
    return answer


def _error(status: int, message: str, *, retry_after_s: float | None = None) -> HttpResponse:
    answer = JsonResponse(
        {"error_code": _ERROR_CODES.get(status, "INTERNAL_ERROR"), "message": message}, status=status
    )
    if retry_after_s:
        answer["Retry-After"] = str(round(retry_after_s))
    return answer
