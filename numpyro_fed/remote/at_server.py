"""Commands of the server: a run over TCP, a run by files, and what a fit says."""

import argparse
import json
import secrets
import sys
from pathlib import Path
from typing import Any

import jax

from numpyro_fed.cache import enable_cache
from numpyro_fed.files import replace_file
from numpyro_fed.remote import files
from numpyro_fed.remote.at_silo import say
from numpyro_fed.remote.config import ConfigError, read_server, secret
from numpyro_fed.remote.silos import RemoteSilos, connect
from numpyro_fed.remote.sockets import Sockets
from numpyro_fed.remote.study import Study
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.load import load
from numpyro_fed.run.lost import SiloLostError

WAITING = 3  # exit code of a round that waits for replies


def run(args: argparse.Namespace) -> int:
    """A whole run over TCP."""
    config, study = read_server(args.server), Study.load(args.study)
    method = study.method(args.method)
    if config.listen is None or not config.keys:
        raise ConfigError(f"{args.server} has no [listen] with an address, or no [silos] with their keys")
    out, checkpoint = _out(args.out), Path(args.checkpoint or _out(args.out).with_suffix(".checkpoint"))
    tls = config.listen.tls(server=True)
    if tls is None:
        say("no TLS: messages are authenticated but not secret, for a trusted network or a tunnel")
    enable_cache(_made(config.folder) / "programs")
    keys = {name: secret(path) for name, path in config.keys.items()}
    with Sockets(config.listen.address, keys, tls, told=say) as transport:
        say(f"listening at {transport.address[0]}:{transport.address[1]} for {', '.join(transport.names)}")
        try:
            silos = connect(study, transport, timeout=args.timeout, quorum=args.quorum, patience=args.patience)
            fit = method.run(
                jax.random.key(args.seed),
                silos,
                args.rounds,
                check=not args.no_check,
                checkpoint=checkpoint,
                checkpoint_every=args.checkpoint_every,
                progress_bar=sys.stderr.isatty(),
            )
        except SiloLostError as lost:
            raise SiloLostError(_so_far(lost, out, checkpoint)) from None
        _finish(fit, out, silos, transport.traffic)
    checkpoint.unlink(missing_ok=True)
    return 0


def _so_far(lost: SiloLostError, out: Path, checkpoint: Path) -> str:
    """What to type when a run has stopped, its fit so far beside where the whole one would be."""
    told = str(lost).replace("The error's .fit is the last good state", "").rstrip(". ")
    if lost.fit is not None:
        told += f". The fit so far, which is not that of the run, is in {lost.fit.save(out.with_suffix('.so-far.npz'))}"
    if checkpoint.exists():
        told += f". When the silo is back, type the same command again: it goes on from {checkpoint}"
    return told


def round_(args: argparse.Namespace) -> int:
    """One step of a run by files: take what was brought, go on, write what to carry."""
    folder = Path(args.study)
    study, config = Study.load(folder / "study.py"), read_server(folder / "server.toml")
    if config.private_key is None or not config.public_keys:
        raise ConfigError(f"{folder / 'server.toml'} has no [files] with private_key and silos, see numpyro-fed keygen")
    settings = _settings(args, study, _made(config.folder) / "run.json")
    method = study.method(settings["method"])
    lost = tuple(args.lost or ())
    for name in (*lost, *(args.again or ())):
        if name not in config.public_keys:
            raise ConfigError(f"no silo is named {name!r}; the silos are {', '.join(config.public_keys)}")
    sign, believe = files.signer(config.private_key), files.believer(config.public_keys)
    names = tuple(config.public_keys)
    transport = files.Files(names, config.folder, Path(args.out), sign, believe, lost)
    for name in args.again or ():
        say(f"{name}: {transport.forget_errors(name)} requests are asked again")
    refused = _absorb(transport, args.absorb)
    enable_cache(config.folder / "programs")
    try:
        silos = connect(study, transport, quorum=settings["quorum"], patience=1, seed=settings["run"])
        key = jax.random.key(settings["seed"])
        fit = method.run(key, silos, settings["rounds"], check=settings["check"], progress_bar=False)
    except files.Waiting as waiting:
        say(f"{waiting}: carry the {transport.written} files in {args.out} to them")
        return 1 if refused else WAITING
    transport.close()
    if transport.written:
        say(f"done. The files in {args.out} bring the fit to the silos; no reply is needed")
    _finish(fit, _out(args.fit or str(config.folder / "fit.npz")), silos, transport.traffic)
    return 1 if refused else 0


def _absorb(transport: files.Files, folder: str | None) -> int:
    """Take all replies of a folder; returns how many were refused."""
    found = [] if folder is None else sorted(Path(folder).glob(f"*{files.REPLY}"))
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--absorb {folder} is no folder")
    refused = 0
    for path in found:
        try:
            transport.absorb(path)
        except (ValueError, OSError) as error:
            refused += 1
            say(f"{path} is refused: {error}")
    if folder is not None:
        say(f"{len(found) - refused} replies were taken of {folder}")
    return refused


def _settings(args: argparse.Namespace, study: Study, path: Path) -> dict[str, Any]:
    """What the run is, said once and kept: another step cannot say otherwise."""
    told = {"method": args.method, "rounds": args.rounds, "seed": args.seed, "quorum": args.quorum}
    told["check"] = False if args.no_check else None
    said = {name: value for name, value in told.items() if value is not None}
    if not path.exists():
        usual = {"method": "EP", "rounds": None, "seed": 0, "quorum": None, "check": True}
        made = {**usual, **said, "study": study.digest, "run": secrets.token_hex(8)}
        study.method(made["method"])
        replace_file(path, json.dumps(made, indent=1).encode())
        return made
    kept: dict[str, Any] = json.loads(path.read_text())
    if kept["study"] != study.digest:
        raise ConfigError(f"{study.path} has changed since this run began: put it back, or remove {path.parent}")
    for name, value in said.items():
        if kept[name] != value:
            raise ConfigError(f"this run began with {name} {kept[name]}, not {value}: to begin anew, remove {path}")
    return kept


def _finish(fit: Fit, out: Path, silos: RemoteSilos, carried: dict[str, tuple[int, int]]) -> None:
    _made(out.parent)
    print(f"{fit}\n\n{fit.summary().round(4).to_string()}\n")
    print(f"{'silo':20} {'bytes up':>12} {'bytes down':>12}   with the transport's own: up, down")
    for name, (up, down) in silos.traffic.items():
        print(f"{name:20} {up:12} {down:12}   {', '.join(map(str, carried.get(name, ())))}")
    print(f"\nsaved: {fit.save(out)}\nverdict: {fit.verdict.status}")


def show(args: argparse.Namespace) -> int:
    """What a saved fit says; nobody is asked."""
    study = Study.load(args.study)
    fit = _loaded(args.fit, study, args.method)
    print(f"{fit}\n\n{fit.summary().round(4).to_string()}\n")
    sent = fit.ledger()
    if len(sent):
        table = sent.groupby(["silo", "phase", "direction"], observed=True)["bytes"].sum().unstack(fill_value=0)
        print(f"Bytes of numbers that were sent:\n{table.to_string()}\n")
    print(fit.verdict)
    return 0


def _loaded(path: str, study: Study, name: str | None) -> Fit:
    methods: dict[str, Any] = study.methods if name is None else {name: study.method(name)}
    errors = []
    for method in methods.values():
        try:
            return load(path, method)
        except ValueError as error:
            errors.append(str(error))
    other = [error for error in errors if "another method" not in error]
    raise ConfigError(other[0] if other else errors[0])


def _out(path: str) -> Path:
    return Path(path) if path.endswith(".npz") else Path(path + ".npz")


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
