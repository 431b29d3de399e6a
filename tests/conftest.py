"""What all tests share."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")  # before anything imports matplotlib: no test opens a window
# Before anything compiles: most of the time goes into compiling small programs that run for a moment. Without XLA's
# newer emitter of fused loops that takes half as long, and without optimisation a third of that. XLA_FLAGS="" in the
# environment compiles as for a user.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
)

import jax
import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Compiled programs are kept between runs, and each worker finds what the others have compiled.

    A program is found by its text and by its compiler's version and options: a change of the library is a new program.
    ``rm -r .pytest_cache/jax`` forgets them; JAX_COMPILATION_CACHE_DIR names another place.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(config.rootpath / ".pytest_cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Read while another worker writes it, a program is compiled again.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry:UserWarning")


# Tests that share nothing: any worker may take one. Those of other files stay together, and share compiled programs.
FREE = ("test_split_model", "test_partition", "test_survey", "test_enumeration", "test_bad_inputs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem not in FREE and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture
def x64():
    """Float64 for one test; the default, float32, is tested as well."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict_ranks():
    """Silent broadcasting raises: for tests of our own algebra, NumPyro's code does not survive it."""
    with jax.numpy_rank_promotion("raise"):
        yield
