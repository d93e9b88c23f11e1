"""The reading of launch scripts: values, conditions and commands, as bash itself would have them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from asyncrl.doctor.bash import read_script
from asyncrl.doctor.shell import Shell
from asyncrl.errors import DataError


def read(tmp_path: Path, code: str, **given: str) -> Shell:
    (tmp_path / "run.sh").write_text(code)
    return read_script(tmp_path / "run.sh", given)


def shown(shell: Shell) -> list[list[str]]:
    """The words of each command."""
    return [[word.value for word in command.words] for command in shell.commands]


SAME_AS_BASH = r"""
A=(
    --x 1   # a comment
    #--y 2
    --z "two words" 'and $raw' a\ b
)
A+=( --k "${B:-default}" "${C-}" ${EMPTY} "${EMPTY}" )
N=3; N+=4
TEXT="  spaced   out "
show [0]*$N+[1]*$N "[0]*$N+[1]*$N"; L=(--layers [0]*$N+[1]*$N); show "${L[@]}"
show "${A[@]}" ${A[0]} $N "$N$N" ${TEXT} "${TEXT}"
show ${UNSET:-one two} "${UNSET:-one two}" ${N:+yes} "a\"b\$c" $((N * 2 + 1)) x"$N"y
show "${P##*/}" "${P%/*}" "${P%%/*}" "${P#*/}"
show $(seq 3) "$(seq 2 4)" 1 $(seq 16 8 40) $(seq 3 -2 -3) $(seq 5 1) "$(seq 5 1)" $(seq $N $((N + 1)))
F=(--sizes 1 2 $(seq 4 4 12)); show "${F[@]}"; for i in $(seq 0 1); do show turn $i; done
show "$(dirname "$P")" "$(basename $P)" "$(echo hi there)"
if [ "$N" -gt 40 ] && [[ "$N" == 3? ]]; then show numbers
elif [ -z "$N" ]; then show empty
else show other
fi
if [ -n "${UNSET:-}" ] || [ "$N" != 34 ]; then show wrong; elif [ "$N" -eq 34 ]; then show right; fi
if [[ ! -z "$N" ]]; then show negated; fi
for each in a "b c" $N; do show turn "$each"; done
case "$N" in 1*) show one;; 3*|4*) show three;; *) show rest;; esac
called() { show "$1" "$@"; }
called "first one" second
E=(a b); E[1]="c d"; E[2]=e; show "${E[@]}"
: "${GPUS:=8}" ${GPUS:=9}; show "$GPUS" "${NODES:=2}" $NODES "$(dirname /a/b/)"
given() { show "${V:-none}" "$N"; }
V=2 N=5 given; given
true && show "and" || show "or"
[ -z "$N" ] && show never
[ -z "$N" ] || show always
D=$(cat <<EOT
{"n": "$N", "b": "${B:-x}"}
EOT
)
show "$D"
show ${A[@]+"${A[@]}"} ${NONE[@]+"${NONE[@]}"} end
show "${A[@]:-none}" ${NONE[@]:-two words}
show \
    continued \
    lines
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_words_are_those_of_bash(tmp_path: Path) -> None:
    script = f'show() {{ for word in "$@"; do printf "%s\\0" "$word"; done; printf "END\\0"; }}\n{SAME_AS_BASH}'
    environment = {"P": "/a/b/c.txt", "EMPTY": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, check=True, text=True)
    expected: list[list[str]] = [[]]
    for word in done.stdout.split("\0")[:-1]:
        if word == "END":
            expected.append([])
        else:
            expected[-1].append(word)
    found = read(tmp_path, SAME_AS_BASH, P="/a/b/c.txt", EMPTY="")
    commands = [words[1:] for words in shown(found) if words[0] == "show"]
    assert commands == expected[:-1]
    assert len(commands) > 15


def test_unknown_values_keep_their_source(tmp_path: Path) -> None:
    shell = read(tmp_path, 'X=$(nvidia-smi -L | wc -l)\nrun --a "$X" --b $HOME_DIR/x --c ${Y:-${X}}\n')
    (words,) = (command.words for command in shell.commands if command.words[0].value == "run")
    by_flag = {words[place].value: words[place + 1] for place in (1, 3, 5)}
    assert by_flag["--a"].unknown == by_flag["--c"].unknown == ("$(nvidia-smi -L | wc -l)",)
    assert by_flag["--b"].unset == ("HOME_DIR",)
    assert by_flag["--b"].value == "$HOME_DIR/x"


@pytest.mark.parametrize(
    "code", ["seq 0 0 3", "seq 1.5", "seq -w 9 11", "seq 1 2 3 4", "seq 99999999", "nproc", "seq $X"]
)
def test_a_command_that_cannot_be_computed_stays_unknown(code: str, tmp_path: Path) -> None:
    (word,) = read(tmp_path, f"run $({code})\n").commands[-1].words[1:]
    assert (word.value, word.unknown) == (f"$({code})", (f"$({code})",))


def test_an_array_that_is_not_set_adds_no_words_and_is_reported(tmp_path: Path) -> None:
    shell = read(tmp_path, 'run --a 1 ${MODEL_ARGS[@]} "${OTHER[@]}"\n')
    assert shown(shell) == [["run", "--a", "1"]]
    assert [note.text for note in shell.notes] == [
        "the script does not set the array MODEL_ARGS, so it adds no words here",
        "the script does not set the array OTHER, so it adds no words here",
    ]


def test_an_array_that_is_not_set_is_a_mistake_if_the_words_of_another_one_are_lost(tmp_path: Path) -> None:
    code = "GRPO_ARGS=(--a 1)\nOTHER=(--b 2)\nrun ${GRP_ARGS[@]} ${OTHER[@]} ${EVAL_ARGS[@]+x}\n"
    shell = read(tmp_path, code)
    assert [(note.place, note.text) for note in shell.mistakes] == [
        (
            "run.sh:3",
            "the script does not set the array GRP_ARGS, so it adds no words here; the words of GRPO_ARGS are used "
            "nowhere",
        )
    ]
    assert not shell.notes
    assert not read(tmp_path, code.replace("GRP_", "GRPO_")).mistakes


def test_variables_can_be_given(tmp_path: Path) -> None:
    assert shown(read(tmp_path, "N=${N:-4}\nrun $N $M\n", N="2", M="m")) == [["run", "2", "m"]]


def test_a_condition_on_a_command_counts_as_false_and_is_reported(tmp_path: Path) -> None:
    shell = read(tmp_path, "if command -v x; then A=1; else A=2; fi\nif [ -f y ]; then A=3; fi\nrun $A\n")
    assert shown(shell)[-1] == ["run", "2"]
    assert [(note.place, note.text) for note in shell.notes] == [
        ("run.sh:1", "assumed to be false: command -v x"),
        ("run.sh:2", "assumed to be false: [ -f y ]"),
    ]


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("[ -f /data ] && A=2", "not read, because the condition is unknown: [ -f /data ] && A=2"),
        ("[[ $A =~ ^1 ]] || { A=2; }", "not read, because the condition is unknown: [[ $A =~ ^1 ]] || { A=2; }"),
        ('if [ "$A" = 1 -o "$A" = 2 ]; then A=2; fi', 'assumed to be false: [ "$A" = 1 -o "$A" = 2 ]'),
    ],
)
def test_an_assignment_that_depends_on_an_unknown_condition_is_reported(code: str, note: str, tmp_path: Path) -> None:
    shell = read(tmp_path, f'A=1\n{code}\ntrain "$A"')
    assert shown(shell) == [["train", "1"]]
    assert [each.text for each in shell.notes] == [note]


def test_a_folder_that_is_made_where_it_is_missing_is_not_reported(tmp_path: Path) -> None:
    assert read(tmp_path, "[ -d /data ] || mkdir /data; [ -d /data ] || exit 1; train").notes == []


@pytest.mark.parametrize("code", ["((A++))", "((A += 2))", "(( A = 2 * A ))", "(( B = 1, A = 3 ))"])
def test_a_variable_that_arithmetic_sets_is_unknown(code: str, tmp_path: Path) -> None:
    ((train,),) = ([command.words for command in read(tmp_path, f'A=1\n{code}\ntrain "$A"').commands],)
    assert [word.is_known for word in train] == [True, False]


def test_a_variable_that_a_loop_or_printf_sets_is_unknown(tmp_path: Path) -> None:
    code = "for ((i=0; i<3; i++)); do A+=(0); done\nwhile x; do B=1; done\nprintf -v C '%s' x\nrun ${A[@]} $B $C\n"
    assert [word.is_known for word in read(tmp_path, code).commands[-1].words] == [True, False, False, False]


def test_files_are_sourced_relative_to_the_script_or_to_a_folder_above_it(tmp_path: Path) -> None:
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "scripts" / "models" / "m.sh").write_text("M=(--from ${BASH_SOURCE[0]##*/})\n")
    for place in ("models/m.sh", "scripts/models/m.sh", "/root/elsewhere/scripts/models/m.sh"):
        (tmp_path / "scripts" / "run.sh").write_text(f'source {place}\nrun "${{M[@]}}"\n')
        assert shown(read_script(tmp_path / "scripts" / "run.sh", {})) == [["run", "--from", "m.sh"]]
    (tmp_path / "scripts" / "run.sh").write_text("A=1\n. models/gone.sh\n")
    assert read_script(tmp_path / "scripts" / "run.sh", {}).missing_files == ["run.sh:2: no such file: models/gone.sh"]


def test_variables_in_front_of_source_are_set_in_the_file_alone(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text('MODEL_ARGS=(--rotary-base "${ROTARY:-1000000}")\n')
    code = """
ROTARY=5000000 source model.sh
train "${MODEL_ARGS[@]}" "${ROTARY:-unset}"
ROTARY=3
ROTARY=4 . model.sh
train "${MODEL_ARGS[@]}" "${ROTARY:-unset}"
"""
    expected = [["train", "--rotary-base", "5000000", "unset"], ["train", "--rotary-base", "4", "3"]]
    assert shown(read(tmp_path, code)) == expected


def test_a_script_that_calls_itself_ends(tmp_path: Path) -> None:
    shell = read(tmp_path, "again() { run; again; }\nagain\nsource run.sh\n")
    assert 0 < len(shell.commands) < 10_000


def test_functions_that_multiply_are_an_error_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more than 100,000 statements"):
        read(tmp_path, "again() { again; again; }\nagain\n")


def test_a_missing_backslash_is_reported(tmp_path: Path) -> None:
    shell = read(tmp_path, "python train.py --a 1\n  --b 2\n")
    assert [(note.place, note.text) for note in shell.mistakes] == [
        ("run.sh:2", "a command begins with --b: the line before it is a comment, or does not end with a backslash")
    ]


def test_a_script_that_cannot_be_read_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_script(tmp_path / "gone.sh", {})


def test_any_bytes_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_bytes(b"\xff\xfe if [ ) ( ${ $(( \x00 done esac\nA=(\n'\"")
    assert read_script(tmp_path / "run.sh", {}).notes
