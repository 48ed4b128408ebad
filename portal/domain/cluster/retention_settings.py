"""How long rows are kept: the settings of the cluster that `scheduler.retention` applies."""

from __future__ import annotations

from portal.domain.setting_types import NumberSetting

NOTICE_RETENTION = "notice_retention_days"
METRICS_RETENTION = "metrics_retention_days"
CYCLE_RETENTION = "cycle_retention_days"
FORECAST_RETENTION = "forecast_retention_days"
EVENT_RETENTION = "event_retention_days"
JOB_RETENTION = "job_retention_days"
AUDIT_RETENTION = "audit_retention_days"

RETENTION_NUMBERS = (
    NumberSetting(
        NOTICE_RETENTION,
        "days",
        1,
        3_650,
        90,
        "Age at which notices that their users have read are deleted, in days; default 90. Raise it if users look "
        "for old notices.",
        per_pool=False,
    ),
    NumberSetting(
        METRICS_RETENTION,
        "days",
        7,
        3_650,
        90,
        "Age at which the metrics of nodes are deleted, in days; default 90. Usage and reports of jobs are kept. "
        "Lower it if the database becomes too large.",
        per_pool=False,
    ),
    NumberSetting(
        CYCLE_RETENTION,
        "days",
        1,
        3_650,
        14,
        "Age at which the records of scheduling cycles and the replays of quotas are deleted, in days; default 14.",
        per_pool=False,
    ),
    NumberSetting(
        FORECAST_RETENTION,
        "days",
        30,
        3_650,
        90,
        "Age at which forecasts of starts are deleted, in days; default 90. Their accuracy is computed from 30 days.",
        per_pool=False,
    ),
    NumberSetting(
        EVENT_RETENTION,
        "days",
        30,
        3_650,
        400,
        "Age at which the timelines of ended jobs are deleted, in days after the end; default 400. Jobs, "
        "attempts and their usage stay.",
        per_pool=False,
    ),
    NumberSetting(
        JOB_RETENTION,
        "days",
        400,
        3_650,
        3_650,
        "Age at which ended jobs are deleted with attempts, usage, logs and comments, in days after the end; default "
        "10 years. At least 400, so that reports of a year are complete.",
        per_pool=False,
    ),
    NumberSetting(
        AUDIT_RETENTION,
        "days",
        400,
        3_650,
        3_650,
        "Age at which entries of the audit trail are deleted, in days; default 10 years. The deletion is an entry, "
        "too. Ask who is responsible for data protection before you change it.",
        per_pool=False,
    ),
)
