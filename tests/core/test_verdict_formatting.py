"""How requests read in the texts of verdicts."""

from __future__ import annotations

import pytest

from scheduler.core.verdicts.formatting import format_gpus


@pytest.mark.parametrize(
    ("milli", "model", "text"),
    [
        (1000, "Pretend GPU", "1 Pretend GPU"),
        (8000, "NVIDIA A100", "8 A100 GPUs"),
        (2000, "A100|Pretend GPU", "2 A100 or Pretend GPUs"),
        (2000, None, "2 GPUs"),
    ],
)
def test_a_model_that_ends_with_gpu_is_not_followed_by_another(
    milli: int, model: str | None, text: str
) -> None:
    assert format_gpus(milli, model) == text
