"""RUNNING, STILL, ENDED: when the weights may move, and who is told of a failure."""

import threading

import pytest
import torch

from ullim.errors import RunFailed
from ullim.learner.publish import Publication
from ullim.weights.session import TransferFailed


def weights(read):
    for name in ("a", "b", "c"):
        read.append(name)
        yield name, torch.zeros(1)


def test_the_weights_are_still_once_all_were_read_though_the_receivers_have_not_confirmed():
    publication, read, confirm = Publication(3), [], threading.Event()

    def send(tensors):
        for _ in tensors:
            pass
        assert confirm.wait(30)

    thread = threading.Thread(target=publication.run, args=(send, weights(read)))
    thread.start()
    publication.wait_until_still(30)
    assert not publication.ended
    confirm.set()
    publication.wait(30)
    assert publication.ended
    thread.join(30)


def test_a_sender_that_takes_nothing_still_lets_every_gather_happen():
    publication, read = Publication(3), []
    publication.run(lambda tensors: None, weights(read))
    assert read == ["a", "b", "c"]
    publication.wait(1)


def test_a_failed_sender_is_reported_by_wait_and_only_there():
    publication, read = Publication(3), []

    def send(tensors):
        next(tensors)
        raise TransferFailed("node-1 is gone", ["node-1"])

    publication.run(send, weights(read))
    assert read == ["a", "b", "c"], "ranks whose gathers stay unanswered would wait in vain"
    publication.wait_until_still(1)
    publication.wait_until_ended(1)
    with pytest.raises(TransferFailed, match="node-1 is gone"):
        publication.wait(1)


def test_a_gather_that_fails_is_reported_too():
    def broken():
        yield "a", torch.zeros(1)
        raise RuntimeError("rank 1 is gone")

    publication = Publication(3)
    publication.run(lambda tensors: [None for _ in tensors], broken())
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        publication.wait(1)


def test_the_wait_has_a_deadline_that_names_the_version():
    with pytest.raises(RunFailed, match=r"publication of version 3 was still running after 0.01 s"):
        Publication(3).wait_until_still(0.01)
