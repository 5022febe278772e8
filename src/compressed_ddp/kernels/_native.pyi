# csrc/binding.cpp. Addresses are integers; statuses are kernels.h's.

def isa() -> str: ...
def allow_simd(level: int, /) -> None: ...
def take_topk(
    residual: int,
    gradient: int,
    out: int,
    numel: int,
    shards: int,
    quotas: int,
    n_quotas: int,
    values: int,
    indices: int,
    taken: int,
    exact: bool,
    threads: int,
    /,
) -> int: ...
def all_finite(residual: int, gradient: int, numel: int, /) -> bool: ...
def accumulate(
    out: int, numel: int, shards: int, pieces: int, n_pieces: int, scale: float, threads: int, /
) -> int: ...
def sum_messages(
    out: int,
    numel: int,
    shards: int,
    messages: int,
    n_messages: int,
    values: int,
    scale: float,
    threads: int,
    /,
) -> tuple[int, int, int]: ...
def put_difference(
    out: int, numel: int, shards: int, shard: int, indices: int, a: int, b: int, count: int, /
) -> int: ...
def ef_encode(
    indices: int, count: int, numel: int, capacity: int, low_bits: int, bitmap_bytes: int, data: int, /
) -> int: ...
def ef_decode(
    data: int, capacity: int, low_bits: int, bitmap_bytes: int, numel: int, count: int, indices: int, /
) -> tuple[int, int]: ...
def log_encode(values: int, count: int, bits: int, data: int, /) -> None: ...
def log_decode(data: int, count: int, bits: int, values: int, /) -> int: ...
def checksum(message: int, n_words: int, skip: int, /) -> int: ...
def fingerprint(data: int, n_words: int, /) -> int: ...
