"""Image usage in the ledger: managed images, time of arrival, time of last use.

Pure functions on the ledger's content, called within its transactions. Images known only to ledgers of
earlier agents count as unmanaged.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, NamedTuple, Optional, Sequence

from agents.node.spec.image_names import normalize_image_name

_IMAGES_KEY, _USES_KEY = "images", "image_uses"
_USE_RETENTION_S = 400 * 86_400.0  # longer than any configurable age
LedgerState = Dict[str, Any]


class ImageUsage(NamedTuple):
    """Usage of an image. Unix seconds; ``last_used_s`` None: no use by a task was recorded."""

    managed: bool
    present_since_s: float
    last_used_s: Optional[float]

    @property
    def unused_since_s(self) -> float:
        """Return since when the image is known to be unused."""
        return max(self.present_since_s, self.last_used_s or 0.0)


def record_use(state: LedgerState, runtime: str, image: Optional[str], now_s: float) -> None:
    """Record that a task begins or ends using its image, by the requested name."""
    if image is not None:
        state.setdefault(_USES_KEY, {}).setdefault(runtime, {})[normalize_image_name(image)] = round(now_s, 3)


def record_arrival(
    state: LedgerState, runtime: str, image_id: str, *, was_present: bool, now_s: float
) -> None:
    """Record a pull or load; an image that was present before keeps its ``managed`` state."""
    here = state.setdefault(_IMAGES_KEY, {}).setdefault(runtime, {})
    ours = here[image_id]["ours"] if was_present and image_id in here else not was_present
    here[image_id] = {"ours": ours, "since_s": round(now_s, 3)}


def record_present(state: LedgerState, runtime: str, image_ids: Iterable[str], now_s: float) -> None:
    """Record the complete list of images: add unknown ones as unmanaged, forget missing ones."""
    before = state.setdefault(_IMAGES_KEY, {}).get(runtime, {})
    new = {"ours": False, "since_s": round(now_s, 3)}
    state[_IMAGES_KEY][runtime] = {each: before.get(each, new) for each in sorted(image_ids)}
    uses = state.setdefault(_USES_KEY, {}).get(runtime, {})
    state[_USES_KEY][runtime] = {
        name: used_s for name, used_s in uses.items() if now_s - used_s < _USE_RETENTION_S
    }


def find_usage(
    state: Mapping[str, Any], runtime: str, image_id: str, names: Sequence[str]
) -> Optional[ImageUsage]:
    """Return the usage of an image with these names; None when it was never recorded."""
    row = state.get(_IMAGES_KEY, {}).get(runtime, {}).get(image_id)
    if row is None:
        return None
    uses = state.get(_USES_KEY, {}).get(runtime, {})
    used = [uses[normalize_image_name(name)] for name in names if normalize_image_name(name) in uses]
    return ImageUsage(row["ours"], row["since_s"], max(used, default=None))
