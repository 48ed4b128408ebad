"""Announcements: written by administrators, shown on the home page until they end."""

from __future__ import annotations

import datetime as dt

from django.urls import reverse
from django.utils import timezone

from portal.models import Announcement, AuditEntry

TEXT = "The cluster is upgraded on Friday."


def home_of(client):
    return client.get(reverse("home")).content.decode()


def test_every_user_sees_an_announcement_until_it_ends(dataset, client_of):
    admin = client_of("admin")
    assert admin.post(reverse("announce"), {"message": TEXT, "period": "2 d"}).status_code == 302
    row = Announcement.objects.get()
    assert dt.timedelta(days=1) < row.ends_at - timezone.now() <= dt.timedelta(days=2)
    assert AuditEntry.objects.filter(action="announcement.create", object_id=row.public_id).exists()
    assert TEXT in home_of(client_of("stranger"))
    Announcement.objects.update(ends_at=timezone.now())
    assert TEXT not in home_of(client_of("stranger"))


def test_wrong_values_are_kept_and_named(dataset, client_of):
    admin = client_of("admin")
    page = admin.post(reverse("announce"), {"message": TEXT, "period": "soon"})
    assert page.status_code == 400 and TEXT in page.content.decode()
    assert "is not a time" in page.content.decode()
    for wrong in ({"message": "", "period": "2 d"}, {"message": TEXT, "period": "9999 d"}):
        assert admin.post(reverse("announce"), wrong).status_code == 400
    assert not Announcement.objects.exists()


def test_a_withdrawn_announcement_is_gone(dataset, client_of):
    admin = client_of("admin")
    admin.post(reverse("announce"), {"message": TEXT, "period": "2 d"})
    row = Announcement.objects.get()
    admin.post(reverse("withdraw-announcement", args=[row.public_id]))
    assert not Announcement.objects.exists()
    assert AuditEntry.objects.get(action="announcement.withdraw").before == {"message": TEXT}
    assert admin.post(reverse("withdraw-announcement", args=[row.public_id])).status_code in (302, 404)
