"""Ranks: who one is, agreeing, stopping together, and speaking with one voice."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jingu.errors import JinguError
from jingu.runtime import signals
from jingu.runtime.collective_stop import CollectiveStop
from jingu.runtime.log import LOGGER, log_info, log_to_folder, report_first_failure
from jingu.runtime.ranks import (
    COLLECTIVE_TIMEOUT,
    RankInfo,
    _check_interface,
    _prepare_nccl,
    agree_on_attempt,
    all_ranks_agree,
    broadcast_from_first,
    choose_device,
    join_process_group,
    wait_until_all_done,
)
from jingu.runtime.signals import StopRequest, catch_stop_signals
from tests.limits import PATIENCE

ALONE = RankInfo(0, 1, torch.device("cpu"))


def me(rank: int, world: int) -> RankInfo:
    return RankInfo(rank, world, torch.device("cpu"), "node-7")


def test_one_process_is_a_group_of_its_own(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    try:
        for _ in range(2):  # one after another in one process
            with join_process_group("auto", 1) as ranks:
                assert (ranks.rank, ranks.world, ranks.is_first) == (0, 1, True)
                assert torch.get_num_threads() == 1
                assert all_ranks_agree(True) and not all_ranks_agree(False)
                assert broadcast_from_first(7) == 7
        monkeypatch.setattr("jingu.runtime.ranks.num_usable_cores", lambda: 3)
        with join_process_group("cpu", None):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def wait_for_the_first(rank: int, world: int) -> list[float]:
    """The first rank is done after a while; what each was given as time to wait."""
    given: list[float] = []

    def done(seconds: float) -> bool:
        given.append(seconds)
        return rank != 0 or len(given) == 5

    wait_until_all_done(done)
    return given


def test_who_is_done_waits_in_small_pieces_for_who_is_not(ranks):
    """A single collective would give up after a while."""
    first, second = ranks.run(wait_for_the_first, 2)
    assert first == second and len(first) == 5
    assert max(first) < COLLECTIVE_TIMEOUT.total_seconds() / 10


def test_threads_of_groups_end_before_the_interpreter() -> None:
    """One that gave a tensor back while the interpreter ends would abort the process."""
    code = """if True:
        import atexit, gc, os, time
        from contextlib import suppress
        from pathlib import Path

        def names():
            for task in Path("/proc/self/task").glob("*/comm"):
                with suppress(OSError):  # it ended meanwhile
                    yield task.read_text().strip()

        def tell():
            print(sorted(names()))

        def tell_at_the_end():
            deadline = time.monotonic() + 100  # one that was waited for may be shown a moment longer
            while "gloo" in "".join(names()) and time.monotonic() < deadline:
                os.sched_yield()
            tell()
            print(collections.count("start"))

        collections = []
        atexit.register(tell_at_the_end)  # called last
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from jingu.runtime.ranks import join_process_group

        with join_process_group("cpu", 1):
            model = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
            model(torch.ones(2, 4)).sum().backward()
            torch.optim.AdamW(model.parameters(), fused=True).step()
            tell()
        del model
        # However many groups there were, garbage is collected once at exit: a collection takes a quarter of a second.
        for _ in range(20):
            with join_process_group("cpu", 1):
                pass
        gc.disable()
        gc.callbacks.append(lambda phase, _: collections.append(phase))
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=PATIENCE)
    before, after, collections = done.stdout.splitlines()
    assert "gloo" in before and "gloo" not in after
    assert collections == "1"


def test_an_environment_that_makes_no_sense(monkeypatch):
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(JinguError) as raised, join_process_group("cpu", 1):
        pass
    assert str(raised.value) == (
        "the environment variable RANK is 'first', which is not a whole number. It is set by torchrun; start the run "
        "with `jingu train run.yaml --processes N` or torchrun, or remove the variable (`unset RANK`)."
    )


def test_devices(monkeypatch):
    for kind in ("cuda", "xpu"):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda kind=kind, **_: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        assert choose_device("auto", 1) == choose_device(kind, 1) == torch.device(kind, 1)
    with pytest.raises(JinguError, match=r"device.type: no NPU device is to be found.*xpu. It needs .*torch_npu"):
        choose_device("npu", 0)
    assert choose_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(JinguError, match="local rank 2 needs a device of its own, and this machine has 2"):
        choose_device("auto", 2)


def agreeing(rank: int, world: int) -> tuple[list[bool], int]:
    return [all_ranks_agree(True), all_ranks_agree(rank != 1), all_ranks_agree(rank == 1)], broadcast_from_first(
        rank + 40
    )


def test_agreement(ranks):
    assert ranks.run(agreeing, 3) == [([True, False, False], 40)] * 3


# Stopping


def stopping(rank: int, world: int, asked_at: int, who: int) -> int:
    """The step at which this rank stops, where one rank is asked to at some step."""
    request = StopRequest()
    stop = CollectiveStop(request, world)
    for step in range(10):
        if step == asked_at and rank == who:
            request.signal = signal.SIGTERM
        if stop.agree().stop:
            stop.wait()
            return step
    stop.wait()
    return -1


def test_all_ranks_stop_at_the_same_step(ranks):
    assert ranks.run(stopping, 3, 4, 2) == [5] * 3
    assert ranks.run(stopping, 2, 0, 0) == [1] * 2
    assert ranks.run(stopping, 2, 9, 0) == [-1] * 2
    assert stopping(0, 1, 4, 0) == 4


def asking_alone(rank: int, world: int) -> None:
    """One rank asks, and the other has failed before it."""
    stop = CollectiveStop(StopRequest(), world)
    all_ranks_agree(True)
    if rank == 0:
        stop.agree()
    stop.wait(timedelta(seconds=0.05))


def test_a_question_that_another_rank_never_asks_is_given_up(ranks):
    assert ranks.run(asking_alone, 2) == [None] * 2


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_request_and_a_second_one_acts(kind, capfd, monkeypatch):
    """Schedulers and launchers may both pass a signal on: twice at once is once."""
    before = signal.getsignal(kind)
    with catch_stop_signals(announce=True) as request:
        assert request.signal is None
        os.kill(os.getpid(), kind)
        os.kill(os.getpid(), kind)
        assert request.signal == kind
        raised = []
        monkeypatch.setattr(signal, "raise_signal", raised.append)
        monkeypatch.setattr(signals, "REPEAT_SECONDS", -1.0)
        os.kill(os.getpid(), kind)
        assert raised == [kind]
        expected = signal.default_int_handler if kind == signal.SIGINT else signal.SIG_DFL
        assert signal.getsignal(kind) == expected
    assert signal.getsignal(kind) == before
    assert capfd.readouterr().err == "\nStopping after this step, and saving. Repeat to stop at once.\n"


def test_only_the_first_rank_tells_that_the_signal_came(capfd):
    with catch_stop_signals() as request:
        os.kill(os.getpid(), signal.SIGINT)
    assert request.signal == signal.SIGINT
    assert capfd.readouterr().err == ""


def test_ranks_of_an_attempt_agree_on_a_number_of_their_own():
    """The store has what an earlier attempt of more ranks has left, and the first rank comes before the others."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    attempts = []
    for world in (4, 3, 3, 1):
        with ThreadPoolExecutor(world) as pool:
            numbers = list(
                pool.map(lambda rank, world=world: agree_on_attempt(store.clone(), rank, world), range(world))
            )
        assert len(set(numbers)) == 1
        attempts += numbers[:1]
    assert attempts == [1, 2, 3, 4]


# Words


def test_words_go_to_the_terminal_and_to_a_file_a_rank(tmp_path, capsys):
    before = list(LOGGER.handlers)
    with log_to_folder(tmp_path, ALONE):
        log_info("Growing.")
    with log_to_folder(tmp_path, me(1, 2)):
        log_info("Growing elsewhere.")
    log_info("Heard by no one.")
    assert capsys.readouterr().err == "Growing.\n"
    assert (tmp_path / "rank-00000.log").read_text().endswith(" INFO Growing.\n")
    assert (tmp_path / "rank-00001.log").read_text().endswith(" INFO Growing elsewhere.\n")
    assert LOGGER.handlers == before


def test_how_a_rank_ended_is_in_its_log_only(tmp_path, capsys):
    with pytest.raises(JinguError), log_to_folder(tmp_path, ALONE):
        raise JinguError("a mistake.", where="somewhere")
    with pytest.raises(ZeroDivisionError), log_to_folder(tmp_path, ALONE):
        raise ZeroDivisionError
    log = (tmp_path / "rank-00000.log").read_text()
    assert " ERROR somewhere: a mistake.\n" in log and "Traceback" in log and "ZeroDivisionError" in log
    assert capsys.readouterr().err == ""


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path, capsys, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with log_to_folder(tmp_path, ALONE):
        monkeypatch.setattr(logging.FileHandler, "flush", full)
        log_info("Growing.")
        monkeypatch.undo()
    assert capsys.readouterr().err == "Growing.\n"


def failing(rank: int, world: int, kinds: list[str]) -> str:
    """How each rank's failure looks from outside."""
    try:
        with report_first_failure(me(rank, world)):
            all_ranks_agree(True)
            if kinds[rank] == "mistake":
                raise JinguError(f"of rank {rank}.")
            if kinds[rank] == "bug":
                raise ZeroDivisionError
    except SystemExit as leaving:
        return f"left {leaving.code}"
    except JinguError as error:
        return f"told {error} {error.__notes__[0]}"
    except ZeroDivisionError as error:
        return f"showed its traceback {error.__notes__[0]}"
    return "went on"


def test_one_rank_tells(ranks):
    told = ranks.run(failing, 3, ["mistake"] * 3)
    assert sorted(text.split()[0] for text in told) == ["left", "left", "told"]
    assert {text for text in told if text.startswith("left")} == {"left 2"}
    assert ranks.run(failing, 2, ["none", "mistake"]) == ["went on", "told of rank 1. This was rank 1 of 2, on node-7."]
    told = ranks.run(failing, 2, ["bug", "bug"])
    first, second = sorted(told)
    assert first == "left 1" and re.fullmatch(r"showed its traceback This was rank [01] of 2, on node-7\.", second)


def test_one_process_speaks_for_itself():
    with pytest.raises(JinguError) as raised, report_first_failure(ALONE):
        raise JinguError("a mistake.")
    assert not hasattr(raised.value, "__notes__")


def test_what_known_cards_need_is_set_and_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda card: "NVIDIA GeForce RTX 3090")
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    assert len(_prepare_nccl()) == 1 and os.environ["NCCL_P2P_DISABLE"] == "1"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert _prepare_nccl() == () and os.environ["NCCL_P2P_DISABLE"] == "0"


def test_a_wrong_network_interface_is_one_sentence(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    _check_interface(has_other_nodes=False)
    with pytest.raises(JinguError, match="GLOO_SOCKET_IFNAME is lo, which does not lead to the other nodes"):
        _check_interface(has_other_nodes=True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such0")
    with pytest.raises(JinguError, match="GLOO_SOCKET_IFNAME is no-such0, which"):
        _check_interface(has_other_nodes=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    _check_interface(has_other_nodes=True)
