"""Jobs, their attempts and what belongs to them."""

from portal.models.jobs.jobs import (
    default_failure_classes as default_failure_classes,  # the first migration uses it
)
