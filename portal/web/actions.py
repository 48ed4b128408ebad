"""Runs the action of a button and redirects back with its result as a message."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from portal.errors import FairwayError
from portal.services.lifecycle.rights_changes import ChoiceRequired


def run_and_redirect(request: HttpRequest, action: Callable[[], str], back: str) -> HttpResponse:
    """Run ``action``, which returns a success message, and redirect to ``back``.

    Refusals become messages too; ``ChoiceRequired`` propagates to the caller. Read rows beforehand, so that a
    missing one answers 404.
    """
    try:
        messages.success(request, action())
    except ChoiceRequired:
        raise
    except FairwayError as refusal:
        messages.error(request, refusal.message)
    return HttpResponseRedirect(back)
