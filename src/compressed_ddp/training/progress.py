"""What a human sees while training: a live bar, plain lines, or JSON lines for programs."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

_REDRAW = 0.1
"""Seconds between two drawings of the bar, at least."""


class Progress:
    """Shows one run. Rank 0 makes an enabled one; a disabled one does nothing at all.

    On a terminal: a live bar while an epoch lasts, then one line that stays. Elsewhere: that line
    alone. With ``json_lines``: one JSON object a line, with an ``event`` of ``step`` (every
    ``every`` steps and at the end of an epoch), ``epoch``, ``note`` or ``summary``; NaN and
    infinity are null. ``stream`` is standard output for JSON and standard error for people,
    unless another one is given.
    """

    def __init__(
        self,
        *,
        epochs: int,
        enabled: bool,
        json_lines: bool = False,
        every: int = 10,
        stream: TextIO | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}: a line every so many steps needs at least 1")
        self.epochs = epochs
        self.enabled = enabled
        self.json_lines = json_lines
        self.every = every
        self.stream = stream if stream is not None else sys.stdout if json_lines else sys.stderr
        self._epoch, self._steps, self._done = 0, 0, 0
        self._bar: Any = None
        self._make_bar: Callable[..., Any] | None = None
        self._drawn = -math.inf
        if enabled and not json_lines and self.stream.isatty():
            self._make_bar = self._find_tqdm()

    def start_epoch(self, epoch: int, steps: int, done: int = 0) -> None:
        """Epoch ``epoch``, counted from 0 and shown from 1, begins; ``done`` of its ``steps`` are over."""
        self._epoch, self._steps, self._done = epoch, steps, done
        self.close()
        if self._make_bar is not None:
            text = f"{self._title()}  {{bar:10}}  step {{n_fmt}}/{{total_fmt}}"
            self._bar = self._make_bar(
                total=steps,
                initial=done,
                file=self.stream,
                leave=False,
                bar_format=text,
                ncols=self._columns(),
            )
            self._drawn = time.monotonic()

    def step(self, figures: Mapping[str, float]) -> None:
        """One step more. All figures are optional.

        ``loss``, ``accuracy`` (percent) or ``perplexity``, ``step_seconds``, ``saved_percent``, and
        ``compress_share`` and ``wait_share`` as parts of 1. Programs get whatever else is there.
        """
        self._done += 1
        last = self._done >= self._steps
        if not self.enabled:
            return
        if self.json_lines and (last or self._done % self.every == 0):
            where = {"epoch": self._epoch + 1, "epoch_step": self._done, "epoch_steps": self._steps}
            self._event("step", where, figures)
        now = time.monotonic()
        if self._bar is not None and (last or now - self._drawn >= _REDRAW):
            self._drawn = now
            self._draw(figures)

    def end_epoch(self, figures: Mapping[str, float]) -> None:
        """The epoch is over: its permanent line.

        ``train_loss``, ``test_loss``, ``test_accuracy`` (percent) or ``test_perplexity``,
        ``seconds`` and ``saved_percent``, all optional. Programs get whatever else is there.
        """
        self.close()
        if not self.enabled:
            return
        if self.json_lines:
            self._event("epoch", {"epoch": self._epoch + 1, "epochs": self.epochs}, figures)
        else:
            self._line("  ".join([self._title(), *_parts(figures, _EPOCH_PARTS)]))

    def note(self, text: str) -> None:
        """Say ``text``, above the bar if there is one."""
        if not self.enabled:
            return
        if self.json_lines:
            self._event("note", {"text": text}, {})
        else:
            self._line(text)

    def summary(self, rows: Sequence[tuple[str, str]], figures: Mapping[str, object]) -> None:
        """The closing table: ``rows`` for people, ``figures`` for programs."""
        self.close()
        if not self.enabled:
            return
        if self.json_lines:
            self._event("summary", {}, figures)
        else:
            width = max((len(name) for name, _ in rows), default=0)
            self._line("\n".join(["", *(f"{name:<{width}}  {value}".rstrip() for name, value in rows)]))

    def close(self) -> None:
        """Take the bar away, if there is one. May be called at any time, also twice."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _find_tqdm(self) -> Callable[..., Any] | None:
        try:
            tqdm = importlib.import_module("tqdm").tqdm
        except ImportError:
            self._line("no live progress: pip install 'compressed-ddp[train]' for it")
            return None
        # Without tqdm's own thread, which would watch over drawings that are timed here.
        bar: Callable[..., Any] = type("Bar", (tqdm,), {"monitor_interval": 0})
        return bar

    def _title(self) -> str:
        return f"epoch {self._epoch + 1}/{self.epochs}"

    def _draw(self, figures: Mapping[str, float]) -> None:
        columns = self._columns()
        front, back = f"{self._title()}  ", f"  step {self._done}/{self._steps}"
        text = "  ".join([back, *_parts(figures, _STEP_PARTS)])
        width = min(20, max(4, columns - len(front) - len(text)))
        self._bar.ncols = columns
        self._bar.bar_format = f"{front}{{bar:{width}}}{text}"
        self._bar.n = self._done
        self._bar.refresh()

    def _columns(self) -> int:
        """One less than the terminal has: some break the line when the last is written to."""
        try:
            columns = os.get_terminal_size(self.stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        # Terminals inside containers often say 0.
        return max((columns or shutil.get_terminal_size().columns) - 1, 20)

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        self.stream.write(text + "\n")
        self.stream.flush()
        if self._bar is not None:
            self._bar.refresh()

    def _event(self, name: str, where: Mapping[str, object], figures: Mapping[str, object]) -> None:
        own = {"event": name, **where}
        # Twice, to be first in the line and to win over a figure of the same name.
        self.stream.write(json.dumps(_plain({**own, **figures, **own}), allow_nan=False, default=str) + "\n")
        self.stream.flush()


def _plain(value: object) -> object:
    """``value`` as JSON can have it; what is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _loss(value: float) -> str:
    return f"{value:.2e}" if 0 < abs(value) < 0.01 else f"{value:.3f}"


def _percent(value: float) -> str:
    # 99.97 must not read as everything.
    return f"{value:.2f} %" if 99.9 <= value < 100 else f"{value:.1f} %"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.1f} ms" if seconds < 0.01 else f"{1e3 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


_Part = tuple[str, Callable[[float], str]]

_STEP_PARTS: dict[str, _Part] = {
    "loss": ("loss {}", _loss),
    "accuracy": ("acc {}", _percent),
    "perplexity": ("perplexity {}", "{:.1f}".format),
    "step_seconds": ("{}/step", _duration),
    "saved_percent": ("saved {}", _percent),
    "compress_share": ("compress {}", _share),
    "wait_share": ("wait {}", _share),
}
_EPOCH_PARTS: dict[str, _Part] = {
    "train_loss": ("train loss {}", _loss),
    "test_loss": ("test loss {}", _loss),
    "test_accuracy": ("acc {}", _percent),
    "test_perplexity": ("perplexity {}", "{:.1f}".format),
    "seconds": ("{}", _duration),
    "saved_percent": ("saved {}", _percent),
}


def _parts(figures: Mapping[str, float], parts: Mapping[str, _Part]) -> list[str]:
    """The figures that are there, in the order of ``parts``, each as a few words."""
    found = ((words, show, figures.get(key)) for key, (words, show) in parts.items())
    return [words.format(show(value)) for words, show, value in found if value is not None]
