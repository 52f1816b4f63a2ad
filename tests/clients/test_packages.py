"""Other people's packages, unchanged: what they get does not depend on which processes are killed meanwhile.

All programs run beside each other, so that each kill hits the calls of many of them.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from client_programs import programs
from live.front import front_of
from live.kills import Kills

pytestmark = [
    pytest.mark.timeout(5400),  # the first run installs all packages
    pytest.mark.skipif(not programs(), reason="no package is chosen"),
]
MODEL = "smollm2"
NUM_KILLS = 4
NUM_ROUNDS = int(os.environ.get("OCTAVO_TEST_ROUNDS", "1"))  # at least; a round of `agents` is six turns of an agent


@pytest.fixture(scope="module", autouse=True)
def installed():
    of_folders = {program.folder: program for program in programs()}  # those of Node share one
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda program: program.install(), of_folders.values()))


def play(program, address, cases, all_quiet, kills):
    """Rounds until there were kills enough; what went wrong, or nothing."""
    with program.running(f"http://{address}", MODEL, cases) as rounds:
        try:
            quiet = next(rounds)
        finally:
            all_quiet.wait()
        begun, num_rounds = kills.num_done, 0
        while kills.num_done < NUM_KILLS or num_rounds < NUM_ROUNDS:
            kills.check()
            found, num_rounds = next(rounds), num_rounds + 1
            assert found == quiet, [(found[case], quiet[case]) for case in quiet if found[case] != quiet[case]]
        return f"{len(quiet)} cases, {num_rounds} rounds, {kills.num_done - begun} kills"


def outcomes(chosen, address, cases_of, kills):
    """What each program came to, by its name. The first round of all is undisturbed."""
    all_quiet = threading.Barrier(len(chosen), action=kills.begin)
    with ThreadPoolExecutor(len(chosen)) as pool:
        plays = {
            program.name: pool.submit(play, program, address, cases_of(program), all_quiet, kills) for program in chosen
        }
        failed = {name: str(error) for name, each in plays.items() if (error := each.exception()) is not None}
    print(*(f"{name}: {failed.get(name) or each.result()}" for name, each in plays.items()), sep="\n")
    return failed


def test_workers_are_killed(model_cluster):
    with Kills(model_cluster, ("w0", "w1")) as kills:
        failed = outcomes(programs(), model_cluster.http_endpoints[0], lambda _: (), kills)
    assert not failed


def test_routers_are_killed(model_cluster):
    """The packages repeat calls that break, and a load balancer takes them to the other router."""
    repeating = [program for program in programs() if program.repeats]
    with front_of(model_cluster.http_endpoints) as address, Kills(model_cluster, ("r0", "r1")) as kills:
        failed = outcomes(repeating, address, lambda program: program.repeats, kills)
    assert not failed
