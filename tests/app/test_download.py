"""Downloads, from a server of our own with a certificate of our own: what is kept, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import socket
import ssl
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from compressed_ddp.data import DATASETS, DownloadError, download
from compressed_ddp.data.archive import ArchiveError, unpack
from compressed_ddp.data.sources import SOURCES, Remote

CONTENT = bytes(range(256)) * 4000  # several chunks
NAME = "train-images-idx3-ubyte.gz"


class Server:
    """Serves ``files`` and writes down what it was asked for. TLS if there is a certificate."""

    def __init__(self, certificate: Path | None) -> None:
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.ranges = True
        self.wrong_range = False
        self.lengths = True
        self.cut: int | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                pass  # refused handshakes are what some tests are about

        self.http = Quiet(("127.0.0.1", 0), Handler)
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            # The handshake happens in the thread of the request: a client that refuses stops no other.
            self.http.socket = context.wrap_socket(
                self.http.socket, server_side=True, do_handshake_on_connect=False
            )
        scheme = "https" if certificate else "http"
        self.url = f"{scheme}://localhost:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers["Range"]
        self.asked.append((request.path, wanted))
        if request.path in self.redirects:
            request.send_response(302)
            request.send_header("Location", self.redirects[request.path])
            request.end_headers()
            return
        if request.path not in self.files:
            request.send_error(404)
            return
        body = self.files[request.path]
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if start and start >= len(body):
            request.send_error(416)
            return
        request.send_response(206 if start else 200)
        if start:
            shown = start + 1 if self.wrong_range else start
            request.send_header("Content-Range", f"bytes {shown}-{len(body) - 1}/{len(body)}")
        if self.lengths:
            request.send_header("Content-Length", str(len(body) - start))
        request.end_headers()
        request.wfile.write(body[start : self.cut])

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and self-signed certificate for localhost, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost -keyout key.pem -out cert.pem"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_bytes((folder / "key.pem").read_bytes() + (folder / "cert.pem").read_bytes())
    return both


@pytest.fixture
def trust(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    monkeypatch.setenv("no_proxy", "*")
    return ssl.create_default_context(cafile=str(certificate.with_name("cert.pem")))


@pytest.fixture
def serve(certificate: Path) -> Iterator[Callable[..., Server]]:
    """Makes servers, with TLS unless told otherwise."""
    made: list[Server] = []

    def make(tls: bool = True) -> Server:
        made.append(Server(certificate if tls else None))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    server = serve()
    server.files[f"/{NAME}"] = CONTENT
    return server


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Remote]:
    """Makes one file all that dataset ``mnist`` needs."""

    def one(*mirrors: str, content: bytes = CONTENT) -> Remote:
        urls = tuple(f"{mirror}/{NAME}" for mirror in mirrors)
        remote = Remote(NAME, len(content), hashlib.sha256(content).hexdigest(), urls)
        monkeypatch.setitem(SOURCES, "mnist", (remote,))
        return remote

    return one


Publish = Callable[..., Remote]
Serve = Callable[..., Server]


def part_of(folder: Path, content: bytes) -> Path:
    part = folder / "mnist" / f"{NAME}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(content)
    return part


def check_kept(folder: Path) -> None:
    """The right file, and nothing else."""
    assert [path.name for path in (folder / "mnist").iterdir()] == [NAME]
    assert (folder / "mnist" / NAME).read_bytes() == CONTENT


def test_download(tmp_path: Path, server: Server, trust: ssl.SSLContext, publish: Publish) -> None:
    publish(server.url)
    calls: list[tuple[str, int, int]] = []
    where = download("mnist", tmp_path, progress=lambda *call: calls.append(call), _context=trust)
    assert where == tmp_path / "mnist"
    check_kept(tmp_path)
    assert calls[0] == (NAME, 0, len(CONTENT)) and calls[-1] == (NAME, len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls}) and len(calls) > 3
    assert server.asked == [(f"/{NAME}", None)]
    download("mnist", tmp_path, _context=trust)
    assert len(server.asked) == 1, "a file with the right hash was fetched again"


def test_a_file_with_another_hash_is_replaced(
    tmp_path: Path, server: Server, trust: ssl.SSLContext, publish: Publish
) -> None:
    publish(server.url)
    part_of(tmp_path, b"").with_suffix("").write_bytes(bytes(len(CONTENT)))
    download("mnist", tmp_path, _context=trust)
    check_kept(tmp_path)


def test_a_file_survives_a_download_that_fails(
    tmp_path: Path, server: Server, trust: ssl.SSLContext, publish: Publish
) -> None:
    publish(server.url)
    server.files[f"/{NAME}"] = bytes(len(CONTENT))
    part_of(tmp_path, b"").with_suffix("").write_bytes(b"what I had")
    with pytest.raises(DownloadError):
        download("mnist", tmp_path, _context=trust)
    assert (tmp_path / "mnist" / NAME).read_bytes() == b"what I had"


def test_an_interrupted_download_goes_on(
    tmp_path: Path, server: Server, trust: ssl.SSLContext, publish: Publish
) -> None:
    publish(server.url)
    server.cut = 700_000
    with pytest.raises(DownloadError, match=r"closed after 700,000 of 1,024,000 bytes"):
        download("mnist", tmp_path, _context=trust)
    server.cut = None
    download("mnist", tmp_path, _context=trust)
    check_kept(tmp_path)
    assert [wanted for _, wanted in server.asked] == [None, "bytes=700000-"]


@pytest.mark.parametrize("had", [0, 1000], ids=["empty", "a beginning"])
def test_a_link_where_a_part_shall_be_is_replaced(
    tmp_path: Path, server: Server, trust: ssl.SSLContext, publish: Publish, had: int
) -> None:
    """Neither overwritten nor made longer is what it leads to."""
    publish(server.url)
    part = part_of(tmp_path, b"")
    part.unlink()
    (tmp_path / "precious").write_bytes(CONTENT[:had])
    part.symlink_to(tmp_path / "precious")
    download("mnist", tmp_path, _context=trust)
    check_kept(tmp_path)
    assert (tmp_path / "precious").read_bytes() == CONTENT[:had]
    assert not (tmp_path / "mnist" / NAME).is_symlink()


def test_another_mirror_goes_on_where_one_stopped(
    tmp_path: Path, server: Server, serve: Serve, trust: ssl.SSLContext, publish: Publish
) -> None:
    second = serve()
    second.files = server.files
    server.cut = 700_000
    publish(server.url, second.url)
    download("mnist", tmp_path, _context=trust)
    check_kept(tmp_path)
    assert second.asked == [(f"/{NAME}", "bytes=700000-")]


def test_a_server_without_ranges_starts_again(
    tmp_path: Path, server: Server, trust: ssl.SSLContext, publish: Publish
) -> None:
    publish(server.url)
    server.ranges = False
    part_of(tmp_path, CONTENT[:1000])
    download("mnist", tmp_path, _context=trust)
    check_kept(tmp_path)
    assert [wanted for _, wanted in server.asked] == ["bytes=1000-"]


@pytest.mark.parametrize(
    ("part", "asked"),
    [
        (b"not a prefix", ["bytes=12-", None]),
        (bytes(len(CONTENT)), [None]),
        (CONTENT + b"!", [None]),
        (CONTENT, []),
    ],
    ids=["foreign", "complete but wrong", "too long", "complete"],
)
def test_partial_files_of_all_kinds(
    tmp_path: Path,
    server: Server,
    trust: ssl.SSLContext,
    publish: Publish,
    part: bytes,
    asked: list[str | None],
) -> None:
    publish(server.url)
    part_of(tmp_path, part)
    download("mnist", tmp_path, _context=trust)
    check_kept(tmp_path)
    assert [wanted for _, wanted in server.asked] == asked


def test_a_range_that_was_not_asked_for_is_refused(
    tmp_path: Path, server: Server, trust: ssl.SSLContext, publish: Publish
) -> None:
    publish(server.url)
    server.wrong_range = True
    part_of(tmp_path, CONTENT[:1000])
    with pytest.raises(DownloadError, match=r"asked for bytes from 1000 on, got bytes 1001-"):
        download("mnist", tmp_path, _context=trust)


def test_a_shorter_file_on_the_server_than_here(
    tmp_path: Path, server: Server, serve: Serve, trust: ssl.SSLContext, publish: Publish
) -> None:
    """416: it has nothing from there on. It is asked for all of it, which is not what was published."""
    stale = serve()
    stale.files[f"/{NAME}"] = CONTENT[:500]
    publish(stale.url, server.url)
    part_of(tmp_path, CONTENT[:1000])
    download("mnist", tmp_path, _context=trust)
    check_kept(tmp_path)
    assert [wanted for _, wanted in stale.asked] == ["bytes=1000-", None]


def test_a_wrong_hash_leads_to_the_next_mirror(
    tmp_path: Path, server: Server, serve: Serve, trust: ssl.SSLContext, publish: Publish
) -> None:
    liar = serve()
    liar.files[f"/{NAME}"] = CONTENT[:-1] + b"?"
    publish(liar.url, server.url)
    download("mnist", tmp_path, _context=trust)
    check_kept(tmp_path)
    assert len(liar.asked) == 1 and server.asked == [(f"/{NAME}", None)]


@pytest.mark.parametrize("lengths", [True, False])
def test_more_than_was_published_is_not_stored(
    tmp_path: Path, server: Server, trust: ssl.SSLContext, publish: Publish, lengths: bool
) -> None:
    remote = publish(server.url, content=CONTENT[:1000])
    server.lengths = lengths
    with pytest.raises(DownloadError, match="it offers 1024000" if lengths else "more than the 1,000 bytes"):
        download("mnist", tmp_path, _context=trust)
    assert sum(path.stat().st_size for path in (tmp_path / "mnist").iterdir()) <= remote.size


def test_an_untrusted_certificate_is_refused(
    tmp_path: Path, server: Server, trust: ssl.SSLContext, publish: Publish
) -> None:
    publish(server.url)
    with pytest.raises(DownloadError, match="CERTIFICATE_VERIFY_FAILED"):
        download("mnist", tmp_path)
    assert server.asked == []


def test_a_certificate_for_another_host_is_refused(
    tmp_path: Path, server: Server, trust: ssl.SSLContext, publish: Publish
) -> None:
    publish(server.url.replace("localhost", "127.0.0.1"))
    with pytest.raises(DownloadError, match=r"IP address mismatch"):
        download("mnist", tmp_path, _context=trust)
    assert server.asked == []


def test_http_is_refused(tmp_path: Path, serve: Serve, trust: ssl.SSLContext, publish: Publish) -> None:
    plain = serve(tls=False)
    plain.files[f"/{NAME}"] = CONTENT
    publish(plain.url)
    with pytest.raises(DownloadError, match="refused, not https"):
        download("mnist", tmp_path, _context=trust)
    assert plain.asked == []


def test_a_redirect_is_followed_on_https_alone(
    tmp_path: Path, server: Server, serve: Serve, trust: ssl.SSLContext, publish: Publish
) -> None:
    plain, detour = serve(tls=False), serve()
    plain.files[f"/{NAME}"] = CONTENT
    publish(detour.url)
    detour.redirects[f"/{NAME}"] = f"{plain.url}/{NAME}"
    with pytest.raises(DownloadError, match=r"refused, it redirects to http://.*not https"):
        download("mnist", tmp_path, _context=trust)
    assert plain.asked == []
    detour.redirects[f"/{NAME}"] = f"{server.url}/{NAME}"
    part_of_it = tmp_path / "mnist" / f"{NAME}.part"
    part_of_it.write_bytes(CONTENT[:1000])
    download("mnist", tmp_path, _context=trust)
    check_kept(tmp_path)
    assert server.asked == [(f"/{NAME}", "bytes=1000-")]


def test_offline_says_why_and_what_to_do(
    tmp_path: Path, server: Server, trust: ssl.SSLContext, publish: Publish
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        nobody = f"https://localhost:{taken.getsockname()[1]}"
        publish(nobody, f"{server.url}/elsewhere")
        with pytest.raises(DownloadError) as caught:
            download("mnist", tmp_path, _context=trust)
    assert isinstance(caught.value, OSError)
    message = str(caught.value)
    assert f"{nobody}/{NAME}: " in message and "refused" in message
    assert f"{server.url}/elsewhere/{NAME}: HTTP Error 404" in message
    assert all(file in message for file in DATASETS["mnist"].files)
    assert str(tmp_path / "mnist") in message


def test_what_needs_no_download(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'digits' needs no download"):
        download("digits", tmp_path)
    with pytest.raises(ValueError, match="unknown dataset 'minst'; did you mean 'mnist'"):
        download("minst", tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_source_is_pinned() -> None:
    assert set(SOURCES) == {name for name, info in DATASETS.items() if info.files}
    for name, remotes in SOURCES.items():
        produced = [file for remote in remotes for file in (remote.members or (remote.name,))]
        assert produced == list(DATASETS[name].files)
        for remote in remotes:
            assert len(bytes.fromhex(remote.sha256)) == 32 and 0 < remote.size < 2**30
            assert remote.mirrors and all(url.startswith("https://") for url in remote.mirrors)
            assert all(url.endswith(f"/{remote.name}") for url in remote.mirrors)


# Archives

NAMES = ("a.bin", "b.bin")
Member = tuple[str, bytes, bytes]


def tar(*members: Member) -> bytes:
    """A .tar.gz of members: name, type, content (of a link: its target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(content)
            else:
                info.linkname = content.decode()
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


GOOD: tuple[Member, ...] = (
    ("cifar/", tarfile.DIRTYPE, b""),
    ("cifar/readme.html", tarfile.REGTYPE, b"hello"),
    ("cifar/a.bin", tarfile.REGTYPE, b"a" * 100),
    ("cifar/b.bin", tarfile.REGTYPE, b"b" * 100),
)


def test_unpack_takes_what_is_wanted(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"old")
    (tmp_path / "x.tar.gz").write_bytes(tar(*GOOD))
    unpack(tmp_path / "x.tar.gz", folder, NAMES, 100)
    assert sorted(path.name for path in folder.iterdir()) == ["a.bin", "b.bin"]
    assert (folder / "a.bin").read_bytes() == b"a" * 100 and (folder / "b.bin").read_bytes() == b"b" * 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar(*GOOD, ("../x", tarfile.REGTYPE, b"x")), "leads out"),
        (tar(*GOOD, ("cifar/../../a.bin", tarfile.REGTYPE, b"x")), "leads out"),
        (tar(*GOOD, ("/tmp/x", tarfile.REGTYPE, b"x")), "leads out"),
        (tar(*GOOD, ("..\\x", tarfile.REGTYPE, b"x")), "leads out"),
        (tar(*GOOD, ("C:x", tarfile.REGTYPE, b"x")), "leads out"),
        (tar(*GOOD, ("s", tarfile.SYMTYPE, b"/etc/passwd")), "is a link or a device"),
        (tar(GOOD[3], ("a.bin", tarfile.SYMTYPE, b"/etc/passwd")), "is a link or a device"),
        (tar(GOOD[3], ("a.bin", tarfile.LNKTYPE, b"b.bin")), "is a link or a device"),
        (tar(*GOOD, ("f", tarfile.FIFOTYPE, b"")), "is a link or a device"),
        (tar(*GOOD, ("huge", tarfile.REGTYPE, bytes(101))), "101 bytes, more than 100"),
        (tar(GOOD[3], ("a.bin", tarfile.REGTYPE, bytes(99))), "one a.bin of 100 bytes, found 99"),
        (tar(*GOOD, ("again/a.bin", tarfile.REGTYPE, bytes(100))), "found a second one"),
        (tar(*GOOD, *((f"m{n}", tarfile.REGTYPE, b"") for n in range(100))), "more than 64 members"),
        (tar(*GOOD[:3]), r"expected b\.bin inside, found no such file"),
        (tar(*GOOD)[:-40], "cannot be unpacked"),
        (gzip.compress(b"no tar" * 1000, mtime=0), "cannot be unpacked"),
        (b"no gzip", "cannot be unpacked"),
    ],
)
def test_evil_archives_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    folder = tmp_path / "in" / "out"
    folder.mkdir(parents=True)
    archive = tmp_path / "x.tar.gz"
    archive.write_bytes(content)
    with pytest.raises(ArchiveError, match=message):
        unpack(archive, folder, NAMES, 100)
    assert sorted(tmp_path.rglob("*")) == sorted([tmp_path / "in", folder, archive])


@pytest.mark.parametrize("good", [True, False])
def test_download_of_an_archive(
    tmp_path: Path, serve: Serve, trust: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, good: bool
) -> None:
    server = serve()
    content = tar(*GOOD) if good else tar(*GOOD, ("../x", tarfile.REGTYPE, b"x"))
    server.files["/x.tar.gz"] = content
    digest = hashlib.sha256(content).hexdigest()
    remote = Remote("x.tar.gz", len(content), digest, (f"{server.url}/x.tar.gz",), NAMES, 100)
    monkeypatch.setitem(SOURCES, "cifar10", (remote,))
    if not good:
        with pytest.raises(DownloadError, match=r"leads out of the folder.*Instead, put data_batch_1\.bin"):
            download("cifar10", tmp_path, _context=trust)
        assert [path.name for path in (tmp_path / "cifar10").iterdir()] == ["x.tar.gz"]
        return
    folder = download("cifar10", tmp_path, _context=trust)
    (folder / "a.bin").unlink()
    download("cifar10", tmp_path, _context=trust)
    assert (folder / "a.bin").read_bytes() == b"a" * 100
    assert len(server.asked) == 1
    server.files.clear()
    (folder / "x.tar.gz").unlink()
    with pytest.raises(DownloadError, match=r"put x\.tar\.gz itself there and run this again"):
        download("cifar10", tmp_path, _context=trust)
