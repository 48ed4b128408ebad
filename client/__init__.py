"""Python client and command line of Fairway, over its REST API. Installed as the package ``fairway``."""

from .api import Fairway, FairwayError, Job, Refused, TimedOut, Unavailable, Unreachable

__version__ = "0.1.0"
__all__ = ["Fairway", "FairwayError", "Job", "Refused", "TimedOut", "Unavailable", "Unreachable"]
