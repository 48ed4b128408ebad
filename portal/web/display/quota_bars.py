"""The usage of a pool as a bar with its numbers and quota as text."""

from __future__ import annotations

from dataclasses import dataclass

from django.utils.translation import gettext as _

from portal.selectors.projects.quota_usage import QuotaUsage
from portal.web.display.formatting import gpu_amount


@dataclass(frozen=True)
class QuotaBar:
    """One bar, in GPU milli. ``requested`` is what a launch would add."""

    share: QuotaUsage
    title: str
    requested: int = 0

    @property
    def within_guarantee(self) -> int:
        return min(self.share.used_milli, self.share.guaranteed_milli)

    @property
    def after_launch(self) -> int:
        """Usage once the requested GPUs have started."""
        return self.share.used_milli + self.requested

    @property
    def scale(self) -> int:
        """The right end of the bar: the limit, or the pool without one."""
        share = self.share
        return max(share.limit_milli or share.pool_milli, self.after_launch, share.guaranteed_milli, 1000)

    @property
    def terms(self) -> str:
        """The quota as text: 10 guaranteed, no limit, 4 per user, pool of 24."""
        share = self.share
        if not share.has_quota:
            text = (
                _("no quota of its own, limited by a project above, pool of {pool}")
                if share.bound_by_ancestor
                else _("no quota of its own, no limit, pool of {pool}")
            )
            return text.format(pool=gpu_amount(share.pool_milli))
        limit = _("no limit")
        if share.limit_milli is not None:
            limit = _("limit {limit}").format(limit=gpu_amount(share.limit_milli))
        if share.user_limit_milli is not None:
            limit += ", " + _("{limit} per user").format(limit=gpu_amount(share.user_limit_milli))
        guaranteed = gpu_amount(share.guaranteed_milli) if share.guaranteed_milli else _("none")
        return _("{guaranteed} guaranteed, {limit}, pool of {pool}").format(
            guaranteed=guaranteed, limit=limit, pool=gpu_amount(share.pool_milli)
        )

    @property
    def message(self) -> str:
        """The bar as text for screen readers."""
        return _("{title}: {used} used, {terms}").format(
            title=self.title, used=gpu_amount(self.share.used_milli), terms=self.terms
        )
