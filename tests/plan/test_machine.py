"""Machines: the library, files, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jingu.cli import main
from jingu.errors import JinguError
from jingu.plan.machine import find_gpu, find_machine
from tests.mistakes import explain_mistake


def test_an_unknown_machine_names_the_nearest() -> None:
    with pytest.raises(JinguError, match=r"there is no machine h10\. Nearest names: h100, "):
        find_machine("h10")


def test_a_file_changes_a_machine_of_the_library(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("like: a100-80\nnic_gbs: 12.5\ngpus_per_node: 4\nefficiency: {nic: 0.5}\n")
    machine = find_machine(str(file))
    assert (machine.name, machine.nic_gbs, machine.gpus_per_node) == ("cluster", 12.5, 4)
    assert machine.memory_gbs == find_machine("a100-80").memory_gbs
    assert machine.efficiency.nic == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("like: a100-80\nmemory_gib: -3\n", "memory_gib: Input should be greater than 0"),
        ("like: a100-80\nnics: 8\n", "nics: Extra inputs are not permitted"),
        ("memory_gib: many\n", "memory_gib: Input should be a valid number"),
        ("like: a100-80\npeak_tflops: .inf\n", "peak_tflops: Input should be a finite number"),
        ("like: a100-80\nmatmul_tflops: 400\n", "matmul_tflops 400 is above peak_tflops 312"),
        ("like: a1000\n", "there is no machine a1000"),
        ("- a100\n", "this does not describe a machine"),
    ],
)
def test_nonsense_in_a_machine_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in explain_mistake(lambda file: find_machine(str(file)), tmp_path / "machine.yaml", text)


def test_a_machine_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(JinguError, match=r"nothing\.yaml: the file cannot be read \(No such file"):
        find_machine(str(tmp_path / "nothing.yaml"))


def test_this_machine_is_measured() -> None:
    machine = find_machine("here")
    assert machine.peak_tflops > 0.001
    assert machine.memory_gbs > 0.1
    assert machine.with_nodes(4).memory_gib == pytest.approx(
        machine.memory_gib / 4 if machine.is_shared else machine.memory_gib
    )


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100", "a100-80"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX_5090", "rtx-5090"),
        ("910B", "ascend-910b"),
        ("Ascend 910C", "ascend-910c"),
        ("AMD Instinct MI300X", "mi300x"),
        ("MI350", "mi350x"),
        ("H100 SXM", "h100"),
        ("b200", "b200"),
        ("RTX3060", "rtx-3060"),
        ("8xH100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("DGX B200", "b200"),
        ("Ascend910B", "ascend-910b"),
        ("NVIDIA GB200 NVL72", "gb200"),
    ],
)
def test_machines_have_the_names_that_people_write(written: str, name: str) -> None:
    assert find_machine(written).name == name


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("Ascend910B2", "ascend-910b"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA RTX A2000", None),
    ],
)
def test_a_gpu_is_the_one_that_its_driver_names(title: str, name: str | None) -> None:
    machine = find_gpu(title)
    assert (machine.name if machine else None) == name


def test_consumer_cards_have_a_usual_main_memory_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-8b", "--on", "RTX 4090", "batch.global_batch_size=8"]) == 1
    assert find_machine("rtx-4090").host_gib < 100
    words = ["plan", "llama-3.2-1b", "--on", "RTX 4090", "batch.global_batch_size=8"]
    capsys.readouterr()
    assert main(words) == 0
    assert "rtx-4090 with 60 GiB of main memory for each GPU and 1 GPUs a node" in capsys.readouterr().out


def test_no_stream_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3-8b", "--serve", "--on", "rtx-4090", "batch.sequence_length=131072"]
    assert main(words) == 1
    assert "0 streams fit" in capsys.readouterr().out
