"""How a job uses the tracking server: the variables of its tasks, and its token.

The token is derived from the secret key and the attempt, so it is stored nowhere. It is valid while the attempt is
live, for the MLflow API of the job's project only, and with the rights that the job's owner has then.
"""

from __future__ import annotations

import hmac
import re

from django.conf import settings
from django.utils.crypto import salted_hmac

from portal.domain.states import LIVE_ATTEMPT_STATES
from portal.errors import Unauthenticated
from portal.models import Attempt, Job

TOKEN_PREFIX = "fwj_"  # noqa: S105 - a prefix
_TOKEN = re.compile(r"fwj_([a-z][a-z0-9]{9})_([1-9][0-9]{0,6})_([0-9a-f]{64})")
TRACKING_URI, TRACKING_TOKEN = "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"


def tracking_url(project: str) -> str:
    """Return the address of the MLflow API of a project (public id)."""
    return f"{settings.TRACKING_URL}/api/mlflow/{project}"


def tracking_variables(job: Job, attempt: int) -> dict[str, str]:
    """Return the variables by which MLflow's client finds the job's project.

    Empty for a job that names a tracking server of its own: it must not get the token.
    """
    if TRACKING_URI in job.env:
        return {}
    return {
        TRACKING_URI: tracking_url(job.project.public_id),
        TRACKING_TOKEN: job_token(job.public_id, attempt),
        "MLFLOW_EXPERIMENT_NAME": job.project.name,
    }


def job_token(job: str, attempt: int, key: str | None = None) -> str:
    digest = salted_hmac("fairway.job-token", f"{job}/{attempt}", key, algorithm="sha256").hexdigest()
    return f"{TOKEN_PREFIX}{job}_{attempt}_{digest}"


def get_token_attempt(text: str) -> Attempt:
    """Return the attempt of a token, with owner and project of its job. Raise Unauthenticated."""
    shaped = _TOKEN.fullmatch(text)
    keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    if shaped is None or not any(
        hmac.compare_digest(job_token(shaped[1], int(shaped[2]), key), text) for key in keys
    ):
        raise Unauthenticated("This token is not valid.", code="invalid_token")
    live = Attempt.objects.filter(
        job__public_id=shaped[1], number=shaped[2], state__in=LIVE_ATTEMPT_STATES
    ).select_related("job__owner", "job__project")
    attempt = live.first()
    if attempt is None:
        raise Unauthenticated("The job of this token has ended.", code="token_expired")
    if not attempt.job.owner.is_active:
        raise Unauthenticated("The account of this job's owner is deactivated.", code="account_deactivated")
    return attempt
