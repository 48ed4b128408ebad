"""Users, and the uids under which their containers run."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib.auth.models import AbstractBaseUser, BaseUserManager
from django.db import models
from django.db.models import Q
from django.db.models.functions import Lower

from portal.models.public_id import PublicIdField, slug_validator

FIRST_UID = 200_000
"""First uid assigned to users without one from a directory."""


if TYPE_CHECKING:
    _BaseUserManager = BaseUserManager["User"]
else:
    _BaseUserManager = BaseUserManager


def normalize_username(text: str) -> str:
    """Return a user name as it is compared: without regard to case, width and surrounding spaces."""
    return unicodedata.normalize("NFKC", text).strip().lower()


class UserManager(_BaseUserManager):
    def get_by_natural_key(self, username: str | None) -> User:
        """Return the user of a typed name; of names that differ in case only, the one that is typed exactly.

        Raise DoesNotExist.
        """
        typed = username or ""
        name = normalize_username(typed)
        found = self.filter(username__iexact=name).order_by("pk")[:10]
        # in some locales a database takes "\u0131" and "i" for one letter, but attempts are counted by the name
        rows = [row for row in found if normalize_username(row.username) == name]
        exact = [row for row in rows if row.username == typed.strip()]
        if not exact and len(rows) != 1:
            raise self.model.DoesNotExist
        return (exact or rows)[0]

    def create_user(self, username: str, password: str | None = None, **fields: Any) -> User:
        """Save a new user; without ``uid`` the next free one is assigned.

        Without a password none is accepted.
        """
        if fields.get("uid") is None:
            top = self.aggregate(top=models.Max("uid"))["top"]
            fields["uid"] = max(FIRST_UID, (top or 0) + 1)
        fields.setdefault("gid", fields["uid"])
        user: User = self.model(username=username, **fields)
        user.set_password(password)
        user.save(using=self._db)
        return user


class User(AbstractBaseUser):
    """A user. Rights come from ``is_admin`` (the whole cluster) and memberships (one project)."""

    public_id = PublicIdField()
    username = models.CharField(max_length=63, unique=True, validators=[slug_validator])
    full_name = models.CharField(max_length=200, blank=True)
    email = models.EmailField(blank=True)
    is_active = models.BooleanField(default=True)
    is_admin = models.BooleanField(default=False, help_text="May see and change everything in the cluster.")
    uid = models.PositiveIntegerField(unique=True)
    gid = models.PositiveIntegerField()
    timezone = models.CharField(max_length=64, default="UTC")
    language = models.CharField(
        max_length=8, blank=True, default="", db_default="", help_text="Of pages; blank: that of the browser."
    )
    created_at = models.DateTimeField(auto_now_add=True)
    rights_version = models.PositiveIntegerField(
        default=1, help_text="Incremented when rights are removed; compared by open sockets."
    )

    objects: ClassVar[UserManager] = UserManager()

    USERNAME_FIELD = "username"
    REQUIRED_FIELDS: ClassVar[list[str]] = []

    class Meta:
        constraints = [
            models.UniqueConstraint(Lower("email"), name="user_email_once", condition=~Q(email="")),
            models.CheckConstraint(condition=Q(uid__gte=1000), name="user_uid_not_system"),
            models.CheckConstraint(condition=Q(gid__gte=1000), name="user_gid_not_system"),
        ]

    def __str__(self) -> str:
        return self.username

    @property
    def display_name(self) -> str:
        """The full name, or the user name if it is empty."""
        return self.full_name or self.username


def optional_user(on_delete: Any) -> models.ForeignKey[User | None, User | None]:
    """Return a reference to the user who did something, without a reverse relation; null: nobody did."""
    return models.ForeignKey(User, null=True, blank=True, on_delete=on_delete, related_name="+")
