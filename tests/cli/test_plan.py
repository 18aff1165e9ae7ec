"""`kimi-jax plan`: what it prints, and its exit codes."""

import json
import re

import pytest

B300 = ("plan", "--device", "B300 288GB", "--count", "8")


def test_plan_prints_every_number_whole(run):
    code, out, _ = run(*B300, "--mesh", "data=2,tensor=4")
    assert code == 0
    assert "kimi-k3 on 8 x B300, on paper: 25 conversations fit" in out
    assert re.search(r"With the mesh data=2,.*tensor=4: 4 conversations fit\n", out)
    for number in (
        "2,304,000,000,000",
        "1,560,860,324,864",
        "743,139,675,136",
        "29,440,401,408",
        "180,807,008,256",
        "111,160,721,792",
        "7,421,703,487,488",
    ):
        assert re.search(rf"(^|\s){number}(\s|$)", out), number
    assert "…" not in out


def test_plan_as_json(run):
    code, out, _ = run(*B300, "--model", "kimi-k3.1-pro", "--json", "--batch", "2", "--mesh", "data=2,tensor=4")
    report = json.loads(out)
    assert code == 0
    assert report["on_paper"]["conversations"] == 20
    held = report["with_mesh"]
    assert held["mesh"]["tensor"] == 4
    assert held["conversations_held"] == 2
    assert held["total_bytes"] + held["free"] == held["device_memory"] == 288_000_000_000
    assert held["weight_bytes"] == sum(held["weights"].values())
    assert {small["device"]: small["on_paper"] for small in report["smallest"]}["H200"] == 16
    first = report["roofline"][0]
    assert first["bytes"] == 144_745_159_040
    assert first["tokens_per_second"] == pytest.approx(64e12 / first["bytes"])


def test_plan_says_what_does_not_fit(run):
    code, out, _ = run("plan", "--device", "h200", "--count", "8")
    assert code == 0
    assert "on paper: no conversation fits: the weights are 432,860,324,864 bytes too large" in out
    assert re.search(r"no conversation fits, [\d,]+ bytes a device too few for 1\n", out)
    assert "16 x" not in out


def test_plan_of_a_device_nobody_knows(run):
    code, out, _ = run("plan", "--device", "MI 355 X 288 GB", "--count", "8")
    assert code == 0
    assert "on 8 x MI 355 X, on paper: 25 conversations" in out
    assert "No roofline: the bandwidth of MI 355 X is not known" in out
    code, out, _ = run("plan", "--device", "MI355X 288GB", "--count", "8", "--json")
    assert json.loads(out)["roofline"] is None


def test_the_memory_given_overrides_the_one_known(run):
    _, out, _ = run("plan", "--device", "B300 0.27TB", "--count", "8", "--json")
    report = json.loads(out)
    assert report["on_paper"]["memory"] == 8 * 270_000_000_000
    assert report["roofline"] is not None


def test_plan_of_a_pod(run):
    code, out, _ = run("plan", "--pod", "v5p-64chips", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["count"], report["context"], report["batch"]) == (64, 8192, 64)
    assert report["device"]["name"] == "v5p"
    assert report["with_mesh"]["mesh"]["tensor"] == 16
    assert report["with_mesh"]["conversations_held"] == 64
    _, out, _ = run("plan", "--pod", "tpu7x-16chips", "--json", "--batch", "2", "--context", "100")
    report = json.loads(out)
    assert (report["context"], report["batch"]) == (100, 2)
    assert report["with_mesh"]["device_memory"] == 96_000_000_000


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, 'give the machine: --device "B300 288GB" --count 8, or --pod v5p-64chips'),
        (("--device", "B300"), 2, "give the machine: "),
        (("--pod", "b300-8", "--count", "8"), 2, "give the machine once: --pod, or --device and --count"),
        (("--pod", "v4-8"), 2, "v4-8 is neither a file nor a shipped pod"),
        (("--device", "B9", "--count", "8"), 2, "device 'B9' is not known"),
        (("--device", "B300 1..2GB", "--count", "8"), 2, "'1..2GB' is not a number of bytes"),
        (("--device", "B300 0GB", "--count", "8"), 2, "the memory must be at least 1 byte, found 0"),
        ((*B300[1:], "--model", "kimi-k9"), 2, "kimi-k9 is neither a file"),
        ((*B300[1:], "--context", "1048577"), 2, "context 1048577 is beyond the model's limit of 1048576"),
        ((*B300[1:], "--batch", "0"), 2, "batch must be at least 1, found 0"),
        (("--pod", "b300-8", "--context", "0"), 2, "context must be at least 1, found 0"),
        ((*B300[1:], "--mesh", "tensor"), 2, "cannot read mesh 'tensor'"),
        ((*B300[1:], "--mesh", "rows=8"), 2, "unknown mesh axis 'rows'"),
        ((*B300[1:], "--mesh", "tensor=4"), 2, "has 4 devices, 8 x B300 have 8"),
        (("--device", "B300", "--count", "64", "--mesh", "tensor=64"), 1, "64 does not divide 96"),
        (("--device", "B300", "--count", "5"), 1, "no mesh over 5 devices divides the model"),
        (("--device", "B300", "--count", "eight"), 2, "eight"),
    ],
)
def test_plan_refuses(run, arguments, code, message):
    found, _, error = run("plan", *arguments)
    assert found == code
    assert message in error


def test_a_pod_file_that_is_wrong(run, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('kind = "B300"\n')
    code, _, error = run("plan", "--pod", str(path))
    assert code == 1
    assert f"{path}: field 'platform' is missing" in error


def test_help(run):
    code, out, _ = run("plan", "--help")
    assert code == 0
    assert "usage: kimi-jax plan" in out
    for option in ("--model", "--device", "--count", "--pod", "--context", "--batch", "--mesh", "--json"):
        assert option in out
