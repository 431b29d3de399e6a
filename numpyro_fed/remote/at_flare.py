"""Commands for those who run a study over NVIDIA FLARE."""

import argparse
import shutil
from pathlib import Path

from numpyro_fed.remote.at_silo import say
from numpyro_fed.remote.flare_kits import harden


def kit(args: argparse.Namespace) -> int:
    """A site's own rules, into its startup kit."""
    for folder in args.kit:
        harden(folder)
        say(f"{folder}: no code, no shell commands, no logs to the server; restart FLARE there")
    return 0


def run(args: argparse.Namespace) -> int:
    """Submit, watch and resubmit a job; or simulate it."""
    from numpyro_fed.remote import flare_jobs  # needs the extra flare

    job = flare_jobs.Job(
        args.study,
        args.method,
        args.name,
        tuple(args.silos.split(",")),
        seed=args.seed,
        num_rounds=args.rounds or 0,
        timeout=args.timeout,
        quorum=args.quorum or 0,
        checkpoint_every=args.checkpoint_every or 0,
        check=not args.no_check,
    )
    if args.simulate:
        shutil.copyfile(flare_jobs.simulate(job, args.simulate), args.out)
    elif args.kit and args.user:
        flare_jobs.run(job, args.kit, args.user, args.out, wait=args.wait, told=say)
    else:
        raise ValueError("say where: --kit FOLDER --user NAME for a deployment, or --simulate FOLDER")
    say(f"saved: {Path(args.out)}")
    return 0
