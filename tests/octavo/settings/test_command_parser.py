"""What every command line has in common: one-line errors, and help that people can read."""

import pytest

from octavo.cli import main
from octavo.settings.loading import parse
from octavo.settings.worker import WorkerSettings


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--role=decode"], "`octavo up` chooses --role for each process; give --prefill-workers and --decode-workers"),
        (["--worker-id=w"], "`octavo up` chooses --worker-id for each process; leave it out"),
        (["--no-host-tier=1"], "--host-tier takes no value: give --host-tier or --no-host-tier"),
        (["--json=\n"], "--json takes no value: give it, or leave it out"),
        (["--host-tier", "yes"], "no such argument: yes; a switch takes no value: --NAME turns it on, --no-NAME off"),
    ],
)
def test_a_flag_of_another_program_names_ours(words, says, capsys):
    assert main(["up", *words]) == 2
    assert capsys.readouterr().err == f"octavo up: {says}; octavo up --help lists what there is\n"
    for wrong in ("--thread=3", "--threads=x", "--threads", "--treads=1"):
        with pytest.raises(SystemExit, match="2"):
            parse(WorkerSettings, [wrong], environ={})
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("octavo worker: ") and "threads" in line
