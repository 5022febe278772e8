"""What a run is. Flags, YAML files and defaults are these dataclasses, and nothing else.

Every field is one flag (``--batch-size``) and one key of a YAML file (``batch_size``), all on one
level. Its docstring is its help.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..communication.choices import resolve
from ..compression.factory import from_config
from ..types import CompressionConfig, unknown_name

Optimizer = Literal["sgd", "adam", "adamw", "rmsprop"]
Schedule = Literal["constant", "cosine", "linear", "step"]
Precision = Literal["fp32", "bf16", "fp16"]
RatioSchedule = Literal["constant", "warmup", "step"]

ADAMS = ("adam", "adamw")
LEARNING_RATES = {"sgd": 0.05, "adam": 0.001, "adamw": 0.001, "rmsprop": 0.0005}


@dataclass(frozen=True)
class Task:
    """what is trained, and on what"""

    model: str = "simple_cnn"
    """simple_cnn, resnet18, resnet50 or gpt. `--model list` shows them with their sizes."""
    dataset: str = "digits"
    """digits (needs no download), mnist, fashion_mnist, cifar10, or text for the gpt."""
    data_dir: str = "data"
    """Where data files are; `compressed-ddp data download mnist` puts them there."""
    text: str | None = None
    """For `text`: a file or a folder. Default: the sources of Python's standard library."""
    block: int = 128
    """For `text`: how many bytes the model sees at once."""
    validation: int = 0
    """Score on this many training examples, held out, instead of the test set: to choose settings."""
    limit: int | None = None
    """Train on this many examples only."""

    def __post_init__(self) -> None:
        _at_least("block", self.block, 2)
        _at_least("validation", self.validation, 0)
        _at_least("limit", self.limit, 1)


@dataclass(frozen=True)
class Optimisation:
    """how it is trained"""

    epochs: int = 5
    """Times through the training data."""
    max_steps: int | None = None
    """End after this many optimizer steps, also in the middle of an epoch."""
    batch_size: int = 32
    """Examples a step for each worker."""
    accumulate: int = 1
    """Micro-batches of batch_size examples that make one step; gradients travel once."""
    optimizer: Optimizer = "sgd"
    """The optimizer: torch's own, except that with topk, threshold and randomk adam and adamw are SplitAdam,
    which divides by the second moment before compression (split_optimizer says when not)."""
    lr: float | None = None
    """Learning rate. Default: 0.05 for sgd, 0.001 for adam and adamw, 0.0005 for rmsprop."""
    momentum: float = 0.9
    """For sgd and rmsprop."""
    beta1: float | None = None
    """For adam and adamw: what their first moment keeps from step to step, in [0, 1). Default: 0.9, and 0,
    which is none, where they begin before compression (split_optimizer)."""
    nesterov: bool = False
    """For sgd: Nesterov momentum."""
    weight_decay: float = 0.0
    """L2 penalty (adamw: decoupled)."""
    schedule: Schedule = "constant"
    """How the learning rate falls after the warm-up: cosine or linear to zero, step to a tenth at one half
    and three quarters of all epochs."""
    warmup: float = 0.0
    """Epochs over which the learning rate rises from zero."""
    clip_norm: float | None = None
    """Scale the averaged gradient down to this norm where it is larger. Where the optimizer begins before
    compression (split_optimizer, momentum_correction): each worker its own gradient, each bucket to its share
    of the norm; with local_steps: each worker its own."""
    precision: Precision = "fp32"
    """What forward and backward compute in; weights, residuals and sums stay fp32."""
    channels_last: bool = False
    """Images lie in memory with their channels last: the same mathematics, on CPUs often faster."""
    seed: int = 0
    """Fixes weights, order of data and augmentation: same seed and workers, same bits."""
    target_accuracy: float | None = None
    """Stop when this accuracy, in percent, is reached."""
    patience: int | None = None
    """Stop after this many epochs without a better score."""

    def __post_init__(self) -> None:
        for name in ("epochs", "max_steps", "batch_size", "accumulate", "patience"):
            _at_least(name, getattr(self, name), 1)
        for name in ("lr", "clip_norm", "target_accuracy"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                without = f"{self.optimizer}'s own" if name == "lr" else "none"
                raise ValueError(f"{name} must be a positive number, got {value}; leave it out for {without}")
        for name in ("momentum", "weight_decay", "warmup"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.target_accuracy is not None and self.target_accuracy > 100:
            raise ValueError(f"target_accuracy is in percent, at most 100; got {self.target_accuracy}")
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ValueError("nesterov needs optimizer sgd and a momentum above 0")
        if self.beta1 is not None and self.optimizer not in ADAMS:
            raise ValueError(
                f"beta1 {self.beta1:g} is of adam and adamw; {self.optimizer} has momentum: leave beta1 out"
            )
        if self.beta1 is not None and not 0 <= self.beta1 < 1:
            raise ValueError(f"beta1 must be in [0, 1), got {self.beta1}; 0 for no first moment")
        if not -(2**63) <= self.seed < 2**63:  # as torch's generators have it, and room for epochs
            raise ValueError(f"seed must fit in 64 bits, -2**63 to 2**63 - 1; got {self.seed}")
        if self.lr is None:
            object.__setattr__(self, "lr", LEARNING_RATES[self.optimizer])

    @property
    def rate(self) -> float:
        """The learning rate; never None."""
        assert self.lr is not None
        return self.lr


@dataclass(frozen=True)
class Running:
    """where it runs, and what it leaves behind"""

    workers: int = 1
    """Workers to start on this machine. Under torchrun this is torchrun's to say."""
    max_restarts: int = 0
    """How often dead workers are started again, from the last checkpoint (with --workers)."""
    device: str = "auto"
    """auto (CUDA, then MPS, then CPU), cpu, cuda, cuda:1 or mps."""
    backend: str = "auto"
    """auto (nccl on CUDA, gloo elsewhere), gloo or nccl."""
    threads: int | None = None
    """Threads of each worker. Default: OMP_NUM_THREADS, or the machine's cores shared among its workers."""
    runs: str = "runs"
    """Each run gets a folder of its own in here; `last` leads to the newest."""
    run_dir: str | None = None
    """The run's folder itself, instead of a new one."""
    resume: str | None = None
    """A run's folder or one checkpoint: go on there, to the bit. auto: if run_dir has a checkpoint. The run's
    own configuration is the default then."""
    checkpoint_every: int = 0
    """Steps between checkpoints, besides the one after each epoch. 0: only those."""
    keep: int = 2
    """Checkpoints to keep, besides the best one. 0: write none at all."""
    tensorboard: bool = True
    """Write TensorBoard events beside the CSV and the JSON lines."""
    log_every: int = 10
    """Steps between figures in the trackers."""
    histograms: int = 0
    """Steps between histograms of gradients and residuals in TensorBoard. 0: one an epoch."""
    log_json: bool = False
    """Progress as JSON lines on standard output."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("threads", 1), ("log_every", 1), ("max_restarts", 0)):
            _at_least(name, getattr(self, name), least)
        for name in ("checkpoint_every", "keep", "histograms"):
            _at_least(name, getattr(self, name), 0)
        if self.backend not in ("auto", "gloo", "nccl"):
            raise unknown_name("backend", self.backend, ("auto", "gloo", "nccl"))


@dataclass(frozen=True)
class Compress:
    """whether gradients travel compressed"""

    compress: bool = False
    """Compress gradients, as the settings below say. Otherwise: plain DistributedDataParallel."""
    split_optimizer: bool | None = None
    """adam, adamw: each worker divides by its own second moment before compression, and what is compressed is
    the update; a first moment is in it only with beta1. Default: where entries wait in a residual (topk,
    threshold, randomk), because there the usual order loses much."""
    freeze_after: int | None = None
    """With split_optimizer: each worker's second moment stays as it is after this many steps; with beta1 0.9
    momentum is compressed then, as by 1-bit Adam. Default: never."""
    momentum_correction: bool = False
    """sgd: each worker adds its momentum before compression, and there is none behind it; clip_norm then
    clips each worker's own gradient."""
    momentum_masking: bool = True
    """With momentum_correction: where an entry was sent, its momentum begins anew."""
    ratio_schedule: RatioSchedule = "constant"
    """How the ratio comes down to what --ratio says, over ratio_warmup epochs: warmup in four stages of one
    factor, from nearly everything; step from ten times as much, at once."""
    ratio_warmup: float = 0.0
    """Epochs in which more is sent, as ratio_schedule says."""

    def __post_init__(self) -> None:
        _at_least("freeze_after", self.freeze_after, 1)
        if not 0 <= self.ratio_warmup < float("inf"):
            raise ValueError(f"ratio_warmup must be 0 or more, got {self.ratio_warmup}")
        if (self.ratio_schedule == "constant") != (self.ratio_warmup == 0):
            raise ValueError(
                f"ratio_schedule {self.ratio_schedule} with ratio_warmup {self.ratio_warmup:g}: a schedule "
                "needs its epochs, and epochs need ratio_schedule warmup or step"
            )


@dataclass(frozen=True)
class LocalSteps:
    """how often workers meet"""

    local_steps: int | None = None
    """Each worker trains by itself for this many optimizer steps, then weights are synchronised: compressed
    with --compress, whole without. Default: gradients are synchronised, in every step."""
    outer_lr: float = 0.7
    """With local_steps: how far the weights follow the mean of what the workers did."""
    outer_momentum: float = 0.9
    """With local_steps: Nesterov momentum of that update. 0 and outer_lr 1 average the weights."""

    def __post_init__(self) -> None:
        _at_least("local_steps", self.local_steps, 1)
        if not 0.0 < self.outer_lr < float("inf"):
            raise ValueError(f"outer_lr must be a positive number, got {self.outer_lr}")
        if not 0.0 <= self.outer_momentum < 1.0:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum}")


SECTIONS: dict[str, type] = {
    "task": Task,
    "optimisation": Optimisation,
    "running": Running,
    "switch": Compress,
    "meetings": LocalSteps,
    "compression": CompressionConfig,
}
# The run's seed is the compressor's too; what DDP needs held back, attach finds out itself.
NOT_FLAGS = {("compression", "seed"), ("compression", "hold_unused")}


@dataclass(frozen=True)
class TrainConfig:
    """All sections of a run's configuration; checked when it is made."""

    task: Task = field(default_factory=Task)
    optimisation: Optimisation = field(default_factory=Optimisation)
    running: Running = field(default_factory=Running)
    switch: Compress = field(default_factory=Compress)
    meetings: LocalSteps = field(default_factory=LocalSteps)
    compression: CompressionConfig = field(default_factory=CompressionConfig)

    def __post_init__(self) -> None:
        if self.compress:
            resolve(self.compression, from_config(self.compression))
        if self.switch.split_optimizer and not (self.compress and self.optimisation.optimizer in ADAMS):
            raise ValueError(
                "split_optimizer needs compress and optimizer adam or adamw; leave it out otherwise"
            )
        if self.switch.momentum_correction and not (
            self.optimisation.optimizer == "sgd" and self.optimisation.momentum
        ):
            raise ValueError("momentum_correction needs optimizer sgd and a momentum above 0")
        self._check_idle()
        masked = self.switch.momentum_correction and self.switch.momentum_masking
        if masked and self.compression.memory != "ef":
            raise ValueError(
                f"memory {self.compression.memory} with momentum_correction: masked is what was sent of a "
                "debt, and EF21 has none; add --no-momentum-masking, or use --memory ef"
            )
        if self.switch.freeze_after is not None and not (self.split and self.optimisation.optimizer in ADAMS):
            raise ValueError(
                f"freeze_after {self.switch.freeze_after} is for SplitAdam: optimizer adam or adamw with "
                "compress, without local_steps, with split_optimizer true where it is not the default. Leave "
                "it out otherwise"
            )
        if self.compress and self.switch.ratio_warmup and not from_config(self.compression).sparse:
            raise ValueError(
                f"ratio_schedule with compressor {self.compression.compressor}, which sends every entry: use "
                "topk, threshold or randomk"
            )
        if self.local and (self.switch.split_optimizer or self.switch.momentum_correction):
            raise ValueError(
                "split_optimizer and momentum_correction compress the update of every step, with local_steps "
                "there is none: leave one of them out"
            )

    def _check_idle(self) -> None:
        """Raises ValueError for settings that nothing here would ever look at."""
        switch, memory, eta = self.switch, self.compression.memory, self.compression.eta
        if switch.ratio_schedule != "constant" and not self.compress:
            raise ValueError(f"ratio_schedule {switch.ratio_schedule} needs compress; leave it out otherwise")
        if switch.momentum_correction and not self.compress:
            raise ValueError("momentum_correction needs compress; leave it out otherwise")
        if not switch.momentum_masking and not switch.momentum_correction:
            raise ValueError("momentum_masking false needs momentum_correction; leave it out otherwise")
        for name in ("outer_lr", "outer_momentum"):
            value = getattr(self.meetings, name)
            if not self.local and value != getattr(LocalSteps, name):
                raise ValueError(f"{name} {value:g} needs local_steps; leave it out otherwise")
        if memory != "ef21-sgdm" and eta != CompressionConfig.eta:
            raise ValueError(
                f"eta {eta:g} needs memory ef21-sgdm, and that is {memory}; leave eta out otherwise"
            )

    @property
    def compress(self) -> bool:
        return self.switch.compress

    @property
    def local(self) -> bool:
        """Whether workers take several steps between two meetings."""
        return self.meetings.local_steps is not None

    @property
    def split(self) -> bool:
        """Whether half of the optimizer's work is done before compression."""
        if not self.compress or self.local:
            return False
        if self.optimisation.optimizer not in ADAMS:
            return self.switch.momentum_correction
        if self.switch.split_optimizer is not None:
            return self.switch.split_optimizer
        if self.compression.memory != "ef":  # the others' belief has no rare, large values
            return False
        compressor = from_config(self.compression)
        return compressor.feedback(self.compression.error_feedback) and compressor.quota(1000) < 1000

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> TrainConfig:
        """From ``{"model": ..., "ratio": ...}``; what is not there is the default."""
        known = set(flat_fields())
        for name in values:
            if name not in known:
                raise unknown_name("setting", name, known)
        sections = {}
        for section, kind in SECTIONS.items():
            mine = {
                f.name: values[f.name] for f in fields(kind) if _is_flag(section, f.name) and f.name in values
            }
            if section == "compression":
                mine["seed"] = values.get("seed", 0)
            sections[section] = kind(**mine)
        return cls(**sections)

    def flat(self) -> dict[str, Any]:
        """The inverse of ``from_flat``: plain values, complete, in the order of the help."""
        return {
            f.name: getattr(getattr(self, section), f.name)
            for section, kind in SECTIONS.items()
            for f in fields(kind)
            if _is_flag(section, f.name)
        }

    def but(self, **changes: Any) -> TrainConfig:
        """A copy with some settings changed."""
        return self.from_flat(self.flat() | changes)


def _is_flag(section: str, name: str) -> bool:
    return (section, name) not in NOT_FLAGS


def flat_fields() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Every setting: its section and its dataclass field, by name."""
    found: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for section, kind in SECTIONS.items():
        for each in fields(kind):
            if _is_flag(section, each.name):
                assert each.name not in found, f"two settings are called {each.name}"
                found[each.name] = (section, each)
    return found


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
