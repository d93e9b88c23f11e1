"""The table of slime's and Megatron's flags: complete, true, and the same in docs/slime.md."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config import flat, status_of
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.config.command_line import parser, read_flags
from asyncrl.config.knobs import ALIASES, knobs
from asyncrl.config.slime.status import Kind
from asyncrl.config.slime.table import SECTIONS, TABLE
from asyncrl.engines.sglang.server_flags import known_server_flags
from tests.unit.config.runs import complaints, complete, load

PAGE = Path(__file__).parents[3] / "docs" / "slime.md"
DATA = Path(__file__).parent / "slime"
OURS = {flag for action in parser()._actions for flag in action.option_strings}  # noqa: SLF001


def lines(name: str) -> list[str]:
    return [line for line in (DATA / name).read_text().splitlines() if line and not line.startswith("#")]


def slime_flags() -> dict[str, str]:
    """The words (none, one or many) that follow each flag of slime."""
    return dict(line.split() for line in lines("flags.txt"))


def scripts() -> Iterator[tuple[str, list[list[str]]]]:
    """The name of each script of slime, and the flags of its training program, each with its words."""
    for block in "\n".join(lines("scripts.txt")).split("[run-")[1:]:
        title, *flags = block.splitlines()
        yield f"run-{title.removesuffix(']')}", [shlex.split(line) for line in flags]


def script_flags() -> set[str]:
    used = {words[0].removeprefix("--") for _, flags in scripts() for words in flags}
    return used | set(lines("more_flags.txt"))


def test_the_data_is_complete() -> None:
    assert len(slime_flags()) == 223
    assert len(list(scripts())) == 29
    assert len(script_flags() - slime_flags().keys()) > 100


@pytest.mark.parametrize("name", sorted(slime_flags().keys() | script_flags()))
def test_every_flag_has_a_status(name: str) -> None:
    status = status_of(name)
    assert status is not None
    assert status.text
    if status.setting is not None:
        assert status.setting in knobs()


def test_an_accepted_flag_takes_as_many_words_as_in_slime() -> None:
    accepted = {name: row.words for name, row in TABLE.items() if row.is_read and name in slime_flags()}
    assert accepted == {name: slime_flags()[name] for name in accepted}


def test_the_table_has_no_flag_twice_and_only_differing_settings() -> None:
    assert len(TABLE) == sum(len(rows) for rows in SECTIONS.values())
    assert {name for name in TABLE if f"--{name}" in OURS} == {name for name, row in TABLE.items() if row.setting}


def test_every_replacement_is_a_flag() -> None:
    named = {flag for row in TABLE.values() for flag in re.findall(r"--[a-z0-9-]+", row.text)}
    assert named <= OURS


def test_the_docs_have_the_same_table() -> None:
    told = {
        flag: (kind, text)
        for flags, kind, text in re.findall(r"^\| (`--.*`) \| (.*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
        if kind in list(Kind)
        for flag in re.findall(r"`--([a-z0-9-]+)`", flags)
    }
    assert told == {name: (row.kind.value, row.text) for name, row in TABLE.items()}


def test_defaults_of_the_optimizer_that_differ_from_megatrons_are_named() -> None:
    ours = {"adam-beta2": 0.98, "lr-decay-style": "constant"}
    megatrons = {"adam-beta2": 0.999, "lr-decay-style": "linear"}
    for name, default in ours.items():
        status = status_of(name)
        assert status is not None and knobs()[name].default == default
        assert status.kind is Kind.DIFFERENT
        assert f"default: {default}, Megatron's is {megatrons[name]}" in status.text


def test_the_default_split_of_an_expert_that_differs_from_megatrons_is_named() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=4, expert_model_parallel_size=8)
    assert parallel.num_expert_tensor_ranks == 1, "Megatron's is 4, the tensor-parallel size"
    status = status_of("expert-tensor-parallel-size")
    assert status is not None and status.kind is Kind.DIFFERENT


def test_the_docs_count_slimes_flags_and_megatrons() -> None:
    def count(names: set[str]) -> list[int]:
        kinds = Counter(status.kind for name in names if (status := status_of(name)))
        return [kinds[kind] for kind in Kind]

    megatron = {name for name in script_flags() - slime_flags().keys() if not name.startswith("sglang-")}
    rows = {
        title: [int(number) for number in numbers.split(" | ")]
        for title, numbers in re.findall(r"^\| (slime|Megatron) \| ([0-9 |]+) \|$", PAGE.read_text(), re.MULTILINE)
    }
    assert rows == {
        "slime": [len(slime_flags()), *count(set(slime_flags()))],
        "Megatron": [len(megatron), *count(megatron)],
    }


@pytest.mark.parametrize(("script", "flags"), list(scripts()), ids=[name for name, _ in scripts()])
def test_a_script_of_slime_has_no_unknown_and_no_ignored_flag(script: str, flags: list[list[str]]) -> None:
    _, given = read_flags([word for words in flags for word in words])
    passed = {f"{prefix}{name}" for prefix, names in given.passed.items() for name in names}
    read = {*given.values, *given.foreign, *passed}
    named = {found[1] for line in given.mistakes if (found := re.match(r"--([a-z0-9-]+) ", line))}
    for name in (words[0].removeprefix("--") for words in flags):
        assert ALIASES.get(name, name).removeprefix("no-") in {flag.removeprefix("no-") for flag in read | named}
    assert [line for line in given.mistakes if "(of slime or Megatron) is not here: " not in line] == []


@pytest.mark.parametrize(
    "words",
    [
        "--optimizer adam",
        "--optimizer=adam",
        "--attention-dropout 0.0 --hidden-dropout 0",
        "--use-fault-tolerance",
        "--swiglu --normalization RMSNorm --vocab-size 151936",
        "--moe-layer-freq [0]*3+[1]*58",
        "--spec slime_plugins.models.glm4 get_glm_spec",
        "--loss-type policy_loss",
        "--colocate --offload-train --offload",
        "--no-offload-train",
        "--rollout-health-check-interval 30",
        "--num-epoch 3",
    ],
)
def test_a_flag_that_is_true_anyway_or_has_no_effect_is_accepted_with_a_note(tmp_path: Path, words: str) -> None:
    run = load(tmp_path, *words.split())
    for name in re.findall(r"--([a-z-]+)", words):
        if name in TABLE:
            assert [note for note in run.notes if f"--{name}" in note] != []


def test_common_flags_of_megatrons_own_scripts_are_accepted_with_notes(tmp_path: Path) -> None:
    words = (
        "--use-mcore-models --use-flash-attn --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap "
        "--ckpt-format torch_dist --auto-detect-ckpt-format --manual-gc --log-throughput --log-interval 1 "
        "--timing-log-level 0 --init-method-std 0.02 --cross-entropy-loss-fusion --cross-entropy-fusion-impl te "
        "--exp-avg-dtype fp32 --no-bias-dropout-fusion --tokenizer-type HuggingFaceTokenizer "
        "--num-layers-per-virtual-pipeline-stage 4 --use-checkpoint-args"
    )
    notes = "\n".join(load(tmp_path, *words.split()).notes)
    names = set(re.findall(r"--([a-z-]+)", words)) - {"overlap-grad-reduce"}
    assert [name for name in names if f"--{name}" not in notes] == []


def test_a_flag_that_sglang_has_replaced_is_not_one_of_its_flags() -> None:
    known = known_server_flags()
    assert not {"enable-ep-moe", "enable-deepep-moe"} & known
    assert {"ep-size", "moe-a2a-backend"} <= known


def test_one_note_names_all_flags_that_are_true_anyway(tmp_path: Path) -> None:
    words = ["--optimizer", "adam", "--swiglu", "--use-fault-tolerance", "--attention-dropout", "0.0"]
    assert load(tmp_path, *words).notes == (
        "true anyway, so these flags may be left out: --optimizer adam, --swiglu, --use-fault-tolerance, "
        "--attention-dropout 0.0",
    )
    assert load(tmp_path).notes == ()


def test_fault_tolerance_with_colocate_is_a_note(tmp_path: Path) -> None:
    notes = load(tmp_path, "--use-fault-tolerance", "--colocate").notes
    assert "with colocate no engine restarts: a lost engine ends the run" in notes


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--optimizer sgd", "--optimizer sgd: the optimizer is AdamW; leave it out or give adam or adamw"),
        ("--attention-dropout 0.1", "--attention-dropout 0.1: there is no dropout; leave it out or give 0"),
        (
            "--moe-aux-loss-coeff 1e-3",
            "--moe-aux-loss-coeff 1e-3: there is no load-balancing loss; leave it out or give 0",
        ),
        ("--loss-type sft_loss", "--loss-type sft_loss: the loss is the policy's, or that of"),
        ("--loss-type custom_loss", "--loss-type custom_loss without custom-loss-function-path"),
        ("--offload-train", "--offload-train without colocate: trainer and engines keep their GPUs"),
        ("--colocate --no-offload-train", "--no-offload-train with colocate, which moves both sides"),
        ("--bf16 --dtype float32", "--bf16 with dtype float32; leave one of them out"),
        ("--use-fault-tolerance --max-engine-restarts 0", "--use-fault-tolerance with max-engine-restarts 0"),
        ("--distributed-backend nccl --device cpu", "--distributed-backend nccl with device cpu"),
        ("--swiglu=false", "--swiglu false: read from the model's config.json, and compared with it; leave it out"),
        ("--bf16=false --dtype float32", "--bf16 false: sets --dtype bfloat16, the default on GPUs; leave it out"),
        ("--optimizer false", "--optimizer false: the optimizer is AdamW; leave it out or give adam or adamw"),
        ("--use-fault-tolerance=false", "--use-fault-tolerance false: engines restart, at most --max-engine-restarts"),
        ("--offload-train=false", "--offload-train false: --colocate moves both sides to host memory; leave it out"),
        ("--update-weight-mode delta", "--update-weight-mode delta: every update sends all weights"),
    ],
)
def test_a_value_that_the_run_does_not_have_is_an_error(tmp_path: Path, words: str, line: str) -> None:
    text = [found for found in complaints(*complete(tmp_path), *words.split()) if found.startswith(line)]
    assert len(text) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--optimizer", "--optimizer: expected one argument"),
        ("--swiglu adam", 'unexpected word "adam": every setting is a flag'),
        ("--release-train", "--release-train (of slime or Megatron) is not here: use --colocate"),
        ("--loss-mask-type qwen", "--loss-mask-type (of slime or Megatron) is not here: name the type in your"),
        ("--sglang-disaggregation-mode prefill", "--sglang-disaggregation-mode cannot be given: every engine does"),
        ("--router-pd-disaggregation", "--router-pd-disaggregation cannot be given: every engine does"),
        ("--sglang-router-ip 10.0.0.1", "--sglang-router-ip cannot be given: asyncrl starts the router"),
        ("--sglang-enable-ep-moe", "--sglang-enable-ep-moe cannot be given: SGLang has replaced it; use --sglang-ep"),
        ("--sglang-enable-deepep-moe", "--sglang-enable-deepep-moe cannot be given: SGLang has replaced it; use"),
        ("--train-iters 5", "--train-iters (of slime or Megatron) is not here: use --num-rollout"),
        (
            "--custom-pg-loss-reducer-function-path a.b",
            "--custom-pg-loss-reducer-function-path (of slime or Megatron) is not here: no function replaces the mean",
        ),
    ],
)
def test_a_flag_that_is_not_here_is_one_line_with_its_replacement(words: str, line: str) -> None:
    (mistake,) = [found for found in complaints(*words.split()) if found.startswith(line)]
    assert mistake


def test_accepted_flags_are_keys_of_the_file_too(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = 'swiglu = true\noptimizer = "adam"\nattention-dropout = 0.0\nspec = ["a.b", "c"]\nbf16 = true\n'
    file.write_text(text + "moe-enable-deepep = false\n")
    run = load(tmp_path, "--config", str(file), "--optimizer", "adamw")
    assert run.foreign == {
        "swiglu": True,
        "optimizer": "adamw",
        "attention-dropout": "0.0",
        "spec": ("a.b", "c"),
        "bf16": True,
    }
    assert run.model.dtype == "bfloat16"


def test_false_in_the_file_is_not_silent_about_what_the_run_does_anyway(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("swiglu = false\noptimizer = false\n")
    assert complaints(*complete(tmp_path), "--config", str(file)) == [
        "--swiglu false: read from the model's config.json, and compared with it; leave it out",
        "--optimizer false: the optimizer is AdamW; leave it out or give adam or adamw",
    ]


def test_false_takes_a_flag_without_effect_out_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("moe-permute-fusion = true\n")
    assert load(tmp_path, "--config", str(file), "--moe-permute-fusion=false").foreign == {}


def test_a_flag_without_a_value_has_none_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("swiglu = [1, 2]\noptimizer = [1, 2]\n")
    assert complaints(*complete(tmp_path), "--config", str(file)) == [
        "--swiglu 1 2: takes no value; give --swiglu alone",
        "--optimizer 1 2: must have one value",
    ]


def test_a_key_that_is_not_here_names_its_replacement(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("ci-test = true\n")
    (line,) = complaints(*complete(tmp_path), "--config", str(file))
    assert line == f"{file}: ci-test (of slime or Megatron) is not here: slime's own tests need it"


def test_user_functions_see_accepted_flags_as_attributes(tmp_path: Path) -> None:
    words = "--moe-router-topk 8 --attention-dropout 0.0 --swiglu --optimizer adam"
    args = flat(load(tmp_path, *words.split()))
    found = [args[name] for name in ("moe_router_topk", "attention_dropout", "swiglu", "optimizer")]
    assert found == [8, 0.0, True, "adam"]
    assert [type(value) for value in found] == [int, float, bool, str]
