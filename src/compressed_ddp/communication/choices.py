"""What a configuration leaves open is chosen, and what it asks for and cannot be is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Real

from ..compression import BaseCompressor
from ..types import CompressionConfig, check_ratio, unknown_name
from .lanes import COLLECTIVES


def resolve(config: CompressionConfig, compressor: BaseCompressor) -> CompressionConfig:
    """``config`` with every choice made; raises ValueError where it asks for what cannot be."""
    asked = f"error_feedback={config.error_feedback}"
    feedback = compressor.feedback(config.error_feedback)
    if config.memory != "ef":
        asked = f"memory={config.memory!r}"
        if config.error_feedback is False:
            raise ValueError(
                f"{asked} is a kind of error feedback, and that is off: leave memory or error_feedback out"
            )
        feedback = True
    if feedback and not compressor.contraction:
        raise ValueError(
            f"{asked} with {compressor.name!r}: its error can exceed the signal, so the residual would grow "
            f"without bound. It is unbiased and works without: leave {asked.split('=')[0]} out"
        )
    if config.adapt_every and not (feedback and config.memory == "ef" and compressor.adapts):
        raise ValueError(
            f"adapt_every={config.adapt_every} needs topk with error feedback (memory='ef'): it distributes "
            "entries by what is owed. Leave it out otherwise"
        )
    if config.adapt_every and config.scope != "bucket":
        raise ValueError(
            f"adapt_every={config.adapt_every} with scope={config.scope!r}: it says itself where entries are "
            "sought. Leave one of them out"
        )
    if config.hold_unused and feedback and config.memory == "ef" and not compressor.says_zero:
        raise ValueError(
            f"{compressor.name!r} has one bit an entry and cannot say nothing about a parameter that was not "
            "used, so what is owed for it would be lost. Use find_unused_parameters=False "
            "(hold_unused=False), or another compressor, or memory='ef21'"
        )
    if config.scope not in compressor.scopes:
        raise ValueError(f"{compressor.name!r} has no scope={config.scope!r}; use {compressor.scopes[0]!r}")
    if config.collective not in ("auto", *COLLECTIVES):
        raise unknown_name("collective", config.collective, ("auto", *compressor.collectives))
    if config.collective not in ("auto", *compressor.collectives):
        raise ValueError(
            f"{compressor.name!r} cannot travel by {config.collective!r}; "
            f"use auto or {' or '.join(compressor.collectives)}"
        )
    return replace(config, compressor=compressor.name, error_feedback=feedback, **compressor.options())


def check_new_ratio(compressor: BaseCompressor, ratio: float) -> None:
    """Raises ValueError unless ``compressor`` has a ratio, and it can be ``ratio``."""
    if not compressor.sparse:
        raise ValueError(f"{compressor.name!r} sends every entry: it has no ratio to change")
    check_ratio(ratio)


def checked_scale(scale: object) -> float:
    """``scale`` as a loss scale; raises ValueError unless the loss can have been multiplied by it."""
    if not isinstance(scale, Real) or isinstance(scale, bool) or not 0.0 < float(scale) < math.inf:
        raise ValueError(
            f"loss_scale must be a positive number, got {scale!r}; GradScaler's get_scale() is one"
        )
    return float(scale)


def in_words(compressor: BaseCompressor, config: CompressionConfig) -> str:
    """The method, for the ledger: what is sent, and what differs from plain error feedback."""
    words = [compressor.name]
    if compressor.sparse:
        words += [f"ratio {compressor.ratio:g}", f"{compressor.values} values"]
    if config.memory != "ef":
        words.append(config.memory)
    elif not config.error_feedback and compressor.feedback(None):
        words.append("no error feedback")
    words += ["adaptive"] if config.adapt_every else []
    return ", ".join(words)
