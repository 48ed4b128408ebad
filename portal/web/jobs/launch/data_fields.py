"""The "Data" part of the launch form: parsing of its lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from portal.domain.projects.secrets import PROJECT_SCOPE, USER_SCOPE
from portal.domain.storage.volumes import default_mount_path
from portal.web.form_fields import text_area

if TYPE_CHECKING:
    from django.utils.functional import _StrOrPromise as StrOrPromise


if TYPE_CHECKING:
    pass


def _lines_field(label: StrOrPromise, help_text: StrOrPromise, **attrs: str) -> forms.CharField:
    widget = text_area(2, spellcheck="false", **attrs)
    return forms.CharField(label=label, max_length=65536, required=False, widget=widget, help_text=help_text)


class DataForm(forms.Form):
    """Volumes and secrets, one per line."""

    volumes = _lines_field(
        gettext_lazy("Volumes"),
        gettext_lazy(
            "One per line: NAME is mounted at /volumes/NAME, NAME /path at /path; append ro for read only."
        ),
    )
    secret_variables = _lines_field(
        gettext_lazy("Secrets as variables"),
        gettext_lazy("One VARIABLE=SECRET per line; project/SECRET is a secret of the project."),
        placeholder="HUB_TOKEN=hub-token",
    )
    secret_files = _lines_field(
        gettext_lazy("Secrets as files"),
        gettext_lazy("One FILE=SECRET per line; the files are in /run/fairway."),
        placeholder="key.pem=deploy-key",
    )

    def clean_volumes(self) -> list[dict[str, Any]]:
        """Convert NAME [PATH] [ro] lines to the API's format."""
        found = []
        for line in self.cleaned_data["volumes"].splitlines():
            words = line.split()
            read_only = len(words) > 1 and words[-1] == "ro"
            words = words[:-1] if read_only else words
            if not words:
                continue
            if len(words) > 2:
                raise forms.ValidationError(
                    _("“{line}” is not of the form NAME [PATH] [ro].").format(line=line.strip()[:40])
                )
            target = words[1] if len(words) == 2 else None
            found.append({"volume": words[0], "target": target, "read_only": read_only})
        return found

    def clean_secret_variables(self) -> list[dict[str, Any]]:
        return parse_secrets(self.cleaned_data["secret_variables"], "variable")

    def clean_secret_files(self) -> list[dict[str, Any]]:
        return parse_secrets(self.cleaned_data["secret_files"], "file")

    def secrets(self) -> list[dict[str, Any]]:
        return [*self.cleaned_data["secret_variables"], *self.cleaned_data["secret_files"]]


def format_volumes(given: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(map(_format_volume, given))


def _format_volume(each: Mapping[str, Any]) -> str:
    name, target = str(each.get("volume", "")), each.get("target")
    words = [name, *([str(target)] if target and target != default_mount_path(name) else [])]
    return " ".join([*words, *(["ro"] if each.get("read_only") else [])])


def parse_secrets(text: str, delivery: str) -> list[dict[str, Any]]:
    """Convert TARGET=SECRET or TARGET=project/SECRET lines to the API's format.

    ``delivery`` is "variable" or "file". Raise ValidationError.
    """
    found = []
    for line in text.splitlines():
        if not line.strip():
            continue
        target, sign, name = (part.strip() for part in line.partition("="))
        if not (target and sign and name):
            raise forms.ValidationError(
                _("“{line}” is not {delivery}=SECRET.").format(
                    line=line.strip()[:40], delivery=delivery.upper()
                )
            )
        of, slash, rest = name.partition("/")
        owner = PROJECT_SCOPE if slash and of == PROJECT_SCOPE else USER_SCOPE
        found.append(
            {"secret": rest if owner == PROJECT_SCOPE else name, "owner_type": owner, delivery: target}
        )
    return found


def format_secrets(given: Iterable[Mapping[str, Any]], delivery: str) -> str:
    """Format the secrets of a job with this delivery as typed."""
    return "\n".join(
        f"{each[delivery]}={'project/' if each.get('owner_type') == PROJECT_SCOPE else ''}{each.get('secret', '')}"
        for each in given
        if each.get(delivery)
    )
