"""Operations on nodes, and rollouts of agent upgrades: one node first, then several in parallel, until one fails."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from portal.domain.nodes.node_operations import OPERATION_TITLES, OperationKind, RolloutStatus
from portal.models.accounts.users import optional_user
from portal.models.columns import flag, one_of, optional_number, optional_text, optional_time
from portal.models.public_id import PublicIdField


class AgentRollout(models.Model):
    """An upgrade of every node whose agent is not the bundled one; its nodes are its ``operations``."""

    public_id = PublicIdField()
    actor = optional_user(models.SET_NULL)
    started_at = models.DateTimeField(auto_now_add=True)
    finished_at = optional_time()
    ok = models.BooleanField(null=True, help_text="null: not finished.")
    message = models.CharField(max_length=500, blank=True, help_text="Result of the rollout.")


class NodeOperation(models.Model):
    """An operation on a node, such as a test or an upgrade; its steps are added as they finish.

    The node's actor finds an operation over the control channel (``portal.domain.nodes.node_operations``) by this
    row, even if its notification is lost.
    """

    public_id = PublicIdField()
    node = models.ForeignKey("Node", on_delete=models.CASCADE, related_name="operations")
    kind = models.CharField(max_length=12, default=OperationKind.TEST.value)
    actor = optional_user(models.SET_NULL)
    started_at = models.DateTimeField(auto_now_add=True)
    finished_at = optional_time()
    ok = models.BooleanField(null=True)
    steps = models.JSONField(
        default=list, help_text="[{name, ok, message, seconds}] in the order they finished."
    )
    rollout = models.ForeignKey(
        AgentRollout, null=True, blank=True, on_delete=models.CASCADE, related_name="operations"
    )
    dispatched_at = optional_time(
        "When it was dispatched over the control channel; null: pending, or not over this channel."
    )
    uncordon_on_success = flag("For a check: uncordon the node if it succeeds.")
    reason = optional_text(500, "Reason for the uncordon or move, given by the user who requested it.")
    new_host = optional_text(255, "For a move: the address that is saved if the test there succeeds.")
    new_port = optional_number("For a move: the port there.")
    program_sha256 = optional_text(64, "Digest of the program that an upgrade sent.")

    class Meta:
        constraints = [
            one_of("kind", OperationKind, "node_operation_kind"),
        ]
        indexes = [
            models.Index(
                fields=["node"],
                condition=Q(finished_at__isnull=True, dispatched_at__isnull=False),
                name="node_operation_due",
            ),
        ]

    @property
    def title(self) -> str:
        return OPERATION_TITLES[OperationKind(self.kind)]

    @property
    def rollout_status(self) -> RolloutStatus:
        """Status of an operation over the control channel."""
        if self.finished_at is not None:
            return RolloutStatus.SUCCEEDED if self.ok else RolloutStatus.FAILED
        return RolloutStatus.PENDING if self.dispatched_at is None else RolloutStatus.RUNNING
