"""Ranks that are lost while the others connect to them."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from jingu.runtime import peer_watch
from jingu.runtime.exit_codes import EXIT_LOST, EXIT_STALLED
from jingu.runtime.peer_watch import PeerWatch, all_peers_are_alive, watch_peers
from tests.limits import PATIENCE


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))


@pytest.fixture
def ranks(store) -> list[PeerWatch]:
    return [PeerWatch(store.clone(), rank, 3, "127.0.0.1") for rank in range(3)]


def test_ranks_that_go_on_are_alive_and_one_that_does_not_is_the_cause(ranks, monkeypatch):
    monkeypatch.setattr(peer_watch, "SILENT_SECONDS", 0.0)
    assert [rank.poll() for rank in ranks[1:]] == [None, None]  # the first rank is not there yet
    monkeypatch.setattr(peer_watch, "SILENT_SECONDS", 60.0)
    assert [rank.poll() for rank in ranks] == [None] * 3
    monkeypatch.setattr(peer_watch, "SILENT_SECONDS", 0.0)
    assert ranks[0].poll() is None  # the counts of the others have changed
    verdict = ranks[0].poll()
    assert verdict.ranks == [1, 2] and verdict.code == EXIT_STALLED
    assert verdict.sentence.startswith("rank 1 (") and "it hangs, or has ended" in verdict.sentence
    # The others learn it from the store, and say nothing.
    monkeypatch.setattr(peer_watch, "SILENT_SECONDS", 60.0)
    assert ranks[2].poll() == ("", [], EXIT_STALLED)


def test_ranks_that_were_suspended_together_do_not_blame_each_other(ranks, monkeypatch):
    """Slurm suspends a job as a whole; the first rank that continues still reads the counts from before."""
    assert [rank.poll() for rank in [*ranks, ranks[0]]] == [None] * 4
    monkeypatch.setattr(peer_watch, "time", Mock(monotonic=Mock(return_value=time.monotonic() + 3600)))
    assert [rank.poll() for rank in ranks] == [None] * 3


def test_a_node_that_cannot_be_reached_is_lost(ranks, monkeypatch):
    ranks[1].poll()
    assert ranks[0].poll() is None
    monkeypatch.setattr(peer_watch, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(peer_watch.socket, "create_connection", Mock(side_effect=TimeoutError))
    verdict = ranks[0].poll()
    assert verdict.code == EXIT_LOST and "its node cannot be reached" in verdict.sentence


def test_a_rank_that_never_starts_is_named(ranks, monkeypatch):
    ranks[1].poll()
    monkeypatch.setattr(peer_watch, "START_SECONDS", 0.0)
    verdict = ranks[0].poll()
    assert verdict == ("rank 2 did not start within 0 minutes.", [2], EXIT_STALLED)


def test_a_failed_connection_between_ranks_that_are_alive_is_told_from_a_lost_rank(store, monkeypatch):
    """A firewall between ranks that are alive is a person's error; a rank that is lost is not."""
    monkeypatch.setattr(peer_watch, "BEAT_SECONDS", 0.05)
    assert not all_peers_are_alive(store, 1)
    with watch_peers(PeerWatch(store.clone(), 0, 1, ""), pytest.fail):
        monkeypatch.setattr(peer_watch, "BEAT_SECONDS", 0.5)
        assert all_peers_are_alive(store, 1)
    assert not all_peers_are_alive(store, 1)


def test_the_loss_of_the_store_is_the_loss_of_the_first_node(monkeypatch):
    monkeypatch.setattr(peer_watch, "BEAT_SECONDS", 0.05)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = PeerWatch(dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False), 1, 2, "")
    verdicts = []
    has_given_up = threading.Event()

    def give_up(verdict):
        verdicts.append(verdict)
        has_given_up.set()

    with watch_peers(watch, give_up):
        del store
        assert has_given_up.wait(PATIENCE)
    assert verdicts[0].code == EXIT_LOST and "first node" in verdicts[0].sentence
