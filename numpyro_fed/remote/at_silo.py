"""Commands of a silo: look before anything is sent, answer a server, answer files, draw its own latents."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from numpyro_fed.data.silos import Silos
from numpyro_fed.judge.messages import partition
from numpyro_fed.methods.base import Method
from numpyro_fed.remote import files
from numpyro_fed.remote.config import KEY_BYTES, ConfigError, SiteConfig, open_site, open_worker, read_site, secret
from numpyro_fed.remote.errors import PolicyRefused
from numpyro_fed.remote.own import own_fit
from numpyro_fed.remote.policy import PHASES, Policy, Purpose
from numpyro_fed.remote.sockets import serve
from numpyro_fed.remote.study import Study
from numpyro_fed.remote.tables import read, renamed


def check(args: argparse.Namespace) -> int:
    """Whether a study fits this silo's data, and what would leave: nothing is sent."""
    site = None if args.site is None else read_site(args.site)
    if site is None and (args.study is None or args.data is None):
        raise ConfigError("check needs a study and data: numpyro-fed check study.py data.csv, or --site site.toml")
    study = Study.load(args.study if site is None else site.study)
    path = Path(args.data) if site is None else site.data
    own = read(path, renamed(study.columns, {} if site is None else site.columns, "site.toml, [columns]"))
    name = path.stem if site is None else site.name
    silos = Silos({name: own}, shared=study.shared)
    silos.own_counts, silos.renumbered = study.own_counts, study.renumbered
    print(f"study {study.name!r}, SHA-256 {study.digest}\n")
    print(f"{silos}\n")
    methods = {args.method: study.method(args.method)} if args.method else study.methods
    first = next(iter(methods.values()))
    part = partition(study.model, silos, getattr(first, "local", None), getattr(first, "shared", None))
    print(f"{part.table}\n")
    for note in part.notes:
        print(f"note: {note}")
    fine = _show_messages(part, methods)
    policy = Policy.from_table({} if site is None else site.policy)
    _show_policy(policy, study.name, _rows(own))
    return 0 if fine else 1


def _show_messages(part: Any, methods: dict[str, Method]) -> bool:
    """What would leave by each method, once its split's log density has been found to be NumPyro's on these data."""
    rows, fine = [], False
    for name, method in methods.items():
        sent = part.messages(method)
        refused = next(iter(sent.attrs["refused"].values()), None)
        if refused is not None:
            print(f"{name} cannot fit this: {refused}\n")
            continue
        fine = True
        up = sent[sent["direction"] == "up"]
        for phase, fields in up.groupby("phase", sort=False):
            named = ", ".join(f"{one.field}{one.shape}" for one in fields.itertuples() if one.field != "envelope")
            rows.append((name, phase, int(fields["bytes"].sum()), named))
    if fine:
        print("The split's log density is NumPyro's own on these data. What would leave, in a round of each phase:\n")
        table = pd.DataFrame(rows, columns=["method", "phase", "bytes", "fields"])
        with pd.option_context("display.max_colwidth", 90, "display.width", 160):
            print(f"{table.to_string(index=False, justify='left')}\n")
    return fine


def _show_policy(policy: Policy, study: str, rows: int) -> None:
    print(f"Policy, for a silo with {rows} rows:")
    try:
        policy.admit(study, rows)
    except PolicyRefused as error:
        print(f"  takes no part: {error.stays}")
        return
    for phase in PHASES:
        try:
            policy.allow(Purpose(phase, 0), rows)
            print(f"  {phase:9} allowed")
        except PolicyRefused as error:
            print(f"  {phase:9} refused: {error.stays}")
    print(
        f"  at most {policy.most_rounds} rounds, {policy.most_messages} messages, {policy.most_points} points of checks"
    )


def _rows(own: dict[str, Any]) -> int:
    return max((len(value) for value in own.values() if hasattr(value, "shape") and value.shape), default=1)


def silo(args: argparse.Namespace) -> int:
    """Answer the server, until it is stopped."""
    config = read_site(args.site)
    if config.server is None or config.key is None:
        raise ConfigError(f"{args.site} has no [server]: add its address and key, or answer files with silo-step")
    key, tls = secret(config.key), config.server.tls(server=False)
    if tls is None:
        say("no TLS: messages are authenticated but not secret, for a trusted network or a tunnel")
    site = open_site(config)
    say(f"{config.name}: {site.worker.rows} rows of {config.data}, study {site.study_name!r}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the request under way is not answered
    serve(config.name, site.handle, config.server.address, key, tls, told=say)
    return 0


def silo_step(args: argparse.Namespace) -> int:
    """Answer requests in files."""
    config = read_site(args.site)
    sign, believe = _signatures(config, args.site)
    request, reply = Path(args.request), Path(args.reply)
    if request.is_dir():
        found = files.waiting_for(request, config.name)
        if not found:
            raise ConfigError(f"{request} holds no request to {config.name!r}: its files end in {files.REQUEST}")
        pairs = [(path, reply / (path.name.removesuffix(files.REQUEST) + files.REPLY)) for path in found]
    else:
        pairs = [(request, reply)]
    site, failed = open_site(config), 0
    for path, to in pairs:
        try:
            said = files.answer(site.handle, path, to, sign, believe)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}. Nothing was answered") from None
        failed += said.type == "error"
        told = f"{said.body.get('kind')} {said.body.get('why')}" if said.type == "error" else said.type
        print(f"{to}: {told}, {len(said.payload)} bytes of numbers")
    if failed:
        say(f"{failed} of {len(pairs)} requests were answered with an error; why, is in {config.folder / 'site.log'}")
    return 1 if failed else 0


def _signatures(config: SiteConfig, path: str) -> tuple[files.Sign, files.Open]:
    if config.private_key is None or config.server_key is None:
        raise ConfigError(f"{path} has no [files]: add private_key = and server =, see numpyro-fed keygen")
    return files.signer(config.private_key), files.believer({"server": config.server_key})


def fit(args: argparse.Namespace) -> int:
    """Draws of the silo's own latents, which stay in it."""
    config = read_site(args.site)
    worker = open_worker(config)
    found = own_fit(worker, args.run)
    key = jax.random.key(args.seed)
    print(f"{found}\n\n{found.summary(key, args.samples, silo=config.name).round(4).to_string(max_rows=60)}")
    if args.out is not None:
        path = Path(args.out) if args.out.endswith(".npz") else Path(args.out + ".npz")
        draws = found.sample_local(key, args.samples, silo=config.name)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            arrays: dict[str, Any] = {name: np.asarray(value) for name, value in draws.items()}
            np.savez(file, **arrays)
        print(f"\nsaved: {path}")
    return 0


def alone(args: argparse.Namespace) -> int:
    """A fit to this silo's data by themselves: nobody is asked, and nothing is sent."""
    worker = open_worker(read_site(args.site))
    study: Any = worker.study
    silos = Silos({worker.name: worker.own}, shared=study.shared)
    silos.own_counts, silos.renumbered = study.own_counts, study.renumbered
    found = study.method(args.method).run(jax.random.key(args.seed), silos, args.rounds)
    print(f"{found}\n\n{found.summary().round(4).to_string(max_rows=60)}")
    if args.out is not None:
        print(f"\nsaved: {found.save(args.out)}. It holds this silo's latents: it stays here")
    return 0


def keygen(args: argparse.Namespace) -> int:
    """Keys of one name."""
    import secrets

    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{args.name}.key"
    if args.name != "server" and not args.files:
        if path.exists():
            raise ConfigError(f"{path} is there already: a key is never overwritten")
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(KEY_BYTES) + "\n")
        print(f"{path}: the secret of {args.name} and the server, for TCP. Give it to both, by a way you trust.")
        return 0
    from numpyro_fed.remote.signing import make_keys

    path = folder / f"{args.name}.sign"
    public = make_keys(path)
    others = "every silo" if args.name == "server" else "the server"
    print(f"{path}: signs files of {args.name}. It stays here.")
    print(f"{path}.pub: {public}\n  its public key: give it to {others}, and compare it by telephone.")
    return 0


def say(line: str) -> None:
    """On the terminal, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
