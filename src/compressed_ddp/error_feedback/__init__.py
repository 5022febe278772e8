"""What was not sent yet, by parameter name."""

from __future__ import annotations

from .buffer import ErrorFeedbackBuffer
from .state import reshard_states

__all__ = ["ErrorFeedbackBuffer", "reshard_states"]
