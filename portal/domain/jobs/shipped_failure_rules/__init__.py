"""The failure rules that Fairway ships. Administrators change, disable and add rules in the database.

``tests/data/failure_logs/<code>.log`` is a log of each failure, and ``tests/core/test_failure_rules.py``
checks that its rule is the best match.
"""

from __future__ import annotations

from portal.domain.jobs.failure_rules import FailureRule
from portal.domain.jobs.shipped_failure_rules.distributed import DISTRIBUTED_RULES, NCCL_RULES
from portal.domain.jobs.shipped_failure_rules.gpu import CUDA_RULES, XID_RULES
from portal.domain.jobs.shipped_failure_rules.host import HOST_RULES
from portal.domain.jobs.shipped_failure_rules.network import NETWORK_RULES
from portal.domain.jobs.shipped_failure_rules.software import SOFTWARE_RULES

ALL_RULES: tuple[FailureRule, ...] = (
    *CUDA_RULES,
    *XID_RULES,
    *NCCL_RULES,
    *DISTRIBUTED_RULES,
    *HOST_RULES,
    *SOFTWARE_RULES,
    *NETWORK_RULES,
)
SHIPPED_RULES = {rule.code: rule for rule in ALL_RULES}
"""The shipped rules by code."""
