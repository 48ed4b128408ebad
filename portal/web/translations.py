"""Texts of scripts in the language of the page, and labels of the domain that pages translate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_safe
from django.views.i18n import JavaScriptCatalog

from agents.launchers import LAUNCHERS
from agents.xid_catalog import XID_MEANINGS
from portal.access import AccessPolicy, access_policy
from portal.catalogues import STORED_CONTEXT
from portal.domain.jobs.end_states import FailureClass
from portal.domain.jobs.job_spec import JobRole, JobSpec, job_fields
from portal.domain.jobs.phases import Phase
from portal.domain.jobs.reasons import END_MESSAGES, NO_FORECAST_REASONS, OTHER_FORECAST_REASONS, VerdictCode
from portal.domain.jobs.schedules import OVERLAP_LABELS, ScheduleSpec
from portal.domain.jobs.shipped_failure_rules import SHIPPED_RULES
from portal.domain.jobs.signals import SIGNALS
from portal.domain.nodes.node_breaker import CAUSE_MESSAGES, INCIDENT_TITLES
from portal.domain.nodes.node_operations import GC_COUNTER_LABELS, OPERATION_TITLES
from portal.domain.notices.notices import CHANNEL_LABELS, EVENTS, JOB_EVENTS
from portal.domain.requests.user_requests import RequestState
from portal.domain.scheduling.policy_settings import CHOICE_SETTINGS, NUMBER_SETTINGS
from portal.domain.serving.model_servers import ACCESS_LABELS, ServiceSpec
from portal.domain.states import DISK_FULL_REASON, FENCED_REASON, GpuHealth, JobKind, NodeState, Role
from portal.domain.sweeps.sweeps import SEARCHER_LABELS, SweepSpec
from portal.errors import NotFound
from portal.selectors.reports.held_time import UsageGrouping
from portal.services.accounts.tokens import Scope
from portal.services.jobs.changes import CHANGE_LABELS
from portal.services.projects.projects import QUOTA_LABELS

VERDICT_DETAILS = (
    "Cluster GPUs", "Fair share GPUs", "Free GPUs", "GPUs shared elsewhere", "Jobs awaited", "Jobs releasing",
    "Largest free GPUs", "Largest free on a node", "Largest node GPUs", "Asked GPUs", "Needed GPUs", "Node",
    "Project", "Reservation", "Steps", "Tasks possible", "Tasks together", "Unfinished dependencies", "Used GPUs",
)  # fmt: skip
"""Labels that pages make of the keys of ``JobVerdict.details``."""
MESSAGES = (NotFound().message, "You may view this, but you lack the permission for this action.")
"""Refusals that are raised below the pages and the services."""
_catalogue = JavaScriptCatalog.as_view()


@access_policy(AccessPolicy.PUBLIC)
@require_safe
@cache_control(private=True, max_age=3600)
def script_translations(request: HttpRequest) -> HttpResponse:
    """Return the script that defines ``gettext`` for scripts; pages name their language in its address."""
    return _catalogue(request)  # type: ignore[return-value]


def translated_labels() -> Iterator[str]:
    """Return labels that are written in English in the domain, for the catalogues."""
    yield from chain(_form_labels(), VERDICT_DETAILS, MESSAGES)
    yield from (setting.description for setting in NUMBER_SETTINGS.values())
    yield from (setting.description for setting in CHOICE_SETTINGS.values())
    for labels in (ACCESS_LABELS, CHANNEL_LABELS, OVERLAP_LABELS, OPERATION_TITLES, SEARCHER_LABELS, SIGNALS):
        yield from labels.values()
    yield from chain(
        NO_FORECAST_REASONS.values(), OTHER_FORECAST_REASONS, XID_MEANINGS.values(), Scope.labels
    )
    yield from chain.from_iterable(GC_COUNTER_LABELS.values())
    yield from chain(
        INCIDENT_TITLES.values(), CAUSE_MESSAGES.values(), (event.label for event in EVENTS.values())
    )
    for value in chain(GpuHealth, JobKind, NodeState, Phase, Role):
        yield value.value
    yield from chain(
        (DISK_FULL_REASON, FENCED_REASON), RequestState, CHANGE_LABELS.values(), QUOTA_LABELS.values()
    )
    for rule in SHIPPED_RULES.values():
        yield from (rule.title, rule.cause, rule.fix)
    for code in chain(VerdictCode, NodeState, FailureClass, UsageGrouping, JOB_EVENTS):
        words = code.replace("_", " ")
        yield from (words, words.capitalize())


def labels_in_context() -> Iterator[tuple[str, str]]:
    """Return texts with a context: templates of stored texts that are constants, and options of settings."""
    for template in (*END_MESSAGES.values(), "{models} or {model}"):
        yield STORED_CONTEXT, template
    for setting in CHOICE_SETTINGS.values():
        yield from (("option", option) for option in setting.options if option.islower())
    yield "trigger", "period"


def _form_labels() -> Iterator[str]:
    """Return what the form fields of requests and of launchers are made with."""
    for spec in (JobSpec, JobRole, ServiceSpec, SweepSpec, ScheduleSpec):
        for rule in job_fields(spec).values():
            yield from (
                rule.label,
                rule.form_help or rule.help,
                rule.if_null,
                *rule.choices,
                *(rule.nouns or ()),
            )
    for launcher in LAUNCHERS.values():
        for option in launcher.options:
            yield from (option.name.replace("_", " ").capitalize(), option.help)
