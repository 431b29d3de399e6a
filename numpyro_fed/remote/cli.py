"""The command ``numpyro-fed``.

Exit codes: 0 done; 1 an error, told in one line; 2 not understood; 3 (of ``round``) waiting for replies; 130 stopped.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata

from numpyro_fed.checks import VerdictWarning
from numpyro_fed.remote import at_flare, at_server, at_silo

EXAMPLES = """
in a silo:
  numpyro-fed check study.py leeds.csv            what would leave, before anything does
  numpyro-fed silo --site site.toml               answer the server
at the server:
  numpyro-fed run study.py --server server.toml --method EP --out fit.npz
  numpyro-fed show fit.npz --study study.py
without a network:
  numpyro-fed round study/ --method EP --out requests/
  numpyro-fed silo-step --site site.toml requests/ replies/
  numpyro-fed round study/ --absorb replies/ --out requests/
over NVIDIA FLARE:
  numpyro-fed flare-kit leeds/                    a site's rules, in its startup kit
  numpyro-fed flare-run asthma --silos leeds,york --kit lead/ --user lead@example.org --out fit.npz
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="numpyro-fed",
        description="Bayesian inference with NumPyro over silos that are elsewhere.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"numpyro_fed {metadata.version('numpyro_fed')}")
    made.add_argument("--debug", action="store_true", help="show where an error was raised")
    commands = made.add_subparsers(dest="command", required=True, metavar="command")

    one = _command(commands, "check", at_silo.check, "see whether a study fits this silo's data, and what would leave")
    one.add_argument("study", nargs="?", help="the study file")
    one.add_argument("data", nargs="?", help="the silo's table: .csv, .parquet or .npz")
    one.add_argument("--site", help="site.toml, in the place of both; its policy is shown, too")
    one.add_argument("--method", help="one of the study's methods; by default all")

    one = _command(commands, "silo", at_silo.silo, "answer the server over TCP, until stopped")
    one.add_argument("--site", required=True, help="site.toml")

    one = _command(commands, "run", at_server.run, "run a study over TCP, at the server")
    one.add_argument("study", help="the study file")
    one.add_argument("--server", default="server.toml", help="server.toml")
    _settings(one, "EP", 0)
    one.add_argument("--out", default="fit.npz", help="where the fit is saved")
    one.add_argument("--checkpoint", help="where the run is kept on the way; by default beside the fit")
    one.add_argument("--checkpoint-every", type=int, help="rounds between two writes; by default about ten seconds")
    one.add_argument("--timeout", type=float, default=600.0, help="seconds that a silo is waited for")
    one.add_argument("--patience", type=int, default=3, help="times a silo is not heard before it is lost for good")

    one = _command(commands, "silo-step", at_silo.silo_step, "answer requests in files")
    one.add_argument("--site", required=True, help="site.toml")
    one.add_argument("request", help="a file, or a folder of them")
    one.add_argument("reply", help="the file to write, or a folder")

    one = _command(commands, "round", at_server.round_, "one step of a run by files, at the server")
    one.add_argument("study", help="a folder with study.py and server.toml")
    _settings(one, None, None)
    one.add_argument("--absorb", help="folder of replies that were brought")
    one.add_argument("--out", required=True, help="folder for requests to be carried")
    one.add_argument("--fit", help="where the fit is saved, in the end; by default in the run's folder")
    one.add_argument("--lost", action="append", metavar="SILO", help="wait for this silo no longer")
    one.add_argument("--again", action="append", metavar="SILO", help="ask this silo again what it failed at")

    one = _command(commands, "flare-kit", at_flare.kit, "write a site's own rules into its FLARE startup kit")
    one.add_argument("kit", nargs="+", help="a folder that holds startup and local")

    one = _command(commands, "flare-run", at_flare.run, "run a study over FLARE: submit, watch, submit again")
    one.add_argument("study", help="the name of the server's copy of the study file, without .py")
    one.add_argument("--silos", required=True, help="who takes part, by their FLARE names: leeds,york,hull")
    one.add_argument("--name", default="run", help="of the run: the same to go on with it, another for another")
    _settings(one, "EP", 0)
    one.add_argument("--out", default="fit.npz", help="where the fit is saved")
    one.add_argument("--checkpoint-every", type=int, help="rounds between two writes; by default about ten seconds")
    one.add_argument("--timeout", type=float, default=600.0, help="seconds that a silo is waited for")
    one.add_argument("--wait", type=float, default=300.0, help="seconds for silos, or the server, to be there")
    one.add_argument("--kit", help="your own startup kit")
    one.add_argument("--user", help="your name in it")
    one.add_argument("--simulate", metavar="FOLDER", help="in FLARE's simulator, on this machine")

    one = _command(commands, "show", at_server.show, "what a saved fit says")
    one.add_argument("fit", help="a file that run or round has saved")
    one.add_argument("--study", required=True, help="the study file")
    one.add_argument("--method", help="of the study's methods; by default the one that fits")

    one = _command(commands, "fit", at_silo.fit, "draws of this silo's own latents from the final fit, in the silo")
    one.add_argument("--site", required=True, help="site.toml")
    one.add_argument("--out", help="where draws are saved, .npz; they are of this silo's own rows")
    one.add_argument("--samples", type=int, default=1000, help="draws")
    one.add_argument("--seed", type=int, default=0, help="of the draws")
    one.add_argument("--run", help="which run, as the audit log names it; by default the last that has ended")

    one = _command(commands, "alone", at_silo.alone, "fit this silo's data by themselves, in the silo")
    one.add_argument("--site", required=True, help="site.toml")
    one.add_argument("--method", default="SFVI", help="one of the study's methods; by default SFVI")
    one.add_argument("--rounds", type=int, help="by default the method's number")
    one.add_argument("--seed", type=int, default=0, help="of the run's random numbers")
    one.add_argument("--out", help="where the fit is saved")

    one = _command(commands, "keygen", at_silo.keygen, "make keys: a silo's secret for TCP, or keys that sign files")
    one.add_argument("name", help="of the silo, or server")
    one.add_argument("--out", default=".", help="folder")
    one.add_argument("--files", action="store_true", help="keys that sign files (always, for server)")
    return made


def _command(commands: argparse._SubParsersAction, name: str, function: object, told: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(name, help=told, description=told[:1].upper() + told[1:] + ".")
    made.set_defaults(function=function)
    return made


def _settings(one: argparse.ArgumentParser, method: str | None, seed: int | None) -> None:
    one.add_argument("--method", default=method, help="one of the study's methods; by default EP")
    one.add_argument("--rounds", type=int, help="by default until the posterior is at rest, or the method's number")
    one.add_argument("--seed", type=int, default=seed, help="of the run's random numbers; by default 0")
    one.add_argument("--quorum", type=int, help="silos without which the run stops; by default all")
    one.add_argument("--no-check", action="store_true", help="do not ask silos for densities to judge the fit by")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; an error is one line that says what to type."""
    args = parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VerdictWarning)  # the verdict is printed
            warnings.showwarning = lambda message, *_: at_silo.say(f"warning: {message}")
            return args.function(args)
    except KeyboardInterrupt:
        print("numpyro-fed: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if args.debug or os.environ.get("NUMPYRO_FED_DEBUG"):
            raise
        kind = (
            "" if isinstance(error, ValueError | OSError | ImportError | RuntimeError) else f"{type(error).__name__}: "
        )
        print(f"numpyro-fed: {kind}{error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
