"""The usage of a pool as a bar with its numbers and quota as text."""

from __future__ import annotations

from dataclasses import dataclass

from portal.selectors.projects.quota_usage import QuotaUsage
from portal.web.display.formatting import gpu_amount


@dataclass(frozen=True)
class QuotaBar:
    """One bar, in GPU milli. ``requested`` is what a launch would add."""

    share: QuotaUsage
    title: str
    requested: int = 0

    @property
    def used(self) -> int:
        return self.share.used_milli

    @property
    def guaranteed(self) -> int:
        return self.share.guaranteed_milli

    @property
    def within_guarantee(self) -> int:
        return min(self.used, self.guaranteed)

    @property
    def borrowed(self) -> int:
        return self.share.borrowed_milli

    @property
    def after_launch(self) -> int:
        """Usage once the requested GPUs have started."""
        return self.used + self.requested

    @property
    def scale(self) -> int:
        """The right end of the bar: the limit, or the pool without one."""
        ends = (
            self.share.limit_milli or self.share.pool_milli,
            self.used + self.requested,
            self.guaranteed,
            1000,
        )
        return max(ends)

    @property
    def terms(self) -> str:
        """The quota as text: 10 guaranteed, no limit, 4 a person, pool of 24."""
        share = self.share
        limit = "no limit" if share.limit_milli is None else f"limit {gpu_amount(share.limit_milli)}"
        if share.user_limit_milli is not None:
            limit += f", {gpu_amount(share.user_limit_milli)} per user"
        pool = f", pool of {gpu_amount(share.pool_milli)}"
        guaranteed = (
            f"{gpu_amount(share.guaranteed_milli)} guaranteed"
            if share.guaranteed_milli
            else "none guaranteed"
        )
        return f"{guaranteed}, {limit}{pool}"

    @property
    def message(self) -> str:
        """The bar as text for screen readers."""
        return f"{self.title}: {gpu_amount(self.used)} used, {self.terms}"
