"""Base of every REST view: default deny, and one declaration per method that guards and documents it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any, TypeVar

from django.db.models import Model, QuerySet
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import serializers
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import Throttled
from rest_framework.request import Request
from rest_framework.views import APIView

from portal.access import AccessPolicy, access_policy, enforce, require_user
from portal.api.framework import pagination, problems
from portal.api.framework.authentication import (
    BearerTokenAuthentication,
    PortalSessionAuthentication,
    client_key,
)
from portal.api.framework.request_parsing import (
    MAX_BODY_BYTES,
    StrictCharField,
    StrictJson,
    StrictSerializer,
    read_body,
    read_query,
    refuse_empty_yaml,
)
from portal.domain.states import JobKind
from portal.errors import Forbidden, PreconditionRequired
from portal.models import ApiToken, Job, User
from portal.services import idempotency
from portal.services.accounts.tokens import Scope, has_scope
from portal.valkey import rate_limits
from portal.valkey.rate_limits import RateLimit

log = logging.getLogger(__name__)

ENTITY_TAGS_PATTERN = r'^(\*|"[^"]*"(, *"[^"]*")*)$'
"""The value of If-Match (RFC 9110, section 13.1.1): ``*`` or a list of entity tags."""

ResponseSchema = (
    type[serializers.BaseSerializer[Any]]
    | list[type[serializers.Serializer[Any]]]
    | type[str]
    | OpenApiTypes
    | None
)
"""A list of one serializer is a page of a list; OBJECT is any object; None is an empty answer."""
_Method = TypeVar("_Method", bound=Callable[..., HttpResponseBase])
_Row = TypeVar("_Row", bound=Model)


class Problem(serializers.Serializer[Any]):
    """RFC 9457 problem details; ``code`` is stable, ``detail`` is a human-readable message."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    detail = serializers.CharField()
    code = serializers.CharField()
    errors = serializers.ListField(  # type: ignore[assignment]
        child=serializers.DictField(child=serializers.CharField()),
        required=False,
        help_text="One entry per invalid field: field, code, message.",
    )
    details = serializers.DictField(
        required=False, help_text="Details of the error, such as the nearest possible request."
    )


class ListQuery(StrictSerializer):
    """Parameters of every list."""

    limit = serializers.IntegerField(
        required=False, min_value=1, max_value=pagination.MAX_LIMIT, default=pagination.DEFAULT_LIMIT
    )
    cursor = StrictCharField(
        required=False, max_length=2000, help_text="Cursor from `next` of the previous page."
    )


@dataclass
class Operation:
    """The declaration of one method of an ApiView, which guards and documents it; used as a decorator.

    ``scope`` is the scope that a token needs (None on public routes). ``scope_by_job_kind`` is for actions on one
    job that need the scope of the job's kind: the method calls ``require_scope_of`` with the job. ``partial`` reads
    the body as a patch of the given fields. ``uploads``: the body is a file, which the method reads.
    ``accepts``: the answer may also be 202 with a Location. ``may_only_check``: it is 200 if nothing was created.
    ``ranges``: a request with ``Range`` gets that part of the response. ``error_statuses`` are statuses beyond those
    that follow from the rest of the declaration and from parameters.
    """

    name: str
    summary: str
    _: KW_ONLY
    tag: str
    scope: Scope | None
    scope_by_job_kind: bool = False
    response: ResponseSchema
    status: int = 200
    query: type[StrictSerializer] | None = None
    body: type[StrictSerializer] | None = None
    partial: bool = False
    uploads: bool = False
    rate: RateLimit | None = None
    idempotent: bool = False
    accepts: bool = False
    may_only_check: bool = False
    if_match: bool = False
    ranges: bool = False
    error_statuses: Sequence[int] = ()
    media_type: str = "application/json"
    detail: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.response, list):
            (item,) = self.response
            self.response = list_schema(item)
            self.query = self.query or ListQuery

    def __call__(self, method: _Method) -> _Method:
        method.operation = self  # type: ignore[attr-defined]
        described: Callable[[_Method], _Method] = extend_schema(
            operation_id=self.name,
            summary=self.summary,
            description=(self.detail or self.summary) + self._scope_line(),
            tags=[self.tag],
            parameters=[*self._headers(), *([self.query] if self.query else [])],
            request=self._request_schema(),
            responses=self._responses(),
        )
        return described(method)

    def _request_schema(self) -> Any:
        if self.uploads:
            return {"application/octet-stream": OpenApiTypes.BINARY}
        return self.body(partial=True) if self.body and self.partial else self.body

    def _scope_line(self) -> str:
        if self.scope_by_job_kind:
            return "\n\nA token needs the scope `jobs`, or `workspaces` if the job is a workspace."
        return f"\n\nA token needs the scope `{self.scope.value}`." if self.scope else ""

    def _headers(self) -> list[OpenApiParameter]:
        headers = []
        if self.idempotent:
            meaning = "A repeated request with the same key and body gets the same response."
            headers.append(_header_parameter("Idempotency-Key", meaning, f"^{idempotency.KEY_PATTERN}$"))
        if self.if_match:
            meaning = "The ETag that was read; 428 if missing, 412 if outdated."
            headers.append(_header_parameter("If-Match", meaning, ENTITY_TAGS_PATTERN, required=True))
        return headers

    def _responses(self) -> dict[Any, OpenApiResponse]:
        codes = {400, 405, 422, 429, 503, *self.error_statuses}
        codes |= {401, 403} if self.scope is not None else set()
        codes |= {413, 415} if self.body is not None else set()
        codes |= {409} if self.idempotent else set()
        codes |= {416} if self.ranges else set()
        codes |= {412, 428} if self.if_match else set()
        good = OpenApiResponse(self.response or None, description="Success.")
        responses: dict[Any, OpenApiResponse] = {
            (self.status, self.media_type) if self.response else self.status: good
        }
        if self.may_only_check:
            text = "Checked; nothing was created."
            responses[200, self.media_type] = OpenApiResponse(self.response, description=text)
        if self.accepts:
            text = "Accepted, not finished; Location is the status."
            responses[202, self.media_type] = OpenApiResponse(self.response, description=text)
        if self.ranges:
            responses[206, self.media_type] = OpenApiResponse(
                self.response, description="The requested range."
            )
        for code in sorted(codes):
            text = status_description(code)
            responses[code, problems.MEDIA_TYPE] = OpenApiResponse(Problem, description=text)
        return responses


operation = Operation


class ApiView(APIView):
    """A REST view; requests need an access policy on it or its base, and ``@operation(...)`` on the method."""

    checks_policy_itself = True  # tokens are authenticated first; see portal.policy_middleware

    authentication_classes: Sequence[type[BaseAuthentication]] = [
        BearerTokenAuthentication,
        PortalSessionAuthentication,
    ]
    parser_classes = [StrictJson]
    max_body_bytes = MAX_BODY_BYTES
    permission_classes = []
    metadata_class = None
    http_method_names = ["get", "head", "post", "put", "patch", "delete"]

    query: dict[str, Any]
    body: dict[str, Any]
    lines_of_body: Mapping[str, int] = {}
    """Line of each key of a YAML body by its path."""
    request: Request

    # -- for methods ---------------------------------------------------------------------------

    @property
    def user(self) -> User:
        return require_user(self.request.user)

    @property
    def token(self) -> ApiToken | None:
        """The token of the request; None for a session."""
        return self.request.auth if isinstance(self.request.auth, ApiToken) else None

    def json_response(
        self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Return a JSON response that is not cached."""
        answer = HttpResponse(
            json.dumps(body, separators=(",", ":")),
            status=status,
            content_type="application/json",
            headers=dict(headers or {}),
        )
        answer["Cache-Control"] = "no-store"
        return answer

    def no_content(self) -> HttpResponse:
        return HttpResponse(status=204)

    def paginated_response(
        self,
        rows: QuerySet[_Row],
        serialize: Callable[[_Row], Any],
        order: pagination.Order = pagination.NEWEST,
    ) -> HttpResponse:
        return self.paginated_batch(rows, lambda found: list(map(serialize, found)), order)

    def paginated_batch(
        self,
        rows: QuerySet[_Row],
        serialize_all: Callable[[list[_Row]], list[Any]],
        order: pagination.Order = pagination.NEWEST,
    ) -> HttpResponse:
        """Return a page whose rows are serialized together, to read what belongs to them in one query."""
        return self.json_response(pagination.paginate(self.request, rows, order, self.query, serialize_all))

    def require_scope_of(self, job: Job) -> None:
        """Raise Forbidden unless the token, if any, has the scope of the job's kind."""
        self._require_scope(Scope.WORKSPACES if job.kind == JobKind.WORKSPACE.value else Scope.JOBS)

    def require_scope(self, scope: Scope) -> None:
        """Raise Forbidden unless the token, if any, has this scope, too."""
        self._require_scope(scope)

    def if_match(self, etag: str) -> bool:
        """Return whether If-Match matches ``etag``. Raise PreconditionRequired without the header."""
        given = self.request.headers.get("If-Match")
        if not given:
            raise PreconditionRequired(
                "If-Match with the ETag that was read is required.", code="if_match_required"
            )
        return given.strip() == "*" or etag in re.findall(r'"[^"]*"', given)

    def idempotent_response(
        self,
        work: Callable[[], Any],
        status: int = 201,
        *,
        precheck: Callable[[], object] | None = None,
        has_secret: bool = False,
    ) -> HttpResponse:
        """Run ``work``, which returns the response body, at most once per Idempotency-Key.

        With a key, ``work`` runs in a transaction; ``precheck`` runs before the transaction begins. ``has_secret``:
        the response is stored encrypted.
        """
        key = self.request.headers.get("Idempotency-Key")
        if key is None:
            return self.json_response(work(), status)
        given = self.request.data
        kept = idempotency.run_once(
            self.user,
            key,
            self.request.path,
            given,
            lambda: (status, work()),
            check=precheck,
            has_secret=has_secret,
        )
        headers = {"Idempotency-Replayed": "true"} if kept.is_replay else {}
        return self.json_response(kept.body, kept.status, headers)

    @property
    def raw_body(self) -> dict[str, Any]:
        """The JSON object as received; ``body`` holds the validated one."""
        return dict(self.request.data)

    # -- request checks ------------------------------------------------------------------------

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Authenticate, authorize, apply rate limits, then parse: in this order."""
        self.perform_authentication(request)
        wanted = getattr(type(self), "access_policy", None)
        if not isinstance(wanted, AccessPolicy):
            raise Forbidden("This route declares no access policy and cannot be used.", code="no_policy")
        enforce(request.user, wanted)
        self._throttle(rate_limits.REQUESTS if request.user else rate_limits.ANONYMOUS_REQUESTS)
        word = (request.method or "").lower()
        method = getattr(self, word, None) if word in self.http_method_names else None
        if method is None:
            return  # DRF answers 405
        plan = getattr(method, "operation", None)
        if not isinstance(plan, Operation):
            raise Forbidden("This route declares no operation and cannot be used.", code="no_policy")
        if plan.scope is not None:
            self._require_scope(plan.scope, *((Scope.WORKSPACES,) if plan.scope_by_job_kind else ()))
        if plan.rate is not None:
            self._throttle(plan.rate)
        self.query = read_query(request.query_params, plan.query)
        if plan.body:
            refuse_empty_yaml(request)
        self.body = read_body(request.data, plan.body, partial=plan.partial) if plan.body else {}

    def perform_content_negotiation(self, request: Request, force: bool = False) -> Any:
        """Select JSON regardless of the Accept header."""
        renderer = self.get_renderers()[0]
        return renderer, renderer.media_type

    def handle_exception(self, exc: Exception) -> Any:
        """Return every failure as a problem; unexpected ones are logged without exposing a traceback."""
        answer = problems.response_for(exc, self.lines_of_body)
        if answer is None:
            log.exception("unforeseen while serving %s %r", self.request.method, self.request.path)
            answer = problems.response_for_status(500)
        return answer

    def finalize_response(self, request: Request, response: Any, *args: Any, **kwargs: Any) -> Any:
        """Add Allow and Vary, as DRF does."""
        answer = super().finalize_response(request, response, *args, **kwargs)
        answer["Vary"] = "Authorization, Cookie"
        return answer

    def _require_scope(self, *any_of: Scope) -> None:
        if self.token is None or any(has_scope(self.token, scope) for scope in any_of):
            return
        raise Forbidden(
            f"This token lacks the scope {' or '.join(any_of)}.",
            code="scope_missing",
            details={"scope": any_of[0].value},
        )

    def _throttle(self, rate: RateLimit) -> None:
        counts = [(rate, client_key(self.request))]
        if isinstance(self.request.user, User):
            user = self.request.user.public_id
            own = f"token:{self.token.public_id}" if self.token else f"sessions:{user}"
            counts = [(rate, own), (rate_limits.shared_by_user(rate), user)]
        # In this order: a request that the token may not make does not count for its owner.
        for each, who in counts:
            wait_s = rate_limits.consume(each, who)
            if wait_s > 0:
                raise Throttled(wait_s)


@access_policy(AccessPolicy.SIGNED_IN)
class SignedInView(ApiView):
    """A view for everybody who is signed in; selectors and services decide about each row."""


@access_policy(AccessPolicy.ADMIN)
class AdminView(ApiView):
    """A view for administrators."""


@cache
def list_schema(item: type[serializers.Serializer[Any]]) -> type[serializers.Serializer[Any]]:
    """Return the schema of one page of a list of ``item``."""
    return type(
        f"{item.__name__}Page",
        (serializers.Serializer,),
        {
            "__doc__": f"One page of a list of {item.__name__}.",
            "items": item(many=True),
            "next": serializers.CharField(
                allow_null=True, help_text="URI reference of the next page; null on the last page."
            ),
        },
    )


def _header_parameter(name: str, meaning: str, pattern: str, *, required: bool = False) -> OpenApiParameter:
    shape: Any = {"type": "string", "pattern": pattern}
    return OpenApiParameter(name, shape, OpenApiParameter.HEADER, required=required, description=meaning)


def status_description(code: int) -> str:
    return {
        400: "The request does not match this document; `errors` names the fields.",
        401: "Credentials are missing or invalid.",
        403: "Not permitted.",
        404: "The object does not exist, or is not visible to you.",
        405: "The method is not allowed.",
        409: "The current state of the object does not allow this.",
        412: "The object was changed since it was read; `details.current` is the current version.",
        413: "The body, or what is requested, is too large.",
        415: "The body must be application/json, or another type that this document names.",
        416: "The range begins beyond the end; `Content-Range` has the size.",
        422: "The request is well-formed, but refers to an object that does not exist, contradicts itself, or could "
        "never run on this cluster; `details` may contain the nearest request that could.",
        428: "If-Match is missing.",
        429: "Too many requests; see Retry-After.",
        503: "A required service is unavailable; see Retry-After.",
    }[code]
