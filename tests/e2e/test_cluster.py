"""The same recipe on a Ray cluster that somebody else started: RAY_ADDRESS is the only difference."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy import toy_recipe

from ullim.config.load import check_recipe
from ullim.monitor.metrics import read_metrics
from ullim.orchestration.run import train

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A one-machine cluster with four logical cores, ended afterwards."""
    ray = str(Path(sys.executable).with_name("ray"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    command = [ray, "start", "--head", "--block", f"--port={port}", "--num-cpus=4", "--include-dashboard=false"]
    command += ["--node-ip-address=127.0.0.1", "--disable-usage-stats"]
    # In the foreground, so that ending it ends this cluster alone: `ray stop` would end every one on the machine.
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as head:
        wait_for_port(port, deadline_s=120)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        try:
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()


def wait_for_port(port: int, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"no Ray head answered on port {port}"
            time.sleep(0.1)


def test_a_run_joins_the_cluster_and_leaves_it_running(cluster: str, tmp_path: Path) -> None:
    settings = toy_recipe(tmp_path, nodes={"count": 2, "threads": 1}, learner={"ranks": 2}, loop={"steps": 4})
    result = train(check_recipe(settings, "toy"))
    assert len(read_metrics(result.directory)) == 4
    status = [str(Path(sys.executable).with_name("ray")), "status", f"--address={cluster}"]
    assert subprocess.run(status, capture_output=True, timeout=60).returncode == 0
