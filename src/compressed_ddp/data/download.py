"""Fetch published files: https alone, checked by SHA-256, resumed where it was interrupted."""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from ..files import longer_file, new_file
from .archive import ArchiveError, unpack
from .catalogue import by_hand, describe
from .sources import SOURCES, Remote

Progress = Callable[[str, int, int], None]
"""Called with a file's name, its bytes so far, and its bytes in all."""

_CHUNK = 2**18
_TIMEOUT = 30.0


class DownloadError(OSError):
    """No mirror gave the file that was published; the message has each one's reason and the way out."""


class _Refused(Exception):
    """Why a mirror's answer was not taken."""


def download(
    name: str,
    data_dir: str | Path = "data",
    *,
    progress: Progress | None = None,
    _context: ssl.SSLContext | None = None,
) -> Path:
    """Fetch the files of dataset ``name`` into its folder under ``data_dir``; returns that folder.

    A file that is there with the right SHA-256 is left alone; one that is not is replaced, but only
    once its successor is complete. One process at a time: do this before the workers start.
    """
    info = describe(name)
    if not info.files:
        raise ValueError(f"dataset {name!r} needs no download: {info.about}")
    folder = Path(data_dir) / info.folders[0]
    folder.mkdir(parents=True, exist_ok=True)
    opener = _opener(_context or ssl.create_default_context())
    for remote in SOURCES[name]:
        path = folder / remote.name
        if not _matches(path, remote):
            reasons = _fetch(remote, path, opener, progress or _silent)
            if reasons:
                raise DownloadError(_failure(name, data_dir, remote, reasons))
        if remote.members:
            try:
                unpack(path, folder, remote.members, remote.member_size)
            except ArchiveError as error:
                raise DownloadError(f"{error}. Instead, {by_hand(name, data_dir)}") from error
    return folder


def _failure(name: str, data_dir: str | Path, remote: Remote, reasons: list[str]) -> str:
    archive = ""
    if remote.members:
        archive = f"\nOr put {remote.name} itself there and run this again: it will be checked and unpacked."
    return (
        f"could not download {remote.name}:\n  "
        + "\n  ".join(reasons)
        + f"\nTry again later (it goes on where it was), or {by_hand(name, data_dir)}.{archive}"
    )


def _fetch(
    remote: Remote, path: Path, opener: urllib.request.OpenerDirector, progress: Progress
) -> list[str]:
    """Put ``remote`` at ``path``. Returns nothing, or why each mirror failed."""
    part = path.with_name(path.name + ".part")
    reasons = []
    for url in remote.mirrors:
        try:
            _complete(remote, url, part, opener, progress)
        except (_Refused, OSError, http.client.HTTPException) as error:
            reason = error.reason if type(error) is urllib.error.URLError else error
            reasons.append(f"{url}: {reason or type(error).__name__}")
            continue
        os.replace(part, path)
        _sync_folder(path.parent)
        return []
    return reasons


def _complete(
    remote: Remote, url: str, part: Path, opener: urllib.request.OpenerDirector, progress: Progress
) -> None:
    """Make ``part`` the whole and right file, or raise. What was there before is tried first."""
    if part.is_symlink():  # not a part that we wrote
        part.unlink()
    for resumed in (True, False):
        have = part.stat().st_size if part.exists() else 0
        if not resumed or have > remote.size:
            part.unlink(missing_ok=True)
            have = 0
        if have < remote.size:
            have = _transfer(remote, url, part, have, opener, progress)
        if _matches(part, remote):
            return
        part.unlink()
        if not have:
            break  # all of it came from here just now: asking again would give the same
    raise _Refused(f"its SHA-256 is not {remote.sha256}: not the file that was published")


def _transfer(
    remote: Remote,
    url: str,
    part: Path,
    have: int,
    opener: urllib.request.OpenerDirector,
    progress: Progress,
) -> int:
    """Append what is missing from ``part``, synced to disk. Returns how much of the old was kept."""
    if urlsplit(url).scheme != "https":
        raise _Refused("refused, not https")
    headers = {"User-Agent": "compressed-ddp", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return _transfer(remote, url, part, 0, opener, progress)
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0  # the server knows no ranges, and sends all of it
        elif not (response.headers["Content-Range"] or "").startswith(f"bytes {have}-"):
            raise _Refused(f"asked for bytes from {have} on, got {response.headers['Content-Range']}")
        length = response.headers["Content-Length"]
        if length is not None and length != str(remote.size - have):
            raise _Refused(f"expected {remote.size - have:,} bytes, it offers {length}")
        with longer_file(part) if have else new_file(part) as file:
            done = have
            progress(remote.name, done, remote.size)
            while chunk := response.read(_CHUNK):
                done += len(chunk)
                if done > remote.size:
                    raise _Refused(f"sends more than the {remote.size:,} bytes that were published")
                file.write(chunk)
                progress(remote.name, done, remote.size)
            file.flush()
            os.fsync(file.fileno())
    if done < remote.size:
        raise _Refused(f"the connection closed after {done:,} of {remote.size:,} bytes")
    return have


def _matches(path: Path, remote: Remote) -> bool:
    if not path.is_file() or path.stat().st_size != remote.size:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == remote.sha256


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirects that stay on https."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme != "https":
            raise _Refused(f"refused, it redirects to {newurl}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def _opener(context: ssl.SSLContext) -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _HttpsOnly())


def _sync_folder(folder: Path) -> None:
    """Make a rename last, where the system can open folders (Windows cannot)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _silent(name: str, done: int, total: int) -> None:
    pass
