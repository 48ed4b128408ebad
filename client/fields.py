"""Fields of a job that have a flag of their own; a test of the server compares them with its specification."""

from __future__ import annotations

FLAGS = {
    "name": str,
    "kind": str,
    "tasks": int,
    "min_tasks": int,
    "gpus_per_task": int,
    "milli_per_gpu": int,
    "gpu_model": str,
    "min_gpu_memory_mib": int,
    "mig_profile": str,
    "min_compute_capability": float,
    "cpu_milli": int,
    "memory_mib": int,
    "shm_mib": int,
    "program": str,
    "code_repository": str,
    "code_ref": str,
    "code_host_key": str,
    "template_version": int,
    "priority": int,
    "preemptible": bool,
    "time_limit_s": int,
    "termination_grace_s": int,
    "max_attempts": int,
    "retry_backoff_s": int,
    "retry_max_backoff_s": int,
    "exclude_failed_node": bool,
    "apply_failure_actions": bool,
    "seed": int,
    "checkpoint_dir": str,
    "checkpoint_keep_last": int,
    "checkpoint_keep_every": int,
    "resume_from": str,
    "stall_timeout_s": int,
    "on_stall": str,
    "launcher": str,
    "completion_role": str,
    "min_succeeded": int,
    "held": bool,
    "start_after": str,
    "ignore_dependency_failure": bool,
}
"""Type of each flag by the name of its field."""

REFERENCES = ("project", "environment", "pool", "template")
OTHERS = (
    "topology_constraint", "preferred_nodes", "parameters", "env", "volumes", "secrets", "retry_on",
    "retry_exit_codes", "launcher_options", "rank_overrides", "roles", "command", "dependencies",
)  # fmt: skip
"""Fields whose values are lists or mappings: --set FIELD=JSON, or a flag of their own notation."""
