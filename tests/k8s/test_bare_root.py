"""The router's image, built as a bare root by debootstrap with the commands of its Dockerfile, and run there.

It runs as the Dockerfile's user, on a root file system that is read-only but for /tmp, and completes a request with a
worker outside. `make test-image` runs this: it needs root, debootstrap, a mirror of Debian, and minutes.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live.cluster import Cluster, Shape
from live.oracle import Oracle
from live.process import Process, wait_until
from rendered_chart import ROOT

from octavo.client import Client, SamplingParams
from octavo.local import ports
from octavo.local.embedded import EmbeddedStore

MIRROR = os.environ.get("OCTAVO_DEBIAN_MIRROR", "http://deb.debian.org/debian")
BARE_ROOT = os.environ.get("OCTAVO_BARE_ROOT", "")  # one that debootstrap has made, with python3-venv: saves minutes
MOST_BYTES = 200 * 10**6
USER = "65532"
DOCKERFILE = ROOT / "k8s/docker/router.Dockerfile"

pytestmark = [
    pytest.mark.night,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap"),
]


def run(*words, **options):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{' '.join(map(str, words))}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def make_bare_root(root):
    """What debootstrap mounts in there goes with its namespace, however it ends: nobody removes a folder with /proc."""
    unsafe = {**os.environ, "DPKG_FORCE": "unsafe-io"}  # nothing here has to outlive a power failure
    words = ["unshare", "--mount", "debootstrap", "--variant=minbase", "--include=python3,python3-venv"]
    run(*words, "bookworm", root, MIRROR, env=unsafe)


def num_bytes(path):
    """What it takes on a disk."""
    return int(run("du", "--summarize", "--block-size=1", path).split()[0])


def fetch_wheels(folder, version):
    """What the Dockerfile installs, octavo itself included, as wheels for a Python of this version."""
    pip = [sys.executable, "-m", "pip"]
    options = ["--python-version", version, "--only-binary", ":all:", "--dest", folder]
    lock = (ROOT / "requirements/router.txt").read_text()
    wanted = folder / "wanted.txt"  # pip asks the Python that runs it about markers, which may be a newer one
    folder.mkdir()
    wanted.write_text(re.sub(r" ; python_full_version < '[\d.]+' (?=\\)", " ", lock))
    run(*pip, "download", "--require-hashes", "--no-deps", "--requirement", wanted, *options)
    settings = re.findall(r"--config-settings='?([^'\s]+)'?", DOCKERFILE.read_text())
    assert len(settings) == 2
    source = folder / "src"
    for words in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(), re.MULTILINE):
        *names, target = words.split()
        for name in names:
            place = source / (target if (ROOT / name).is_dir() else Path(target) / Path(name).name)
            place.parent.mkdir(parents=True, exist_ok=True)
            run("cp", "-r", ROOT / name, place)
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, source, *(f"--config-settings={each}" for each in settings))
    shutil.rmtree(source)


@pytest.fixture(scope="module")
def bare_root(tmp_path_factory):
    """Debian's smallest system with Python, and /opt/octavo as the Dockerfile makes it."""
    folder = tmp_path_factory.mktemp("image")
    root = folder / "root"
    if BARE_ROOT:
        run("cp", "--archive", BARE_ROOT, root)
    else:
        make_bare_root(root)
    inside = ["chroot", root]
    version = run(*inside, "python3", "-c", "import sys; print(*sys.version_info[:2], sep='.')").strip()
    fetch_wheels(root / "wheels", version)
    before = num_bytes(root)
    run(*inside, "python3", "-m", "venv", "/pip")
    run(*inside, "python3", "-m", "venv", "--without-pip", "/opt/octavo")
    install = [
        *inside,
        "/pip/bin/pip",
        "--python",
        "/opt/octavo",
        "install",
        "--no-cache-dir",
        "--no-index",
        "--no-deps",
    ]
    run(*install, *(f"/wheels/{wheel.name}" for wheel in (root / "wheels").glob("*.whl")))
    for name in ("wheels", "pip"):
        shutil.rmtree(root / name)
    print(f"\nthe bare root: {before / 1e6:.0f} MB with wheels, {num_bytes(root) / 1e6:.0f} MB with /opt/octavo")
    yield root
    shutil.rmtree(root)


@pytest.fixture
def outside(tmp_path):
    """A store on a port, and a worker with the witness runner beside it."""
    cluster = Cluster(tmp_path, Shape(routers=0, workers=1))
    [port] = ports.pick(1)
    cluster.store._store = EmbeddedStore(tmp_path / "store", port=port)
    cluster.store.start()
    worker = Process("w0", cluster._command("w0"), tmp_path / "w0.log", ROOT)
    worker.start()
    yield f"redis://127.0.0.1:{port}/0"
    worker.stop()
    cluster.store.stop()


def test_the_packages_are_small_and_have_neither_torch_nor_pip(bare_root):
    size = num_bytes(bare_root / "opt/octavo")
    print(f"/opt/octavo: {size / 1e6:.0f} MB")
    assert size <= MOST_BYTES
    [packages] = (bare_root / "opt/octavo/lib").glob("python*/site-packages")
    names = {path.name for path in packages.iterdir()}
    assert {"octavo", "router", "grpc"} <= names
    assert not names & {"torch", "numpy", "transformers", "gpu_worker", "pip", "setuptools", "cryptography"}


def test_it_serves_as_nobody_on_a_read_only_root(bare_root, outside, tmp_path):
    grpc_port, http_port = ports.pick(2)
    words = ["--listen", f"127.0.0.1:{grpc_port}", "--http-listen", f"127.0.0.1:{http_port}"]
    words += ["--admin-listen", "127.0.0.1:0", "--web-listen", "127.0.0.1:0", "--store", outside]
    entry = re.search(r'^ENTRYPOINT \["octavo", "(\w+)"\]$', DOCKERFILE.read_text(), re.MULTILINE)[1]
    mount = tmp_path / "mounted"
    mount.mkdir()
    script = f"""set -e
        mount --bind {bare_root} {mount}
        mount -o remount,bind,ro {mount}
        mount -t proc proc {mount}/proc
        mount -t tmpfs -o size=64m,mode=1777 tmpfs {mount}/tmp
        mount --bind /dev {mount}/dev
        exec env -i PATH=/opt/octavo/bin:/usr/bin:/bin HOME=/tmp PYTHONUNBUFFERED=1 \
            {shutil.which("chroot")} --userspec={USER}:{USER} {mount} octavo {entry} "$@"
    """
    command = ["/usr/bin/unshare", "--mount", "/bin/sh", "-c", script, "sh", *words]
    router = Process("router", command, tmp_path / "router.log", tmp_path)
    router.start()
    try:
        with Client(f"127.0.0.1:{grpc_port}") as client:
            wait_until(lambda: "found worker w0" in router.tail() or not router.running, 180, "the worker is not found")
            assert router.running, router.tail()
            made = client.complete([1, 2, 3], max_tokens=40, temperature=0)
        expected = Oracle("witness").outputs([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=40))[0]
        assert tuple(made.token_ids) == expected.token_ids
        status = Path(f"/proc/{router.pid}/status").read_text()
        assert re.search(r"^Uid:\s+(\d+)\s+(\d+)", status, re.MULTILINE).groups() == (USER, USER)
        mounts = [line.split() for line in Path(f"/proc/{router.pid}/mountinfo").read_text().splitlines()]
        assert [words[5].split(",")[0] for words in mounts if words[4] == "/"] == ["ro"]
        assert not list((bare_root / "tmp").iterdir())
        os.kill(router.pid, signal.SIGTERM)
        wait_until(lambda: not router.running, 60, "it does not end")
        assert router.exit_code == 0, router.tail()
        print(f"peak of memory and what it said:\n{router.tail()[-600:]}")
    finally:
        router.stop(0)
