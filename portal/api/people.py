"""REST: the person who asks, and their tokens."""

from __future__ import annotations

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal import throttle
from portal.access import Policy, policy, roles_of
from portal.api.bodies import Closed, NonBlankText, Whole
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import people as shapes
from portal.selectors.projects import projects_for
from portal.services.tokens import DEFAULT_DAYS, MAX_DAYS, Scope, do_create_token, do_revoke_token, tokens_for


@policy(Policy.SIGNED_IN)
class MeRoute(Route):
    """The person who asks."""

    @operation("me", "Who am I", tag="me", scope=Scope.READ, answer=shapes.Me)
    def get(self, request: Request) -> HttpResponse:
        """Account, projects with roles, and the scopes of this way of asking."""
        return self.answer(
            shapes.me(self.person, list(projects_for(self.person)), roles_of(self.person), self.token)
        )


class TokenBody(Closed):
    """A new token."""

    name = NonBlankText(max_length=100)
    scopes = serializers.ListField(
        child=serializers.ChoiceField(shapes.SCOPES), allow_empty=False, max_length=len(shapes.SCOPES)
    )
    days = Whole(required=False, default=DEFAULT_DAYS, min_value=1, max_value=MAX_DAYS)


@policy(Policy.SIGNED_IN)
class TokensRoute(Route):
    """One's own tokens."""

    @operation(
        "tokens_list",
        "List my tokens",
        tag="tokens",
        scope=Scope.READ,
        query=PageQuery,
        answer=page_of(shapes.Token),
        detail="Asked with a token: those that have no scope it lacks.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Newest first, revoked and expired ones included."""
        return self.page(tokens_for(self.person, self.token), shapes.token)

    @operation(
        "tokens_create",
        "Make a token",
        tag="tokens",
        scope=Scope.TOKENS,
        body=TokenBody,
        answer=shapes.NewToken,
        status=201,
        rate=throttle.TOKENS,
        refusals=[409],
        detail="The answer holds the token's text, this once. A token makes none stronger than itself.",
    )
    def post(self, request: Request) -> HttpResponse:
        """Shows the secret once."""
        scopes = {Scope(word) for word in self.body["scopes"]}
        row, text = do_create_token(
            self.person, name=self.body["name"].strip(), scopes=scopes, days=self.body["days"], by=self.token
        )
        return self.answer({**shapes.token(row), "token": text}, 201)


@policy(Policy.SIGNED_IN)
class TokenRoute(Route):
    """One of one's own tokens."""

    @operation(
        "tokens_revoke",
        "Revoke a token",
        tag="tokens",
        scope=Scope.TOKENS,
        answer=None,
        status=204,
        refusals=[404],
        detail="It stops working at once. A token revokes none that has a scope it lacks.",
    )
    def delete(self, request: Request, token: str) -> HttpResponse:
        """It stops working at once."""
        do_revoke_token(self.person, token, by=self.token)
        return self.done()
