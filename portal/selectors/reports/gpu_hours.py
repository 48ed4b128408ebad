"""The GPU-hours of jobs as an expression of queries."""

from __future__ import annotations

from typing import Any

from django.db.models import DurationField, ExpressionWrapper, F, FloatField, Subquery, Sum
from django.db.models.functions import Coalesce, Extract, Now

from portal.models import UsageInterval


def job_gpu_hours(**where: Any) -> Coalesce:
    """Return the expression of the GPU-hours of a job, open intervals up to now; 0 before it has used any."""
    span = Coalesce("ended_at", Now()) - F("started_at")
    used = ExpressionWrapper(span * F("milli") / 1000.0, output_field=DurationField())
    rows = UsageInterval.objects.filter(**where).annotate(used=used)
    per_job = rows.order_by().values("job").annotate(sum=Sum("used"))
    seconds = Extract(Subquery(per_job.values("sum")), "epoch", output_field=FloatField())
    return Coalesce(seconds / 3600.0, 0.0)
