"""REST: the current user and their tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import roles_by_project
from portal.api.framework.request_parsing import NonBlankCharField, StrictIntegerField, StrictSerializer
from portal.api.framework.views import SignedInView, operation
from portal.api.serializers.users import SCOPES, Authentication, CurrentUser, NewToken, Token
from portal.selectors.projects.projects import list_projects
from portal.services.accounts.tokens import (
    DEFAULT_DAYS,
    MAX_DAYS,
    Scope,
    do_create_token,
    do_revoke_token,
    visible_tokens,
)
from portal.valkey import rate_limits

_write = partial(operation, tag="tokens", scope=Scope.TOKENS)


class CurrentUserView(SignedInView):
    @operation("me", "Get the current user", tag="me", scope=Scope.READ, response=CurrentUser)
    def get(self, request: Request) -> HttpResponse:
        """Account, projects with roles, and the scopes of this authentication."""
        return self.json_response(
            CurrentUser.represent(
                self.user,
                Authentication(list(list_projects(self.user)), roles_by_project(self.user), self.token),
            )
        )


class NewTokenBody(StrictSerializer):
    """A new token."""

    name = NonBlankCharField(max_length=100)
    scopes = serializers.ListField(
        child=serializers.ChoiceField(SCOPES),
        allow_empty=False,
        max_length=len(SCOPES),
    )
    days = StrictIntegerField(required=False, default=DEFAULT_DAYS, min_value=1, max_value=MAX_DAYS)


class TokensView(SignedInView):
    @operation(
        "tokens_list",
        "List your tokens",
        tag="tokens",
        scope=Scope.READ,
        response=[Token],
        detail="Requests with a token list only tokens whose scopes it has too.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Tokens, newest first, including revoked and expired ones."""
        return self.paginated_response(visible_tokens(self.user, self.token), Token.represent)

    @_write(
        "tokens_create",
        "Create a token",
        body=NewTokenBody,
        response=NewToken,
        status=201,
        rate=rate_limits.TOKEN_CREATIONS,
        idempotent=True,
        error_statuses=[409],
        detail="Only this response contains the token's text. A token cannot create one with scopes that it lacks.",
    )
    def post(self, request: Request) -> HttpResponse:
        """The new token; its secret is shown only here."""
        scopes = {Scope(word) for word in self.body["scopes"]}
        name, days = self.body["name"].strip(), self.body["days"]

        def work() -> dict[str, Any]:
            row, text = do_create_token(self.user, name=name, scopes=scopes, days=days, by=self.token)
            return NewToken.represent(row, text)

        return self.idempotent_response(work, has_secret=True)


class TokenView(SignedInView):
    @_write(
        "tokens_revoke",
        "Revoke a token",
        response=None,
        status=204,
        detail="Effective at once. A token cannot revoke one with scopes that it lacks.",
    )
    def delete(self, request: Request, token: str) -> HttpResponse:
        """The token stops working at once."""
        do_revoke_token(self.user, token, by=self.token)
        return self.no_content()
