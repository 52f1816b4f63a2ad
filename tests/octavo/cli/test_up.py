"""What `octavo up` refuses before it starts anything."""

from octavo.cli.commands import main


def test_more_roles_than_workers_are_refused(tmp_path, capsys):
    options = ["--workers", "2", "--prefill-workers", "2", "--decode-workers", "1", "--state-dir", str(tmp_path)]
    assert main(["up", "--runner", "witness", *options])
    assert "--prefill-workers 2 and --decode-workers 1 are more than --workers 2" in capsys.readouterr().err
