"""The engine over devices, in processes that have several.

Laws of two devices in one process are in tests/laws/two_devices.py, which is collected here alone.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import numpyro_fed as nf
from numpyro_fed.engines.places import places_of

HERE = Path(__file__).parent


def environment(devices: int) -> dict[str, str]:
    return {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {os.environ['XLA_FLAGS']}"}


def laws(which: str, seconds: float) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", which, str(HERE / "laws" / "two_devices.py")]
    done = subprocess.run(command, env=environment(2), capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


@pytest.mark.merge
def test_two_devices() -> None:
    laws("not slow", 600)


@pytest.mark.slow
def test_two_devices_and_every_method() -> None:
    laws("slow", 3000)


# --- with the one device that there is --------------------------------------------------------------------------------


def test_more_devices_than_there_are() -> None:
    number = len(jax.devices()) + 1
    with pytest.raises(ValueError, match=rf"devices={number}, and JAX has .*host_platform_device_count={number}"):
        nf.engines.Sharded(devices=number)


def test_buckets_are_filled_with_copies() -> None:
    """Law: nobody hears of a copy, and no cohort has one."""
    names, buckets = ("a", "b", "c", "d", "e"), (("b", "d"), ("a", "c", "e"))
    places = places_of(names, buckets, 4)
    np.testing.assert_array_equal(places.of_bucket[0], [1, 3, 3, 3])
    np.testing.assert_array_equal(places.of_bucket[1], [0, 2, 4, 4])
    np.testing.assert_array_equal(np.concatenate(places.of_bucket)[places.order], np.arange(5))
    np.testing.assert_array_equal(places.within[0], [4, 0, 4, 1, 4])
    np.testing.assert_array_equal(places.within[1], [0, 4, 1, 4, 2])
    assert places_of(("a", "b"), (("a", "b"),), 2).order is None, "nothing to leave out"
    assert places_of(("a", "b", "c"), (("a", "b", "c"),), 2).order is not None


def test_a_store_is_read_elsewhere() -> None:
    store = nf.SiloStore.from_function(lambda j: dict(x=np.zeros(3, "f")), 2)
    with pytest.raises(TypeError, match=r"nf.engines.Sharded needs all data in memory, got an nf.SiloStore"):
        nf.FedAvg(lambda x: None).run(jax.random.key(0), store, 1, engine=nf.engines.Sharded())


def test_the_class_is_no_engine() -> None:
    given: Any = nf.engines.Sharded
    with pytest.raises(TypeError, match=r"pass engine=nf.engines.Sharded\(\)"):
        nf.FedAvg(lambda x: None).run(jax.random.key(0), nf.Silos({"a": dict(x=np.zeros(3, "f"))}), 1, engine=given)


# --- several processes ------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def together(*commands: list[str], seconds: float) -> None:
    """Processes side by side, all of which end well in time."""
    running = [
        subprocess.Popen(command, env=environment(1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        end = time.monotonic() + seconds
        for process in running:
            told, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
            assert process.returncode == 0, told[-4000:]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Each has half of the silos' data on its device and the whole fit, which is that of one process."""
    methods = ["SFVI, no locals", "SFVI", "SEP", "FedAvg"]
    out = [tmp_path / f"{number}.npz" for number in (-1, 0, 1)]
    of = lambda number, port: [
        sys.executable,
        str(HERE / "one_of_two.py"),
        str(number),
        str(port),
        str(out[number + 1]),
    ]
    together([*of(-1, 0), *methods], seconds=600)
    port = free_port()
    together([*of(0, port), *methods], [*of(1, port), *methods], seconds=900)
    expected, *found = (dict(np.load(path)) for path in out)
    for one in found:
        assert one.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(one[name], array, rtol=2e-4, atol=2e-5, err_msg=name)  # float32, five rounds
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array, err_msg=name)
