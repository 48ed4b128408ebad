"""REST: announcements; all users read them, administrators write them."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import require_admin
from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import AdminView, SignedInView, operation
from portal.selectors.notices.announcements import current_announcements
from portal.services.accounts.tokens import Scope
from portal.services.notices.announcements import MAX_LENGTH, do_announce, do_withdraw_announcement


class AnnouncementBody(StrictSerializer):
    """A message to all users."""

    message = StrictCharField(max_length=MAX_LENGTH)
    ends_at = serializers.DateTimeField(help_text="It is not shown from then on; at most 366 days ahead.")


class AnnouncementDetail(ResponseSerializer):
    """An announcement that has not ended."""

    id = serializers.CharField(source="public_id")
    message = serializers.CharField()
    ends_at = serializers.DateTimeField()
    created_at = serializers.DateTimeField()


class AnnouncementsView(SignedInView):
    @operation(
        "announcements_list",
        "List announcements",
        tag="cluster",
        scope=Scope.READ,
        response=[AnnouncementDetail],
    )
    def get(self, request: Request) -> HttpResponse:
        return self.paginated_response(
            current_announcements(), AnnouncementDetail.represent, Order("id", descending=True)
        )

    @operation(
        "announcements_create",
        "Write an announcement",
        tag="cluster",
        scope=Scope.ADMIN,
        body=AnnouncementBody,
        response=AnnouncementDetail,
        status=201,
        idempotent=True,
    )
    def post(self, request: Request) -> HttpResponse:
        require_admin(self.user, "write announcements")
        return self.idempotent_response(
            lambda: AnnouncementDetail.represent(
                do_announce(self.user, self.body["message"], self.body["ends_at"])
            )
        )


class AnnouncementView(AdminView):
    @operation(
        "announcements_withdraw",
        "Withdraw an announcement",
        tag="cluster",
        scope=Scope.ADMIN,
        response=None,
        status=204,
    )
    def delete(self, request: Request, announcement: str) -> HttpResponse:
        do_withdraw_announcement(self.user, announcement)
        return self.no_content()


ROUTES = [
    path("announcements/", AnnouncementsView.as_view()),
    path("announcements/<slug:announcement>/", AnnouncementView.as_view()),
]
