"""What a machine is told by a file of its own: site.toml at a silo, server.toml at the server.

Nothing in these files is ever said by the other side: where data, keys and state lie is the owner's business. Paths are
relative to the file. A silo's::

    name = "leeds"
    study = "study.py"
    data = "leeds.csv"
    folder = "state"              # state, audit log, compiled programs; by default beside this file

    [columns]                     # where this silo's columns have other names than the study's
    smoke = "mother_smokes"

    [policy]                      # what may leave (numpyro_fed.remote.policy)
    most_rounds = 200

    [server]                      # over a network
    address = "coordinator.example.org:7433"
    key = "leeds.key"             # a secret that the server has, too: numpyro-fed keygen
    authority = "authority.pem"   # with TLS: who vouches for the server
    certificate = "leeds.pem"     # ... and this silo's own certificate and key, where the server asks for them
    private_key = "leeds-tls.key"

    [files]                       # by files (numpyro-fed silo-step)
    private_key = "leeds.sign"    # signs replies: numpyro-fed keygen
    server = "ed25519:..."        # whose requests are answered: a public key, or a file that holds it

The server's::

    folder = "run"

    [silos]                       # who takes part, and the secret shared with each
    leeds = "leeds.key"

    [listen]
    address = "0.0.0.0:7433"
    certificate = "server.pem"    # with TLS
    private_key = "server-tls.key"
    authority = "authority.pem"   # asks silos for certificates, too

    [files]
    private_key = "server.sign"

    [files.silos]
    leeds = "leeds.sign.pub"
"""

import ssl
import stat
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpyro_fed.cache import enable_cache
from numpyro_fed.remote.policy import Policy
from numpyro_fed.remote.site import Site
from numpyro_fed.remote.study import Study
from numpyro_fed.remote.tables import check_known, read, renamed
from numpyro_fed.remote.worker import Worker

PORT = 7433
KEY_BYTES = 32


class ConfigError(ValueError):
    """A file of settings is not one; the message says what to write."""


@dataclass(frozen=True)
class Network:
    """One end of a connection."""

    address: tuple[str, int]
    authority: Path | None = None  # certificates that vouch for the other side
    certificate: Path | None = None
    private_key: Path | None = None

    def tls(self, server: bool) -> ssl.SSLContext | None:
        """TLS 1.3 as this end does it; None: none, for a trusted network or a tunnel."""
        if self.authority is None and self.certificate is None:
            return None
        if server and self.certificate is None:
            raise ConfigError("[listen]: a server with TLS shows a certificate: add certificate = and private_key =")
        if not server and self.authority is None:
            raise ConfigError("[server]: say who vouches for the server: add authority =")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.private_key)
            if self.authority is not None:
                context.load_verify_locations(self.authority)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"TLS: {self.certificate or ''} {self.authority or ''}: {error}") from None
        return context


@dataclass(frozen=True)
class SiteConfig:
    """What site.toml says."""

    name: str
    study: Path
    data: Path
    folder: Path
    columns: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    server: Network | None = None
    key: Path | None = None  # the secret shared with the server
    private_key: Path | None = None  # signs replies in files
    server_key: str | None = None  # public: whose requests in files are answered


@dataclass(frozen=True)
class ServerConfig:
    """What server.toml says."""

    folder: Path
    keys: dict[str, Path]  # of each silo, by name; in their order
    listen: Network | None = None
    private_key: Path | None = None  # signs requests in files
    public_keys: dict[str, str] = field(default_factory=dict)  # "ed25519:...", of silos that answer by files

    @property
    def names(self) -> tuple[str, ...]:
        return tuple({**self.keys, **self.public_keys})


def read_site(path: str | Path) -> SiteConfig:
    """A silo's site.toml."""
    path = Path(path)
    said = _read(path)
    top = Part(said, str(path), path.parent, "name study data folder columns policy server files")
    server, files = (Part(top.table(key), f"{path}, [{key}]", path.parent, keys) for key, keys in SITE_PARTS.items())
    name = _name(top.text("name"), f"{path}: name")
    return SiteConfig(
        name,
        top.file("study"),
        top.file("data"),
        top.path("folder", f"{name}-state"),
        top.table("columns"),
        top.table("policy"),
        server.network() if "server" in said else None,
        server.file("key") if "server" in said else None,
        files.file("private_key") if "files" in said else None,
        files.public("server") if "files" in said else None,
    )


def read_server(path: str | Path) -> ServerConfig:
    """The server's server.toml."""
    path = Path(path)
    said = _read(path)
    top = Part(said, str(path), path.parent, "folder silos listen files")
    listen = Part(top.table("listen"), f"{path}, [listen]", path.parent, SITE_PARTS["server"].replace("key ", "", 1))
    files = Part(top.table("files"), f"{path}, [files]", path.parent, "private_key silos")
    keys, public = (Part(part.table("silos"), f"{part.where}, silos", path.parent, None) for part in (top, files))
    for name in {**keys.said, **public.said}:
        _name(name, f"{path}: a silo's name")
    if not keys.said and not public.said:
        raise ConfigError(f'{path} names no silo: add [silos] with a line such as leeds = "leeds.key"')
    return ServerConfig(
        top.path("folder", "run"),
        {name: keys.file(name) for name in keys.said},
        listen.network() if "listen" in said else None,
        files.file("private_key") if "files" in said else None,
        {name: public.public(name) for name in public.said},
    )


SITE_PARTS = {"server": "address key authority certificate private_key", "files": "private_key server"}


@dataclass(frozen=True)
class Part:
    """A table of a settings file. Unknown keys are errors that name the nearest; paths are relative to the file."""

    said: Mapping[str, Any]
    where: str
    base: Path
    known: str | None  # None: any

    def __post_init__(self) -> None:
        for key in self.said if self.known is not None else ():
            try:
                check_known(key, self.known.split(), self.where)  # type: ignore[union-attr]
            except ValueError as error:
                raise ConfigError(str(error)) from None

    def table(self, key: str) -> dict[str, Any]:
        found = self.said.get(key, {})
        if not isinstance(found, dict):
            raise ConfigError(f"{self.where}: {key} is a table: write [{key}] and its lines below it")
        return found

    def text(self, key: str) -> str:
        found = self.said.get(key)
        if not isinstance(found, str) or not found:
            got = "it is missing" if found is None else f"got {found!r}"
            raise ConfigError(f'{self.where}: {key} must be a text, {got}: write {key} = "..."')
        return found

    def path(self, key: str, default: str | None = None) -> Path:
        return self.base / Path(self.text(key) if key in self.said or default is None else default).expanduser()

    def file(self, key: str) -> Path:
        found = self.path(key)
        if not found.is_file():
            raise ConfigError(f"{self.where}: {key} names the file {found}, which is not there")
        return found

    def public(self, key: str) -> str:
        """A public key, written here or in a file."""
        found = self.text(key)
        return found if found.startswith("ed25519:") else self.file(key).read_text(encoding="utf-8").strip()

    def network(self) -> Network:
        files = {key: self.file(key) for key in ("authority", "certificate", "private_key") if key in self.said}
        return Network(address(self.text("address"), self.where), **files)


def address(text: str, where: str = "address") -> tuple[str, int]:
    """Host and port.

    >>> address("york.example.org:9000"), address("localhost")
    (('york.example.org', 9000), ('localhost', 7433))
    """
    host, colon, port = text.rpartition(":") if text.count(":") == 1 or text.startswith("[") else (text, "", "")
    if colon and not (port.isdigit() and int(port) < 65536):
        raise ConfigError(f'{where}: {text!r} must be a host and a port, such as "coordinator.example.org:{PORT}"')
    return host.strip("[]"), int(port) if colon else PORT


def secret(path: Path) -> bytes:
    """A key file of ``numpyro-fed keygen``: 32 bytes in hexadecimal, readable by its owner alone."""
    _check_private(path)
    try:
        found = bytes.fromhex(path.read_text().strip())
    except (UnicodeDecodeError, ValueError):
        found = b""
    if len(found) != KEY_BYTES:
        raise ConfigError(f"{path} is no key file ({KEY_BYTES} bytes in hexadecimal): make one with numpyro-fed keygen")
    return found


def _check_private(path: Path) -> None:
    if sys.platform != "win32" and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path} is a secret that others on this machine may read: chmod 600 {path}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is no TOML file: {error}") from None


def _name(name: str, where: str) -> str:
    if name == "server" or len(name.encode()) > 200 or not all(letter.isalnum() or letter in "-_. " for letter in name):
        raise ConfigError(f"{where} must be letters, digits, blanks, points and dashes, and not 'server'; got {name!r}")
    if name[0] in ". " or name[-1] in ". ":
        raise ConfigError(f"{where} must begin and end with a letter or digit, got {name!r}")
    return name


def open_worker(config: SiteConfig) -> Worker:
    """What a silo computes with: its own copy of the study, its own table, its folder."""
    study = Study.load(config.study)  # first: it may choose 64 bits
    own = read(config.data, renamed(study.columns, config.columns, "site.toml, [columns]"))
    config.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    enable_cache(config.folder / "programs")
    return Worker(config.name, own, study, config.folder, study.own_counts, study.renumbered)


def open_site(config: SiteConfig) -> Site:
    """A silo as it answers, by its owner's policy."""
    policy, worker = Policy.from_table(config.policy), open_worker(config)
    study: Any = worker.study
    return Site(worker, study.digest, study.name, config.folder, policy)
