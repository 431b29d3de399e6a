"""Compiled programs that outlive their process."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def enable_cache(directory: str | Path | None = None) -> Path:
    """Keep every compiled program on disk, so that the next process of the same study compiles nothing.

    Most of a first run is compilation. This switches on JAX's persistent compilation cache, for programs of any size
    and any time to compile: those of a run, of draws and predictions, and of pooled NUTS. A program is found again by
    what it computes: the same model, method and shapes, the same versions and flags. No data are kept, but arguments
    that all silos share (``shared=``) may be constants of a program.

    Args:
        directory: where programs are kept; by default ``numpyro_fed`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``. It
            may be removed at any time. Let only those write to it whose programs you would run.

    Returns:
        The directory, which is made where there is none.

    Example:
        Once, at the beginning of a script::

            import numpyro_fed as nf

            nf.enable_cache()
    """
    if directory is None:
        base = os.environ.get("XDG_CACHE_HOME")
        directory = (Path(base) if base else Path.home() / ".cache") / "numpyro_fed"
    path = Path(directory).expanduser().resolve()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # programs may have been compiled before, without it
    return path
