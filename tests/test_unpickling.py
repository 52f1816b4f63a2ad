"""The guard against pickles: octavo's code and the libraries that it uses load none in the whole test run."""

import pickle
from collections import OrderedDict
from multiprocessing import Pipe

import pytest
from guard.unpickling import UnpicklingRefused


@pytest.mark.parametrize("load", [pickle.loads, pickle._loads], ids=["c", "python"])
def test_a_pickle_that_names_a_class_is_refused(load):
    with pytest.raises(UnpicklingRefused, match="test_unpickling loads a pickle"):
        load(pickle.dumps(OrderedDict(a=1)))


def test_processes_of_a_test_may_exchange_objects():
    near, far = Pipe()
    near.send(OrderedDict(a=1))
    assert far.recv() == OrderedDict(a=1)
    near.close()
    far.close()
