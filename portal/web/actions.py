"""What a button of a page asks for: done or refused, then back to the page with a message that says which."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from portal.errors import FairwayError
from portal.services.lifecycle.rights_changes import ChoiceRequired


def run_and_redirect(request: HttpRequest, action: Callable[[], str], back: str) -> HttpResponse:
    """Does ``act``, which gives what it did as a message, and sends the reader ``back`` to an address.

    A refusal is told there too; ``ChoiceNeeded`` goes on to the caller, who asks. Look rows up before, so that one
    that is not there answers 404.
    """
    try:
        messages.success(request, action())
    except ChoiceRequired:
        raise
    except FairwayError as refusal:
        messages.error(request, refusal.message)
    return HttpResponseRedirect(back)
