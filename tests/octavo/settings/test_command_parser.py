"""What every command line has in common: one-line errors, and help that people can read."""

import pytest

from octavo.cli import main
from octavo.settings.loading import parse
from octavo.settings.worker import WorkerSettings

ROLE = "`octavo up` chooses --role for each process; give --prefill-workers and --decode-workers"
TIER = "--host-tier takes no value: give --host-tier or --no-host-tier"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--role", "prefill"], ROLE),
        (["--role=decode"], ROLE),
        (["--listen", "a:1"], "`octavo up` chooses --listen for each process; give --host and --grpc-port"),
        (["--worker-id=w"], "`octavo up` chooses --worker-id for each process; leave it out"),
        (["--host-tier=yes"], TIER),
        (["--no-host-tier=1"], TIER),
        (["--json=\n"], "--json takes no value: give it, or leave it out"),
        (["--host-tier", "yes"], "no such argument: yes; a switch takes no value: --NAME turns it on, --no-NAME off"),
    ],
)
def test_a_flag_of_another_program_names_ours(words, says, capsys):
    assert main(["up", *words]) == 2
    assert capsys.readouterr().err == f"octavo up: {says}; octavo up --help lists what there is\n"


def test_one_line_says_what_is_wrong(capsys):
    for words in (["--thread=3"], ["--threads=x"], ["--threads"], ["--treads=1"]):
        with pytest.raises(SystemExit) as ended:
            parse(WorkerSettings, words, environ={})
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("octavo worker: ")
        assert "threads" in line
