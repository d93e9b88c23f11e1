"""The report on whole launch scripts, whose settings must start a run."""

import io
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from asyncrl.app.dry_run import dry_run
from asyncrl.config import load_run
from asyncrl.doctor.__main__ import main
from asyncrl.doctor.report import Report, examine_script, written
from asyncrl.doctor.settings import Verdict
from asyncrl.engines.sglang.launch import ServerLaunch, server_command
from asyncrl.errors import DataError

SCRIPTS = Path(__file__).parent / "scripts"
BASE = Path(__file__).parents[3] / "configs" / "quickstart"
COLOCATED, ASYNC = SCRIPTS / "run-colocated.sh", SCRIPTS / "run-async.sh"


def examined(script: Path) -> Report:
    return examine_script(script, {"BASE_DIR": str(BASE)})


def flags(report: Report, verdict: Verdict) -> set[str]:
    return {finding.flag.name for finding in report.translation.of(verdict)}


def test_a_script_without_obstacles_gives_settings_that_start_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.toml"
    assert main([str(COLOCATED), "--env", f"BASE_DIR={BASE}", "--out", str(out)]) == 0
    assert "Nothing is missing" in capsys.readouterr().err
    run = load_run(["--config", str(out), "--device", "cpu", "--dry-run"])
    assert (run.rollout.num_rollout, run.rollout.n_samples_per_prompt, run.rollout.staleness) == (3, 2, 0)
    assert run.model.hf_checkpoint == BASE / "model"
    assert run.evaluation.data_sets == (("sums", BASE / "heldout.jsonl"),)
    assert (run.train.lr, run.train.adam_beta2, run.cluster.colocate) == (1e-6, 0.98, True)
    assert run.sglang == {"mem-fraction-static": "0.7"}
    console = Console(file=io.StringIO(), width=200)
    dry_run(run, console)
    assert console.file.getvalue().endswith("the dry run found nothing wrong\n")  # type: ignore[attr-defined]


def test_every_flag_of_a_script_gets_one_verdict() -> None:
    report = examined(COLOCATED)
    assert len(report.translation.findings) == len(report.launch.flags) == 28
    assert flags(report, Verdict.TRUE_ANYWAY) == {
        "attention-backend",
        "attention-dropout",
        "moe-layer-freq",
        "normalization",
        "optimizer",
        "swiglu",
    }
    assert flags(report, Verdict.MISSING) == set()
    assert {name: value.value for name, value in report.launch.environment.items()} == {
        "MASTER_ADDR": "127.0.0.1",
        "NCCL_NVLS_ENABLE": "0",
        "PYTHONPATH": f"/root/Megatron-LM/:{SCRIPTS}/plugins",
        "PYTHONUNBUFFERED": "1",
    }


def test_a_script_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("a process was started")

    for name in ("system", "posix_spawn", "execve", "fork"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr("subprocess.Popen", refuse)
    before = set(sys.modules)
    examined(ASYNC)
    assert not {"rewards", "picks", "generation", "calls"} & (set(sys.modules) - before)


def test_flags_that_stand_in_the_way_are_named_with_their_reasons() -> None:
    translation = examined(ASYNC).translation
    missing = {finding.flag.name: finding.reason for finding in translation.of(Verdict.MISSING)}
    assert missing["optimizer"] == "the optimizer is AdamW; only adam or adamw is possible"
    assert missing["made-up-flag"].startswith("neither asyncrl nor slime's scripts have such a flag")
    assert missing["lr"] == 'the value must be a number, got "fast"'
    unknown = {finding.flag.name: finding.reason for finding in translation.of(Verdict.UNKNOWN_VALUE)}
    assert unknown == {
        "save": "$(date +%s) is not run",
        "load": "the script does not set RESUME_DIR; give --env RESUME_DIR=VALUE",
    }
    assert translation.lines["num-rollout"] == "9"
    (repeated,) = (finding for finding in translation.of(Verdict.DIFFERENT) if finding.flag.name == "num-rollout")
    assert repeated.reason == "given again later as --num-rollout 9, which counts in slime"
    assert "max-staleness" not in translation.lines


def test_user_functions_are_found_and_their_obstacles_named() -> None:
    report = examined(ASYNC)
    plugins = SCRIPTS / "plugins"
    by_flag = {function.flag: function for function in report.functions}
    assert by_flag["custom-rm-path"].place == str(plugins / "rewards.py")
    assert not by_flag["custom-rm-path"].problems
    assert [(each.symbol, each.is_there) for each in by_flag["custom-rm-path"].imports] == [
        ("slime.utils.types.Sample", True)
    ]
    assert by_flag["dynamic-sampling-filter-path"].place == "asyncrl.filters.check_reward_nonzero_std"
    assert not by_flag["dynamic-sampling-filter-path"].problems
    (wrong,) = by_flag["buffer-filter-path"].problems
    assert wrong.startswith(f"{plugins / 'picks.py'}: line 4: 'pick' must take (step, waiting, size) or slime's")
    assert [(each.symbol, each.place) for each in by_flag["custom-generate-function-path"].imports] == [
        ("slime.utils.misc", f"{plugins / 'calls.py'}:3"),
        ("slime.agent.sandbox.post", f"{plugins / 'calls.py'}:4"),
        ("slime.utils.types.Sample", f"{plugins / 'calls.py'}:5"),
    ]
    assert "rollout-function-path" not in by_flag  # its flag is missing already
    assert by_flag["custom-advantage-function-path"].problems[0].startswith("nowhere is missing in ")


def test_the_report_names_everything_and_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ASYNC), "--env", f"BASE_DIR={BASE}"]) == 1
    toml, report = capsys.readouterr()
    assert f'hf-checkpoint = "{BASE}/model"\n' in toml
    assert "# save = ?  # --save /data/run-$(date +%s): $(date +%s) is not run\n" in toml
    for line in (
        "run-async.sh:39: train_async.py with 18 flags",
        "run-async.sh:11: no such file: /root/there/scripts/models/nowhere.sh",
        "calls.py:4: slime.agent.sandbox.post",
        "other machines join a Ray cluster",
        "MASTER_ADDR=10.0.0.1",
    ):
        assert line in report
    assert report.endswith("things to change before this run starts.\n")


def test_a_variable_that_must_be_given_is_named() -> None:
    text = written(examine_script(ASYNC, {}))
    assert "run-async.sh:5: the script may end here (exit); the rest is read as well" in text
    assert "--hf-checkpoint $BASE_DIR/model: the script does not set BASE_DIR; give --env BASE_DIR=VALUE" in text


def test_settings_that_asyncrl_refuses_are_listed(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python train_async.py --rollout-batch-size 3 --num-rollout 2 --sglang-made-up 1 stray\n")
    report = examine_script(script, {})
    assert any("--hf-checkpoint is missing" in line for line in report.refusals)
    assert report.num_obstacles >= 2


def test_values_and_conditions_of_all_kinds_of_flags_are_checked(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    flags = "--num-rollout 2 --rollout-batch-size 3 --n-samples-per-prompt 2 --sglang-cuda-graph-bs 1 2 4"
    data = f"--hf-checkpoint {BASE}/model --prompt-data {BASE}/train.jsonl --label-key label --rm-type number"
    script.write_text(f"python train_async.py {data} {flags} --offload\n")
    report = examine_script(script, {})
    assert report.translation.lines["sglang-cuda-graph-bs"] == '["1", "2", "4"]'
    assert [line for line in report.refusals if "without colocate" in line] == list(report.refusals)
    assert report.num_obstacles == 1
    script.write_text(script.read_text().replace("--offload", "--colocate --max-staleness 0 --offload"))
    assert examine_script(script, {}).num_obstacles == 0


def test_sizes_that_a_script_counts_with_seq_reach_the_server(tmp_path: Path) -> None:
    report = written_script(tmp_path, "${SIZES[@]}", "SIZES=(--sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256))")
    assert report.num_obstacles == 0
    (tmp_path / "run.toml").write_text(report.toml)
    flags = load_run(["--config", str(tmp_path / "run.toml"), "--dry-run"]).sglang
    sizes = ("1", "2", "4", "8", *(str(size) for size in range(16, 257, 8)))
    assert flags == {"cuda-graph-bs": sizes}
    launch = ServerLaunch(
        model_path=BASE, port=1, key="", nccl_port=2, device="cuda", dtype="bfloat16", seed=1, flags=flags
    )
    words = server_command(launch).arguments
    assert words[words.index("--cuda-graph-bs") + 1 :] == sizes


NEEDED = (
    f"--hf-checkpoint {BASE}/model --prompt-data {BASE}/train.jsonl --label-key label --rm-type number "
    "--num-rollout 2 --rollout-batch-size 3 --n-samples-per-prompt 2"
)


def written_script(folder: Path, flags: str, before: str = "") -> Report:
    script = folder / "run.sh"
    script.write_text(f"{before}\npython train_async.py {NEEDED} {flags}\n")
    return examine_script(script, {})


def test_files_with_settings_are_found_from_the_script_and_checked(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "more.yaml").write_text("max_calls: 3\n")
    (tmp_path / "examples" / "sets.yaml").write_text("datasets: [{name: a, path: a.jsonl}]\n")
    words = "--custom-config-path examples/more.yaml --eval-config examples/sets.yaml"
    report = written_script(tmp_path, words)
    assert report.num_obstacles == 0
    assert (report.refusals, report.absent) == ((), ())
    assert report.translation.lines["custom-config-path"] == '"examples/more.yaml"'
    (tmp_path / "examples" / "more.yaml").write_text("lr: fast\n")
    (line,) = written_script(tmp_path, words).refusals
    assert line.endswith('more.yaml: lr must be a number, got "fast"')


def test_a_missing_file_of_settings_hides_no_other_refusal(tmp_path: Path) -> None:
    report = written_script(tmp_path, "--custom-config-path examples/x.yaml --max-engine-restarts -7")
    assert len(report.refusals) == 1
    assert "max-engine-restarts" in report.refusals[0]
    assert report.absent == ("--custom-config-path examples/x.yaml",)


def test_a_repeated_list_says_that_the_run_would_join_it(tmp_path: Path) -> None:
    report = written_script(tmp_path, "--rollout-stop a --rollout-stop b --prompt-data x.jsonl")
    assert report.translation.lines["rollout-stop"] == '["b"]'
    reasons = {finding.flag.name: finding.reason for finding in report.translation.of(Verdict.DIFFERENT)}
    assert reasons == {
        "rollout-stop": "given again later as --rollout-stop b, which counts in slime; train_async.py would add the "
        "words of both",
        "prompt-data": "given again later as --prompt-data x.jsonl, which counts in slime",
    }


def test_a_flag_whose_name_depends_on_a_variable_is_left_out_of_the_file(tmp_path: Path) -> None:
    report = written_script(tmp_path, "--sglang-${FOO} 3 --$BAR 4 --router-ü 5")
    assert len(report.translation.of(Verdict.UNKNOWN_VALUE)) == 3
    (tmp_path / "run.toml").write_text(report.toml)
    assert load_run(["--config", str(tmp_path / "run.toml")]).sglang == {}


def test_the_folders_of_functions_are_exported_without_slimes_megatron(tmp_path: Path) -> None:
    for folder in ("Megatron-LM/megatron", "mine/sums", "helpers"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "mine" / "sums" / "reward.py").write_text(
        "from slime.utils.types import Sample\nasync def rate(args, sample: Sample, **kwargs): return 1.0\n"
    )
    before = f"export PYTHONPATH={tmp_path}/Megatron-LM:{tmp_path}/helpers:{tmp_path}/mine:{tmp_path}/nowhere"
    report = written_script(tmp_path, "--custom-rm-path sums.reward.rate", before)
    assert f"  export PYTHONPATH={tmp_path}/mine:{tmp_path}/helpers\n" in written(report)
    assert "Megatron-LM" not in written(report)
    assert report.num_obstacles == 0  # the symbol of slime is there


@pytest.mark.parametrize(
    ("slip", "line"),
    [
        ("${SIZES[@]}\n--lr 1e-6", "run.sh:5: a command begins with --lr: the line before it is a comment, or"),
        ("${SIZE[@]} --lr 1e-6", "run.sh:4: the script does not set the array SIZE, so it adds no words here; the"),
        ("\\\n# ${SIZES[@]} \\\n--lr 1e-6", "run.sh:6: a command begins with --lr: the line before it is a comment"),
    ],
)
def test_a_script_that_loses_flags_is_not_called_complete(
    slip: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = "SIZES=(--rollout-max-response-len 64)\n"
    assert written_script(tmp_path, "${SIZES[@]} --lr 1e-6", before).num_obstacles == 0
    (tmp_path / "run.sh").write_text(f"{before}\n\npython train_async.py {NEEDED} {slip}\n")
    assert main([str(tmp_path / "run.sh")]) == 1
    report = capsys.readouterr().err
    assert report.split("\n\n")[1].startswith(f"Mistakes in the script, which lose flags:\n  {line}")
    assert report.endswith("\n\n1 thing to change before this run starts.\n")


def test_no_folder_is_exported_without_functions(tmp_path: Path) -> None:
    report = written_script(tmp_path, "--custom-rm-path my.py:rate", f"export PYTHONPATH={tmp_path}")
    assert report.python_path == ()


def test_keys_are_in_neither_the_file_nor_the_report(tmp_path: Path) -> None:
    before = "export WANDB_API_KEY=s3cr3t1\nexport HF_TOKEN=s3cr3t2\nexport TOKENS=5\nKEY=s3cr3t3"
    report = written_script(tmp_path, "--use-wandb --wandb-key s3cr3t4 --wandb-key $KEY", before)
    assert "s3cr3t" not in report.toml + written(report)
    assert "# wandb-key = ?  # secret, and not written" in report.toml
    for line in ("WANDB_API_KEY=***", "HF_TOKEN=***", "TOKENS=5"):
        assert f"  {line}\n" in written(report)
    assert report.num_obstacles == 0


def test_the_key_of_the_engines_is_written_nowhere(tmp_path: Path) -> None:
    words = "--sglang-api-key s3cr3t5 --router-api-key s3cr3t6 --sglang-max-prefill-tokens 4096 --label-key label"
    report = written_script(tmp_path, words)
    assert "s3cr3t" not in report.toml + written(report)
    assert "# sglang-api-key = ?  # secret, and not written" in report.toml
    assert 'sglang-max-prefill-tokens = "4096"' in report.toml
    assert 'label-key = "label"' in report.toml


def test_a_script_without_a_training_command_gives_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text("echo train.py\n")
    with pytest.raises(DataError, match="no training command"):
        examine_script(tmp_path / "run.sh", {})
    assert main([str(tmp_path / "run.sh")]) == 2
    assert main([str(tmp_path / "gone.sh")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.skipif("SLIME_ROOT" not in os.environ, reason="SLIME_ROOT must name a checkout of slime")
def test_slimes_own_scripts_are_read() -> None:
    scripts = sorted(Path(os.environ["SLIME_ROOT"]).glob("scripts/**/run-*.sh"))
    assert len(scripts) > 20
    for script in scripts:
        report = examine_script(script, {})
        unknown = [finding for finding in report.translation.findings if "have such a flag" in finding.reason]
        assert (script.name, unknown) == (script.name, [])


EDITS = [
    b"${",
    b"}",
    b"$(",
    b")",
    b'"',
    b"'",
    b"((",
    b"\n",
    b"fi",
    b"do ",
    b"[[",
    b"`",
    b"<<E\n",
    b"#",
    b"\\",
    b"\xff",
    b"",
]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 12), st.sampled_from(EDITS)), min_size=1, max_size=20))
def test_a_damaged_script_gives_a_report_or_an_error_line(edits: list[tuple[int, int, bytes]]) -> None:
    for script in (COLOCATED, ASYNC):
        code = bytearray(script.read_bytes())
        for place, removed, added in edits:
            code[place : place + removed] = added
        with tempfile.TemporaryDirectory() as folder:
            damaged = Path(folder) / "run.sh"
            damaged.write_bytes(code)
            with suppress(DataError):
                assert written(examine_script(damaged, {})).endswith(".")
