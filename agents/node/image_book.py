"""What the ledger knows of images: which of them we brought, since when each is here, when each was last used.

Pure: functions on the ledger's content, inside its transactions. Ledgers of earlier agents have neither key, so the
images of that time count as other people's.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, NamedTuple, Optional, Sequence

from agents.node.image_names import plain_name

_HERE, _USES = "images", "image_uses"
_FORGET_USES_AFTER_S = 400 * 86_400.0  # longer than any knob asks for
State = Dict[str, Any]


class Known(NamedTuple):
    """An image as the ledger knows it. Times are Unix seconds; ``used_s`` None: no task was seen to use it."""

    ours: bool
    since_s: float
    used_s: Optional[float]

    @property
    def idle_since_s(self) -> float:
        """Since when nobody used it, as far as we know."""
        return max(self.since_s, self.used_s or 0.0)


def note_use(state: State, runtime: str, image: Optional[str], now_s: float) -> None:
    """A task that begins or ends uses its image, by whatever name it was asked for."""
    if image is not None:
        state.setdefault(_USES, {}).setdefault(runtime, {})[plain_name(image)] = round(now_s, 3)


def note_brought(state: State, runtime: str, image_id: str, *, was_here: bool, now_s: float) -> None:
    """An image was pulled or loaded; one that was here before stays whose it was."""
    here = state.setdefault(_HERE, {}).setdefault(runtime, {})
    ours = here[image_id]["ours"] if was_here and image_id in here else not was_here
    here[image_id] = {"ours": ours, "since_s": round(now_s, 3)}


def note_here(state: State, runtime: str, image_ids: Iterable[str], now_s: float) -> None:
    """These are all the images there are now: those not known are noted as others', those gone are forgotten."""
    before = state.setdefault(_HERE, {}).get(runtime, {})
    new = {"ours": False, "since_s": round(now_s, 3)}
    state[_HERE][runtime] = {each: before.get(each, new) for each in sorted(image_ids)}
    uses = state.setdefault(_USES, {}).get(runtime, {})
    state[_USES][runtime] = {
        name: used_s for name, used_s in uses.items() if now_s - used_s < _FORGET_USES_AFTER_S
    }


def known(state: Mapping[str, Any], runtime: str, image_id: str, names: Sequence[str]) -> Optional[Known]:
    """What is known of an image that has these names; None for one that was never noted."""
    row = state.get(_HERE, {}).get(runtime, {}).get(image_id)
    if row is None:
        return None
    uses = state.get(_USES, {}).get(runtime, {})
    used = [uses[plain_name(name)] for name in names if plain_name(name) in uses]
    return Known(row["ours"], row["since_s"], max(used, default=None))
